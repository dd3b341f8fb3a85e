"""The launch scripts for one machine: with a stub Python where only their logic matters, and with
pip for the environment that they build. What is common to all scripts."""

import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"
STAND_INS = Path(__file__).parent / "stand_ins"
SCRIPTS = sorted(
    [*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch"), *STAND_INS.iterdir(), ROOT / ".ci" / "run"]
)
BASH = shutil.which("bash")

# The beginning of each stand-in for an environment's Python: its path.
PYTHON = r"""#!/bin/sh
case "$*" in
  -c*) exit ;;
  *environment.py*) echo "$0"; exit ;;
esac
"""
# One that prints its arguments.
STUB = PYTHON + """printf '%s\\n' "$@" "EFX_EXTRAS=$EFX_EXTRAS"; exit ${STUB_STATUS:-0}\n"""


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def call(*command, cwd=ROOT, **env):
    """Runs a command in a clean environment plus `env`."""
    base = {key: value for key, value in os.environ.items() if not key.startswith("EFX_")}
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**base, **{key: str(value) for key, value in env.items()}},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=120,
    )


def one_error(result, *names, status=2):
    """The script failed with one line of error in which each of `names` occurs."""
    assert result.returncode == status, (result.stdout, result.stderr)
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("efx: error: ") and all(name in line for name in names), line


@pytest.fixture
def stub(tmp_path):
    """An EFX_VENV whose Python is the stub."""
    return script(tmp_path / "stub venv" / "bin" / "python", STUB).parent.parent


def test_scripts_are_clean():
    checker = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if checker is None:
        pytest.skip("shellcheck is not installed (extra dev)")
    checked = call(checker, *SCRIPTS)
    assert checked.returncode == 0, checked.stdout
    assert all(os.access(path, os.X_OK) for path in SCRIPTS)


def test_scripts_run_on_bash_3():
    """macOS has bash 3.2, which lacks these."""
    newer = r"mapfile|readarray|declare -[Ag]|local -n|wait -n|\$\{\w+(\^\^|,,|@Q)|\|&|&>>|coproc"
    for path in SCRIPTS:
        text = re.sub(r"(?m)^\s*#.*$", "", path.read_text())
        assert not re.findall(newer, text), path.name


# ---- environment.sh ----------------------------------------------------------------------------


def test_a_missing_or_old_python_is_refused(tmp_path):
    for name in ("bash", "dirname"):
        script(tmp_path / name, f'#!/bin/sh\nexec {shutil.which(name)} "$@"\n')
    local = (BASH, LAUNCH / "local.sh")
    one_error(call(*local, PATH=tmp_path, EFX_VENV=tmp_path / "none"), "Python 3.11")
    old = script(tmp_path / "python3", "#!/bin/sh\nexit 1\n")
    one_error(call(*local, EFX_PYTHON=old), "EFX_PYTHON=")


def test_unknown_extras_and_folders_that_are_no_environment_are_refused(tmp_path):
    (tmp_path / "mine").write_text("")
    environment = (BASH, LAUNCH / "environment.sh")
    known = dict(EFX_PYTHON=sys.executable, EFX_VENV=tmp_path)
    one_error(call(*environment, EFX_EXTRAS="dev,intrep", **known), "'intrep'", "interop")
    result = call(*environment, **known)
    assert result.returncode == 2 and str(tmp_path) in result.stderr.splitlines()[-1]
    assert (tmp_path / "mine").exists()


def wheel(folder, name, version):
    """A wheel that holds one module with its version, made by hand."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", f"version = {version}")
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        file.writestr(f"{info}/METADATA", metadata)
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")


# The build of efx: its wheel is there already.
BUILD = """
import os, pathlib, shutil

def build_editable(folder, *_):
    (wheel,) = pathlib.Path(os.environ["EFX_WHEELS"]).glob("efx-*.whl")
    return pathlib.Path(shutil.copy(wheel, folder)).name
