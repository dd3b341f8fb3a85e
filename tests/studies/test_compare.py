"""Plans of comparisons: error rates, verdicts, refusals; and one from plan to report."""

import json
import re
import shlex
import shutil

import numpy as np
import pytest
from study_helpers import error_line, make_runs_here

pytest.importorskip("pandas", reason="the extra `studies` is not installed")

import pandas as pd

from efx import run_dir
from efx.logging import tables
from efx.studies import compare, statistics, verdicts

LEVELS = statistics.levels((4, 8, 12))._asdict()


def made_plan(*tests, **changes):
    plan = {"tests": tests or [["b", "a"]], "looks": [4, 8, 12], "seeds": list(range(12))}
    return plan | {"levels": LEVELS, "margin": 0.02, "paired": [], "order": "fixed"} | changes


def losses_of(seeds=4, std=0.004, **means):
    """A table of made-up runs, whose losses have exactly these means and deviations."""
    z = np.random.default_rng(0).normal(size=(len(means), seeds))
    z = (z - z.mean(1, keepdims=True)) / z.std(1, ddof=1, keepdims=True)
    return pd.DataFrame(
        [
            {"name": name, "seed": seed, "loss": mean + std * z[i, seed], "gain": 0.0}
            for i, (name, mean) in enumerate(means.items())
            for seed in range(seeds)
        ]
    )


# ---- error rates --------------------------------------------------------------------------------


@pytest.mark.parametrize("looks", [(4, 8, 12), (3, 6, 9, 12), (10,)])
@pytest.mark.parametrize("std", [0.004, 0.012])
def test_false_claims_are_at_most_five_percent(looks, std):
    at_margin = statistics.power(std, looks, true=0.02)
    equal = statistics.power(std, looks, seed=1)
    assert at_margin["equivalent"] <= 0.05
    assert equal["better"] + equal["worse"] <= 0.05


def test_paired_claims_hold_the_same_levels():
    assert statistics.power(0.01, (4, 8, 12), true=0.02, paired=True)["equivalent"] <= 0.05
    equal = statistics.power(0.01, (4, 8, 12), paired=True)
    assert equal["better"] + equal["worse"] <= 0.05


def test_power_grows_with_seeds_and_falls_with_the_deviation():
    power = statistics.power(0.012, (4, 8, 12))["equivalent"]
    assert power > 0.9 > statistics.power(0.012, (4,))["equivalent"]
    assert statistics.power(0.02, (4, 8, 12))["equivalent"] < 0.5
    # About nine seeds an arm bound a difference by 0.02 nats with 90% power at this deviation.
    assert 0.85 < statistics.power(0.012, (9,))["equivalent"] < 0.97
    assert statistics.upper_deviation(0.01, 5) == pytest.approx(
        0.01 * np.sqrt(5 / 2.3425), rel=1e-3
    )


# ---- verdicts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mean", "verdict"),
    [
        (1.90, "better"),
        (2.10, "worse"),
        (2.001, "equivalent"),
        (2.012, "equivalent and different"),
        (2.02, "undecided"),
    ],
)
def test_verdicts(mean, verdict):
    std = 0.006 if verdict == "undecided" else 0.002
    if verdict == "undecided":
        mean = 2.01
    row = verdicts.assess(made_plan(), losses_of(std=std, a=2.0, b=mean))[0]
    assert row["verdict"] == verdict and row["is_final"] == (verdict != "undecided")
    assert row["percent"] == pytest.approx(50 * (mean - 2.0))


def test_a_verdict_is_not_revised_at_a_later_look():
    table = losses_of(seeds=8, std=0.002, a=2.0, b=2.001)
    table.loc[(table["name"] == "b") & (table.seed > 3), "loss"] += 1.0
    row = verdicts.assess(made_plan(), table)[0]
    assert (row["look"], row["verdict"]) == (4, "equivalent")


