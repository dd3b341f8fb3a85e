"""The lines that a run prints after its last step."""

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
    assert "./launch/local.sh sample '" in lines()[1]
