"""The notebooks for Colab: they run in smoke size, find efx or end with one line, and keep the JAX
of the runtime."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_isoflop import fake_runs

from efx.logging import read_metrics
from efx.run_dir import run_record
from efx.studies import isoflop
from launch.notebooks import stamp

FOLDER = Path(__file__).resolve().parents[2] / "launch/notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
sys.path.insert(0, str(FOLDER))
import install  # noqa: E402

INSTALL = install.install

# The extras that the notebooks install.
NEEDS = {
    "bring_your_model": ["interop"],
    "compare_families": ["report"],
    "isoflop": [],
    "mixture_of_depths": ["report"],
    "quickstart": [],
}
# Where the third notebook looks for the run that the first has trained and the second shows.
MOD = "families/Mixture-of-Depths"
STEPS = 12


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folder of all runs."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def kernel():
    """One process for all notebooks: JAX is imported once."""
    for name in ("nbformat", "nbclient", "ipykernel", "jinja2", "plotly"):
        pytest.importorskip(name, reason="the extras `notebooks` and `report` are not installed")
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(cwd=str(FOLDER))
    yield manager
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def read(name):
    return json.loads((FOLDER / f"{name}.ipynb").read_text())


def code_cells(name):
    return [cell for cell in read(name)["cells"] if cell["cell_type"] == "code"]


def parameters(name):
    """The values of a notebook's cell of parameters."""
    (cell,) = [
        cell for cell in code_cells(name) if "parameters" in cell["metadata"].get("tags", [])
    ]
    values = {}
    exec("".join(cell["source"]), values)
    return {key: value for key, value in values.items() if key.isupper()}


def executed(kernel, name, **changes):
    """(text printed, [{kind of output: data}]) of a notebook, its parameters changed."""
    import nbclient
    import nbformat

    assert changes.keys() <= parameters(name).keys()
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    at = next(i for i, c in enumerate(notebook.cells) if "parameters" in c.metadata.get("tags", ()))
    changed = "\n".join(f"{key} = {value!r}" for key, value in changes.items())
    notebook.cells.insert(at + 1, nbformat.v4.new_code_cell(changed))
    # What another notebook has left must not be needed.
    forget = '%reset -f\nimport os\nos.environ.pop("PYTHONPATH", None)'
    notebook.cells.insert(0, nbformat.v4.new_code_cell(forget))
    nbclient.NotebookClient(notebook, km=kernel, timeout=600).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.get("text", "") for output in outputs)
    return text, [output["data"] for output in outputs if "data" in output]


# ---- as they are committed -----------------------------------------------------------------------


def first_cell(name):
    """The code that finds and installs efx."""
    return "".join(code_cells(name)[0]["source"])


def test_notebooks_are_committed_without_outputs():
    nbformat = pytest.importorskip("nbformat", reason="the extra `notebooks` is not installed")
    for name in NAMES:
        nbformat.validate(read(name))
        for cell in code_cells(name):
            assert cell["outputs"] == [] and cell["execution_count"] is None, cell["id"]


def test_all_notebooks_install_efx_in_the_same_way():
    assert NAMES == sorted(NEEDS)
    cells = {name: first_cell(name) for name in NAMES}
    line = {name: f"NEEDS = {json.dumps(NEEDS[name])}  # extras of efx\n" for name in NAMES}
    (same,) = {cells[name].replace(line[name], "") for name in NAMES}
    assert "NEEDS = " not in same


def test_the_address_of_pyproject_is_in_the_notebooks(root, tmp_path):
    written = tmp_path / "launch/notebooks"
    shutil.copytree(FOLDER, written)
    shutil.copy(root / "pyproject.toml", tmp_path)
    stamp.stamp(tmp_path)
    for path in FOLDER.glob("*.ipynb"):
        assert (written / path.name).read_bytes() == path.read_bytes()


# ---- executed ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quickstart(kernel, runs):
    return executed(kernel, "quickstart", RUN=str(runs / MOD), STEPS=STEPS)


