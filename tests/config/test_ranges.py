"""Every setting has its range: each value of it makes an experiment whose step can be traced, or is
refused in one line, with nothing made in the run directory.

tests/config/hostile_settings.py makes the values, for the settings of all families.
"""

import hostile_settings
import pytest
import test_cli
from hostile_settings import CASES, configured, hostile, trace_step, walked, write_folder
from run_files import TINY

from efx.config import schema
from efx.config.run import Config
from efx.errors import UsageError
from efx.models import FAMILIES
from efx.train import trainer

QUICK = "masks", "mod", "soft_experts"
CASE = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A text, and what another run needs to be a member of a model: its config and tokenizer."""
    folder = tmp_path_factory.mktemp("ranges")
    write_folder(folder)
    return folder


@pytest.mark.parametrize("case", CASE)
def test_any_value_of_any_setting(case, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some values are names of folders
    family, changes, _ = CASES[case]
    config, workdir = configured(family, changes, folder), tmp_path / "run"
    made, messages = 0, []
    with hostile_settings.remembered():
        traced = {trainer.Trainer(config, workdir, (), 0.0, None).experiment.model}
        for key, hint in walked(case, config).items():
            for value in hostile(hint):
                try:
                    changed = schema.replaced(config, {key: value})
                    trace_step(trainer.Trainer(changed, workdir, (), 0.0, None), traced)
                    made += 1
                except UsageError as error:
                    messages.append(str(error))
                except Exception as error:
                    messages.append(f"{key}={value!r}\n{error!r}")
                assert not workdir.exists(), (key, value)
    wrong = [line for line in messages if "\n" in line or "config." not in line]
    assert not wrong, "\n".join(ascii(line)[:300] for line in wrong)
    assert made > 1 and len(messages) > 1


def test_every_setting_is_walked_over(folder):
    """A new block of settings has to be in a case."""
    configs = [Config(model=family.config()) for family in FAMILIES.values()]
    every = {name.removeprefix("config.") for c in configs for name, _, _ in schema.leaves(c)}
    assert every == {
        key
        for case, (family, changes, _) in CASES.items()
        for key in walked(case, configured(family, changes, folder))
    }


@pytest.mark.slow
def test_a_run_with_many_settings_at_their_least_ends(folder, tmp_path, one_device):
    ones = "steps data.seq_len model.depth log.every checkpoint.every checkpoint.keep_last"
    ones += " evaluate.every sample.every sample.max_new_tokens train.loss_chunk model.mlp.hidden"
    ones += " model.attention.num_heads model.attention.window model.depth_routing.every"
    zeros = "optim.b1 optim.clip_norm optim.weight_decay optim.learning_rate sample.temperature"
    zeros += " model.init_std optim.schedule.warmup_steps checkpoint.keep_best"
    least = {"model.width": 2, "model.depth_routing.capacity": 1e-30, "sample.top_p": 1e-30}
    least |= {"model.depth_routing.slack": 1.0, "sample.prompt": "", "data.cache_dir": folder}
    least |= {"data.source": f"text:{folder / 'text.txt'}"}
    least |= dict.fromkeys(ones.split(), 1) | dict.fromkeys(zeros.split(), 0)
    workdir = f"--workdir={tmp_path / 'run'}"
    assert test_cli.call("--config=mod", workdir, **{**TINY, **least}) == 0
    assert (tmp_path / "run/checkpoints/1").is_dir()
