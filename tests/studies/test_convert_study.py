"""The study of conversions without its runs: commands, budgets, resuming, table."""

import json
from pathlib import Path

import pytest

from efx.studies import convert, jobs, rehearsal

LOSS = {"parent": 1.5, "scratch": 1.25, "mod_5": 1.75, "drop_5": 2.0, "distilled_5": 1.625}


@pytest.fixture
def study(monkeypatch, tmp_path):
    """(commands so far, function of flags that runs the study, whose runs do not start)."""
    commands = []

    def run(title, arguments, log, cpus=None):
        commands.append(arguments)
        flags = dict(word.split("=", 1) for word in arguments)
        folder = Path(flags["--workdir"])
        if "--mode" in flags:
            assert (Path(flags["--from"]) / "metrics.jsonl").is_file()
            (folder / "checkpoints/0").mkdir(parents=True)
            return 0, ""
        folder.mkdir(parents=True, exist_ok=True)
        loss = LOSS[folder.name] + int(folder.parent.name[-1]) / 8
        row = {"step": 3, "flops": 4e9, "tokens": 7, "eval/loss": loss, "eval/split_fraction": 1.0}
        if folder.name == "mod_5":
            row["eval/router/flops_per_token"] = 12.0
        (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        return 0, ""

    monkeypatch.setattr(jobs, "run_main", run)
    monkeypatch.setattr(rehearsal, "check", lambda runs: None)
    known = {name: 20.0 for name in LOSS}, {name: 8 * loss for name, loss in LOSS.items()}
    monkeypatch.setattr(convert.Study, "_costs_and_speeds", lambda self: known)
    flags = [f"--workdir={tmp_path}", "--seeds=0,1", "--fractions=0.05"]
    return commands, lambda *more: convert.main([*flags, *more])


def test_commands_have_their_budgets_and_conversions_run_once(study, tmp_path, root, monkeypatch):
    monkeypatch.chdir(root)
    commands, run = study
    assert run("--", "--config.log.every=7", "drop:--config.optim.learning_rate=0.5") == 0
    of_seed_1 = [
        (Path(next(word for word in command if word.startswith("--workdir="))).name, command)
        for command in commands
        if "seed1" in " ".join(command)
    ]
    of_seed, made = dict(of_seed_1), {n: c for n, c in of_seed_1 if "--mode=convert" in c}
    assert of_seed.keys() == LOSS.keys()
    assert made.keys() == {"mod_5", "drop_5", "distilled_5"}
    assert all(len(of_seed[name]) == 1 for name in made)  # trained by the settings of the folder
    assert f"--config.train_flops={0.05 * 4e9}" in made["mod_5"] and "--to=mod" in made["mod_5"]
    assert "--config.train_flops=4000000000.0" in of_seed["scratch"]
    assert "--config=convert_mod:scratch" in of_seed["scratch"]
    assert "--config=convert_mod:distill" in made["distilled_5"]
    assert "--to=layer_drop" in made["drop_5"] and "--config.seed=1" in made["drop_5"]
    rate = "--config.optim.learning_rate=0.5"
    assert rate in made["drop_5"] and rate not in made["mod_5"] + of_seed["parent"]
    assert all("--config.log.every=7" in c for c in (*made.values(), of_seed["parent"]))
    count = len(commands)
    assert run() == 0
    assert not any("--mode=convert" in c for c in commands[count:])


def test_the_table_compares_runs_with_their_parent(study, tmp_path, root, monkeypatch):
    monkeypatch.chdir(root)
    assert study[1]() == 0
    rows = json.loads((tmp_path / "table.json").read_text())
    row = rows["converted to MoD, 5% of its FLOPs"]
    assert row[convert.DIFFERENCE] == [0.25, 0.25] and row[convert.COST] == [12.0, 12.0]
    assert row[convert.SPEED] == [1.75 / 1.5]
    assert rows["dense parent"][convert.COST] == [20.0, 20.0]
    text = (tmp_path / "table.md").read_text()
    line = next(line for line in text.splitlines() if line.startswith("| every second block"))
    assert "| 2.0625 ± 0.0884 | 0.5000 ± 0.0000 | 20 FLOPs | 1.33 |" in line
