"""What a new user gets wrong, each in one line that says what would be right, before anything runs.

Misspelt keys wherever they were set, flags, numbers that mean nothing, routing that no block has,
variants that contradict each other, runs and stages of studies.
"""

import importlib
import itertools
import json
import re
import tomllib
from types import SimpleNamespace
from typing import Literal

import families
import numpy as np
import pytest
import test_layout

from efx import build, command_line, hints, main, models, run_settings
from efx.cbtm import run as cbtm
from efx.cbtm import table as cbtm_table
from efx.config import config_of_run, load_config
from efx.configs import common
from efx.data.tokenizers import ByteTokenizer, CharTokenizer
from efx.errors import UsageError
from efx.models.decoder_config import DecoderConfig
from efx.models.families import FAMILIES, config_of
from efx.settings import block
from efx.studies import calm, convert, coord_check, isoflop, jobs, phatgoose, rehearsal, sweep

CONFIGS = [path.stem for path in test_layout.CONFIGS]


@pytest.fixture(autouse=True)
def here(root, monkeypatch):
    monkeypatch.chdir(root)


def refused(call, *words, **options):
    with pytest.raises(UsageError) as error:
        call(**options)
    line = str(error.value)
    assert "\n" not in line and all(word in line for word in words), line


def error_line(capsys):
    error = capsys.readouterr().err
    assert error.startswith("efx: error: ") and error.count("\n") == 1, error
    return error


# ---- keys --------------------------------------------------------------------------------------

WRONG_KEYS = [  # what a config file does, what is said
    ('c.optim.schedule.kindd = "wsd"', "config.optim.schedule.kindd", "did you mean 'kind'"),
    ("c.foo = 3", "config.foo is not a setting"),
    ("c.learning_rate = 1.0", "did you mean 'config.optim.learning_rate'"),
    ("c.losses.router_bse = 0.1", "config.losses.router_bse", "did you mean 'router_bce'"),
    ("c.model.mlp.moe.num_expert = 2", "did you mean 'num_experts'"),
    ("c.optim = dict(name='lion')", "config.optim.learning_rate is missing"),
    ("del c.sample.top_p", "config.sample.top_p is missing"),
    ("del c.log; c.log = 3", "config.log=3: expected a block of settings"),
    ("common.apply(c, {'modle.width': 3})", "config.modle", "did you mean 'model'"),
    ("common.variant(c, 'x', x={'model.widht': 3})", "variant 'x'", "did you mean 'width'"),
    ("c.model.family = 'latent'", "config.model are those of 'decoder'"),
    ("c = None", "expected a ConfigDict, not NoneType"),
]


def test_a_family_may_have_the_settings_of_another(monkeypatch):
    """A decoder that computes something else, with no setting of its own, was taken for a config of
    the decoder whose family had been changed."""

    @block("config.model")
    class OtherConfig(DecoderConfig):
        family: Literal["other"] = "other"

    monkeypatch.setitem(FAMILIES, "other", FAMILIES["decoder"]._replace(config=OtherConfig))
    plain = run_settings.known().model.to_dict() | {"family": "other"}
    assert type(config_of(plain)) is OtherConfig
    refused(lambda: config_of(plain | {"family": "latent"}), "config.model are those of 'decoder'")


@pytest.mark.parametrize("line, words", [(line, words) for line, *words in WRONG_KEYS])
def test_a_misspelt_key_set_inside_a_config_file_trained_to_the_end(tmp_path, line, words):
    path = tmp_path / "mine.py"
    path.write_text(
        "from efx.configs import common\n\n\ndef get_config():\n    c = common.base()\n"
        f"    {line}\n    return c\n"
    )
    refused(lambda: load_config(str(path)), str(path), *words)