@pytest.mark.slow
def test_quickstart_runs(quickstart, runs):
    text, shown = quickstart
    assert f"finished: {STEPS} steps" in text and "JAX" in text
    assert any("image/png" in data for data in shown)
    assert (runs / MOD / "metrics.jsonl").exists()


@pytest.mark.slow
def test_mixture_of_depths_runs(kernel, runs, quickstart):
    """On the finished run of the quickstart."""
    changes = dict(RUN=str(runs / MOD), STEPS=STEPS, TEXT="def f(x):")
    text, shown = executed(kernel, "mixture_of_depths", **changes)
    assert "eval/loss_topk" in text and "routed_fraction" in text
    (frame,) = [data["text/html"] for data in shown if "text/html" in data]
    assert "<iframe" in frame and "Tokens and blocks" in frame and len(frame) > 1e6


@pytest.mark.slow
def test_isoflop_runs(kernel, runs, quickstart):
    """On fake runs; tests of the study train."""
    grid, folder = runs / "grid.py", runs / "isoflop"
    smaller = parameters("isoflop")["GRID"].replace("(6e9, 2.4e10)", "(6e8, 2.4e9)")
    grid.write_text(smaller)
    of_text = {key: run_record(runs / MOD)[key] for key in ("text", "tokenizer")}
    fake_runs(isoflop.load_grid(grid), folder, record=of_text)
    _, shown = executed(kernel, "isoflop", FOLDER=str(folder), GRID=smaller)
    assert any("image/png" in data for data in shown)
    (tables,) = [data["text/markdown"] for data in shown if "text/markdown" in data]
    assert "MoD 12.5%" in tables and "2.40 GFLOPs" in tables


@pytest.mark.slow
def test_compare_families_runs(kernel, runs, quickstart):
    """On the finished run of the quickstart; other tests train the other families."""
    name = "Mixture-of-Depths"
    families = {name: parameters("compare_families")["FAMILIES"][name]}
    changes = dict(FOLDER=str(runs / "families"), STEPS=STEPS, FAMILIES=families)
    _, shown = executed(kernel, "compare_families", **changes)
    (table,) = [data["text/markdown"] for data in shown if "text/markdown" in data]
    losses = [row["eval/loss"] for row in read_metrics(runs / MOD) if "eval/loss" in row]
    assert f"| {name} | {losses[-1]:.3f} |" in table


@pytest.mark.slow
def test_bring_your_model_runs(kernel, runs):
    pytest.importorskip("transformers", reason="the extra `interop` is not installed")
    changes = dict(FOLDER=str(runs / "own"), STEPS=6, CONTEXT=32)
    text, _ = executed(kernel, "bring_your_model", **changes)
    assert text.count("held-out loss: ") == 2
    names = {path.name for path in (runs / "own/tiny/exported").iterdir()}
    assert {"model.safetensors", "modeling_efx.py", "tokenizer.json"} <= names


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
        cell = re.sub(
            "^SOURCE = .*$", lambda _: f"SOURCE = {source!r}", first_cell(name), flags=re.M
        )
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
    subprocess.run([*command, "init", "--quiet"], check=True)
    subprocess.run([*command, "add", "."], check=True)
    subprocess.run([*command, "commit", "--quiet", "-m", "first"], check=True)
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


def test_a_source_is_used(root, tmp_path, colab, monkeypatch):
    """A folder where it is; a bare repository is cloned once. The environment variable wins."""
    folder = leave_checkout(root, tmp_path / "folder")
    assert colab(source=str(folder)) == [(folder, [])]
    bare = tmp_path / "bare.git"
    command = ["git", "clone", "--quiet", "--bare", str(committed(folder)), str(bare)]
    subprocess.run(command, check=True)
    sys.path[:2] = []  # which the first run has added
    monkeypatch.setenv("EFX_SOURCE", str(bare))
    cloned = (tmp_path / "content/efx-checkout", ["report"])
    assert colab(source=str(folder), name="mixture_of_depths")[1:] == [cloned]
    shutil.rmtree(bare)
    assert colab(name="mixture_of_depths")[2:] == [cloned]


