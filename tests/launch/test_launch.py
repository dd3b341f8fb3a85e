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

# Stands for an environment's Python: reports that it is ready, then prints its arguments.
STUB = """#!/bin/sh
case "$*" in
  -c*) ;;
  *environment.py*) echo "$0" ;;
  *) printf '%s\\n' "$@" "EFX_EXTRAS=$EFX_EXTRAS"; exit ${STUB_STATUS:-0} ;;
esac
"""

# The beginning of each other stand-in for an environment's Python: its path.
PYTHON = r"""#!/bin/sh
case "$*" in
  -c*) exit ;;
  *environment.py*) echo "$0"; exit ;;
esac
"""


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


@pytest.fixture
def stub(tmp_path):
    """An EFX_VENV whose Python is the stub."""
    return script(tmp_path / "stub venv" / "bin" / "python", STUB).parent.parent


# ---- all scripts -------------------------------------------------------------------------------


def test_scripts_are_clean():
    for path in SCRIPTS:
        parsed = call(BASH, "-n", path)
        assert parsed.returncode == 0, parsed.stderr
        assert os.access(path, os.X_OK), f"{path.name} is not executable"
    checker = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if checker is None:
        pytest.skip("shellcheck is not installed (extra dev)")
    checked = call(checker, *SCRIPTS)
    assert checked.returncode == 0, checked.stdout


def test_scripts_run_on_bash_3():
    """macOS has bash 3.2, which lacks these."""
    newer = r"mapfile|readarray|declare -[Ag]|local -n|wait -n|\$\{\w+(\^\^|,,|@Q)|\|&|&>>|coproc"
    for path in SCRIPTS:
        text = re.sub(r"(?m)^\s*#.*$|\(bash 3.2.*", "", path.read_text())
        assert not re.findall(newer, text), path.name


# ---- environment.sh ----------------------------------------------------------------------------


def one_error(result, *names, status=2):
    """The script failed with one line of error in which each of `names` occurs."""
    assert result.returncode == status, (result.stdout, result.stderr)
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("efx: error: ") and all(name in line for name in names), line