def test_a_misspelt_key_is_named_wherever_else_it_was_set(tmp_path):
    """In a notebook's config, in the config.json of a run folder, on the command line."""
    config = common.base()
    config.data.packng = True
    refused(lambda: build.experiment(config), "config.data.packng", "did you mean 'packing'")
    plain = common.base().to_dict()
    plain["log"]["evry"] = 5
    (tmp_path / "config.json").write_text(json.dumps(plain))
    words = (str(tmp_path / "config.json"), "config.log.evry", "did you mean 'every'")
    refused(lambda: config_of_run(tmp_path), *words)
    refused(lambda: command_line.parse(["efx", "--mode=sample", f"--workdir={tmp_path}"]), *words)
    plain["log"] = common.base().log.to_dict() | {"every": "often"}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    refused(lambda: config_of_run(tmp_path), "config.log.every='often': expected int")
    plain["log"] = common.base().log.to_dict()
    (tmp_path / "config.json").write_text(json.dumps(plain))
    assert config_of_run(tmp_path).log.every == common.base().log.every
    depth = ["efx", "--config=configs/mod.py", "--workdir=x", "--config.depth=3"]
    refused(lambda: command_line.parse(depth), "--config.depth", "'config.model.depth'")


OF_OTHERS = [  # what a user of another program writes, and what is meant
    ("--config.optim.lr=3e-4", "'config.optim.learning_rate'"),
    ("--config.lr=3e-4", "'config.optim.learning_rate'"),
    ("--config.train.lr=3e-4", "'config.optim.learning_rate'"),
    ("--lr=3e-4", "'--config.optim.learning_rate'"),
    ("--config.model.dim=64", "'config.model.width'"),
    ("--config.model.n_layers=2", "'config.model.depth'"),
    ("--config.model.n_heads=2", "'config.model.attention.num_heads'"),
    ("--config.model.block_size=64", "'config.data.seq_len'"),
    ("--config.max_steps=64", "'config.steps'"),
    ("--config.evaluate.bs=4", "'config.data.batch_size'"),
    ("--config.optim.wd=0", "'config.optim.weight_decay'"),
]


@pytest.mark.parametrize("argument, meant", OF_OTHERS)
def test_names_that_other_programs_have_for_a_setting(argument, meant):
    arguments = ["efx", "--config=configs/mod.py", "--workdir=x", argument]
    refused(lambda: command_line.parse(arguments), f"(did you mean {meant}?)")


def test_each_name_of_other_programs_leads_to_one_setting():
    every = list(run_settings.names(run_settings.known()))
    called = run_settings.CALLED_ELSEWHERE
    names = [name for line in called.values() for name in line.split()]
    assert len(names) == len(set(names))
    assert {f"config.{setting}" for setting in called} <= set(every)
    # A setting of this name would be found without the table.
    assert not set(names) & {name.rpartition(".")[2] for name in every}


# ---- the command line --------------------------------------------------------------------------


@pytest.mark.parametrize("arguments, words", [
    (["--confg", "configs/mod.py"], "--confg is not a flag (did you mean '--config'?)"),
    (["--config=configs/mod.py", "--wrkdir=x"], "--wrkdir is not a flag (did you mean '--workdir'"),
    (["--config=configs/mod.py", "--workdir=x", "--steps=5"], "did you mean '--config.steps'?"),
    (["--workdir=x", "--learning_rate", "1"], "did you mean '--config.optim.learning_rate'?"),
    (["--config=configs/mdo.py", "--workdir=x"], "configs/mdo.py: there is no such file (did you"),
    (["--config=configs/mod.py", "--workdir=x", "--workdir=y"], "already defined as x"),
    (["--config=configs/mod.py", "--workdir=x", "--prompt=y"], "--prompt goes with --mode=sample"),
    (["--config=configs/mod.py", "--workdir=x", "--step=3"], "--step goes with --mode=evaluate or"),
    (["--config=configs/mod.py", "--workdir=x", "--cpu_devices=-1"], "--cpu_devices=-1"),
    (["configs/mod.py", "--workdir=x", "--config=configs/mod.py"], "'configs/mod.py': settings"),
    (["--mode=sample"], "--workdir is missing"),
    (["--workdir=nowhere"], "--config is missing"),
])  # fmt: skip
def test_a_misspelt_flag_was_answered_by_a_sentence_about_another(arguments, words, capsys):
    assert main.main(["efx", *arguments]) == 2
    assert words in error_line(capsys)


