"""Installs efx in a notebook's runtime, beside the JAX that the runtime has.

    import install
    install.install("efx-checkout", ["report"])

Colab's runtimes for GPUs and TPUs come with a JAX that belongs to their driver. The pins of
requirements.txt would replace it by another, or by the one for CPUs, and so pip is told to keep
the versions that are there; where efx does not take them, one line says so before anything is
installed. Needs nothing but pip and `packaging`, which every Jupyter has.
"""

import importlib.metadata
import pathlib
import re
import subprocess
import sys
import tempfile
import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# What makes up an installation of JAX: itself, its compiled part, its plugins for accelerators.
OF_JAX = re.compile(r"jax|jaxlib|jax-.*(plugin|pjrt)|libtpu(-.*)?")
# {a distribution: the extra of jax that brings it}
EXTRAS = {"jax-cuda12-plugin": "cuda12", "jax-cuda13-plugin": "cuda13", "libtpu": "tpu"}
MENU = "Runtime > Change runtime type > Runtime version"


def installed_versions():
    """{canonical name: version} of all that is installed."""
    found = importlib.metadata.distributions()
    return {canonicalize_name(one.name): one.version for one in found if one.name}


def accepted(checkout):
    """The `Requirement` for jax of a checkout's pyproject.toml."""
    text = (pathlib.Path(checkout) / "pyproject.toml").read_text(encoding="utf-8")
    requirements = map(Requirement, tomllib.loads(text)["project"]["dependencies"])
    return next(one for one in requirements if one.name == "jax")


def constraints(installed, accepted):
    """Lines for `pip install --constraint` that keep the JAX that is there; none without one.

    Args:
      installed: {canonical name: version}.
      accepted: the `Requirement` for jax.

    Raises SystemExit, of one line, if jax is not of a version that is accepted.
    """
    version = installed.get("jax")
    if version is None:
        return []
    if not accepted.specifier.contains(version, prereleases=True):
        extra = next((EXTRAS[name] for name in EXTRAS if name in installed), "")
        wanted = f"jax[{extra}]" if extra else "jax"
        raise SystemExit(
            f"This runtime has jax {version}, and efx takes {accepted}: choose another {MENU}, or"
            f" run `%pip install '{wanted}{accepted.specifier}'`, restart the session and run this"
            " cell again."
        )
    return [f"{name}=={installed[name]}" for name in sorted(installed) if OF_JAX.fullmatch(name)]


def changed_modules(before, after, loaded, providers):
    """["numpy 2.0.2 -> 2.4.6"] of what Python has loaded in a version that is no longer there.

    Args:
      before, after: {canonical name: version}.
      loaded: names of modules. providers: {module: [distributions that it may be of]}.
    """
    names = {canonicalize_name(one) for module in loaded for one in providers.get(module, ())}
    return [
        f"{name} {before[name]} -> {after.get(name, 'none')}"
        for name in sorted(names & before.keys())
        if before[name] != after.get(name)
    ]


def install(checkout, extras=()):
    """Installs a checkout of efx with its extras; SystemExit with one line if that cannot be, or if
    the session has to be restarted first."""
    before = installed_versions()
    lines = constraints(before, accepted(checkout))
    what = str(checkout) + f"[{','.join(extras)}]" * bool(extras)
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "constraints.txt"
        file.write_text("".join(f"{line}\n" for line in lines))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--constraint", str(file)]
        status = subprocess.run([*command, "--editable", what], check=False).returncode
    if status:
        raise SystemExit(f"pip could not install {what} (what it says is above).")
    print("kept:", ", ".join(lines) or "no JAX was there, and so pip chose one")
    loaded = {name.partition(".")[0] for name in list(sys.modules)}
    providers = importlib.metadata.packages_distributions()
    changed = changed_modules(before, installed_versions(), loaded, providers)
    if changed:
        raise SystemExit(
            f"Restart the session (Runtime > Restart session) and run this cell again: what it has"
            f" loaded is of other versions now ({', '.join(changed)})."
        )
