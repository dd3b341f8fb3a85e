"""Create or update efx's virtual environment and print the path of its Python.

    python launch/environment.py VENV [EXTRA,EXTRA...]

environment.sh finds a Python for it. Messages go to stderr. VENV/efx-installed holds a hash of the
pinned requirements and one of each extra; nothing is installed while they are unchanged. The tasks
of an array job start together: one process installs, and the others wait for VENV.lock.
"""

import fcntl
import hashlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PINS = (ROOT / "requirements.txt").read_text()
NO_NETWORK = "NewConnectionError|NameResolutionError|unreachable|[Tt]imed? ?out|ProxyError|SSLError"


def fail(message, status=1):
    print(f"efx: error: {message}", file=sys.stderr)
    raise SystemExit(status)


def is_usable(python):
    """Whether this is an environment's Python, of the version of this one, with pip."""
    probe = f"import sys, pip; sys.exit(sys.version_info[:2] != {tuple(sys.version_info[:2])})"
    if not python.exists():
        return False
    return subprocess.run([python, "-c", probe], capture_output=True).returncode == 0


def create(venv):
    """Create the environment, in place of one that is broken or of another Python version."""
    if venv.exists() and any(venv.iterdir()) and not (venv / "pyvenv.cfg").exists():
        fail(f"{venv} is not a virtual environment; move it, or set EFX_VENV=PATH", status=2)
    print(f"efx: creating a virtual environment in {venv}", file=sys.stderr)
    # Not the environment's own Python, which is deleted.
    base = Path(sys.executable).resolve()
    done = subprocess.run([base, "-m", "venv", "--clear", venv], capture_output=True, text=True)
    if done.returncode:
        cause = " ".join((done.stdout + done.stderr).split("\n\n")[0].split())
        fail(
            f"cannot create {venv}: {cause}; install {base.name}-venv (Debian, Ubuntu), or set"
            " EFX_PYTHON=PATH to another Python"
        )


def install(python, extras, log):
    """Install the requirements; pip's output goes to `log`."""
    names = ", ".join(["the pinned requirements", *(f"extra {name}" for name in extras)])
    print(f"efx: installing {names} (one to three minutes; log: {log})", file=sys.stderr)
    command = [python, "-m", "pip", "install", "--no-input", "--progress-bar", "off"]
    command += ["-r", ROOT / "requirements.txt", *sum(extras.values(), [])]
    with open(log, "w") as file:
        environment = {**os.environ, "PIP_USER": "0"}  # "1", set for a cluster, is an error here
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
    if done.returncode:
        output = log.read_text(errors="replace")
        cause = ["pip failed", *re.findall(r"^ERROR: (.*)$", output, flags=re.M)][-1]
        if re.search(NO_NETWORK, output):
            cause = "cannot reach the package index; check the network"
        fail(f"installing the requirements failed: {cause} (log: {log})")


def lock(file, venv):
    """Wait until no other process holds the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"efx: waiting for another process that installs {venv}", file=sys.stderr)
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        pass  # a file system without locks


def token(lines):
    """A hash of requirements and of the pins that they are installed with."""
    return hashlib.sha256(repr((PINS, lines)).encode()).hexdigest()


def installed_tokens(venv):
    stamp = venv / "efx-installed"
    usable = is_usable(venv / "bin/python") and stamp.exists()
    return set(stamp.read_text().split()) if usable else set()


def main(venv, names):
    venv = Path(venv).absolute()
    python, stamp = venv / "bin/python", venv / "efx-installed"
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name in names:
        if name not in known:
            choices = ", ".join(sorted(known))
            fail(f"EFX_EXTRAS={','.join(names)}: unknown extra {name!r}; use {choices}", status=2)
    extras = {name: known[name] for name in names}
    tokens = {token([]), *map(token, extras.values())}
    # Without the lock first: an installed environment may be on a read-only file system.
    if not tokens <= installed_tokens(venv):
        venv.parent.mkdir(parents=True, exist_ok=True)
        with open(venv.with_name(f"{venv.name}.lock"), "a") as file:
            lock(file, venv)
            before = installed_tokens(venv)
            if not tokens <= before:
                if not is_usable(python):
                    create(venv)
                stamp.unlink(missing_ok=True)
                install(python, extras, venv / "efx-install.log")
                # Earlier extras remain installed unless the pins have changed.
                stamp.write_text("\n".join(tokens | (before if token([]) in before else set())))
    print(python)


if __name__ == "__main__":
    try:
        main(sys.argv[1], [name for name in "".join(sys.argv[2:]).split(",") if name])
    except OSError as error:
        fail(f"cannot write {error.filename}: {error.strerror}; set EFX_VENV=PATH")
    except KeyboardInterrupt:
        fail("interrupted; run the same command again to resume", status=130)
