"""Lints, public APIs of JAX, pinned packages, and nothing of one machine in the files."""

import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from efx.interop.hf_export import TRANSFORMERS

ROOT = Path(__file__).resolve().parents[2]
SHARED = ("__init__.py", "common.py")
LEFT_OUT = (".venv", "runs")  # of the checkout, where git cannot say what belongs to it
CONFIGS = sorted(path for path in (ROOT / "configs").glob("*.py") if path.name not in SHARED)


def project_files():
    """(path, text) of all text files of the project, tracked or new."""
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


@pytest.mark.parametrize("command", ["check --output-format=concise", "format --check"])
def test_ruff(command):
    if find_spec("ruff") is None:
        pytest.skip("ruff is not installed (extra dev)")
    words = [sys.executable, "-m", "ruff", *command.split(), "--no-cache", "."]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# Written so that this file does not match them.
PRIVATE = re.compile(r"jax[.](_src|interpreters)|thread[_]resources")
FOLDERS = re.compile(r"(?<![\w.~}$/-])/(?:home|root|work|Users)[/]")
REGISTRIES = re.compile(r"index[-]url|find[-]links|pypi[.]org|files[.]pythonhosted")


def matches(patterns, suffixes=()):
    """[path: text] of files in which one of the patterns occurs."""
    return [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path, text in project_files()
        for pattern in patterns
        if (not suffixes or path.suffix in suffixes) and (match := pattern.search(text))
    ]


def test_public_apis_only():
    assert matches([PRIVATE], (".py", ".ipynb")) == []


def test_no_paths_of_a_machine_and_no_registries():
    assert matches([FOLDERS, REGISTRIES]) == []


def pins(*files):
    """The pins of requirements.txt and constraints.txt."""
    lines = "\n".join((ROOT / file).read_text() for file in files).splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


PINS = "requirements.txt", "constraints.txt"


def test_what_continuous_integration_installs_is_pinned_within_the_ranges():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    (installed,) = re.findall(r"--extras (\S+)", (ROOT / ".ci/run").read_text())
    always = [Requirement(line) for line in project["dependencies"]]
    needed = [*always, *(Requirement(x) for key in installed.split(",") for x in extras[key])]
    accepted = {}
    for each in needed:
        name = canonicalize_name(each.name)
        accepted[name] = accepted.get(name, SpecifierSet()) & each.specifier
    for pin in pins(*PINS):
        (only,) = pin.specifier
        assert only.operator == "==" and "*" not in only.version, pin
        ranges = accepted.get(canonicalize_name(pin.name))
        assert ranges is None or ranges.contains(only.version), f"{pin}, not {ranges}"

    def chosen(*files):
        for pin in pins(*files):
            if not pin.marker or pin.marker.evaluate({"python_version": "3.12"}):
                yield canonicalize_name(pin.name)

    assert len([*chosen(*PINS)]) == len({*chosen(*PINS)})
    assert {canonicalize_name(each.name) for each in always} <= {*chosen("requirements.txt")}
    assert {*accepted} <= {*chosen(*PINS)}


def test_extras_accept_ranges():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for line in sum(project["optional-dependencies"].values(), project["dependencies"]):
        operators = {each.operator for each in Requirement(line).specifier}
        assert not operators & {"==", "===", "~="}, line
    assert TRANSFORMERS in project["optional-dependencies"]["interop"]


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