def test_what_is_no_flag_may_look_like_one():
    values = command_line.parse(["efx", "--config", "configs/mod.py", "--workdir", "x",
                                 "--mode=sample", "--prompt", "--confg",
                                 "--config.train_flops", "-1.0", "--config.steps=2",
                                 "--config.steps=3", "--nodistributed"])  # fmt: skip
    assert values.prompt == "--confg" and values.config.train_flops == -1.0
    assert values.config.steps == 3 and values.distributed is False


# ---- numbers and routing that mean nothing -----------------------------------------------------


COUNTS = {"checkpoint.every": 0, "evaluate.every": 0, "evaluate.batch_size": 1, "log.every": 1,
          "evaluate.max_batches": 0, "log.profile_at": 0, "log.profile_steps": 1,
          "sample.every": 0, "train.max_nonfinite": 1}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_every_minus_one_was_due_at_each_step(name):
    least = COUNTS[name]
    config = common.apply(common.base(), {name: least - 1})
    words = f"config.{name}={least - 1}: must be at least {least}"
    refused(lambda: build.experiment(config), words)


@pytest.mark.parametrize("changes, words", [
    ({"depth_routing.kind": "mod", "depth_routing.every": 5}, "depth_routing.every=5: the stack"),
    ({"mlp.kind": "moe", "mlp.moe.every": 5}, "config.model.mlp.moe.every=5: the stack has 4"),
    ({"dense_former.on": True, "dense_former.period": 5}, "dense_former.period=5: the stack has 4"),
    ({"dropout.kind": "elementwise", "dropout.sites": ()}, "config.model.dropout.sites=()"),
    ({"family": "latent", "mlp.kind": "moe", "mlp.moe.every": 5}, "moe.every=5: the stack has 4"),
    ({"family": "latent", "depth_routing.kind": "mod", "depth_routing.every": 5}, "every=5: the"),
    ({"family": "encoder_decoder", "mlp.kind": "moe", "mlp.moe.every": 5}, "the stack has 4"),
])  # fmt: skip
def test_routing_or_experts_that_no_block_has_trained_a_dense_model(changes, words):
    refused(lambda: families.make({"depth": 4, **changes}), words)
    for key in ("depth_routing.every", "mlp.moe.every", "dense_former.period"):
        if key in changes:
            families.make({"depth": 4, **changes, key: 4})


# ---- variants ----------------------------------------------------------------------------------


def loaded(name, variants):
    """The config of variants in this order, or what is said of them."""
    try:
        return load_config(f"configs/{name}.py:{','.join(variants)}")
    except UsageError as error:
        return str(error).replace(",".join(variants), "")


@pytest.mark.parametrize("name", CONFIGS)
def test_variants_depended_on_their_order(name):
    """Any two of a config give one config in both orders, or one line; with smoke, a small one."""
    names = list(importlib.import_module(f"efx.configs.{name}").VARIANTS)
    for pair in itertools.combinations(names, 2):
        config, other = loaded(name, pair), loaded(name, pair[::-1])
        assert config == other, pair
        if isinstance(config, str):
            assert "smoke" not in pair and "\n" not in config and repr(pair[0]) in config, config
        elif config.model.family != "bridged":  # which is made from runs
            length = config.data.seq_len
            options = dict(vocab_size=257, context=length, dtype=config.train.dtype)
            try:
                model = models.build(config.model, **options)
            except UsageError as error:
                assert "smoke" not in pair and "\n" not in str(error)
                continue
            if "smoke" in pair:
                cost = model.ledger(length).train_flops(config.data.batch_size * length)
                assert config.steps <= 60 and config.steps * cost < 5e11, pair
                assert config.data.tokenizer in ("bytes", "chars"), pair


def test_variants_that_contradict_each_other_are_both_named():
    def load(arg):
        return load_config(f"configs/{arg}")

    refused(lambda: load("shakespeare_char.py:gpu,cpu"), "'cpu' and 'gpu' contradict each other")
    refused(lambda: load("encoder_decoder.py:serial,same_layer"), "config.model.cross_source")
    published = load("encoder_decoder.py:serial,published")  # of a recipe details may be changed
    assert published.model.cross_source == "final" and published.model.depth == 13
    assert load("latent.py:one_level,smoke").model.level_widths == (32,)
    assert load("shakespeare_char.py:mod").data.batch_size == 12  # the recipe that is not named