"""


@pytest.mark.slow
def test_the_environment_is_built_once_and_kept_up_to_date(tmp_path):
    """With real pip or uv and paths with spaces; a second process that starts meanwhile waits."""
    tree, wheels = tmp_path / "a tree", tmp_path / "wheels"
    (tree / "launch").mkdir(parents=True)
    wheels.mkdir()
    for name in ("environment.sh", "environment.py"):
        shutil.copy(LAUNCH / name, tree / "launch")
    for name, version in (("efxone", "1.0"), ("efxtwo", "1.0"), ("efxtwo", "2.0")):
        wheel(wheels, name, version)
    (tree / "requirements.txt").write_text("efxone==1.0\n")
    (tree / "constraints.txt").write_text("# pins\nefxtwo==1.0\n")
    extras = '[project.optional-dependencies]\nmore = ["efxtwo>=1"]\nother = ["efxone"]\n'
    wheel(wheels, "efx", "1.0")
    (tree / "efx").mkdir()
    (tree / "build.py").write_text(BUILD)
    backend = '[build-system]\nrequires = []\nbuild-backend = "build"\nbackend-path = ["."]\n'
    project = '[project]\nname = "efx"\nversion = "1"\n'
    (tree / "pyproject.toml").write_text(backend + project + extras)
    python = tree / ".venv/bin/python"
    no_index = dict(PIP_CONFIG_FILE=os.devnull, PIP_NO_INDEX=1, PIP_FIND_LINKS=wheels)
    no_index |= dict(UV_NO_INDEX=1, UV_FIND_LINKS=wheels, EFX_WHEELS=wheels)

    def build(**env):
        command = (BASH, tree / "launch/environment.sh")
        return call(*command, cwd=tmp_path, EFX_PYTHON=sys.executable, **no_index, **env)

    def imports(module):
        return call(python, "-c", f"import {module}", cwd=tmp_path).returncode == 0

    with ThreadPoolExecutor() as pool:
        first = pool.submit(build)
        while not (tree / ".venv/pyvenv.cfg").exists() and not first.done():
            time.sleep(0.05)
        second = build()
    for result in (first.result(), second):
        assert result.returncode == 0 and result.stdout.strip() == str(python), result.stderr
    assert first.result().stderr != "" == second.stderr
    assert imports("efxone") and imports("efx") and not imports("efxtwo")
    assert build().stderr == ""
    assert build(EFX_EXTRAS="more").returncode == 0 and imports("efxtwo")
    assert build(EFX_EXTRAS="other").stderr != ""
    assert build().stderr == "" == build(EFX_EXTRAS="more").stderr
    printed = "import efxtwo; print(efxtwo.version)"
    assert call(python, "-c", printed).stdout == "1.0\n"
    (tree / "constraints.txt").write_text("efxtwo==2.0\n")
    assert build(EFX_EXTRAS="more").returncode == 0
    assert call(python, "-c", printed).stdout == "2.0\n"

    (tree / "requirements.txt").write_text("efxone==1.0\nefxthree==1.0\n")
    for _ in range(2):  # a failed installation is not recorded as done
        failed = build()
        assert failed.returncode == 1 and failed.stdout == "" and "efxthree" in failed.stderr
        assert failed.stderr.splitlines()[-1].startswith("efx: error: ")
    assert imports("efxtwo")  # an environment that works is not made anew


# ---- local.sh, test.sh, .ci/run ----------------------------------------------------------------


def test_local_has_defaults_that_arguments_override(stub):
    for given, expected in (
        (["--config.steps=3"], ["--config", "configs/mod.py:quick", "--workdir", "runs/mod"]),
        (["--config=configs/gpt2.py:smoke"], ["--workdir", "runs/gpt2-smoke"]),
        (["--workdir", "x y"], ["--config", "configs/mod.py:quick"]),
        (["--workdir=x", "--config=c.py"], []),
        (["--mode=sample", "--prompt", "def "], ["--workdir", "runs/mod"]),
        (["--mode", "convert", "--from=runs/a", "--to", "mod"], []),
        (["sample", "runs/a"], []),
    ):
        result = call(BASH, LAUNCH / "local.sh", *given, EFX_VENV=stub)
        assert result.stdout.splitlines()[:-1] == ["-P", "-m", "efx.main", *expected, *given]


def test_local_resumes_a_run_with_its_own_config_from_another_folder(stub, tmp_path):
    tree = tmp_path / "a tree"
    shutil.copytree(LAUNCH, tree / "launch")
    local = (tree / "launch" / "local.sh",)
    result = call(*local, cwd=tmp_path, EFX_VENV=stub, STUB_STATUS=3)
    assert result.returncode == 3
    assert {f"{tree}/configs/mod.py:quick", f"{tree}/runs/mod"} <= {*result.stdout.splitlines()}
    (tmp_path / "config.json").write_text("{}")
    result = call(*local, "--workdir", tmp_path, EFX_VENV=stub)
    assert result.stdout.splitlines()[:-1] == ["-P", "-m", "efx.main", "--workdir", str(tmp_path)]


def test_the_test_scripts_pass_arguments_extras_and_status(stub, tmp_path):
    def arguments(*command):
        result = call(BASH, *command, cwd=tmp_path, EFX_VENV=stub, STUB_STATUS=5)
        assert result.returncode == 5  # pytest's "no tests collected" must not pass
        *printed, extras = result.stdout.splitlines()
        assert printed[:2] == ["-m", "pytest"]
        return printed, extras

    given = (LAUNCH / "test.sh", "--extras", "dev,interop", "-k", "a and b")
    default, whole = arguments(*given), arguments(*given, "--all")
    assert default[1] == whole[1] == "EFX_EXTRAS=dev,interop"
    assert default[0][-2:] == whole[0][-2:] == ["-k", "a and b"]
    assert "not slow" in default[0] and "not slow" not in whole[0]
    row = arguments(LAUNCH / "test.sh", "--family", "mod")[0]
    assert row[-3:] == ["--family", "mod", "tests/contract"] and "not slow" not in row
    assert "interop" in arguments(ROOT / ".ci/run")[1]


# ---- multiprocess.sh ---------------------------------------------------------------------------

# Process 1 writes its arguments to a file and, with FAIL, fails; process 0 would run for minutes.
PEERS = (
    PYTHON
    + """
