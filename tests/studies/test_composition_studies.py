"""Studies of composition without their runs: mixtures, tables, commands."""

import json

import pytest

from efx import main
from efx.config import flags
from efx.studies import calm, composition, jobs, phatgoose, rehearsal


def test_a_mixture_alternates_pieces_and_cuts_at_lines():
    a, b = (b"".join(b"%c%04d\n" % (c, i) for i in range(300)) for c in (b"a", b"b"))
    mixed = composition.interleaved([a, b], piece_bytes=60)
    lines = mixed.split(b"\n")[:-1]
    assert sorted(lines) == sorted((a + b).split(b"\n")[:-1])  # whole lines, all of both
    owners = bytes(line[0] for line in lines)
    assert owners[:44] == b"a" * 11 + b"b" * 11 + b"a" * 11 + b"b" * 11
    # The shortest domain ends the mixture.
    mixed = composition.interleaved([a, b[:600]], piece_bytes=60)
    assert abs(mixed.count(b"a") - mixed.count(b"b")) <= 11


def commands_of(monkeypatch, study, tmp_path, *arguments, config):
    """The commands of a study's runs, none of which starts; evaluations are 1.0."""
    commands = []

    def run(title, arguments, log, cpus=None):
        commands.append(arguments)
        return 0, ""

    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("text")
    monkeypatch.setattr(jobs, "run_main", run)
    monkeypatch.setattr(rehearsal, "check", lambda runs, in_order: None)
    monkeypatch.setattr(composition.SeedStudy, "mixture", composition.Rehearsal.mixture)
    rows = {"eval/loss": 1.0, "eval/split_fraction": 0.5}
    monkeypatch.setattr(
        composition.SeedStudy, "evaluate", lambda self, _: dict.fromkeys(self.domains, rows)
    )
    flags = [f"--domain={name}=text:{tmp_path}/{name}.txt" for name in ("a", "b")]
    flags += [f"--config={config}", f"--workdir={tmp_path}", "--seeds=0,3"]
    assert study.main([*flags, *arguments]) == 0
    return commands


STUDIES = [
    (phatgoose, "configs/phatgoose.py:smoke", "adapter_of_all"),
    (calm, "configs/calm.py", "bridge"),
]


@pytest.mark.parametrize("study, config, last", STUDIES)
def test_efx_accepts_every_command_of_a_study(monkeypatch, study, config, last, tmp_path, root):
    """Its variants and settings exist; arguments of a stage go to that stage."""
    monkeypatch.chdir(root)
    short = {"steps": 2, "optim.schedule.warmup_steps": 1}
    extra = ("--", "--config.log.every=7")
    extra += tuple(f"{last}:--config.{key}={value}" for key, value in short.items())
    commands = commands_of(monkeypatch, study, tmp_path, *extra, config=config)
    for command in commands:
        values = main.parse(["efx", *command])
        assert values.mode in flags.MODES and values.config.log.every == 7
        assert (values.config.steps == 2) == (f"/{last}" in values.workdir)
        assert values.config.seed in (0, 3)
    folders = [command[2] for command in commands]
    assert len(set(folders)) == len(folders) == 2 * (10 if study is phatgoose else 5)
    table = json.loads((tmp_path / "table.json").read_text())
    assert all(len(rows) == 2 for rows in table.values())
