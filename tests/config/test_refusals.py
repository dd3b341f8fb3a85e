"""Bad input gives one line with the name at fault, status 2, and no run directory.

The settings are in tests/refusals.py. Here are flags, names of files, and keys that were misspelt
elsewhere than on the command line.
"""

import json
import re

import jax
import pytest
import refusals
import test_cli
from refusals import refused

from efx import io, main
from efx.config import flags, schema
from efx.config.load import CALLED_ELSEWHERE, config_of_run, load_config, names, run_file
from efx.config.run import Config, default_config
from efx.configs import common
from efx.errors import UsageError, nearest
from efx.parallel import multihost
from efx.studies import report
from efx.train import setup

CASES = [
    pytest.param(changes, name, id=f"{area}-{name}")
    for area in ("GENERAL", "MODELS", "ROUTING", "DATA", "RUNS", "STUDIES")
    for changes, name in getattr(refusals, area)
]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("refusals") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    return path


@pytest.fixture(autouse=True)
def here(root, monkeypatch):
    monkeypatch.chdir(root)


@pytest.mark.parametrize("changes, name", CASES)
def test_bad_settings_are_refused_by_name(changes, name, text, tmp_path, capsys):
    given = {**test_cli.SETTINGS, "data.source": f"text:{text}", "data.cache_dir": text.parent}
    assert test_cli.call(f"--workdir={tmp_path / 'run'}", **given | changes) == 2
    assert name in test_cli.error_line(capsys)
    assert not (tmp_path / "run").exists()


MOD = "--config=configs/mod.py"
FLAGS = [  # of the command line, what is named
    ([MOD], "--workdir"),
    (["--workdir=x"], "--config"),
    (["--workdir=x", "--config=/etc/passwd"], "/etc/passwd"),
    (["--workdir=x", "--config=configs/none.py"], "configs/none.py"),
    (["--workdir=x", "--config=configs/mod.py:smok"], "'smoke'"),
    (["--workdir=x", MOD, "--mode=trian"], "'train'"),
    (["--workdir=x", MOD, "--wrkdir=y"], "'--workdir'"),
    (["--workdir=x", MOD, "--workdir=y"], "workdir"),
    (["--workdir=x", MOD, "stray"], "'stray'"),
    (["--workdir=x", MOD, "--", "--config.steps=3"], "'--'"),
    (["--workdir=x", MOD, "--steps=5"], "'--config.steps'"),
    (["--workdir=nowhere", "--mode=sample"], "nowhere"),
    (["--workdir=nowhere", "--mode=evaluate"], "nowhere"),
    (["--workdir=x", MOD, "--prompt=y"], "--prompt"),
    (["--workdir=x", MOD, "--step=3"], "--step"),
    (["--workdir=x", MOD, "--mode=sample", "--topology=v5e:1x1"], "--topology"),
    (["--workdir=x", MOD, "--cpu_devices=-1"], "--cpu_devices=-1"),
    (["--workdir=x", MOD, "--num_processes=2"], "--coordinator_address"),
    (["--workdir=x", MOD, "--coordinator_address=a:1", "--num_processes=2", "--process_id=2"],
     "--process_id=2"),
    (["--workdir=x", MOD, "--coordinator_address=a", "--num_processes=1", "--process_id=0"],
     "--coordinator_address"),
    # Names that other programs have for a setting.
    (["--workdir=x", MOD, "--config.optim.lr=3e-4"], "'config.optim.learning_rate'"),
    (["--workdir=x", MOD, "--lr=3e-4"], "'--config.optim.learning_rate'"),
    (["--workdir=x", MOD, "--config.model.n_heads=2"], "'config.model.attention.num_heads'"),
    (["--workdir=x", MOD, "--config.evaluate.bs=4"], "'config.data.batch_size'"),
]  # fmt: skip


@pytest.mark.parametrize("arguments, name", FLAGS)
def test_bad_flags_are_refused_by_name(arguments, name, tmp_path, capsys, monkeypatch):
    assert main.main(["efx", *arguments]) == 2
    assert name in test_cli.error_line(capsys)


def test_a_value_may_look_like_a_flag():
    values = flags.parse(["efx", "--config", "configs/mod.py", "--workdir", "x",
                                 "--mode=sample", "--prompt", "--confg",
                                 "--config.train_flops", "-1.0", "--config.steps=2",
                                 "--config.steps=3", "--nodistributed"])  # fmt: skip
    assert values.prompt == "--confg" and values.config.train_flops == -1.0
    assert values.config.steps == 3 and values.distributed is False


