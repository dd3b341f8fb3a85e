"""The notebooks for Colab: they run, in smoke size, are committed without outputs, find efx or say
in one line what they need, and install it beside the JAX that a runtime has."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_isoflop import fake_runs

from efx import api
from efx.metrics import read_metrics
from efx.runfolder import run_record
from efx.studies import isoflop
from launch.notebooks import stamp

FOLDER = Path(__file__).resolve().parents[2] / "launch/notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
sys.path.insert(0, str(FOLDER))
import install  # noqa: E402

INSTALL = install.install

needs_jupyter = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("nbformat", "nbclient", "ipykernel")),
    reason="the extra `notebooks` is not installed",
)
needs_pages = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("jinja2", "plotly")),
    reason="the extra `report` is not installed",
)
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


@pytest.mark.quick
@pytest.mark.parametrize("name", NAMES)
def test_no_outputs_are_committed(name):
    nbformat = pytest.importorskip("nbformat", reason="the extra `notebooks` is not installed")
    nbformat.validate(read(name))
    for cell in code_cells(name):
        assert cell["outputs"] == [] and cell["execution_count"] is None, cell["id"]


def first_cell(name):
    """The code that finds and installs efx."""
    return "".join(code_cells(name)[0]["source"])


@pytest.mark.quick
def test_all_install_in_the_same_way(root):
    """But for the extras; and from the address that pyproject.toml has."""
    assert NAMES == sorted(NEEDS)
    cells = {name: first_cell(name) for name in NAMES}
    line = {name: f"NEEDS = {json.dumps(NEEDS[name])}  # extras of efx\n" for name in NAMES}
    (same,) = {cells[name].replace(line[name], "") for name in NAMES}
    assert "NEEDS = " not in same
    urls = tomllib.loads((root / "pyproject.toml").read_text())["project"].get("urls", {})
    assert f'\nSOURCE = "{urls.get("Repository", "")}"  # @param {{type:"string"}}\n' in same


@pytest.mark.quick
def test_the_address_is_stamped(root, tmp_path):
    shutil.copytree(FOLDER, tmp_path / "launch/notebooks")
    written = tmp_path / "launch/notebooks"
    (tmp_path / "pyproject.toml").write_text((root / "pyproject.toml").read_text())
    stamp.stamp(tmp_path)
    notebooks = {path.name: path.read_bytes() for path in FOLDER.glob("*.ipynb")}
    assert notebooks == {path.name: path.read_bytes() for path in written.glob("*.ipynb")}
    released = '[project.urls]\nRepository = "https://example.org/efx.git"\n'
    (tmp_path / "pyproject.toml").write_text(released)
    stamp.stamp(tmp_path)
    for name in NAMES:
        text = (written / f"{name}.ipynb").read_text()
        assert 'SOURCE = \\"https://example.org/efx.git\\"  # @param' in text
        assert text.count("\n") == notebooks[f"{name}.ipynb"].count(b"\n")


@pytest.mark.quick
def test_every_family_has_a_config():
    configs = parameters("compare_families")["FAMILIES"]
    found = {api.load_config(config).model.family for config in configs.values()}
    assert {"decoder", "encoder_decoder", "latent"} <= found
    # Held-out losses of one table are of one text.
    data = [dict(api.load_config(config).data) for config in configs.values()]
    keys = ("source", "tokenizer", "eval_fraction", "seq_len", "batch_size", "max_bytes")
    assert len({tuple(row[key] for key in keys) for row in data}) == 1


# ---- executed ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quickstart(kernel, runs):
    return executed(kernel, "quickstart", RUN=str(runs / MOD), STEPS=STEPS)


@needs_jupyter
def test_quickstart(quickstart, runs):
    text, shown = quickstart
    assert f"finished: {STEPS} steps" in text and "def " in text and "JAX" in text
    assert any("image/png" in data for data in shown)
    assert (runs / MOD / "metrics.jsonl").exists()


@needs_jupyter
@needs_pages
def test_mixture_of_depths(kernel, runs, quickstart):
    """On the run of the quickstart, which is finished."""
    changes = dict(RUN=str(runs / MOD), STEPS=STEPS, TEXT="def f(x):")
    text, shown = executed(kernel, "mixture_of_depths", **changes)
    assert "4 blocks; routed: one in 2; capacity: 12.5%" in text
    assert "eval/loss_topk" in text and "routed_fraction" in text and "9 tokens" in text
    (frame,) = [data["text/html"] for data in shown if "text/html" in data]
    assert "<iframe" in frame and "Tokens and blocks" in frame and len(frame) > 1e6


@needs_jupyter
def test_isoflop(kernel, runs, quickstart):
    """One run is trained; the others have ended, on the text of the quickstart's."""
    grid, folder = runs / "grid.py", runs / "isoflop"
    smaller = parameters("isoflop")["GRID"].replace("(6e9, 2.4e10)", "(6e8, 2.4e9)")
    grid.write_text(smaller)
    of_text = {key: run_record(runs / MOD)[key] for key in ("text", "tokenizer")}
    fake_runs(isoflop.load_grid(grid), folder, record=of_text)
    trained = folder / "dense_8_wide_600_MFLOPs-seed0"
    shutil.rmtree(trained)
    text, shown = executed(kernel, "isoflop", FOLDER=str(folder), GRID=smaller)
    assert read_metrics(trained)[-1]["eval/loss"] < 6
    assert any("image/png" in data for data in shown)
    (tables,) = [data["text/markdown"] for data in shown if "text/markdown" in data]
    assert "MoD 12.5%" in tables and "2.40 GFLOPs" in tables


