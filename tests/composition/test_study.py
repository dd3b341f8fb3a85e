"""The studies of PHATGOOSE and CALM without training: their runs, mixtures and tables."""

import math

import pytest

pytest.importorskip("pandas", reason="the extra `studies` is not installed")

import pandas as pd

from efx.composition import calm, phatgoose
from efx.composition import study as lib
from efx.studies import runs as runs_lib


def test_a_mixture_alternates_whole_lines_until_the_shortest_domain_ends():
    a, b = (b"".join(b"%c%04d\n" % (c, i) for i in range(300)) for c in (b"a", b"b"))
    mixed = lib.interleaved([a, b], piece_bytes=60)
    lines = mixed.split(b"\n")[:-1]
    assert sorted(lines) == sorted((a + b).split(b"\n")[:-1])
    assert bytes(line[0] for line in lines)[:44] == 2 * (b"a" * 11 + b"b" * 11)
    mixed = lib.interleaved([a, b[:600]], piece_bytes=60)
    assert abs(mixed.count(b"a") - mixed.count(b"b")) <= 11


@pytest.mark.parametrize("diverged", ["anchor", "augment_a"])
def test_the_best_single_model_is_not_one_that_diverged(diverged):
    class Study:
        domains = {"base": "", "a": ""}

        def row(self, name):
            return dict.fromkeys(self.domains, math.nan if name == diverged else 2.0)

    assert calm.rows(Study())["best single"] == {"base": 2.0, "a": 2.0}


@pytest.mark.parametrize("study, last, count", [
    (phatgoose, "adapter_of_all", 10),
    (calm, "bridge", 5),
])  # fmt: skip
def test_each_run_has_a_directory_and_the_settings_of_its_stage(
    study, last, count, tmp_path, root, monkeypatch
):
    monkeypatch.chdir(root)
    made = []
    monkeypatch.setattr(runs_lib, "run_all", lambda runs: made.extend(runs))
    ones = lambda self, name: dict.fromkeys(self.domains, 1.0)  # noqa: E731
    monkeypatch.setattr(lib.Study, "row", ones)
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("text")
    (tmp_path / "w").mkdir()
    domains = [f"--domain={name}=text:{tmp_path}/{name}.txt" for name in ("a", "b")]
    short = {"steps": 2, "optim.schedule.warmup_steps": 1}
    extra = ["--config.log.every=7", *(f"{last}:--config.{key}={x}" for key, x in short.items())]
    assert study.main([*domains, f"--workdir={tmp_path}/w", "--seeds=0,3", "--", *extra]) == 0
    assert len({run.folder for run in made}) == len(made) == 2 * count
    for run in made:
        config = run.config()
        assert config.log.every == 7 and config.seed in (0, 3)
        assert (config.steps == 2) == (run.folder.name == last)
    table = pd.read_csv(tmp_path / "w/table.csv")
    assert set(table.seed) == {0, 3} and (table["mean"] == 1).all()
