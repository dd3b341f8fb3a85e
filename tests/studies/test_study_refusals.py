"""A study refuses bad input in one line before its first run trains."""

import pytest
from refusals import refused
from study_helpers import error_line

from efx.cbtm import run as cbtm
from efx.cbtm import table as cbtm_table
from efx.config.load import load_config, to_config
from efx.configs import common
from efx.studies import calm, convert, coord_check, isoflop, jobs, phatgoose, rehearsal, sweep

SWEEP = """
def get_sweep():
    return dict(config="configs/mod.py:smoke", seeds=(0, 1), equal="flops", columns={}, runs=RUNS)
"""
GRID = """
def get_grid():
    return dict(config="configs/mod.py:smoke", seeds=(0, 2), budgets=(1e10, 2e10),
                families={"d": {}}, sizes={"1": {}, "2": {}, "3": {}, "+": {}})
"""


@pytest.fixture(autouse=True)
def here(root, monkeypatch):
    monkeypatch.chdir(root)


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    """A study that starts a run fails the test."""

    def start(*arguments, **options):
        raise AssertionError(f"a study started {arguments}")

    monkeypatch.setattr(jobs, "run_main", start)


def study_refuses(study, arguments, workdir, capsys, name, after=()):
    """The study ends with status 2, one line that has this name, and no directory."""
    out = "out" if study is coord_check else "workdir"
    assert study.main([*arguments, f"--{out}={workdir}", *after]) == 2
    error_line(capsys, name)
    assert not workdir.exists()


@pytest.mark.parametrize("runs, name", [
    ({"lr +1": {}, "lr -1": {}}, "'lr +1' and 'lr -1'"),  # one directory for both
    ({"a": {}, "b": {"model.depht": 2}}, "'b': --config.model.depht"),
    ({"a": {}, "b": {"model.depth": 0}}, "'b': config.model.depth=0"),
    ({"a": {}, "b": {"data.source": "text:none.txt"}}, "'b': config.data.source='text:none.txt'"),
    pytest.param({"a": {"steps": 9}, "c": {"log.profile_at": 400}},
                 "'c': config.log.profile_at=400", marks=pytest.mark.slow),
])  # fmt: skip
def test_each_run_of_a_sweep_is_checked(runs, name, tmp_path, capsys):
    path = tmp_path / "sweep.py"
    path.write_text(f"RUNS = {runs!r}\n{SWEEP}")
    study_refuses(sweep, ["--sweep", str(path)], tmp_path / "w", capsys, name)


@pytest.mark.parametrize("change, name", [
    (("2e10", "2e10, 2.001e10"), "20.0 GFLOPs"),
    (('"1": {}', '"-": {}'), "would share"),
    pytest.param(('"2": {}', '"2": {"model.width": 33}'), "config.model.width=33",
                 marks=pytest.mark.slow),
])  # fmt: skip
def test_each_point_of_a_grid_has_a_directory_and_a_model(change, name, tmp_path, capsys):
    path = tmp_path / "grid.py"
    path.write_text(GRID.replace(*change))
    study_refuses(isoflop, ["--grid", str(path)], tmp_path / "w", capsys, name)


def test_a_model_is_checked_without_a_text(one_device):
    def flops_of(changes, budget=0.0):
        config = common.apply(load_config("configs/mod.py:smoke"), changes)
        return rehearsal.flops_of(to_config(config), 1, budget, {})

    refused(lambda: flops_of({"model.depth_routing.every": 9}), "config.model.depth_routing.every")
    refused(lambda: flops_of({"log.profile_at": 400}), "config.log.profile_at=400")
    flops = flops_of({})
    assert flops > 0 and flops_of({"steps": 9}, flops) == flops
    # The number of steps may depend on the text: then nothing that depends on it is refused.
    assert flops_of({"log.profile_at": 400}, None) is None


MOD_TABLE, ISOFLOP = "--sweep=configs/sweeps/mod_table.py", "--grid=configs/sweeps/isoflop.py"
SMOKE = "--config=phatgoose:smoke"
EXTRAS = [  # a study, its own arguments, what follows --, the name
    (phatgoose, [], "bse:--config.steps=3", "'base'"),
    (phatgoose, [], "base:--config.stps=3", "--config.stps"),
    (phatgoose, [], "base:config.steps=3", "'base:config.steps=3'"),
    (phatgoose, [], "--workdir=x", "--workdir=x"),
    (phatgoose, ["--domain=x=text:none", "--domain=y=stdlib"], "--config.steps=3", "'text:none'"),
    (calm, [], "bridge:--config.optim.learning_rate=-1", "'bridge': config.optim.learning_rate"),
    (cbtm, ["--config=configs/cbtm.py"], "bse:--config.steps=3", "'bse:"),
    (cbtm_table, [], "--config.seed=3", "--config.seed=3"),
    (convert, [], "mood:--config.steps=3", "'mood'"),
    (sweep, [MOD_TABLE], "--config.seed=3", "--config.seed=3"),
    (isoflop, [ISOFLOP], "--config.stps=3", "'steps'"),
    *(pytest.param(*row, marks=pytest.mark.slow) for row in [
        (phatgoose, [SMOKE], "gate:--config.optim.frozen=nosuch", "'gate_prose': config.optim"),
        (calm, ["--config=calm:smoke"], "anchor:--config.model.depth=1",
         "'bridge': config.model.pairs=2"),
        (convert, [], "scratch:--config.log.profile_at=100000", "'scratch': config.log.profile_at"),
        (cbtm, ["--config=cbtm:smoke"], "--config.optim.frozen=nosuch", "config.optim.frozen"),
    ]),
]  # fmt: skip


@pytest.mark.parametrize("study, arguments, extra, name", EXTRAS)
def test_settings_for_runs_of_studies_are_checked(study, arguments, extra, name, tmp_path, capsys):
    study_refuses(study, arguments, tmp_path / "w", capsys, name, after=["--", extra])


@pytest.mark.parametrize("study, arguments, name", [
    (phatgoose, ["--domain=of_all=stdlib", "--domain=b=pydoc"], "'adapter_of_all'"),
    (phatgoose, ["--domain=b=text:a", "--domain=b=text:b"], "--domain"),
    (phatgoose, ["--domain=a"], "--domain"),
    (calm, ["--domain=base=text:x"], "--domain"),
    (phatgoose, ["--seeds=0,0"], "--seeds=0,0"),
    (convert, ["--fractions=0.1,0.10000001"], "--fractions"),  # both would have one directory
    (coord_check, ["--widths=a,b"], "--widths=a,b"),
    (coord_check, ["--set=model.dept=2"], "--set: config.model.dept"),
])  # fmt: skip
def test_arguments_of_studies_are_checked(study, arguments, name, tmp_path, capsys):
    study_refuses(study, arguments, tmp_path / "w", capsys, name)


@pytest.mark.parametrize("study", [sweep, cbtm])
def test_misspelt_flags_of_studies_are_refused(study, capsys):
    with pytest.raises(SystemExit) as end:
        study.main(["--wokdir=x"])
    assert end.value.code == 2
    error_line(capsys, "'--workdir'")