@needs_jupyter
@needs_pages
def test_compare_families(kernel, runs, quickstart):
    """Of two: each more would be compiled for many seconds, and is trained by tests of its own."""
    names = ("dense", "Mixture-of-Depths")
    families = {name: parameters("compare_families")["FAMILIES"][name] for name in names}
    changes = dict(FOLDER=str(runs / "families"), STEPS=STEPS, FAMILIES=families)
    text, shown = executed(kernel, "compare_families", **changes)
    (table,) = [data["text/markdown"] for data in shown if "text/markdown" in data]
    loss = read_metrics(runs / "families/dense")[-1]["eval/loss"]
    assert f"| dense | {loss:.3f} |" in table and "| Mixture-of-Depths |" in table
    (frame,) = [data["text/html"] for data in shown if "text/html" in data]
    assert "<iframe" in frame and "Mixture-of-Depths" in frame


@needs_jupyter
def test_bring_your_model(kernel, runs):
    pytest.importorskip("transformers", reason="the extra `interop` is not installed")
    changes = dict(FOLDER=str(runs / "own"), STEPS=6, CONTEXT=32)
    text, _ = executed(kernel, "bring_your_model", **changes)
    assert text.count("held-out loss: ") == 2 and "def add(first, second):" in text
    names = {path.name for path in (runs / "own/tiny/exported").iterdir()}
    assert {"model.safetensors", "modeling_efx.py", "tokenizer.json"} <= names


# ---- where efx is --------------------------------------------------------------------------------


@pytest.fixture
def colab(root, tmp_path, monkeypatch):
    """Runs a first cell in a folder `content`, where no efx is but by what the cell adds to
    `sys.path`; returns [(checkout, extras)] that were installed."""
    (tmp_path / "content").mkdir()
    monkeypatch.chdir(tmp_path / "content")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.delenv("EFX_SOURCE", raising=False)
    before = list(sys.path)
    monkeypatch.setattr(sys, "path", list(before))

    def find(name):
        return PathFinder.find_spec(name, [path for path in sys.path if path not in before])

    monkeypatch.setattr(importlib.util, "find_spec", find)
    monkeypatch.setattr(sys, "executable", "echo")  # in place of a Python that asks JAX
    installed = []
    monkeypatch.setattr(install, "install", lambda *arguments: installed.append(arguments))

    def run(source="", name="quickstart"):
        cell = re.sub(
            "^SOURCE = .*$", lambda _: f"SOURCE = {source!r}", first_cell(name), flags=re.M
        )
        exec(compile(cell, "cell", "exec"), {})
        return installed

    return run


def leave_checkout(root, folder):
    """What a cell asks of a checkout, in a folder."""
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


@pytest.mark.quick
def test_a_notebook_alone_says_what_it_needs(colab):
    with pytest.raises(SystemExit) as error:
        colab(name="compare_families")
    line = str(error.value)
    assert "Upload a zip of its checkout" in line and "set SOURCE above to the address" in line
    assert "`%pip install` its wheel (extras: report)" in line and "\n" not in line


@pytest.mark.quick
@pytest.mark.parametrize("place", ["efx", "efx-main", ".."])
def test_a_checkout_that_lies_here_is_used(root, tmp_path, colab, place):
    """Beside the notebook, whatever SOURCE says, or around it. Processes find it, too."""
    checkout = (tmp_path / "content" / place).resolve()
    leave_checkout(root, checkout)
    assert colab(source="https://example.org/none.git") == [(checkout, [])]
    assert sys.path[0] == os.environ["PYTHONPATH"] == str(checkout)


