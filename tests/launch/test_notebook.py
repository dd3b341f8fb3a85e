"""The notebooks for Colab: they run in smoke size, find efx or end with one line, and keep the JAX
of the runtime."""

import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from test_isoflop import fake_runs

from efx.run_dir import run_record
from efx.studies import isoflop
from launch.notebooks import stamp

FOLDER = Path(__file__).resolve().parents[2] / "launch/notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
sys.path.insert(0, str(FOLDER))
import install  # noqa: E402

MOD = "families/Mixture-of-Depths"  # the run of the quickstart, which other notebooks read
STEPS = 12


def code_cells(name):
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def first_cell(name):
    """The code that finds and installs efx."""
    return "".join(code_cells(name)[0]["source"])


def parameters(name):
    """The values of a notebook's cell of parameters."""
    values = {}
    for cell in code_cells(name):
        if "parameters" in cell["metadata"].get("tags", []):
            exec("".join(cell["source"]), values)
    return {key: value for key, value in values.items() if key.isupper()}


# ---- as they are committed -----------------------------------------------------------------------


def test_notebooks_are_committed_without_outputs():
    nbformat = pytest.importorskip("nbformat", reason="the extra `notebooks` is not installed")
    for name in NAMES:
        nbformat.validate(json.loads((FOLDER / f"{name}.ipynb").read_text()))
        for cell in code_cells(name):
            assert cell["outputs"] == [] and cell["execution_count"] is None, cell["id"]


def test_all_notebooks_install_efx_in_the_same_way():
    (same,) = {re.sub(r"(?m)^NEEDS = .*\n", "", first_cell(name)) for name in NAMES}
    assert "install.install(checkout, NEEDS)" in same


def test_the_address_of_pyproject_is_in_the_notebooks(root, tmp_path):
    written = tmp_path / "launch/notebooks"
    shutil.copytree(FOLDER, written)
    shutil.copy(root / "pyproject.toml", tmp_path)
    stamp.stamp(tmp_path)
    for path in FOLDER.glob("*.ipynb"):
        assert (written / path.name).read_bytes() == path.read_bytes()


# ---- executed ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folder of all runs."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def execute():
    """Runs a notebook, its parameters changed; returns the text of all its outputs.

    In one process for all: JAX is imported once.
    """
    for name in ("nbformat", "nbclient", "ipykernel", "jinja2", "plotly"):
        pytest.importorskip(name, reason="the extras `notebooks` and `studies` are not installed")
    import nbclient
    import nbformat
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(cwd=str(FOLDER))

    def run(name, **changes):
        assert changes.keys() <= parameters(name).keys()
        notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
        cells = notebook.cells
        at = next(i for i, c in enumerate(cells) if "parameters" in c.metadata.get("tags", ()))
        changed = "\n".join(f"{key} = {value!r}" for key, value in changes.items())
        cells.insert(at + 1, nbformat.v4.new_code_cell(changed))
        # A notebook must not need the variables of another one.
        forget = '%reset -f\nimport os\nos.environ.pop("PYTHONPATH", None)'
        cells.insert(0, nbformat.v4.new_code_cell(forget))
        nbclient.NotebookClient(notebook, km=manager, timeout=600).execute()
        return json.dumps([cell.get("outputs", []) for cell in cells])

    yield run
    client.stop_channels()
    manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def quickstart(execute, runs):
    return execute("quickstart", RUN=str(runs / MOD), STEPS=STEPS)


@pytest.mark.slow
def test_quickstart_runs(quickstart):
    assert f"finished: {STEPS} steps" in quickstart and "image/png" in quickstart


@pytest.mark.slow
def test_mixture_of_depths_runs_on_the_run_of_the_quickstart(execute, runs, quickstart):
    shown = execute("mixture_of_depths", RUN=str(runs / MOD), STEPS=STEPS, TEXT="def f(x):")
    assert "eval/loss_topk" in shown and "routed_fraction" in shown and "<iframe" in shown