case "$*" in
  *--process_id=0*) [ -z "$FAIL" ] || exec sleep 300; printf '%s\\n' "$@" ;;
  *) printf '%s\\n' "$@" >"$TMPDIR/one"; [ -z "$FAIL" ] || { echo broken; exit 7; } ;;
esac
"""
)


def test_multiprocess_starts_all_and_stops_all(stub, tmp_path):
    script(stub / "bin" / "python", PEERS)
    env = dict(EFX_VENV=stub, EFX_PORT=1234, TMPDIR=tmp_path)
    result = call(BASH, LAUNCH / "multiprocess.sh", 2, "--config=c.py", **env)
    assert result.returncode == 0, result.stderr
    words = result.stdout.splitlines()
    assert {"--coordinator_address=127.0.0.1:1234", "--num_processes=2"} <= set(words)
    assert "--process_id=0" in words and words[-1] == "--config=c.py"
    assert "--process_id=1" in (tmp_path / "one").read_text().splitlines()
    assert not list(tmp_path.glob("efx-processes.*"))

    result = call(BASH, LAUNCH / "multiprocess.sh", 2, FAIL=1, **env)  # has 120 s
    assert result.returncode == 7
    assert "broken" in result.stderr and "status 7" in result.stderr.splitlines()[-1]
    one_error(call(BASH, LAUNCH / "multiprocess.sh", "--help"), "number of processes")
