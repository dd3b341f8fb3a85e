"""Builds or updates efx's virtual environment and prints the path of its Python.

    python launch/environment.py VENV [EXTRA,EXTRA...]

Needs Python >= 3.11 and nothing else. Called by environment.sh, which finds that Python. Progress
and errors go to stderr, so that stdout is the path alone. What has been installed is noted in
VENV/efx-installed as one token per part (requirements.txt, each extra) that hashes its
requirements and the Python version: while they are unchanged, nothing is installed again. One
process at a time makes an environment or installs into it, since the tasks of an array job, or
several launches by hand, begin together; VENV.lock is what they wait for.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements.txt"
# (pattern of pip's output, cause). The first match is reported, else pip's last error line.
CAUSES = (
    (r"No space left on device", "the disk is full"),
    (
        r"NewConnectionError|NameResolutionError|Network is unreachable|timed out|ProxyError"
        r"|ConnectTimeout|Temporary failure in name resolution|Connection refused",
        "the package index cannot be reached; check the network",
    ),
    (r"SSLError|CERTIFICATE_VERIFY_FAILED", "the package index's certificate is not trusted"),
)


def fail(message, status=1):
    """Exit with one line."""
    print(f"efx: error: {message}", file=sys.stderr)
    raise SystemExit(status)


def requirements_by_part(extras):
    """{"requirements": pinned lines, extra: its requirements, ...} for the extras asked for."""
    parts = {"requirements": REQUIREMENTS.read_text().splitlines()}
    if extras:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        known = project["optional-dependencies"]
        for extra in extras:
            if extra not in known:
                fail(
                    f"EFX_EXTRAS={','.join(extras)}: unknown extra {extra!r}; use"
                    f" {', '.join(sorted(known))}",
                    status=2,
                )
            parts[extra] = known[extra]
    return parts


def tokens(parts, python):
    """One token per part; it changes with the part's requirements and the Python version."""
    version = subprocess.run([python, "-VV"], capture_output=True, text=True, check=True).stdout
    return {
        f"{part}:{hashlib.sha256(repr((lines, version)).encode()).hexdigest()}"
        for part, lines in parts.items()
    }


def works(python):
    """Whether `python` is an environment's Python, of this version, with a pip."""
    probe = f"import sys, pip; sys.exit(sys.version_info[:2] != {tuple(sys.version_info[:2])})"
    try:
        return subprocess.run([python, "-c", probe], capture_output=True).returncode == 0
    except OSError:
        return False


def create(venv):
    """Makes the environment, in place of a broken one or one of another Python version."""
    if venv.exists() and not (venv / "pyvenv.cfg").exists() and any(venv.iterdir()):
        fail(f"{venv} is not a virtual environment; move it, or set EFX_VENV=PATH", status=2)
    # Where this Python is the environment's own, it is about to be deleted: use the one it is from.
    base = Path(sys.base_prefix, "bin", f"python{sys.version_info[0]}.{sys.version_info[1]}")
    base = str(base if base.exists() else sys.executable)
    shutil.rmtree(venv, ignore_errors=True)
    made = subprocess.run([base, "-m", "venv", str(venv)], capture_output=True, text=True)
    if made.returncode:
        shutil.rmtree(venv, ignore_errors=True)
        said = made.stdout + made.stderr
        if "ensurepip" in said or "No module named venv" in said:
            fail(
                f"{base} cannot create virtual environments; install its venv package "
                f"({Path(base).name}-venv on Debian and Ubuntu), or set EFX_PYTHON=PATH"
            )
        fail(f"cannot create {venv}: {(said.strip().splitlines() or ['no message'])[-1]}")


def install(python, parts, log):
    """Runs pip on all parts at once, its words going to `log`; shows which package it is at."""
    extras = [line for part, lines in parts.items() if part != "requirements" for line in lines]
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    command += ["--progress-bar", "off", "--retries", "3", "-r", str(REQUIREMENTS), *extras]
    live = sys.stderr.isatty()
    began = time.monotonic()
    with open(log, "w") as file:
        # PIP_USER in the environment or pip's configuration would be refused in an environment.
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env={**os.environ, "PIP_USER": "0"},
        )
        try:
            for line in process.stdout:
                file.write(line)
                step = re.match(r"(Collecting [^\s<>=!~;\[]+|Installing collected packages)", line)
                if step and live:
                    note = f"  {time.monotonic() - began:4.0f} s  {step[1]}"
                    print(f"\r\033[K{note}", end="", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            process.wait()
            print(file=sys.stderr)
            raise
        finally:
            if live:
                print("\r\033[K", end="", file=sys.stderr, flush=True)
    if process.wait():
        said = Path(log).read_text(errors="replace")
        errors = re.findall(r"^ERROR: (.*)$", said, flags=re.M)
        cause = next((why for pattern, why in CAUSES if re.search(pattern, said)), None)
        cause = cause or (errors or said.strip().splitlines() or ["no message"])[-1]
        fail(f"installing the requirements failed: {cause} (full output: {log})")
    return time.monotonic() - began


def lock(venv):
    """Waits until no other process makes or changes the environment; others wait until what is
    returned, a context manager, is left."""
    try:
        venv.parent.mkdir(parents=True, exist_ok=True)
        file = open(venv.with_name(f"{venv.name}.lock"), "a")
    except OSError:  # that nothing can be written here is said by those that write the environment
        return contextlib.nullcontext()
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"efx: waiting for another process that installs {venv}", file=sys.stderr)
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        pass  # a file system without locks
    return file


def installed(stamp):
    """The tokens of what has been installed; none while something is being installed."""
    return set(stamp.read_text().split()) if stamp.exists() else set()


def main(venv, extras):
    """Makes `venv` hold requirements.txt and `extras`; prints its Python."""
    venv = Path(venv).absolute()
    # Not resolved: an environment's python is a link to the one that made it.
    python = str(venv / "bin" / "python")
    parts = requirements_by_part(extras)
    stamp = venv / "efx-installed"
    # Without the lock first: an environment that is ready may lie where nothing can be written.
    if not works(python) or not tokens(parts, python) <= installed(stamp):
        with lock(venv):
            update(venv, python, parts, stamp)
    print(python)


def update(venv, python, parts, stamp):
    """Makes the environment and installs the parts, as far as no other process has done so."""
    if not works(python):
        print(f"efx: creating a virtual environment in {venv}", file=sys.stderr)
        create(venv)
    wanted, have = tokens(parts, python), installed(stamp)
    if wanted <= have:
        return
    extras = (f"extra {part}" for part in parts if part != "requirements")
    what = ", ".join(["the pinned requirements", *extras])
    print(f"efx: installing {what}; this takes one to three minutes", file=sys.stderr)
    stamp.unlink(missing_ok=True)
    seconds = install(python, parts, venv / "efx-install.log")
    # Extras installed earlier still stand if the pins they were installed with do.
    kept = have if any(token.startswith("requirements:") for token in wanted & have) else set()
    stamp.write_text("\n".join(sorted(wanted | kept)) + "\n")
    print(f"efx: installed in {seconds:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    try:
        main(sys.argv[1], [extra for extra in "".join(sys.argv[2:]).split(",") if extra])
    except OSError as problem:
        fail(f"cannot write {problem.filename}: {problem.strerror}; set EFX_VENV=PATH")
    except KeyboardInterrupt:
        print("efx: interrupted; run the same command again to resume", file=sys.stderr)
        raise SystemExit(130) from None