def test_tests_in_a_fixed_order_wait_for_those_before():
    plan = made_plan(["b", "a"], ["c", "a"])
    rows = verdicts.assess(plan, losses_of(std=0.006, a=2.0, b=2.01, c=1.5))
    assert [row["verdict"] for row in rows] == ["undecided", "not tested"]
    assert not any(row["is_final"] for row in rows)
    rows = verdicts.assess(plan, losses_of(std=0.006, a=2.0, b=2.2, c=1.5))
    assert [row["verdict"] for row in rows] == ["worse", "better"]
    # The last look ends with an undecided test, and those after it are never tested.
    rows = verdicts.assess(plan, losses_of(seeds=12, std=0.02, a=2.0, b=2.01, c=1.5))
    assert [row["verdict"] for row in rows] == ["undecided", "not tested"]
    assert all(row["is_final"] for row in rows)


def test_holms_correction_needs_smaller_p_values():
    tests = [[name, "a"] for name in "bcde"]
    table = losses_of(std=0.006, a=2.0, b=2.016, c=2.0, d=2.0, e=2.0)
    alone = verdicts.assess(made_plan(tests[0]), table)[0]
    together = verdicts.assess(made_plan(*tests, order="holm"), table)[0]
    assert alone["verdict"] == "worse" and together["verdict"] == "undecided"
    assert alone["p"] == together["p"]


def test_a_large_deviation_is_futile_at_the_second_look():
    table = losses_of(seeds=8, std=0.03, a=2.0, b=2.01)
    first = verdicts.assess(made_plan(), table[table.seed < 4])[0]
    second = verdicts.assess(made_plan(), table)[0]
    assert not first["is_final"] and second["is_final"]
    assert second["verdict"] == "undecided" and "futile" in second["note"]
    apart = losses_of(seeds=8, std=0.03, a=2.0, b=1.94)
    decided = verdicts.assess(made_plan(), apart)[0]
    assert (decided["look"], decided["verdict"], decided["note"]) == (8, "better", "")


def test_a_diverged_run_counts():
    table = losses_of(a=2.0, b=1.5)
    table.loc[5, "loss"] = np.nan
    row = verdicts.assess(made_plan(), table)[0]
    assert row["verdict"] == "undecided" and "1 of 8" in row["note"]


def test_pairs_share_what_seeds_add():
    table = losses_of(std=0.05, a=2.0)
    noise = np.random.default_rng(1).normal(0, 0.002, len(table))
    table = pd.concat([table, table.assign(name="b", loss=table.loss - 0.015 + noise)])
    assert verdicts.assess(made_plan(), table)[0]["verdict"] == "undecided"
    paired = verdicts.assess(made_plan(paired=[["b", "a"]]), table)[0]
    assert paired["difference"] == pytest.approx(-0.015, abs=0.004)
    assert paired["verdict"] in ("better", "equivalent and different")


def test_published_rows_come_out_again(root):
    published, _ = tables.read_csv(root / "results/comparisons.csv")
    rows, _ = tables.read_csv(root / "results/mod_evidence.csv")
    for row in published[(published.files == "mod_evidence") & (published.budget == 1.2e13)].iloc:
        chosen = [("name", row["size"]), ("against", row.against_size)]
        runs = [
            rows[(rows.budget == row.budget) & (rows.family == row[key]) & (rows["size"] == size)]
            for key, size in chosen
        ]
        n = min(map(len, runs))
        names = [row["name"], row.against]
        table = pd.concat(run.assign(name=name) for run, name in zip(runs, names, strict=True))
        plan = made_plan(names, looks=[n], seeds=sorted(runs[0].seed))
        found = verdicts.assess(plan, table)[0]
        assert found["difference"] == pytest.approx(row.difference, abs=1e-4)
        assert found["p"] == pytest.approx(row.p, abs=1e-3)


# ---- copying, and the ladder --------------------------------------------------------------------


