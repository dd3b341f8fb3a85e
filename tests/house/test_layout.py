"""The house rules that a parser can check; each test names the files and lines at fault."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "efx").rglob("*.py"))
MODEL_CODE = [path for path in SOURCES if {"models", "layers"} & set(path.relative_to(ROOT).parts)]
SHARED = ("__init__.py", "common.py")
LEFT_OUT = (".venv", "runs")  # of the checkout, where git cannot say what belongs to it
CONFIGS = sorted(path for path in (ROOT / "configs").glob("*.py") if path.name not in SHARED)
TREES = {path: ast.parse(path.read_text(), str(path)) for path in SOURCES}


def at(path, node):
    """Where a fault is: efx/x.py:12."""
    return f"{path.relative_to(ROOT)}:{node.lineno}"


def nodes(paths, *kinds):
    """(path, node) for the syntax nodes of these kinds in these files."""
    for path in paths:
        for node in ast.walk(TREES[path]):
            if isinstance(node, kinds):
                yield path, node


def project_files():
    """All text files of the project, tracked or about to be."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0 and listed.stdout:
        paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:  # a downloaded archive
        everything = ((path.relative_to(ROOT), path) for path in ROOT.rglob("*"))
        paths = [path for name, path in everything if name.parts[0] not in LEFT_OUT]
    for path in paths:
        if path.is_file() and path.suffix != ".pyc":
            text = path.read_bytes()
            if b"\0" not in text[:1024]:
                yield path, text.decode(errors="replace")


# ---- shape -------------------------------------------------------------------------------------


def test_one_training_loop():
    found = [
        at(path, node)
        for path, node in nodes(SOURCES, ast.FunctionDef)
        if node.name == "train_and_evaluate"
    ]
    assert len(found) == 1, found


def test_ruff():
    if find_spec("ruff") is None:
        pytest.skip("ruff is not installed (extra dev)")
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format=concise", "."]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


# ---- configs -----------------------------------------------------------------------------------


def is_config(node):
    """Whether an expression is a config or a part of one, going by the names in it."""
    text = ast.unparse(node)
    return re.search(r"(^|[._])(config|cfg)\b", text) is not None


def test_no_hidden_defaults():
    """Every knob is in a config file, so nothing falls back on a default of its own."""
    found = []
    for path, node in nodes(SOURCES, ast.Call):
        name = node.func
        if isinstance(name, ast.Attribute) and name.attr == "get":
            owner = name.value
        elif isinstance(name, ast.Name) and name.id == "getattr" and len(node.args) == 3:
            owner = node.args[0]
        else:
            continue
        if is_config(owner):
            found.append(f"{at(path, node)}: {ast.unparse(node)}")
    assert found == []


# ---- JAX ---------------------------------------------------------------------------------------

# Written so that this file does not match them.
PRIVATE = re.compile(r"jax[.](_src|interpreters)|thread[_]resources")
FOLDERS = re.compile(r"(?<![\w.~}$/-])/(?:home|root|work|Users)[/]")
REGISTRIES = re.compile(r"index[-]url|find[-]links|pypi[.]org|files[.]pythonhosted")


def test_public_apis_only():
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path, text in project_files()
        if path.suffix in (".py", ".ipynb") and (match := PRIVATE.search(text))
    ]
    assert found == []


def test_only_configs_name_mesh_axes():
    found = [
        f"{at(path, node)}: {node.value!r}"
        for path, node in nodes(MODEL_CODE, ast.Constant)
        if node.value in ("data", "fsdp", "tensor")
    ]
    assert found == []


def test_selection_is_in_one_place():
    """Top-k over tokens belongs to the router; sampling's is over the vocabulary."""
    names = ("top_k", "approx_max_k", "approx_min_k")
    allowed = {ROOT / "efx" / "layers" / "routing" / "plans.py", ROOT / "efx" / "sample.py"}
    found = []
    for path, node in nodes(set(SOURCES) - allowed, ast.Attribute, ast.ImportFrom):
        if isinstance(node, ast.ImportFrom):
            hit = node.module == "jax.lax" and any(name.name in names for name in node.names)
        else:
            hit = node.attr in names and ast.unparse(node.value) in ("lax", "jax.lax")
        if hit:
            found.append(f"{at(path, node)}: {ast.unparse(node)}")
    assert found == []


# ---- axis suffixes -----------------------------------------------------------------------------