# ---- studies -----------------------------------------------------------------------------------

SWEEP = """
def get_sweep():
    return dict(config="configs/mod.py:smoke", seeds=(0, 1), equal="flops", columns={}, runs=RUNS)
"""


@pytest.fixture
def nothing_runs(monkeypatch):
    """Whatever a study starts fails the test."""

    def start(*arguments, **options):
        raise AssertionError(f"a study started {arguments}")

    monkeypatch.setattr(jobs, "run_main", start)


@pytest.mark.parametrize("runs, words", [
    ({"lr +1": {}, "lr -1": {}}, "'lr +1' and 'lr -1' would share the folder lr_1-seed0"),
    ({"A": {}, "a": {}}, "'A' and 'a' would share the folder"),
    ({}, "runs is empty"),
    ({"a": {}, "b": {"model.depht": 2}}, "the run 'b': --config.model.depht is not a setting"),
    ({"a": {}, "b": {"model.depth": "x"}}, "the run 'b': --config.model.depth=x: expected"),
    ({"a": {}, "b": {"config": "configs/none.py"}}, "the run 'b': --config=configs/none.py"),
    ({"a": {}, "b": {"model.depth": 0}}, "the run 'b': config.model.depth=0"),
    ({"a": {}, "b": {"data.source": "text:none.txt"}}, "the run 'b': config.data.source='text:non"),
    ({"a": {}, "b": {"data.source": "tokens:none"}}, "'tokens:none': no such file or folder"),
    ({"a": {}, "b": {"data.split": "documents", "data.source": "mix:stdlib,text:no"}},
     "'text:no': no such file or folder"),
    ({"a": {}, "b": {"data.eval_source": "text:no*e"}}, "eval_source='text:no*e': no file matches"),
])  # fmt: skip
def test_rows_of_a_sweep_are_checked_before_the_first_trains(
    runs, words, tmp_path, capsys, nothing_runs
):
    path = tmp_path / "sweep.py"
    path.write_text(f"RUNS = {runs!r}\n{SWEEP}")
    assert sweep.main(["--sweep", str(path), "--workdir", str(tmp_path / "w")]) == 2
    assert words in error_line(capsys) and not (tmp_path / "w").exists()


def test_a_model_that_cannot_be_is_told_before_the_first_run_trains(tmp_path, capsys, nothing_runs):
    """Of a sweep and of a grid, by a process of its own, which takes no device that runs need."""
    runs = {"a": {"steps": 9}, "b": {"steps": 9}, "c": {"log.profile_at": 400}}
    path, workdir = tmp_path / "sweep.py", tmp_path / "w"
    path.write_text(f"RUNS = {runs!r}\n{SWEEP}")
    assert sweep.main(["--sweep", str(path), "--workdir", str(workdir)]) == 2
    # The steps that it would have had with the FLOPs of the first.
    assert "the run 'c': config.log.profile_at=400" in error_line(capsys)
    path.write_text("""
def get_grid():
    return dict(config="configs/mod.py:smoke", seeds=(0,), budgets=(1e10,), families={"d": {}},
                sizes={"1": {}, "2": {"model.width": 33}, "3": {}, "4": {}})
""")
    assert isoflop.main(["--grid", str(path), "--workdir", str(workdir)]) == 2
    assert "config.model.width=33 is not divisible by" in error_line(capsys)
    assert not workdir.exists()


