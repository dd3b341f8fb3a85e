"""The lines that a run prints after its last step."""

import re
import tomllib

import test_layout

from efx.train import messages


def test_the_suggested_commands_fit_the_installation(monkeypatch):
    def lines(tensorboard=True, module=None):
        monkeypatch.setattr(messages.importlib.util, "find_spec", lambda name: module)
        return messages.closing_lines(test_layout.ROOT / "runs" / "a run", tensorboard)

    assert "-m tensorboard.main --logdir " in lines(module="here")[-1]
    assert "pip install tensorboard" in lines()[-1]
    assert "metrics.jsonl" in lines(tensorboard=False)[-1]
    monkeypatch.setenv("EFX_COMMAND", "./launch/local.sh")
    assert "./launch/local.sh --mode=sample --workdir '" in lines()[1]


def test_messages_and_documents_name_extras_that_exist():
    """And no package index: whoever registers the name there could be installed."""
    project = tomllib.loads((test_layout.ROOT / "pyproject.toml").read_text())["project"]
    known, named = set(project["optional-dependencies"]), []
    for path, text in test_layout.project_files():
        if path.name == "test_docs.py":  # has wrong ones on purpose
            continue
        assert not re.search(r"\befx\[[a-z]|pip[ ]install (-\S+ )*'?efx\b", text), path
        found = re.findall(r"""['"]\.\[([\w,]+)\]|EFX_EXTRAS=([a-z][\w,]*)""", text)
        named += [extra for one in found for extra in "".join(one).split(",")]
    assert set(named) <= known and len(named) > 5
