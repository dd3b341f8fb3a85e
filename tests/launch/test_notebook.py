"""The notebooks run as they are, at a small size."""

import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "launch/notebooks"
NAMES = ("quickstart", "mixture_of_depths", "bring_your_model", "certify")


def test_notebooks_are_committed_without_outputs():
    nbformat = pytest.importorskip("nbformat", reason="the extra `notebooks` is not installed")
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == {*NAMES}
    for name in NAMES:
        notebook = json.loads((FOLDER / f"{name}.ipynb").read_text())
        nbformat.validate(notebook)
        for cell in notebook["cells"]:
            assert not cell.get("outputs") and not cell.get("execution_count"), name


def execute(name, **changes):
    """Run a notebook with changed parameters; return its outputs as text."""
    for package in ("nbformat", "nbclient", "ipykernel", "pandas"):
        pytest.importorskip(package, reason="the extras `notebooks` and `studies` are needed")
    import nbclient
    import nbformat

    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    is_parameters = ["parameters" in cell.metadata.get("tags", ()) for cell in notebook.cells]
    changed = "\n".join(f"{key} = {value!r}" for key, value in changes.items())
    at = is_parameters.index(True)
    assert all(f"{key} =" in notebook.cells[at].source for key in changes)
    notebook.cells.insert(at + 1, nbformat.v4.new_code_cell(changed))
    path = {"metadata": {"path": str(FOLDER.parents[1])}}
    nbclient.NotebookClient(notebook, timeout=280, resources=path).execute()
    return json.dumps([cell.get("outputs", []) for cell in notebook.cells])


@pytest.mark.slow
def test_quickstart(tmp_path):
    shown = execute("quickstart", RUN=str(tmp_path / "run"), STEPS=4)
    assert "finished: 4 steps" in shown and "image/png" in shown


@pytest.mark.slow
def test_mixture_of_depths(tmp_path):
    shown = execute("mixture_of_depths", FOLDER=str(tmp_path), STEPS=4, TEXT="def f(x):")
    assert "<iframe" in shown and "dense, half as deep" in shown


@pytest.mark.slow
def test_bring_your_model(tmp_path):
    pytest.importorskip("torch", reason="the extra `interop` is not installed")
    shown = execute("bring_your_model", FOLDER=str(tmp_path), STEPS=4)
    assert "held-out loss:" in shown and "def add" in shown


@pytest.mark.slow
def test_certify(tmp_path):
    pytest.importorskip("torch", reason="the extra `interop` is not installed")
    shown = execute("certify", FOLDER=str(tmp_path))
    assert "no look ahead" in shown and "sleeping parts" in shown