NO_MODELS = [
    ({"model.width": 1_000_000}, "config.model.width=1000000: training needs"),
    ({"model.depth_routing.every": 9}, "config.model.depth_routing.every=9: the stack has 4"),
    ({"optim.frozen": "nosuch"}, "config.optim.frozen='nosuch' matches no parameter"),
    ({"optim.decay": "nosuch"}, "config.optim.decay='nosuch' matches no parameter"),
    ({"data.tokenizer": "/none"}, "config.data.tokenizer='/none': no such file"),
    ({"init.run": "/none"}, "config.init.run='/none': there is no such run folder"),
    ({"losses.distill": 1.0, "train.teacher": "/none"}, "config.train.teacher=/none: there is no"),
    ({"adapter.kind": "lora"}, "config.adapter.kind='lora': config.init.run is empty"),
    ({"checkpoint.keep_best": 1, "checkpoint.best_metric": "x"}, "config.checkpoint.best_metric="),
    # Of what there is the rows over all layers are listed.
    (
        {
            "checkpoint.keep_best": 1,
            "checkpoint.best_metric": "x",
            "model.dropout.kind": "elementwise",
        },
        "eval/dropout/kept, eval/dropout/near_one, eval/dropout/near_zero, eval/loss",
    ),
    ({"data.seq_len": 10**7}, "config.data.seq_len=10000000"),
    ({"log.profile_at": 400}, "config.log.profile_at=400"),
    ({"train.accumulation": 3}, "config.data.batch_size=8: must be a multiple"),
]


def test_what_only_a_model_shows_is_said_without_a_text(one_device):
    def looked_at(changes, budget=0.0):
        config = common.apply(load_config("configs/mod.py:smoke"), changes)
        return rehearsal.flops_of(run_settings.check(config), 1, budget, {})

    for changes, words in NO_MODELS:
        refused(lambda changes=changes: looked_at(changes), words)
    flops = looked_at({})
    assert flops > 0 and looked_at({"steps": 9}, flops) == flops
    # How many steps a run has may depend on its text: then nothing is said against them.
    for unknown in ({"log.profile_at": 400}, {"log.profile_at": 400, "data.tokenizer": "chars"}):
        assert looked_at(unknown, None) is None


@pytest.mark.parametrize("change, words", [
    (("(1e9,", "(2.001e9,"), "two of them are 2.00 GFLOPs"),
    (('"+":', '"-":'), "'d, +, 1.00 GFLOPs' and 'd, -, 1.00 GFLOPs' would share"),
    (("seeds=(0,", "seeds=(1, 1,"), "seeds=(1, 1, 2) has a seed twice"),
])  # fmt: skip
def test_points_of_a_grid_have_folders_of_their_own(change, words, tmp_path):
    text = """
def get_grid():
    return dict(config="configs/mod.py", seeds=(0, 2), budgets=(1e9, 2e9), families={"d": {}},
                sizes={"+": {}, "1": {}, "2": {}, "3": {}})
"""
    path = tmp_path / "grid.py"
    path.write_text(text)
    assert isoflop.load_grid(path)
    if change[1] == '"-":':
        change = ('"1":', '"-":')
    path.write_text(text.replace(*change))
    refused(lambda: isoflop.load_grid(path), words)