@pytest.fixture
def bare_path(tmp_path):
    """A PATH with the Unix tools of the scripts and without Python."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "dirname", "basename", "sed", "tar", "mktemp"):
        (tools / name).symlink_to(shutil.which(name))
    return tools


def test_a_missing_or_old_python_is_refused(tmp_path, bare_path):
    local = (BASH, LAUNCH / "local.sh")
    one_error(call(*local, PATH=bare_path, EFX_VENV=tmp_path / "none"), "Python 3.11")
    assert not (tmp_path / "none").exists()
    script(bare_path / "python3", "#!/bin/sh\nexit 1\n")
    one_error(call(*local, EFX_PYTHON=bare_path / "python3"), "EFX_PYTHON=")


def test_unknown_extras_and_folders_that_are_no_environment_are_refused(tmp_path):
    (tmp_path / "mine").write_text("")
    environment = (BASH, LAUNCH / "environment.sh")
    known = dict(EFX_PYTHON=sys.executable, EFX_VENV=tmp_path)
    one_error(call(*environment, EFX_EXTRAS="dev,intrep", **known), "'intrep'", "interop")
    result = call(*environment, **known)
    assert result.returncode == 2 and str(tmp_path) in result.stderr.splitlines()[-1]
    assert (tmp_path / "mine").exists()


def wheel(folder, name):
    """A wheel that holds one empty module, made by hand."""
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", "")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")


class Environment:
    """A tree with environment.sh whose requirements are the hand-made package `efxone`."""

    def __init__(self, folder):
        self.folder, self.tree, wheels = folder, folder / "a tree", folder / "wheels"
        (self.tree / "launch").mkdir(parents=True)
        wheels.mkdir()
        for name in ("environment.sh", "environment.py"):
            shutil.copy(LAUNCH / name, self.tree / "launch")
        for name in ("efxone", "efxtwo"):
            wheel(wheels, name)
        (self.tree / "requirements.txt").write_text("efxone==1.0\n")
        (self.tree / "pyproject.toml").write_text(
            '[project.optional-dependencies]\nmore = ["efxtwo"]\nother = ["efxone"]\n'
        )
        alone = dict(PIP_CONFIG_FILE=os.devnull, PIP_NO_INDEX="1", PIP_FIND_LINKS=wheels)
        self.env = {"EFX_PYTHON": sys.executable, **alone}

    def __call__(self, **env):
        command = (BASH, self.tree / "launch" / "environment.sh")
        return call(*command, cwd=self.folder, **{**self.env, **env})


@pytest.mark.slow
def test_the_environment_is_built_once_and_kept_up_to_date(tmp_path):
    """With real pip and paths with spaces; a second process that starts meanwhile waits."""
    environment = Environment(tmp_path)
    python = environment.tree / ".venv" / "bin" / "python"

    def imports(module):
        return call(python, "-c", f"import {module}").returncode == 0

    with ThreadPoolExecutor() as pool:
        first = pool.submit(environment)
        for _ in range(600):
            if (environment.tree / ".venv" / "pyvenv.cfg").exists():
                break
            time.sleep(0.05)
        second = environment()
    first = first.result()
    assert (first.returncode, second.returncode) == (0, 0), (first.stderr, second.stderr)
    assert first.stdout.strip() == second.stdout.strip() == str(python)
    assert "installing" in first.stderr and "installing" not in second.stderr
    assert imports("efxone") and not imports("efxtwo")
    assert environment().stderr == ""
    assert environment(EFX_EXTRAS="more").returncode == 0 and imports("efxtwo")
    assert "installing" in environment(EFX_EXTRAS="other").stderr
    assert environment().stderr == "" == environment(EFX_EXTRAS="more").stderr

    (environment.tree / "requirements.txt").write_text("efxone==1.0\nefxthree==1.0\n")
    for _ in range(2):  # a failed installation is not recorded as done
        failed = environment()
        assert failed.returncode == 1 and failed.stdout == ""
        assert "efxthree==1.0" in failed.stderr.splitlines()[-1]


# ---- local.sh, test.sh, .ci/run ----------------------------------------------------------------


def test_local_has_defaults_that_arguments_override(stub):
    for given, expected in (
        (["--config.steps=3"], ["--config", "configs/mod.py", "--workdir", "runs/mod"]),
        (["--config=configs/gpt2.py:smoke"], ["--workdir", "runs/gpt2-smoke"]),
        (["--workdir", "x y"], ["--config", "configs/mod.py"]),
        (["--workdir=x", "--config=c.py"], []),
        (["--mode=sample", "--prompt", "def "], ["--workdir", "runs/mod"]),
        (["--mode", "convert", "--from=runs/a", "--to", "mod"], []),
    ):
        result = call(BASH, LAUNCH / "local.sh", *given, EFX_VENV=stub)
        assert result.stdout.splitlines()[:-1] == ["-P", "-m", "efx.main", *expected, *given]


def test_local_resumes_a_run_with_its_own_config_from_another_folder(stub, tmp_path):
    tree = tmp_path / "a tree"
    shutil.copytree(LAUNCH, tree / "launch")
    local = (tree / "launch" / "local.sh",)
    result = call(*local, cwd=tmp_path, EFX_VENV=stub, STUB_STATUS=3)
    assert result.returncode == 3
    assert {f"{tree}/configs/mod.py", f"{tree}/runs/mod"} <= {*result.stdout.splitlines()}
    (tmp_path / "config.json").write_text("{}")
    result = call(*local, "--workdir", tmp_path, EFX_VENV=stub)
    assert result.stdout.splitlines()[:-1] == ["-P", "-m", "efx.main", "--workdir", str(tmp_path)]


def test_the_test_script_passes_arguments_extras_and_status(stub, tmp_path):
    def arguments(*given):
        command = (BASH, LAUNCH / "test.sh", "--extras", "dev,interop", *given)
        result = call(*command, cwd=tmp_path, EFX_VENV=stub, STUB_STATUS=5)
        assert result.returncode == 5  # pytest's "no tests collected" must not pass
        *printed, extras = result.stdout.splitlines()
        assert printed[:2] == ["-m", "pytest"] and extras == "EFX_EXTRAS=dev,interop"
        return printed[2:]

    default, whole = arguments("-k", "a and b"), arguments("--all", "-k", "a and b")
    assert default[-2:] == whole[-2:] == ["-k", "a and b"]
    assert "not slow" in default and "not slow" not in whole


def test_ci_runs_with_all_extras(stub):
    result = call(BASH, ROOT / ".ci" / "run", EFX_VENV=stub, STUB_STATUS=1, CI="true")
    assert result.returncode == 1
    extras = result.stdout.splitlines()[-1].removeprefix("EFX_EXTRAS=").split(",")
    assert {"dev", "interop", "notebooks", "report", "tpu"} <= set(extras)


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
