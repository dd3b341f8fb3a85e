"""The notebooks run as they are, at a small size, and install what they need."""

import ast
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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


@pytest.mark.parametrize("name", NAMES)
def test_the_first_cell_installs_what_a_notebook_imports(name, monkeypatch):
    """On a machine without efx, such as Colab's."""
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]
    codes = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    tree = ast.parse(re.sub(r"(?m)^%.*", "", "\n".join(codes)))
    modules = {alias.name for node in ast.walk(tree) for alias in getattr(node, "names", ())
               if isinstance(node, ast.Import)}  # fmt: skip
    modules |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules = {module.partition(".")[0] for module in modules}

    commands = []
    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "distributions", lambda: ())
        patch.setattr(importlib.util, "find_spec", lambda module: None)
        patch.setattr(subprocess, "run", lambda command, check: commands.append(command))
        exec(codes[0], {})
    requirement = Requirement(commands[0][-1])
    address = requirement.url.removeprefix("git+https://github.com/")
    assert f"github/{address}/blob/main/launch/notebooks/{name}.ipynb" in cells[0]["source"][2]
    project = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text())["project"]
    lines = sum((project["optional-dependencies"][extra] for extra in requirement.extras), [])
    names = {Requirement(line).name for line in project["dependencies"] + lines} | {
        "efx",
        "ipython",
    }
    installed = {canonicalize_name(each) for each in names}
    owners = importlib.metadata.packages_distributions()
    for module in modules - sys.stdlib_module_names - {"efx"}:
        assert installed & {canonicalize_name(each) for each in owners.get(module, [module])}, (
            module
        )


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
