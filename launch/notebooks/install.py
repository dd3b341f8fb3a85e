"""Installs efx in a notebook's runtime, beside the JAX that the runtime has.

    import install
    install.install("efx-checkout", ["report"])

Colab's runtimes for GPUs and TPUs come with a JAX that belongs to their driver, and with a PyTorch.
The pins of requirements.txt would replace them by others, or by those for CPUs, and so pip is told
to keep the versions that are there; where efx does not take the JAX, one line says so before
anything is installed. Where nothing is missing, nothing is installed. Needs nothing but pip and
`packaging`, which every Jupyter has.
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
from packaging.version import Version

# What a runtime keeps: PyTorch, and what makes up an installation of JAX, which is itself, its
# compiled part, its plugins for accelerators.
KEPT = re.compile(r"torch|jax|jaxlib|jax-.*(plugin|pjrt)|libtpu(-.*)?")
# {a distribution: the extra of jax that brings it}
EXTRAS = {"jax-cuda12-plugin": "cuda12", "jax-cuda13-plugin": "cuda13", "libtpu": "tpu"}
MENU = "Runtime > Change runtime type > Runtime version"


def installed_versions():
    """{canonical name: version} of all that is installed."""
    found = importlib.metadata.distributions()
    return {canonicalize_name(one.name): one.version for one in found if one.name}


# What the session's modules were loaded from. It becomes what is installed once nothing that is
# loaded has changed: so the demand for a restart is repeated until there was one.
loaded_from = installed_versions()


def requirements(checkout, extras=()):
    """([Requirement] of efx itself, those of the extras), by a checkout's pyproject.toml."""
    text = (pathlib.Path(checkout) / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    of_extras = [line for extra in extras for line in project["optional-dependencies"][extra]]
    return tuple(
        [one for one in map(Requirement, lines) if not one.marker or one.marker.evaluate()]
        for lines in (project["dependencies"], of_extras)
    )


def missing(wanted, installed, of_extras=False):
    """Those of the `Requirement`s that {canonical name: version} does not meet.

    Extras pin what is tested: there another release of the same major version will do.
    """

    def met(one):
        version = installed.get(canonicalize_name(one.name))
        if version is None or one.specifier.contains(version, prereleases=True):
            return version is not None
        pins = [Version(part.version) for part in one.specifier if part.operator == "=="]
        return of_extras and any(pin.major == Version(version).major for pin in pins)

    return [one for one in wanted if not met(one)]


def constraints(installed, accepted):
    """Lines for `pip install --constraint` that keep the JAX and the PyTorch that are there.

    Args:
      installed: {canonical name: version}.
      accepted: the `Requirement` for jax.

    Raises SystemExit, of one line, if jax is not of a version that is accepted.
    """
    version = installed.get("jax")
    if version and not accepted.specifier.contains(version, prereleases=True):
        extra = next((EXTRAS[name] for name in EXTRAS if name in installed), "")
        wanted = f"jax[{extra}]" if extra else "jax"
        raise SystemExit(
            f"This runtime has jax {version}, and efx requires {accepted}: choose another {MENU},"
            f" or run `%pip install '{wanted}{accepted.specifier}'`, restart the session and run"
            " this cell again."
        )
    return [f"{name}=={installed[name]}" for name in sorted(installed) if KEPT.fullmatch(name)]


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
    """Installs a checkout of efx, and what its extras need, unless all that is there already;
    SystemExit with one line if that cannot be, or if the session has to be restarted first."""
    installed = installed_versions()
    of_efx, of_extras = requirements(checkout, extras)
    more = [str(one) for one in missing(of_extras, installed, of_extras=True)]
    if more or missing(of_efx, installed):
        jax = next(one for one in of_efx if one.name == "jax")
        _pip_install(["--editable", str(checkout), *more], constraints(installed, jax))
    after = installed_versions()
    loaded = {name.partition(".")[0] for name in list(sys.modules)}
    providers = importlib.metadata.packages_distributions()
    changed = changed_modules(loaded_from, after, loaded, providers)
    if changed:
        raise SystemExit(
            f"Restart the session (Runtime > Restart session) and run this cell again: loaded"
            f" packages have changed ({', '.join(changed)})."
        )
    loaded_from.clear()
    loaded_from.update(after)


def _pip_install(what, lines):
    """`pip install` under these lines of constraints."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "constraints.txt"
        file.write_text("".join(f"{line}\n" for line in lines))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--constraint", str(file)]
        status = subprocess.run([*command, *what], check=False).returncode
    if status:
        raise SystemExit(f"pip could not install {' '.join(what[1:])} (its output is above).")
    print("kept:", ", ".join(lines) or "neither JAX nor PyTorch was there")