def test_the_repository_that_colab_opened_the_notebook_from_is_cloned(tmp_path, colab, monkeypatch):
    """Colab's server has its address as the path of the notebook."""
    opened = "fileId=https%3A//github.com/someone/efx-fork/blob/main/launch/notebooks/a.ipynb"

    class Server(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/api/sessions" else 404)
            self.end_headers()
            self.wfile.write(json.dumps([{"name": "a.ipynb", "path": opened}]).encode())

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("COLAB_JUPYTER_IP", "127.0.0.1")
        monkeypatch.setenv("KMP_TARGET_PORT", str(server.server_port))
        # No test reaches the network: git replaces each address by a missing folder.
        monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
        monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.{tmp_path}/none/.insteadOf")
        monkeypatch.setenv("GIT_CONFIG_VALUE_0", "https://")
        stops(colab, "https://github.com/someone/efx-fork")
        server.shutdown()


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
    still_free = (
        "import jax; jax.config.update('jax_num_cpu_devices', 3); print(jax.device_count())"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{first_cell('isoflop')}\n{still_free}"],
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
        with pytest.raises(SystemExit) as error:
            install.constraints(installed | {"jax": "0.7.2"}, ACCEPTED)
        line = str(error.value)
        assert "jax 0.7.2" in line and extra in line and "\n" not in line


@pytest.fixture
def pip(monkeypatch):
    """A runtime of these `versions` whose pip exits with `status` and, if that is 0, installs
    `later`. `calls` has its arguments and constraints. Other commands run."""
    runtime = SimpleNamespace(versions=dict(COLAB_GPU), later={}, status=0, calls=[])
    really = subprocess.run

    def run(command, **options):
        if "--constraint" not in command:
            return really(command, **options)
        file = Path(command[command.index("--constraint") + 1])
        what = command[command.index(str(file)) + 1 :]
        runtime.calls.append((what, file.read_text().splitlines()))
        if runtime.status == 0:
            runtime.versions |= runtime.later
        return SimpleNamespace(returncode=runtime.status)

    monkeypatch.setattr(install, "installed_versions", lambda: dict(runtime.versions))
    monkeypatch.setattr(install, "loaded_from", dict(COLAB_GPU))
    monkeypatch.setattr(subprocess, "run", run)
    return runtime


def complete(root, *extras):
    """{canonical name: least version} of the requirements of efx and these extras."""
    of_efx, of_extras = install.requirements(root, extras)
    return {
        canonicalize_name(one.name): part.version
        for one in of_efx + of_extras
        for part in one.specifier
        if part.operator in (">=", "==")
    }


def test_pip_installs_the_missing_requirements_and_keeps_jax_and_pytorch(root, pip):
    """Though the extra pins another PyTorch."""
    install.install(root, ["report", "interop"])
    (what, lines) = pip.calls[0]
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


def test_a_loaded_package_that_was_replaced_needs_a_restart(
    root, tmp_path, colab, pip, monkeypatch
):
    """Until then the cell, run again in the same session, fails again; then it installs nothing."""
    monkeypatch.setattr(install, "install", INSTALL)
    leave_checkout(root, tmp_path / "content/efx-main")
    pip.later = complete(root) | {"jax": COLAB_GPU["jax"], "numpy": "2.4.6"}
    for _ in range(2):
        stops(colab, "numpy 2.0.2 -> 2.4.6")
    assert len(pip.calls) == 1
    install.loaded_from = dict(pip.versions)
    colab()
    assert len(pip.calls) == 1


def test_a_failed_installation_is_one_line(root, pip):
    pip.status = 1
    stops(lambda: install.install(root), str(root))