def test_what_goes_through_copying_is_told_apart():
    rng = np.random.default_rng(0)
    gain = rng.uniform(0, 3, 16)
    loss = 2.0 - 0.1 * gain + 0.03 * (np.arange(16) % 2) + rng.normal(0, 1e-3, 16)
    both = pd.DataFrame({"loss": loss, "gain": gain})
    row = verdicts.at_equal_gain(both[1::2], both[::2])
    assert row["low"] < 0.03 < row["high"] and row["high"] - row["low"] < 0.005
    assert verdicts.at_equal_gain(both[1::2].assign(gain=0.0), both[::2].assign(gain=0.0)) is None
    table = losses_of(a=2.0, b=2.0).assign(gain=[0.1, 0.2, 0.4, 3.5] * 2)
    assert "2 of 8" in verdicts.warnings_of(made_plan(), table)[0]
    assert not verdicts.warnings_of(made_plan(), table.assign(gain=0.1))


def test_tokens_to_copy_count_runs_that_never_do():
    def run(name, seed, reached):
        gains = [(100 * i, 2.0 if 100 * i >= reached else 0.0) for i in range(1, 6)]
        return [{"name": name, "seed": seed, "tokens": t, "gain": g} for t, g in gains]

    rows = [run("a", seed, 100) for seed in range(6)]
    rows += [run("b", seed, reached) for seed, reached in enumerate([300, 300, 400, 999, 999, 999])]
    found = verdicts.tokens_to_copy(made_plan(), pd.DataFrame(sum(rows, [])))
    assert found["median"]["a"] == 100
    assert found["median"]["b"] == 400
    assert found["p"]["b-a"] < 0.05


def test_a_loss_as_a_multiple_of_a_ladders_flops():
    ladder = pd.DataFrame({"flops": [1.0, 4.0, 16.0], "seconds": [1.0, 4.0, 16.0]})
    ladder["loss"] = [3.0, 2.0, 1.0]
    table = losses_of(a=2.5, b=0.5).assign(flops=1.0, seconds=4.0)
    found = verdicts.multiples(table, ladder)
    assert found["a"]["flops"] == pytest.approx(2.0) and found["a"]["seconds"] == pytest.approx(0.5)
    assert found["b"]["flops"] is None


# ---- plans --------------------------------------------------------------------------------------


def commands(root):
    """The command lines of the page, without `python -m efx.studies.compare`."""
    blocks = re.findall(r"```bash\n(.*?)```", (root / "docs/compare.md").read_text(), re.DOTALL)
    return [shlex.split(block.replace("\\\n", " "))[3:] for block in blocks]


@pytest.fixture
def clean(monkeypatch, root):
    """The code as if it were committed, in the folder of efx."""
    git = {"revision": "r", "code": "c", "dirty": False}
    monkeypatch.setattr(run_dir, "git_revision", lambda package=None: git)
    monkeypatch.chdir(root)
    return git


@pytest.fixture
def make_plan(root, clean):
    """Makes the page's plan with other flags or arms; returns the exit status."""
    _, *arguments = commands(root)[0]
    end, extra = arguments.index("--flops"), arguments.index("--")

    def make(path, *flags, arms=arguments[:end]):
        flags = [*arguments[end:extra], *flags, f"--out={path}"]
        return compare.main(["plan", *arms, *flags, *arguments[extra:]])

    return make