@pytest.mark.slow
def test_compare_families_runs_on_the_run_of_the_quickstart(execute, runs, quickstart):
    """Other tests train the other families."""
    name = "Mixture-of-Depths"
    families = {name: parameters("compare_families")["FAMILIES"][name]}
    folder = str(runs / "families")
    shown = execute("compare_families", FOLDER=folder, STEPS=STEPS, FAMILIES=families)
    assert f"| {name} | " in shown


@pytest.mark.slow
def test_isoflop_runs(execute, runs, quickstart):
    """On fake runs; tests of the study train."""
    grid, folder = runs / "grid.py", runs / "isoflop"
    smaller = parameters("isoflop")["GRID"].replace("(6e9, 2.4e10)", "(6e8, 2.4e9)")
    grid.write_text(smaller)
    text_of_run = {key: run_record(runs / MOD)[key] for key in ("text", "tokenizer")}
    fake_runs(isoflop.load_grid(grid), folder, record=text_of_run)
    shown = execute("isoflop", FOLDER=str(folder), GRID=smaller)
    assert "image/png" in shown and "MoD 12.5%" in shown and "2.40 GFLOPs" in shown


@pytest.mark.slow
def test_bring_your_model_runs(execute, runs):
    pytest.importorskip("transformers", reason="the extra `interop` is not installed")
    shown = execute("bring_your_model", FOLDER=str(runs / "own"), STEPS=6, CONTEXT=32)
    assert shown.count("held-out loss: ") == 2
    assert (runs / "own/tiny/exported/model.safetensors").exists()


# ---- where efx is --------------------------------------------------------------------------------


@pytest.fixture
def colab(root, tmp_path, monkeypatch):
    """Runs a first cell in a folder `content` that does not contain efx; returns the installed
    [(checkout, extras)]."""
    (tmp_path / "content").mkdir()
    monkeypatch.chdir(tmp_path / "content")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.delenv("EFX_SOURCE", raising=False)
    before = list(sys.path)
    monkeypatch.setattr(sys, "path", list(before))

    def find(name):
        return PathFinder.find_spec(name, [path for path in sys.path if path not in before])

    monkeypatch.setattr(importlib.util, "find_spec", find)
    monkeypatch.setattr(sys, "executable", "echo")  # the cell starts a Python that imports JAX
    installed = []
    monkeypatch.setattr(install, "install", lambda *arguments: installed.append(arguments))

    def run(source="", name="quickstart"):
        cell = re.sub("(?m)^SOURCE = .*$", lambda _: f"SOURCE = {source!r}", first_cell(name))
        exec(compile(cell, "cell", "exec"), {})
        return installed

    return run


def stops(run, *names, **arguments):
    """The cell ends with one line that contains each of `names`."""
    with pytest.raises(SystemExit) as error:
        run(**arguments)
    line = str(error.value)
    assert "\n" not in line and all(name in line for name in names), line


def leave_checkout(root, folder):
    """The part of a checkout that a first cell looks for."""
    (folder / "launch/notebooks").mkdir(parents=True)
    (folder / "efx").mkdir()
    (folder / "efx/__init__.py").touch()
    for name in ("pyproject.toml", "launch/notebooks/install.py"):
        shutil.copy(root / name, folder / name)
    return folder


def committed(folder):
    """The folder as a git repository."""
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "first"]):
        subprocess.run([*command, *words], check=True)
    return folder


@pytest.mark.parametrize("place", ["efx-main", ".."])
def test_a_checkout_beside_or_around_the_notebook_is_used(root, tmp_path, colab, place):
    """Whatever SOURCE is; child processes find it, too."""
    checkout = (tmp_path / "content" / place).resolve()
    leave_checkout(root, checkout)
    assert colab(source="https://example.org/none.git") == [(checkout, [])]
    assert sys.path[0] == os.environ["PYTHONPATH"] == str(checkout)


def test_an_uploaded_zip_is_used(root, tmp_path, colab):
    leave_checkout(root, tmp_path / "zipped/efx-main")
    shutil.make_archive(tmp_path / "content/efx-main", "zip", tmp_path / "zipped")
    assert colab() == [(tmp_path / "content/efx-checkout/efx-main", [])]


