"""A message is one line with the setting at fault, its value and what to do."""

import json

import pytest
import test_cli

from efx import build
from efx.configs import common
from efx.errors import UsageError, nearest
from efx.interop import hf_config

SETTINGS = [  # changed settings, what names them and their values, the remedy
    ({"data.packing": "yes"}, "--config.data.packing=yes: ", "true or false"),
    ({"steps": "1e3"}, "--config.steps=1e3: ", "1000"),
    ({"optim.learning_rate": "fast"}, "--config.optim.learning_rate=fast: ", "0.1"),
    ({"model.width": 10**7}, "config.model.width=10000000: ", "lower config.model.width"),
    ({"data.seq_len": 10**5}, "config.data.seq_len=100000: ", "lower config.data.seq_len"),
    ({"data.batch_size": 9}, "config.data.batch_size=9: ", "use a multiple of 8"),
]


@pytest.fixture
def refused(tmp_path, capsys, monkeypatch):
    """The line that refuses arguments, on a text of few words."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    monkeypatch.setenv("EFX_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def line(config="configs/mod.py", workdir="run", **settings):
        given = {**test_cli.SETTINGS, "data.source": "text:text.txt", **settings}
        assert test_cli.call(f"--workdir={workdir}", config=config, **given) == 2
        return test_cli.error_line(capsys)

    return line


@pytest.mark.parametrize("settings, name, remedy", SETTINGS)
def test_a_setting_is_refused_by_name_with_a_remedy(refused, settings, name, remedy):
    line = refused(**settings)
    assert name in line and remedy in line, line


@pytest.mark.parametrize("workdir, cause", [("/proc/efx", "/proc/efx"), ("text.txt/a", "text.txt")])
def test_the_remedy_fits_the_cause_of_a_failed_write(refused, workdir, cause):
    line = refused(workdir=workdir)
    assert cause in line and "another" in line and "free" not in line, line


def test_only_close_names_of_configs_are_suggested(refused, tmp_path):
    (tmp_path / "load.py").write_text("print()")
    (tmp_path / "mime.py").write_text("def get_config():\n    return None\n")
    for name, suggestion in (("mod.py", "'mod'"), ("mine.py", "'mime.py'"), ("loaf.py", "")):
        line = refused(config=name)
        assert suggestion in line and ("did you mean" in line) == bool(suggestion), line
    assert not nearest("load", ["mod"]) and "evaluate" in nearest("eval", ["train", "evaluate"])


def test_another_tokenizer_or_an_own_export_is_refused_with_a_remedy(tmp_path):
    config = common.base()
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    other = common.apply(common.base(), {"data.tokenizer": "bpe:512"})
    with pytest.raises(UsageError, match="config.data.tokenizer='bpe:512': .*use --config.data"):
        build.check_tokenizer(other, "--workdir", tmp_path)
    with pytest.raises(UsageError, match="model_type='efx': .*use the run folder"):
        hf_config.complete({"model_type": "efx"})