@pytest.mark.quick
@pytest.mark.parametrize("inside", ["", "efx-main"])
def test_a_zip_that_lies_here_is_used(root, tmp_path, colab, inside):
    leave_checkout(root, tmp_path / "zipped" / inside)
    shutil.make_archive(tmp_path / "content/efx-main", "zip", tmp_path / "zipped")
    assert colab() == [(tmp_path / "content/efx-checkout" / inside, [])]


@pytest.mark.quick
def test_a_source_is_used(root, tmp_path, colab, monkeypatch):
    """A folder where it is, be it a repository or not; a repository of which no files are there is
    cloned, once. The environment comes before what the notebook has."""
    folder = leave_checkout(root, tmp_path / "folder")
    assert colab(source=str(folder)) == [(folder, [])]
    bare = tmp_path / "bare.git"
    command = ["git", "clone", "--quiet", "--bare", str(committed(folder)), str(bare)]
    subprocess.run(command, check=True)
    sys.path[:2] = []  # what the first run has left
    monkeypatch.setenv("EFX_SOURCE", str(bare))
    cloned = (tmp_path / "content/efx-checkout", ["report"])
    assert colab(source=str(folder), name="mixture_of_depths")[1:] == [cloned]
    shutil.rmtree(bare)
    assert colab(name="mixture_of_depths")[2:] == [cloned]


@pytest.mark.quick
@pytest.mark.parametrize("setting", ["", "https://example.org/set.git"])
def test_the_repository_that_colab_opened_the_notebook_from_is_cloned(
    tmp_path, colab, monkeypatch, capfd, setting
):
    """Where nothing else says where efx is. Colab's server says it as its address of the file."""
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
        # No test reaches the network: git takes each address for a folder that is not there.
        monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
        monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.{tmp_path}/none/.insteadOf")
        monkeypatch.setenv("GIT_CONFIG_VALUE_0", "https://")
        with pytest.raises(SystemExit) as error:
            colab(source=setting)
        server.shutdown()
    assert str(error.value).startswith(
        f"git could not clone {setting or 'https://github.com/someone/efx-fork'} ("
    )
    assert f"{tmp_path}/none/" in capfd.readouterr().err
    with pytest.raises(SystemExit, match="No efx here"):  # the server is gone
        colab()


