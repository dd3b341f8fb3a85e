"""Import directions (the contracts of pyproject.toml), and packages of extras."""

import ast
import importlib
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from refusals import refused

from docs import architecture

ROOT = Path(__file__).resolve().parents[2]


needs_linter = pytest.mark.skipif(
    find_spec("importlinter") is None, reason="import-linter is not installed (extra dev)"
)


def lint(tree):
    """(exit status, output) of import-linter on a copy of the project."""
    code = "from importlinter.cli import lint_imports_command as run; run()"
    command, env = [sys.executable, "-c", code, "--no-cache"], {"PYTHONPATH": str(tree)}
    result = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    return result.returncode, result.stdout + result.stderr


@needs_linter
def test_contracts_hold():
    status, output = lint(ROOT)
    assert status == 0, output


def test_configs_import_one_way_too():
    """The linter does not see their folder."""
    names = architecture.packages()
    edges = architecture.imports(names)
    assert {"config.run"} <= edges["configs"]
    for name, others in edges.items():
        assert all(names.index(name) < names.index(other) for other in others), name


@needs_linter
def test_a_module_that_stands_in_no_layer_is_refused(tmp_path):
    """Such as a new family that imports another one."""
    shutil.copytree(ROOT / "efx", tmp_path / "efx")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    modules = ("models/toy.py", "config/toy.py", "toy.py")
    for module in modules:
        (tmp_path / "efx" / module).write_text("from efx.models.decoder import Decoder\n")
    status, output = lint(tmp_path)
    assert status != 0
    for module in modules:
        name = "efx." + module.removesuffix(".py").replace("/", ".")
        assert re.search(rf"^- {re.escape(name)}$", output, re.M), output


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Packages whose import name is not their name in a registry.
INSTALLED_AS = {"absl": "absl-py", "orbax": "orbax-checkpoint", "sklearn": "scikit-learn"}
WITH_EXTRA = ("lm_eval.py", "modeling_efx.py", "torch_models.py")


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
    """Only studies and `WITH_EXTRA` need an extra to be imported."""
    extras = sum(PROJECT["optional-dependencies"].values(), [])
    base = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
    more = {canonicalize_name(Requirement(line).name) for line in extras}
    for path in sorted((ROOT / "efx").rglob("*.py")):
        if not (path.parent / "__init__.py").exists():
            continue
        tree = ast.parse(path.read_text())
        needs_extra = path.parent.name in ("studies", "composition") or path.name in WITH_EXTRA
        at_import = base | more if needs_extra else base
        for everywhere, known in ((False, at_import), (True, base | more)):
            for package, line in imported(tree, everywhere):
                if package not in {*sys.stdlib_module_names, "efx", "configs"}:
                    name = canonicalize_name(INSTALLED_AS.get(package, package))
                    assert name in known, f"{path.relative_to(ROOT)}:{line} imports {package}"


def needed_by_studies():
    """Import names of the packages of the extra `studies`."""
    names = {name: module for module, name in INSTALLED_AS.items()}
    packages = [Requirement(line).name for line in PROJECT["optional-dependencies"]["studies"]]
    return [names.get(package, package.replace("-", "_")) for package in packages]


@pytest.mark.parametrize("package", needed_by_studies())
def test_each_missing_package_of_studies_is_named(package, monkeypatch):
    pytest.importorskip("pandas", reason="the extra `studies` is not installed")
    for name in [name for name in sys.modules if name.startswith(("efx.studies", "efx.compos"))]:
        monkeypatch.delitem(sys.modules, name)  # imported by another test
    monkeypatch.setitem(sys.modules, package, None)  # as if not installed
    refused(lambda: importlib.import_module("efx.composition.clustering"), "`studies`", package)


def test_each_dependency_is_imported():
    found = set()
    for path in (ROOT / "efx").rglob("*.py"):
        found |= {package for package, _ in imported(ast.parse(path.read_text()), everywhere=True)}
    names = {canonicalize_name(INSTALLED_AS.get(package, package)) for package in found}
    needed = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["studies"]
    assert {canonicalize_name(Requirement(line).name) for line in needed} <= names
