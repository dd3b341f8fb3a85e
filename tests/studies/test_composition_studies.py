"""The studies of composition apart from their runs: mixtures, tables, commands, bad input."""

import json

import pytest

from efx.studies import calm, composition, jobs, phatgoose


def test_a_mixture_takes_turns_and_cuts_at_lines():
    a, b = (b"".join(b"%c%04d\n" % (c, i) for i in range(300)) for c in (b"a", b"b"))
    mixed = composition.interleaved([a, b], piece_bytes=60)
    lines = mixed.split(b"\n")[:-1]
    assert sorted(lines) == sorted((a + b).split(b"\n")[:-1])  # whole lines, all of both
    owners = bytes(line[0] for line in lines)
    assert owners[:44] == b"a" * 11 + b"b" * 11 + b"a" * 11 + b"b" * 11
    # The shorter one ends it: no domain gets more than its share.
    mixed = composition.interleaved([a, b[:600]], piece_bytes=60)
    assert abs(mixed.count(b"a") - mixed.count(b"b")) <= 11


def test_table():
    rows = {"base": [{"x": 1.0, "mean": 1.5}, {"x": 2.0, "mean": 1.5}],
            "gates": [{"x": 0.5, "mean": 1.0, "experts a token": 2.0}] * 2}  # fmt: skip
    text = composition.markdown(rows, [0, 1], "configs/x.py", "python -m x", "split")
    assert "| base | 1.5000 ± 0.7071 | 1.5000 ± 0.0000 |  |" in text
    assert "| gates | 0.5000 ± 0.0000 | 1.0000 ± 0.0000 | 2.0000 ± 0.0000 |" in text
    assert "seeds 0, 1: mean ± standard deviation; split." in text


def ran(monkeypatch, study, tmp_path, *arguments, config):
    """The commands of a study's runs, none of which is started; evaluations are 1.0."""
    commands = []

    def run(title, arguments, log, cpus=None):
        commands.append(arguments)
        return 0, ""

    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("text")
    monkeypatch.setattr(jobs, "run_main", run)
    monkeypatch.setattr(composition.SeedStudy, "mixture", composition.Rehearsal.mixture)
    monkeypatch.setattr(
        composition.SeedStudy,
        "evaluate",
        lambda self, name: dict.fromkeys(
            self.domains, {"eval/loss": 1.0, "eval/split_fraction": 0.5}
        ),
    )
    status = study.main(
        [
            f"--config={config}",
            f"--workdir={tmp_path}",
            "--seeds=0,3",
            f"--domain=a=text:{tmp_path}/a.txt",
            f"--domain=b=text:{tmp_path}/b.txt",
            *arguments,
        ]
    )
    assert status == 0
    return commands


@pytest.mark.parametrize(
    "study, config, last",
    [
        (phatgoose, "configs/phatgoose.py:smoke", "adapter_of_all"),
        (calm, "configs/calm.py", "bridge"),
    ],
)
def test_every_command_of_a_study_is_one_that_efx_takes(
    monkeypatch, study, config, last, tmp_path, root, capsys
):
    """Its variants exist and its settings are settings; stage arguments go to their stages."""
    from efx import main

    monkeypatch.chdir(root)
    short = {"steps": 2, "optim.schedule.warmup_steps": 1}
    extra = ("--", "--config.log.every=7")
    extra += tuple(f"{last}:--config.{key}={value}" for key, value in short.items())
    commands = ran(monkeypatch, study, tmp_path, *extra, config=config)
    for command in commands:
        values = main.parse(["efx", *command])
        assert values.mode in main.MODES and values.config.log.every == 7
        assert (values.config.steps == 2) == (f"/{last}" in values.workdir)
        assert values.config.seed in (0, 3)
    folders = [command[2] for command in commands]
    assert len(set(folders)) == len(folders) == 2 * (10 if study is phatgoose else 5)
    table = json.loads((tmp_path / "table.json").read_text())
    assert all(len(rows) == 2 for rows in table.values())
    text = (tmp_path / "table.md").read_text()
    assert "| base |" in text or study is calm
    assert "; 50% of the held-out split. Command" in text


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--domain=a"], "--domain=a: expected NAME=SOURCE"),
        (["--domain=a=text:x"], "--domain: 1 is too few"),
        (["--seeds=1,b"], "--seeds=1,b: expected different numbers"),
    ],
)
def test_bad_arguments_are_one_line(arguments, words, tmp_path, capsys):
    assert phatgoose.main([f"--workdir={tmp_path}", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_calm_keeps_the_anchors_name_for_itself(tmp_path, capsys):
    arguments = ["--domain=base=text:x", "--domain=b=text:y"]
    assert calm.main([f"--workdir={tmp_path}", *arguments]) == 2
    assert (
        "--domain=base=...: this name is taken by the anchor's own domain"
        in capsys.readouterr().err
    )