@pytest.mark.slow
def test_the_page_from_plan_to_report(
    root, tmp_path, monkeypatch, clean, make_plan, capsys, one_device
):
    plan, run, report = commands(root)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "compare.json"
    assert compare.main(plan) == 0
    assert "power" in capsys.readouterr().out
    assert compare.main(report) == 2  # nothing has run
    error_line(capsys, "not finished")
    started = make_runs_here(monkeypatch)
    assert compare.main(run) == 0
    names = [run.name for run in started]
    assert names[:4] == [
        f"{arm}, rate {rate}, seed 1000" for arm in ("dense", "mod") for rate in ("0.001", "0.002")
    ]
    assert len(names) == 8 and {run.labels["seed"] for run in started[4:]} == {0, 1}
    result = json.loads((tmp_path / "runs/compare/report.json").read_text())
    (row,) = result["tests"]
    assert row["look"] == 2 and set(result["rates"]) == {"dense", "mod"}
    table, header = tables.read_csv(tmp_path / "runs/compare/runs.csv")
    assert table.uncopied_loss.notna().all() and header["plan"] == [result["plan"]]
    assert (tmp_path / "runs/compare/report.png").stat().st_size > 10_000
    assert "verdict" in capsys.readouterr().out
    assert compare.main(run) == 0
    assert len(started) == (8 if row["is_final"] else 10)

    # Without the run directories, rows of runs.csv count as finished runs.
    result, count = json.loads((tmp_path / "runs/compare/report.json").read_text()), len(started)
    for folder in [path for path in (tmp_path / "runs/compare").iterdir() if path.is_dir()]:
        shutil.rmtree(folder)
    assert compare.main(run) == 0 and len(started) == count
    again = json.loads((tmp_path / "runs/compare/report.json").read_text())
    assert again["tests"] == result["tests"] and again["rates"] == result["rates"]

    changed = json.loads(path.read_text()) | {"margin": 0.5}
    path.write_text(json.dumps(changed))
    assert compare.main(run) == 2
    error_line(capsys, "compare.json", "changed")
    assert make_plan(path, "--margin=0.03") == 0  # another plan, for the same directory
    assert compare.main(run) == 2
    error_line(capsys, "another plan")
    clean["code"] = "d"
    assert compare.main(run) == 2
    error_line(capsys, "code")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--margin=0"], ["--margin"]),
        (["--looks=4,3"], ["--looks"]),
        (["--sd=-1"], ["--sd"]),
        (["--tests=mod-none"], ["--tests", "mod-none"]),
        (["--rates=fast"], ["--rates"]),
        (["--rate-seed=1"], ["--rate-seed"]),
        (["--flops=1e8"], ["steps", "FLOPs"]),
        (["--sd=0.02"], ["power", "--underpowered"]),
        (["--paired=mod-dense"], ["paired", "tokens"]),
    ],
)
def test_plans_that_are_refused(tmp_path, capsys, make_plan, flags, words):
    assert make_plan(tmp_path / "plan.json", *flags) == 2
    error_line(capsys, *words)
    assert not (tmp_path / "plan.json").exists()


def test_a_plan_compares_one_text(tmp_path, capsys, clean, make_plan):
    (tmp_path / "other.py").write_text(
        "from efx.configs import mod\n\ndef get_config():\n    config = mod.get_config('smoke')\n"
        "    config.data.tokenizer = 'bpe:300'\n    return config\n"
    )
    arms = "mod=mod:smoke", f"other={tmp_path / 'other.py'}"
    assert make_plan(tmp_path / "plan.json", arms=arms) == 2
    error_line(capsys, "other", "text or tokenizer")
    clean["dirty"] = True
    assert make_plan(tmp_path / "plan.json") == 2
    error_line(capsys, "uncommitted")


def test_a_pilot_estimates_the_deviation(tmp_path, monkeypatch):
    rows = {"a": [("x", 2.0), ("x", 2.1), ("y", 3.0), ("y", 3.3)]}["a"]
    last = [{"eval/loss": loss, "seconds": 2.0, "flops": 4.0} for _, loss in rows]
    monkeypatch.setattr(compare, "read_metrics", lambda folder: [last[folder]])
    monkeypatch.setattr(compare, "config_of_run", lambda folder: rows[folder][0])
    monkeypatch.setattr(compare, "to_config", lambda config: config)
    monkeypatch.setattr(compare.runs_lib, "settings_digest", lambda config: config)
    std, freedom, seconds = compare.deviation(range(4))
    assert std == pytest.approx(np.sqrt((0.005 + 0.045) / 2)) and freedom == 2 and seconds == 0.5