def test_each_name_of_another_program_leads_to_one_setting():
    every = set(names(default_config()))
    called = CALLED_ELSEWHERE
    others = [name for line in called.values() for name in line.split()]
    assert len(others) == len(set(others))
    assert {f"config.{setting}" for setting in called} <= every
    # A setting with such a name would be found without the table.
    assert not set(others) & {name.rpartition(".")[2] for name in every}


def test_only_close_names_are_suggested(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mime.py").write_text("def get_config():\n    return None\n")
    for name, suggestion in (("mod.py", "'mod'"), ("mine.py", "'mime.py'"), ("loaf.py", "")):
        with pytest.raises(UsageError) as error:
            load_config(name)
        line = str(error.value)
        assert suggestion in line and ("did you mean" in line) == bool(suggestion), line
    assert not nearest("load", ["mod"]) and "evaluate" in nearest("eval", ["train", "evaluate"])


# ---- names of files and folders ----------------------------------------------------------------

BRIDGE = "--config=configs/calm.py:bridge"
NAMED = [  # flags in which NAME is the name of a file or folder, what is named
    (["--workdir=NAME"], "--workdir="),
    (["--workdir=NAME", "--mode=evaluate", "--config="], "--workdir="),
    (["--config=NAME"], "--config="),
    (["--mode=import", "--from=NAME"], "--from="),
    (["--mode=convert", "--from=NAME", "--to=mod", "--config="], "--from="),
    (["--config.data.tokenizer=NAME"], "config.data.tokenizer="),
    (["--config.data.source=text:NAME"], "config.data.source="),
    (["--config.data.subset=NAME", "--config.data.split=documents",
      "--config.data.document_bytes=64"], "config.data.subset="),
    (["--config.init.run=NAME"], "config.init.run="),
    (["--config.losses.distill=1.0", "--config.train.teacher=NAME"], "config.train.teacher="),
    ([BRIDGE, "--config.model.anchor=NAME"], "config.model.anchor="),
]  # fmt: skip


def with_name(arguments, workdir, text, name):
    """These flags with NAME replaced, and the others that a run needs."""
    given = [argument.replace("NAME", name) for argument in arguments]
    flags = {argument.partition("=")[0] for argument in given}
    rest = {"--config": "configs/mod.py", "--workdir": workdir, "--config.data.source": text}
    rest |= {"--config.data.seq_len": 8}
    given += [f"{flag}={value}" for flag, value in rest.items() if flag not in flags]
    return [flag for flag in given if flag != "--config="]


@pytest.mark.parametrize("arguments, named", NAMED)
def test_names_that_no_file_can_have_are_refused(arguments, named, text, tmp_path, capsys):
    workdir = tmp_path / "run"
    for name in ("a" * 300, "a\0b"):
        assert main.main(["efx", *with_name(arguments, workdir, f"text:{text}", name)]) == 2
        line = test_cli.error_line(capsys)
        assert named in line and ascii(name)[1:-1] in line, line
        assert not workdir.exists()


@pytest.mark.parametrize("arguments, named", [
    (["--config.init.run=NAME"], "config.init.run"),
    ([BRIDGE, "--config.model.anchor=NAME"], "config.model.anchor"),
    (["--mode=convert", "--from=NAME", "--to=mod", "--config="], "--from="),
    (["--config.data.tokenizer=NAME"], "config.data.tokenizer"),
])  # fmt: skip
def test_a_directory_of_another_kind_is_refused(arguments, named, text, tmp_path, capsys):
    workdir, name = tmp_path / "run", str(tmp_path)
    assert main.main(["efx", *with_name(arguments, workdir, f"text:{text}", name)]) == 2
    line = test_cli.error_line(capsys)
    assert named in line and name in line
    assert not workdir.exists()


def test_other_commands_refuse_names_that_no_file_can_have(tmp_path):
    for name in ("a" * 300, "a\0b"):
        refused(lambda name=name: run_file("sweep", name, "sweeps"), "--sweep=")
        refused(lambda name=name: report.collect([name]), "RUN=")
        refused(lambda name=name: io.local_path(name, "--to"), "--to=")


def test_an_unexpanded_home_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for function in (io.folder, io.local_path):
        refused(lambda function=function: function("~/x"), "--workdir=~/x", f"{tmp_path}/x")
        assert str(function("~x/~")) == "~x/~"


@pytest.mark.parametrize("workdir, cause", [("/proc/efx", "/proc/efx"), ("text.txt/a", "text.txt")])
def test_the_remedy_fits_the_cause_of_a_failed_write(
    workdir, cause, text, capsys, monkeypatch, one_device
):
    monkeypatch.chdir(text.parent)
    given = {**test_cli.SETTINGS, "data.source": f"text:{text}", "data.cache_dir": text.parent}
    assert test_cli.call(f"--workdir={workdir}", **given) == 2
    line = test_cli.error_line(capsys)
    assert cause in line and "another" in line and "free" not in line, line


@pytest.mark.parametrize("content", [b"", b"\0\1\2\3" * 500])
def test_files_that_are_no_text_are_refused(content, tmp_path, capsys):
    path = tmp_path / "bad"
    path.write_bytes(content)
    given = {**test_cli.SETTINGS, "data.source": f"text:{path}", "data.tokenizer": "chars"}
    assert test_cli.call(f"--workdir={tmp_path / 'run'}", **given) == 2
    assert str(path) in test_cli.error_line(capsys)


# ---- keys in files -----------------------------------------------------------------------------


WRONG_KEYS = [  # a line of a config file, what is named
    ('c.optim.schedule.kindd = "wsd"', "config.optim.schedule.kindd", "'kind'"),
    ("c.learning_rate = 1.0", "'config.optim.learning_rate'"),
    ("c.losses.router_bse = 0.1", "config.losses.router_bse", "'router_bce'"),
    ("c.optim = dict(name='lion')", "config.optim.learning_rate"),
    ("del c.sample.top_p", "config.sample.top_p"),
    ("del c.log; c.log = 3", "config.log=3"),
    ("common.apply(c, {'modle.width': 3})", "config.modle", "'model'"),
    ("common.variant(c, 'x', x={'model.widht': 3})", "'x'", "'width'"),
    ("c.model.family = 'latent'", "config.model"),
    ("c = None", "ConfigDict"),
]


@pytest.mark.parametrize("line, names", [(line, names) for line, *names in WRONG_KEYS])
def test_misspelt_keys_in_a_config_file_are_refused(tmp_path, line, names):
    path = tmp_path / "mine.py"
    path.write_text(
        "from efx.configs import common\n\n\ndef get_config():\n    c = common.base()\n"
        f"    {line}\n    return c\n"
    )
    refused(lambda: load_config(str(path)), str(path), *names)


def test_misspelt_keys_are_refused_in_a_notebook_and_in_a_run_directory(tmp_path):
    config = common.base()
    config.data.packng = True
    refused(lambda: setup.experiment(config), "config.data.packng", "'packing'")
    plain = common.base().to_dict()
    plain["log"]["evry"] = 5
    (tmp_path / "config.json").write_text(json.dumps(plain))
    names = (str(tmp_path / "config.json"), "config.log.evry", "'every'")
    refused(lambda: config_of_run(tmp_path), *names)
    refused(lambda: flags.parse(["efx", "--mode=sample", f"--workdir={tmp_path}"]), *names)


# ---- schedules, clusters -----------------------------------------------------------------------


@pytest.mark.parametrize("weight, name", [
    ({"schedule": "expo", "rate": 1.0}, "z_loss.schedule='expo'"),
    ({"schedule": "constant", "value": "1"}, "config.losses.z_loss.value='1'"),
    ({"schedule": "linear", "c_start": 0.0, "c_end": float("inf"), "steps": 1}, "z_loss.c_end=inf"),
    ({"schedule": "exponential", "rate": 1.0, "c_min": 7, "c_max": 5}, "z_loss.c_min=7.0"),
    ({"schedule": "cosine", "c_start": 0, "c_end": 1, "steps": -1}, "z_loss.steps=-1"),
])  # fmt: skip
def test_bad_schedules_of_loss_weights_are_refused(weight, name):
    refused(lambda: schema.replaced(Config(), {"losses.z_loss": weight}), name)


@pytest.mark.parametrize("address, status", [(None, 75), ("nowhere:1", 2)])
def test_a_cluster_that_does_not_answer_is_temporary_unless_an_address_is_given(
    monkeypatch, capsys, address, status
):
    """Launchers restart a command that ends with 75. A given address may be wrong."""

    def unreached(*arguments, **options):
        raise RuntimeError("DEADLINE_EXCEEDED: 3 of 4 tasks")

    monkeypatch.setattr(jax.distributed, "initialize", unreached)
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    monkeypatch.setattr(main, "run", lambda argv: multihost.connect(address, preemption=False))
    assert main.main([]) == status
    assert re.search("^efx: error: .*connect", capsys.readouterr().err, re.M)
