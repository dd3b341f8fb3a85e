"""The Colab notebook runs as it is."""

import pytest


def test_quickstart_runs(root, tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat", reason="the extra `notebooks` is not installed")
    nbclient = pytest.importorskip("nbclient", reason="the extra `notebooks` is not installed")
    pytest.importorskip("ipykernel", reason="the extra `notebooks` is not installed")
    monkeypatch.setenv("EFX_RUNS", str(tmp_path))
    notebook = nbformat.read(root / "launch/notebooks/quickstart.ipynb", as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(root / "launch/notebooks")}}
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.get("text", "") for output in outputs)
    assert "finished: 60 steps" in text and "def " in text
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert (tmp_path / "quickstart/metrics.jsonl").exists()
