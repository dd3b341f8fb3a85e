"""Create or update efx's virtual environment and print the path of its Python.

    python launch/environment.py VENV [EXTRA,EXTRA...]

environment.sh finds a Python for it. Installs requirements.txt, the extras in the versions of
constraints.txt, and this checkout's efx, editable. Messages go to stderr. VENV/efx-installed lists
the installed requirements: nothing is installed while it has all that are needed. The tasks of an
array job start together: one process installs, and the others wait for VENV.lock.
"""

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS, CONSTRAINTS = ROOT / "requirements.txt", ROOT / "constraints.txt"
# The line of efx-installed for efx itself. A Docker image has the requirements before the code.
EDITABLE = {f"-e {ROOT}"} if (ROOT / "efx").is_dir() else set()


def fail(message, status=1):
    print(f"efx: error: {message}", file=sys.stderr)
    raise SystemExit(status)


def requirements(extras):
    """Return the lines of requirements.txt and constraints.txt, and those of the extras."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in extras:
        if extra not in known:
            choices = ", ".join(sorted(known))
            fail(f"EFX_EXTRAS={','.join(extras)}: unknown extra {extra!r}; use {choices}", status=2)
    pins = REQUIREMENTS.read_text() + CONSTRAINTS.read_text()
    return set(pins.splitlines()), {line for extra in extras for line in known[extra]}


def installed(venv):
    """Return the lines of efx-installed; None if the environment is broken or of another Python."""
    python, stamp = venv / "bin/python", venv / "efx-installed"
    probe = f"import sys, pip; sys.exit(sys.version_info[:2] != {tuple(sys.version_info[:2])})"
    if not python.exists() or subprocess.run([python, "-c", probe], capture_output=True).returncode:
        return None
    return set(stamp.read_text().splitlines()) if stamp.exists() else set()


def run(*command):
    """Run a command of an installation; end with one line if it fails."""
    environment = {**os.environ, "PIP_USER": "0"}  # "1", set for a cluster, is an error here
    if subprocess.run(command, stdout=sys.stderr, env=environment).returncode:
        fail("the installation failed for the reason above, such as no network or no python3-venv")


def create(venv):
    if venv.exists() and any(venv.iterdir()) and not (venv / "pyvenv.cfg").exists():
        fail(f"{venv} is not a virtual environment; move it, or set EFX_VENV=PATH", status=2)
    # Not by the environment's own Python, which is deleted.
    run(Path(sys.executable).resolve(), "-m", "venv", "--clear", venv)


def install(python, extras):
    """Install the requirements and efx with uv, if it is there, or pip."""
    command = [python, "-m", "pip", "install", "-qq", "--no-compile"]
    if shutil.which("uv"):
        command = ["uv", "pip", "install", "-q", "--python", python]
    run(*command, "-r", REQUIREMENTS, "-c", CONSTRAINTS, *extras)
    if EDITABLE:  # built by the pinned setuptools, without another download
        run(*command, "--no-deps", "--no-build-isolation", "-e", ROOT)
    # pip compiles on one core, this on all. A file that does not compile does no harm.
    compile_all = [python, "-m", "compileall", "-qq", "-j0", "-x", "/tests/"]
    subprocess.run([*compile_all, python.parent.parent / "lib"], stdout=sys.stderr)


def main(venv, names):
    venv = Path(venv).absolute()
    pins, extras = requirements(names)
    stamp, wanted = venv / "efx-installed", pins | extras | EDITABLE
    # Without the lock first: an installed environment may be on a read-only file system.
    if not wanted <= (installed(venv) or set()):
        venv.parent.mkdir(parents=True, exist_ok=True)
        with open(venv.with_name(f"{venv.name}.lock"), "a") as file:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            before = installed(venv)
            if before is None or not wanted <= before:
                print(f"efx: installing {venv} (a minute or two)", file=sys.stderr)
                if before is None:
                    create(venv)
                stamp.unlink(missing_ok=True)  # the installation may fail
                install(venv / "bin/python", extras)
                # Earlier extras remain installed unless the pins have changed; of several
                # checkouts only the last one's efx does.
                earlier = before if before and pins <= before else set()
                earlier = {line for line in earlier if not line.startswith("-e ")}
                stamp.write_text("\n".join(sorted(wanted | earlier)))
    print(venv / "bin/python")


if __name__ == "__main__":
    try:
        main(sys.argv[1], [name for name in "".join(sys.argv[2:]).split(",") if name])
    except OSError as error:
        fail(f"cannot write {error.filename}: {error.strerror}; set EFX_VENV=PATH")
    except KeyboardInterrupt:
        fail("interrupted; run the same command again to resume", status=130)