@pytest.mark.quick
def test_a_source_that_is_none_is_one_line(tmp_path, colab, capfd):
    """A folder that is neither checkout nor repository; a repository of something else."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").touch()
    with pytest.raises(SystemExit, match=r"^git could not clone \S+other \(what it says is above"):
        colab(source=str(other))
    assert "does not exist" in capfd.readouterr().err
    with pytest.raises(SystemExit, match=r"other is no checkout of efx, which has launch/\S+. Del"):
        colab(source=str(committed(other)))


@pytest.mark.quick
def test_an_efx_that_is_installed_is_used(tmp_path, colab):
    """A folder of its name, which is no package, is none."""
    (tmp_path / "content/efx").mkdir()
    sys.path.insert(0, str(tmp_path / "content"))
    with pytest.raises(SystemExit, match="No efx here"):
        colab()
    (tmp_path / "content/efx/__init__.py").touch()
    assert colab() == []


def test_the_devices_are_left_to_the_processes_of_a_study(root):
    """The first cell shows them and has none: a TPU is one process's alone, and on a GPU the first
    takes most of the memory."""
    # JAX refuses this setting once it has taken devices.
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
    shown, devices = done.stdout.splitlines()
    assert shown.startswith("JAX ") and "Device" in shown and devices == "3", done.stderr


# ---- installing ----------------------------------------------------------------------------------

COLAB_GPU = {
    "accelerate": "1.11.0",
    "jax": "0.10.2",
    "jaxlib": "0.10.2+cuda12",
    "jax-cuda12-plugin": "0.10.2",
    "jax-cuda12-pjrt": "0.10.2",
    "jaxtyping": "0.3.1",
    "numpy": "2.0.2",
    "torch": "2.9.0+cu126",
    "torchvision": "0.24.0+cu126",
    "transformers": "4.57.1",
}
COLAB_TPU = {"jax": "0.11.0", "jaxlib": "0.11.0", "libtpu": "0.0.40", "numpy": "2.4.6"}
ACCEPTED = Requirement("jax>=0.10.2,<0.12")


@pytest.mark.quick
def test_the_jax_of_the_runtime_is_kept():
    assert install.constraints(COLAB_GPU, ACCEPTED) == [
        "jax==0.10.2",
        "jax-cuda12-pjrt==0.10.2",
        "jax-cuda12-plugin==0.10.2",
        "jaxlib==0.10.2+cuda12",
        "torch==2.9.0+cu126",
    ]
    lines = install.constraints(COLAB_TPU, ACCEPTED)
    assert lines == ["jax==0.11.0", "jaxlib==0.11.0", "libtpu==0.0.40"]
    assert install.constraints({"numpy": "2.4.6"}, ACCEPTED) == []


@pytest.mark.quick
@pytest.mark.parametrize(
    "installed, version, wanted",
    [
        (COLAB_GPU, "0.7.2", "'jax[cuda12]<0.12,>=0.10.2'"),
        (COLAB_TPU, "0.12.0", "'jax[tpu]<0.12,>=0.10.2'"),
        ({}, "0.10.1", "'jax<0.12,>=0.10.2'"),
    ],
)
def test_a_jax_that_efx_does_not_take_is_one_line(installed, version, wanted):
    with pytest.raises(SystemExit) as error:
        install.constraints(installed | {"jax": version}, ACCEPTED)
    line = str(error.value)
    assert f"has jax {version}, and efx requires jax<0.12,>=0.10.2" in line and wanted in line
    assert "Change runtime type" in line and "\n" not in line


@pytest.fixture
def pip(monkeypatch):
    """A runtime of these `versions`; pip says `status` and, if that is 0, leaves `later`. `calls`
    has what it was asked to install, and its constraints. All else is run."""
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
    """{canonical name: the least version} of all that efx and these extras need."""
    of_efx, of_extras = install.requirements(root, extras)
    return {
        canonicalize_name(one.name): part.version
        for one in of_efx + of_extras
        for part in one.specifier
        if part.operator in (">=", "==")
    }


@pytest.mark.quick
def test_what_pip_is_asked_for(root, pip, capsys):
    """efx with what an extra needs and the runtime lacks, under constraints that keep its JAX and
    its PyTorch, though the extra pins another."""
    install.install(root, ["report", "interop"])
    (what, lines) = pip.calls[0]
    assert what[:2] == ["--editable", str(root)]
    assert {one.partition("==")[0] for one in what[2:]} == {"jinja2", "plotly", "transformers"}
    assert lines == install.constraints(COLAB_GPU, ACCEPTED)
    assert "kept: jax==0.10.2" in capsys.readouterr().out
    (jax,) = [one for one in install.requirements(root)[0] if one.name == "jax"]
    assert jax == ACCEPTED


@pytest.mark.quick
def test_where_nothing_is_missing_nothing_is_installed(root, pip):
    """In a checkout with an environment of its own."""
    pip.versions = complete(root, "report", "interop") | {"transformers": "5.0.0"}
    install.loaded_from = {}
    install.install(root, ["report", "interop"])
    assert pip.calls == []
    install.loaded_from = {}  # or, where another test has loaded transformers, a restart is due
    pip.versions["transformers"] = "4.57.1"
    install.install(root, ["report"])
    assert pip.calls == []
    install.install(root, ["interop"])
    install.loaded_from = {}
    pip.versions["flax"] = "0.11.0"
    install.install(root)
    assert [what[2:] for what, _ in pip.calls] == [[str(Requirement("transformers==5.23.0"))], []]


@pytest.mark.quick
@pytest.mark.parametrize("versions, status, later, line", [
    ({}, 1, {}, "pip could not install"),
    ({"jax": "0.7.2"}, 0, {}, "This runtime has jax 0.7.2, and efx requires"),
    ({}, 0, {"numpy": "2.4.6"}, r"Restart the session .* \(numpy 2.0.2 -> 2.4.6\)"),
])  # fmt: skip
def test_what_has_failed_fails_again(
    root, tmp_path, colab, pip, monkeypatch, versions, status, later, line
):
    """The cell, run again in the same session, does not take what it has left for an efx."""
    monkeypatch.setattr(install, "install", INSTALL)
    leave_checkout(root, tmp_path / "content/efx-main")
    pip.versions, pip.status = pip.versions | versions, status
    pip.later = complete(root) | {"jax": COLAB_GPU["jax"]} | later
    for _ in range(3):
        with pytest.raises(SystemExit, match=line):
            colab()
    pip.versions, pip.status = complete(root), 0
    install.loaded_from = complete(root)  # the session was restarted
    for _ in range(2):
        colab()
