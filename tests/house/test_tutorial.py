"""The tutorial's code runs as it is, and does what the text says."""

import os
import re
import subprocess
import sys

import pytest


def test_the_tutorial(root, tmp_path):
    pytest.importorskip("pandas", reason="the extra `studies` is not installed")
    blocks = re.findall(r"```python\n(.*?)```", (root / "docs/tutorial.md").read_text(), re.DOTALL)
    (tmp_path / "cosine.py").write_text("\n".join(blocks))
    done = subprocess.run(
        [sys.executable, "cosine.py"], cwd=tmp_path, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^block_\d+ ([#.]+)$", done.stdout, re.MULTILINE)
    assert len(lines) == 2 and all(line.count("#") >= 1 for line in lines), done.stdout
    assert "held-out loss" in done.stdout
