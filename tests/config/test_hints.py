"""The lines that a run prints after its last step."""

import re
from types import SimpleNamespace

import numpy as np
import test_layout

from efx.configs import common
from efx.data.tokenizers import ByteTokenizer, CharTokenizer
from efx.train import messages


def closing_hints(monkeypatch, tokenizer, text, prompt, tensorboard=True, module=None):
    """The lines at the end of a run; module: that of TensorBoard, None where it is missing."""
    monkeypatch.setattr(messages.importlib.util, "find_spec", lambda name: module)
    batch = {"inputs": np.array([tokenizer.encode(text)])}
    data = SimpleNamespace(tokenizer=tokenizer, eval_batches=lambda size, most: iter([batch]))
    config = common.apply(common.base(), {"sample.prompt": prompt, "log.tensorboard": tensorboard})
    return messages.closing_lines(test_layout.ROOT / "runs" / "a run", config, data, 8)[1:]


CHARACTERS, TEXT = CharTokenizer("天地玄黃 "), "天地玄黃 天地玄黃 玄黃"


def test_the_suggested_prompt_is_one_that_the_tokenizer_has(monkeypatch):
    def prompt(*arguments):
        return re.search(r"a run'(.*)", closing_hints(monkeypatch, *arguments)[0])[1]

    assert prompt(CHARACTERS, TEXT, "地玄 ") == " --prompt '地玄 '"
    assert prompt(CHARACTERS, TEXT, "def ") == " --prompt '天地玄黃'"  # its tokenizer has no "d"
    assert prompt(ByteTokenizer(), "x", "\n") == ""  # the config's, without a flag


def test_the_suggested_commands_fit_the_installation(monkeypatch):
    def last_line(**options):
        return closing_hints(monkeypatch, CHARACTERS, TEXT, "地", **options)[-1]

    assert "-m tensorboard.main --logdir " in last_line(module="here")
    assert "pip install tensorboard" in last_line()
    assert "metrics.jsonl" in last_line(tensorboard=False)
    monkeypatch.setenv("EFX_COMMAND", "./launch/local.sh")
    lines = closing_hints(monkeypatch, CHARACTERS, TEXT, "地")
    assert lines[0].count("./launch/local.sh --mode=sample") == 1
