"""Import directions (the contracts of pyproject.toml), and packages of extras."""

import ast
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
lint = pytest.mark.skipif(
    find_spec("importlinter") is None, reason="import-linter is not installed (extra dev)"
)


def check(folder):
    """Runs import-linter on the efx package in `folder`."""
    code = "from importlinter.cli import lint_imports_command as run; run()"
    return subprocess.run(
        [sys.executable, "-c", code, "--no-cache"],
        cwd=folder,
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )


@lint
def test_contracts_hold():
    result = check(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@lint
@pytest.mark.slow
@pytest.mark.parametrize(
    "module, line, contract",
    [
        ("layers/mlp.py", "from efx.models import decoder", "Imports go one way"),
        ("models/latent/model.py", "from efx.models.decoder import x", "Families do not import"),
        ("layers/mlp.py", "import ml_collections", "A config reaches a model once"),
        ("step.py", "import time", "The step is pure"),
    ],
)
def test_a_wrong_import_breaks_its_contract(tmp_path, module, line, contract):
    """In a tree of empty modules."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    files = """__init__ main train evaluate sample step losses optim sharding flops errors
    data/__init__ data/sources models/__init__ models/decoder models/latent/__init__
    models/latent/model models/adapters/__init__ models/adapters/model
    layers/__init__ layers/mlp interop/__init__ interop/hf studies/__init__"""
    for name in files.split():
        path = tmp_path / "efx" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    (tmp_path / "efx" / module).write_text(f"{line}\n")
    result = check(tmp_path)
    broken = [part for part in result.stdout.splitlines() if " BROKEN" in part]
    assert result.returncode == 1, result.stdout + result.stderr
    assert len(broken) == 1 and broken[0].startswith(contract), result.stdout


# Packages whose import name is not their name in a registry.
INSTALLED_AS = {"absl": "absl-py", "orbax": "orbax-checkpoint", "sklearn": "scikit-learn"}


def imported(tree, everywhere):
    """Top-level packages that a module imports when it is imported, or `everywhere` in it."""
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.split(".")[0], node.lineno
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or everywhere:
            pending.extend(ast.iter_child_nodes(node))


def test_extras_are_imported_where_used():
    """Importing efx needs the dependencies of pyproject.toml alone."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = sum(project["optional-dependencies"].values(), [])
    base = {canonicalize_name(Requirement(line).name) for line in project["dependencies"]}
    more = {canonicalize_name(Requirement(line).name) for line in extras}
    for path in sorted((ROOT / "efx").rglob("*.py")):
        if not (path.parent / "__init__.py").exists():
            continue
        tree = ast.parse(path.read_text())
        for everywhere, known in ((False, base), (True, base | more)):
            for package, line in imported(tree, everywhere):
                if package not in {*sys.stdlib_module_names, "efx", "configs"}:
                    name = canonicalize_name(INSTALLED_AS.get(package, package))
                    assert name in known, f"{path.relative_to(ROOT)}:{line} imports {package}"