EXTRAS = [  # a study, its own arguments, what follows --, what is said
    (phatgoose, [], "bse:--config.steps=3", "no run's name begins with 'bse' (did you mean 'base'"),
    (phatgoose, [], "adaptr:--config.steps=3", "did you mean 'adapter'"),
    (phatgoose, [], "base:--config.stps=3", "the run 'base': --config.stps is not a setting"),
    (phatgoose, [], "base:config.steps=3", "unexpected argument 'base:config.steps=3'"),
    (phatgoose, [], ":--config.steps=3", "no run's name begins with ''"),
    (phatgoose, [], "--workdir=x", "--workdir=x: the study sets this"),
    (calm, [], "augmnt:--config.steps=3", "did you mean 'augment'"),
    (calm, [], "anchor:--config.seed=3", "anchor:--config.seed=3: the study sets this"),
    (
        phatgoose,
        ["--config=phatgoose:smoke"],
        "gate:--config.optim.frozen=nosuch",
        "the run 'gate_prose': config.optim.frozen='nosuch' matches no parameter",
    ),
    (
        calm,
        ["--config=calm:smoke"],
        "anchor:--config.model.depth=1",
        "the run 'bridge': config.model.pairs=2: must be from 1 to 1, the layers of",
    ),
    (
        convert,
        [],
        "scratch:--config.log.profile_at=100000",
        "the run 'scratch': config.log.profile_at=100000",
    ),
    (
        phatgoose,
        ["--domain=x=text:none", "--domain=y=stdlib"],
        "--config.steps=3",
        "the run 'adapter_x': config.data.source='text:none': no such file or folder",
    ),
    (phatgoose, [], "joint:--config.adapter.rank=-1", "the run 'joint': config.adapter.rank=-1"),
    (calm, [], "bridge:--config.optim.learning_rate=-1", "the run 'bridge': config.optim.learning"),
    (cbtm, ["--config=configs/cbtm.py"], "bse:--config.steps=3", "unexpected argument 'bse:"),
    (
        cbtm,
        ["--config=cbtm:smoke"],
        "--config.optim.frozen=nosuch",
        "the run 'seed model': config.optim.frozen='nosuch' matches no parameter",
    ),
    (cbtm_table, [], "bse:--config.steps=3", "unexpected argument 'bse:--config"),
    (
        cbtm_table,
        ["--config=cbtm:smoke"],
        "--config.train.accumulation=3",
        "the run 'one model on everything, seed 0': config.data.batch_size=",
    ),
    (cbtm_table, [], "--config.seed=3", "--config.seed=3: the study"),
    (sweep, ["--sweep=configs/sweeps/mod_table.py"], "bse:--config.steps=3", "unexpected argument"),
    (sweep, ["--sweep=configs/sweeps/mod_table.py"], "--config.seed=3", "--config.seed=3: the"),
    (isoflop, ["--grid=configs/sweeps/isoflop.py"], "--config.stps=3", "did you mean 'steps'"),
]


@pytest.mark.parametrize("study, arguments, extra, words", EXTRAS)
def test_an_unknown_prefix_was_ignored_and_trained_a_thousand_steps(
    study, arguments, extra, words, tmp_path, capsys, nothing_runs
):
    workdir = tmp_path / "w"
    assert study.main([*arguments, f"--workdir={workdir}", "--", extra]) == 2
    assert words in error_line(capsys) and not workdir.exists()


@pytest.mark.parametrize("study, arguments, words", [
    (phatgoose, ["--domain=of_all=stdlib", "--domain=b=pydoc"], "are called 'adapter_of_all'"),
    (phatgoose, ["--domain=b=text:a", "--domain=b=text:b"], "a name is used twice"),
    (phatgoose, ["--seeds=0,0"], "--seeds=0,0: expected different numbers"),
    (phatgoose, ["--config=configs/phatgoose.py:smok"], "did you mean 'smoke'"),
    (cbtm_table, ["--seeds=0,x"], "--seeds=0,x: expected different numbers"),
    (coord_check, ["--widths=a,b"], "--widths=a,b: expected different numbers"),
    (coord_check, ["--set=model.dept=2"], "--set: config.model.dept is not a setting"),
])  # fmt: skip
def test_arguments_of_studies(study, arguments, words, tmp_path, capsys, nothing_runs):
    out = "out" if study is coord_check else "workdir"
    assert study.main([*arguments, f"--{out}={tmp_path / 'w'}"]) == 2
    assert words in error_line(capsys) and not (tmp_path / "w").exists()


@pytest.mark.parametrize("study", [sweep, isoflop, cbtm, cbtm_table, phatgoose, calm, coord_check])
def test_misspelt_flags_of_studies(study, capsys):
    with pytest.raises(SystemExit) as end:
        study.main(["--ouut=x" if study is coord_check else "--wokdir=x"])
    line = error_line(capsys)
    assert end.value.code == 2 and "is not a flag (did you mean '--" in line, line


# ---- what a run ends with ----------------------------------------------------------------------