def alphabet():
    """The axis letters, from where they are written once: `B batch, T query position, ...`."""
    docstring = ast.get_docstring(TREES[ROOT / "efx" / "models" / "__init__.py"])
    listed = re.search(r"Axis letters.*?: (.*?)\.(\s|$)", docstring, flags=re.S)[1]
    return {entry.strip()[0] for entry in listed.split(",")}


def suffix(name):
    """ "BTD" of x_BTD; None for a name without a suffix."""
    match = re.fullmatch(r"_?[a-z]\w*?_([A-Z]+)", name)
    return match and match[1]


def operand(node):
    """The name behind an einsum's operand, x_BTD or x_BTD.astype(...); None if it has none."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr != "astype":
            return None
        node = node.func.value
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def test_axis_letters():
    letters = alphabet()
    assert set("BTSDNKGHFVECMPLRX") == letters
    found = []
    for path, node in nodes(MODEL_CODE, ast.Name, ast.arg, ast.Attribute):
        name = getattr(node, "id", None) or getattr(node, "arg", None) or getattr(node, "attr", "")
        if not set(suffix(name) or "") <= letters:
            found.append(f"{at(path, node)}: {name}")
    assert found == []


def einsums(paths):
    """(path, node, inputs, output) for every einsum with a literal equation."""
    for path, node in nodes(paths, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if called == "einsum" and node.args and isinstance(node.args[0], ast.Constant):
            inputs, _, output = node.args[0].value.replace(" ", "").partition("->")
            yield path, node, inputs.split(","), output


def test_einsums_say_what_the_names_say():
    letters, found = alphabet(), []
    for path, node, inputs, output in einsums(MODEL_CODE):
        if not set("".join([*inputs, output])) <= letters | {"."}:
            found.append(f"{at(path, node)}: {node.args[0].value} has letters of its own")
        for subscripts, given in zip(inputs, node.args[1:], strict=True):
            said = suffix(operand(given) or "")
            if said and "." not in subscripts and said != subscripts:
                found.append(f"{at(path, node)}: {operand(given)} taken as {subscripts}")
    for path, node in nodes(MODEL_CODE, ast.Assign):
        for _, call, _, output in einsums([path]):
            if call is node.value and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                if suffix(name) and "." not in output and suffix(name) != output:
                    found.append(f"{at(path, node)}: {output} called {name}")
    assert found == []


# ---- what the project may carry ----------------------------------------------------------------


def test_no_paths_of_a_machine_and_no_registries():
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path, text in project_files()
        for pattern in (FOLDERS, REGISTRIES)
        if (match := pattern.search(text))
    ]
    assert found == []


def requirements():
    """The pins of requirements.txt."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def test_requirements_are_pinned_within_the_ranges():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [Requirement(line) for line in project["dependencies"]]
    tests = [Requirement(line) for line in project["optional-dependencies"]["dev"]]
    accepted = {canonicalize_name(each.name): each.specifier for each in [*needed, *tests]}
    for pin in requirements():
        (only,) = pin.specifier
        assert only.operator == "==" and "*" not in only.version, pin
        ranges = accepted.get(canonicalize_name(pin.name))
        assert ranges is None or ranges.contains(only.version), f"{pin}, not {ranges}"
    for python in ("3.11", "3.12", "3.13"):  # each package once, whatever the Python
        chosen = [
            canonicalize_name(pin.name)
            for pin in requirements()
            if not pin.marker or pin.marker.evaluate({"python_version": python})
        ]
        assert len(chosen) == len(set(chosen))
        assert {canonicalize_name(each.name) for each in needed} <= set(chosen)


def test_extras_that_are_named_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = []
    for path, text in project_files():
        named = re.findall(r"(?:\.|\befx)\[([a-z][a-z0-9,]*)\]", text)
        named += re.findall(r"`([a-z0-9]+)`", "".join(re.findall(r"the extras: (.*)", text)))
        unknown = set(",".join(named).split(",")) - {"", *project["optional-dependencies"]}
        if path.suffix in (".md", ".sh", ".sbatch", ".yaml") and unknown:
            found.append(f"{path.relative_to(ROOT)}: {', '.join(sorted(unknown))}")
    assert found == []


def test_this_environment_is_the_pinned_one():
    """Only where the launch scripts made it: elsewhere any version in range will do."""
    if not (Path(sys.prefix) / "efx-installed").exists():
        pytest.skip("not an environment made by launch/environment.sh")
    for pin in requirements():
        if not pin.marker or pin.marker.evaluate():
            assert pin.specifier.contains(version(pin.name)), f"{pin}, not {version(pin.name)}"
