"""Each bad setting of tests/refusals.py ends a run with one line, status 2 and no run directory."""

import pytest
import refusals
import test_cli

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


@pytest.mark.parametrize("changes, name", CASES)
def test_bad_settings_are_refused_by_name(changes, name, text, root, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(root)
    given = {**test_cli.SETTINGS, "data.source": f"text:{text}", "data.cache_dir": text.parent}
    assert test_cli.call(f"--workdir={tmp_path / 'run'}", **given | changes) == 2
    assert name in test_cli.error_line(capsys)
    assert not (tmp_path / "run").exists()
