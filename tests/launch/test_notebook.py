"""The notebooks for Colab: they run, in smoke size, are committed without outputs, and install efx
beside the JAX that a runtime has."""

import ast
import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from test_isoflop import fake_runs

from efx import api
from efx.metrics import read_metrics
from efx.runfolder import run_record
from efx.studies import isoflop

FOLDER = Path(__file__).resolve().parents[2] / "launch/notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
sys.path.insert(0, str(FOLDER))
import install  # noqa: E402

needs_jupyter = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("nbformat", "nbclient", "ipykernel")),
    reason="the extra `notebooks` is not installed",
)
needs_pages = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("jinja2", "plotly")),
    reason="the extra `report` is not installed",
)
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


@pytest.mark.quick
def test_all_install_in_the_same_way():
    first, *others = [code_cells(name)[0]["source"] for name in NAMES]
    assert len(others) == 4 and all(source == first for source in others)
    assert 'SOURCE = ""' in "".join(first)


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


@pytest.mark.quick
def test_a_notebook_alone_asks_for_the_source(tmp_path, monkeypatch):
    """Where there is no checkout and no efx, the one line says what to put where."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    source = "".join(code_cells("quickstart")[0]["source"])
    with pytest.raises(SystemExit, match="Set SOURCE above to the address of efx's git repository"):
        exec(compile(ast.parse(source), "cell", "exec"), {})


# ---- installing ----------------------------------------------------------------------------------

COLAB_GPU = {
    "jax": "0.10.2",
    "jaxlib": "0.10.2+cuda12",
    "jax-cuda12-plugin": "0.10.2",
    "jax-cuda12-pjrt": "0.10.2",
    "jaxtyping": "0.3.1",
    "flax": "0.11.0",
    "numpy": "2.0.2",
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
    assert f"has jax {version}, and efx takes jax<0.12,>=0.10.2" in line and wanted in line
    assert "Change runtime type" in line and "\n" not in line


@pytest.mark.quick
def test_what_pip_is_asked_for(root, monkeypatch, capsys):
    """The constraints are those of the pyproject.toml of the checkout and of what is installed; a
    module that is loaded in a version that is gone asks for a restart."""
    versions, calls = [dict(COLAB_GPU)], []

    def run(command, check):
        file = Path(command[command.index("--constraint") + 1])
        calls.append((command[-2:], file.read_text().splitlines()))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(install, "installed_versions", lambda: versions[min(len(calls), 1) - 1])
    monkeypatch.setattr(subprocess, "run", run)
    install.install(root, ["report"])
    assert calls == [(["--editable", f"{root}[report]"], install.constraints(COLAB_GPU, ACCEPTED))]
    assert "kept: jax==0.10.2" in capsys.readouterr().out
    assert install.accepted(root).specifier == ACCEPTED.specifier
    calls.clear()
    versions[:] = [COLAB_GPU | {"numpy": "2.4.6"}, COLAB_GPU]  # after, before
    with pytest.raises(SystemExit, match=r"Restart the session .* \(numpy 2.0.2 -> 2.4.6\)"):
        install.install(root)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1))
    with pytest.raises(SystemExit, match="pip could not install"):
        install.install(root)