def ended(monkeypatch, tokenizer, text, prompt, tensorboard=True, script=None, module=None):
    """The closing hints of a run on a machine that has tensorboard as a script, or as a module."""
    monkeypatch.setattr(hints.shutil, "which", lambda name: script)
    monkeypatch.setattr(hints.importlib.util, "find_spec", lambda name: module)
    batch = {"inputs": np.array([tokenizer.encode(text)])}
    data = SimpleNamespace(tokenizer=tokenizer, eval_batches=lambda size, most: iter([batch]))
    config = common.apply(common.base(), {"sample.prompt": prompt, "log.tensorboard": tensorboard})
    return hints.after(test_layout.ROOT / "runs" / "a run", config, data, 8)[1:]


def test_estimate_names_small_variants_for_a_long_run_on_a_cpu():
    for command in (["efx", "--config", "gpt2"], ["efx", "--config=configs/gpt2.py:x"]):
        long, short = (hints.before(flops, 1, 0, command) for flops in (1e18, 1e9))
        source = command[-1].split("=")[-1].removesuffix(":x")
        assert f"--config {source}:smoke" in long and "smoke" not in short
    assert "smoke" not in hints.before(1e18, 1, 0, ["efx", "--config", "mine.py"])
    # On an accelerator, from its peak: 10 days at full speed.
    days = int(re.search(r"(\d+) d ", hints.before(864e18, 1, 1e15, []))[1])
    assert 20 <= days <= 40


def test_the_closing_hints_fit_the_run(monkeypatch):
    monkeypatch.delenv("EFX_COMMAND", raising=False)
    chars, text = CharTokenizer("天地玄黃 "), "天地玄黃 天地玄黃 玄黃"

    def prompt(*arguments):
        line = ended(monkeypatch, *arguments)[0]
        return re.search(r"a run'(.*)", line)[1]

    assert prompt(chars, text, "地玄 ") == " --prompt '地玄 '"
    assert prompt(chars, text, "def ") == " --prompt '天地玄黃'"  # its tokenizer has no "d"
    assert prompt(ByteTokenizer(), "of words that it saw", "def ") == " --prompt 'def '"
    assert prompt(ByteTokenizer(), "of words that it saw", "def of words") == " --prompt of"
    assert prompt(ByteTokenizer(), "x", "\n") == ""  # the config's own, without a flag
    look = [line[2].partition("look at it:")[2].strip() for line in (
        ended(monkeypatch, chars, text, "地", script="/bin/tensorboard"),
        ended(monkeypatch, chars, text, "地", module="here"),
        ended(monkeypatch, chars, text, "地"),
        ended(monkeypatch, chars, text, "地", tensorboard=False),
    )]  # fmt: skip
    assert look[0].startswith("tensorboard --logdir ")
    assert look[1].startswith("python -m tensorboard.main --logdir ")
    assert look[2].startswith("python -m pip install tensorboard && python -m tensorboard.main ")
    assert look[3].endswith("metrics.jsonl has one line per logged step")
    for script, command in (("/env/bin/efx", "efx"), (None, "/env/bin/efx")):  # installed
        monkeypatch.setattr(hints.sys, "argv", ["/env/bin/efx"])
        line = ended(monkeypatch, chars, text, "地", script=script)[0]
        assert f" {command} --mode=sample" in line
    monkeypatch.setenv("EFX_COMMAND", "./launch/local.sh")
    lines = ended(monkeypatch, chars, text, "地")
    assert lines[0].count("./launch/local.sh --mode=sample") == 1
    assert "python -m pip" not in lines[2].replace(hints.sys.executable, "that of the launch")


def test_install_hints_name_what_exists():
    """No package index has efx, and whoever takes that name there could be installed."""
    project = tomllib.loads((test_layout.ROOT / "pyproject.toml").read_text())["project"]
    known, found = set(project["optional-dependencies"]), []
    for path, text in test_layout.project_files():
        if path.name == "test_docs.py":  # which shows that wrong ones are found
            continue
        assert not re.search(r"\befx\[[a-z]|pip[ ]install (-\S+ )*'?efx\b", text), path
        named = re.findall(r"""['"]\.\[([\w,]+)\]|EFX_EXTRAS=([a-z][\w,]*)""", text)
        found += [extra for one in named for extra in "".join(one).split(",")]
    assert set(found) <= known and len(found) > 5