def test_a_repository_is_cloned(root, tmp_path, colab, monkeypatch):
    """The environment variable wins over SOURCE."""
    repository = committed(leave_checkout(root, tmp_path / "repository"))
    bare = tmp_path / "bare.git"
    subprocess.run(["git", "clone", "-q", "--bare", str(repository), str(bare)], check=True)
    monkeypatch.setenv("EFX_SOURCE", str(bare))
    cloned = (tmp_path / "content/efx-checkout", ["report"])
    assert colab(source="none", name="mixture_of_depths") == [cloned]


def test_without_a_checkout_the_notebook_ends_with_one_line(tmp_path, colab):
    stops(colab, "SOURCE", "report", name="compare_families")
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").touch()
    stops(colab, str(other), source=str(other))
    stops(colab, "other", "launch/", source=str(committed(other)))


@pytest.mark.slow
def test_the_devices_are_left_to_the_processes_of_a_study(root):
    """A TPU belongs to one process, and on a GPU the first allocates most of the memory."""
    # JAX refuses this setting once it has initialised devices.
    free = "import jax; jax.config.update('jax_num_cpu_devices', 3); print(jax.device_count())"
    done = subprocess.run(
        [sys.executable, "-c", f"{first_cell('isoflop')}\n{free}"],
        cwd=FOLDER,
        env={**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    printed, devices = done.stdout.splitlines()
    assert printed.startswith("JAX ") and devices == "3", done.stderr


# ---- installing ----------------------------------------------------------------------------------

COLAB_GPU = {
    "accelerate": "1.11.0",
    "jax": "0.10.2",
    "jaxlib": "0.10.2+cuda12",
    "jax-cuda12-plugin": "0.10.2",
    "numpy": "2.0.2",
    "torch": "2.9.0+cu126",
    "torchvision": "0.24.0+cu126",
    "transformers": "4.57.1",
}
ACCEPTED = Requirement("jax>=0.10.2,<0.12")


def test_a_jax_outside_the_accepted_range_is_refused():
    for installed, extra in ((COLAB_GPU, "jax[cuda12]"), ({"libtpu": "0.0.40"}, "jax[tpu]")):
        constraints = functools.partial(install.constraints, installed | {"jax": "0.7.2"}, ACCEPTED)
        stops(constraints, "jax 0.7.2", extra)


@pytest.fixture
def runtime(monkeypatch):
    """A runtime of these `versions` whose pip exits with `status`; `calls` has pip's arguments and
    constraints."""
    runtime = SimpleNamespace(versions=dict(COLAB_GPU), status=0, calls=[])

    def pip(command, **options):
        file = command[command.index("--constraint") + 1]
        what = command[command.index(file) + 1 :]
        runtime.calls.append((what, Path(file).read_text().splitlines()))
        return SimpleNamespace(returncode=runtime.status)

    monkeypatch.setattr(install, "installed_versions", lambda: dict(runtime.versions))
    monkeypatch.setattr(install, "loaded_from", dict(COLAB_GPU))
    monkeypatch.setattr(subprocess, "run", pip)
    return runtime


def test_pip_installs_the_missing_requirements_and_keeps_jax_and_pytorch(root, runtime):
    """Though the extra pins another PyTorch."""
    install.install(root, ["report", "interop"])
    (what, lines) = runtime.calls[0]
    assert what[:2] == ["--editable", str(root)]
    assert {one.partition("==")[0] for one in what[2:]} == {"jinja2", "plotly", "transformers"}
    assert lines == [
        "jax==0.10.2",
        "jax-cuda12-plugin==0.10.2",
        "jaxlib==0.10.2+cuda12",
        "torch==2.9.0+cu126",
    ]
    (jax,) = [one for one in install.requirements(root)[0] if one.name == "jax"]
    assert jax == ACCEPTED


def test_a_loaded_package_that_was_replaced_needs_a_restart(root, runtime):
    """Until then the cell, run again in the same session, fails again."""
    runtime.versions["numpy"] = "2.4.6"
    for _ in range(2):
        stops(lambda: install.install(root), "numpy 2.0.2 -> 2.4.6")
    install.loaded_from["numpy"] = "2.4.6"
    install.install(root)


def test_a_failed_installation_is_one_line(root, runtime):
    runtime.status = 1
    stops(lambda: install.install(root), str(root))
