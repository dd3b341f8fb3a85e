"""The launch scripts for one machine, run for real: against a stub Python where only their logic
matters, and against pip for the environment they build. What all scripts have to be."""

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

# Stands for an environment's Python: finds itself ready, then shows what it was asked to run.
STUB = """#!/bin/sh
case "$*" in
  -c*) echo 3.11.9 ;;
  *environment.py*) echo "$0" ;;
  *) printf '%s\\n' "$@" "EFX_EXTRAS=$EFX_EXTRAS"; exit ${STUB_STATUS:-0} ;;
esac
"""

# How the stand-in for an environment's Python begins, whatever it then plays: it tells its version
# and where it is.
PYTHON = r"""#!/bin/sh
case "$*" in
  -c*) echo 3.11.9; exit ;;
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


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_script_is_clean(path):
    checker = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    parsed = call(BASH, "-n", path)
    assert parsed.returncode == 0, parsed.stderr
    assert os.access(path, os.X_OK), f"{path.name} is not executable"
    if checker is None:
        pytest.skip("shellcheck is not installed (extra dev)")
    checked = call(checker, path)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_script_runs_on_bash_3(path):
    """macOS has bash 3.2, which lacks these."""
    newer = r"mapfile|readarray|declare -[Ag]|local -n|wait -n|\$\{\w+(\^\^|,,|@Q)|\|&|&>>|coproc"
    assert not re.findall(newer, re.sub(r"(?m)^\s*#.*$|\(bash 3.2.*", "", path.read_text()))


# ---- environment.sh ----------------------------------------------------------------------------


def one_error(result, status=2):
    """The single line that a failed script has printed."""
    assert result.returncode == status, (result.stdout, result.stderr)
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("efx: error: "), result.stderr
    return lines[0]


@pytest.fixture
def bare_path(tmp_path):
    """A PATH with what the scripts need of a Unix, and no Python."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "dirname", "basename", "sed", "tar", "mktemp"):
        (tools / name).symlink_to(shutil.which(name))
    return tools


@pytest.mark.parametrize("name", ["local.sh", "test.sh"])
def test_without_python_one_line(name, tmp_path, bare_path):
    result = call(BASH, LAUNCH / name, PATH=bare_path, EFX_VENV=tmp_path / "none")
    assert "Python 3.11 or newer not found" in one_error(result)
    assert not (tmp_path / "none").exists()


def test_old_python_is_named(tmp_path, bare_path):
    script(bare_path / "python3", "#!/bin/sh\necho 3.9.18\n")
    result = call(BASH, LAUNCH / "local.sh", PATH=bare_path, EFX_VENV=tmp_path / "none")
    assert "python3 is Python 3.9.18" in one_error(result)
    result = call(BASH, LAUNCH / "local.sh", EFX_PYTHON=bare_path / "python3")
    assert "EFX_PYTHON=" in one_error(result)


def test_unknown_extra_and_foreign_folder(tmp_path):
    (tmp_path / "mine").write_text("")
    environment = (BASH, LAUNCH / "environment.sh")
    known = dict(EFX_PYTHON=sys.executable, EFX_VENV=tmp_path)
    line = one_error(call(*environment, EFX_EXTRAS="dev,intrep", **known))
    assert "'intrep'" in line and "interop" in line
    result = call(*environment, **known)
    assert result.returncode == 2 and "is not a virtual environment" in result.stderr
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
            '[project.optional-dependencies]\nmore = ["efxtwo"]\nother = []\n'
        )
        alone = dict(PIP_CONFIG_FILE=os.devnull, PIP_NO_INDEX="1", PIP_FIND_LINKS=wheels)
        self.env = {"EFX_PYTHON": sys.executable, **alone}

    def __call__(self, **env):
        command = (BASH, self.tree / "launch" / "environment.sh")
        return call(*command, cwd=self.folder, **{**self.env, **env})


def test_environment_is_made_once_and_kept_up_to_date(tmp_path):
    """The real thing, with hand-made packages and paths with spaces, called from elsewhere."""
    environment = Environment(tmp_path)
    tree = environment.tree

    def imports(module):
        return call(tree / ".venv" / "bin" / "python", "-c", f"import {module}").returncode == 0

    first = environment()
    assert first.returncode == 0, first.stderr
    assert first.stdout.strip() == str(tree / ".venv" / "bin" / "python")
    assert "installing the pinned requirements" in first.stderr
    assert imports("efxone") and not imports("efxtwo")
    assert environment().stderr == ""

    assert "extra more" in environment(EFX_EXTRAS="more").stderr and imports("efxtwo")
    assert "extra other" in environment(EFX_EXTRAS="other").stderr
    assert environment().stderr == "" == environment(EFX_EXTRAS="more").stderr

    (tree / "requirements.txt").write_text("efxone==1.0\nefxthree==1.0\n")
    failed = environment()
    assert failed.returncode == 1 and failed.stdout == ""
    assert "installing the requirements failed" in failed.stderr
    assert "efxthree==1.0" in failed.stderr.splitlines()[-1]
    # Nor is it taken for done the next time.
    index = dict(PIP_NO_INDEX="0", PIP_INDEX_URL="http://127.0.0.1:9/simple", NO_PROXY="127.0.0.1")
    assert "cannot be reached" in environment(**index).stderr.splitlines()[-1]


def test_environment_is_made_by_one_process_at_a_time(tmp_path):
    """Tasks of an array job start together; here the second comes while the first makes it."""
    environment = Environment(tmp_path)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(environment)
        for _ in range(600):
            if (environment.tree / ".venv" / "pyvenv.cfg").exists():
                break
            time.sleep(0.05)
        second = environment()
    first = first.result()
    assert (first.returncode, second.returncode) == (0, 0), (first.stderr, second.stderr)
    assert first.stdout == second.stdout and "installing" in first.stderr
    assert "waiting for another process" in second.stderr and "installing" not in second.stderr
    assert environment().stderr == ""


# ---- local.sh, test.sh, .ci/run ----------------------------------------------------------------


@pytest.mark.parametrize(
    "given, expected",
    [
        ([], ["--config", "configs/mod.py", "--workdir", "runs/mod"]),
        (["--config.steps=3"], ["--config", "configs/mod.py", "--workdir", "runs/mod"]),
        (["--config", "configs/gpt2.py"], ["--workdir", "runs/gpt2"]),
        (["--config=configs/gpt2.py:smoke"], ["--workdir", "runs/gpt2-smoke"]),
        (["--workdir", "x y"], ["--config", "configs/mod.py"]),
        (["--workdir=x", "--config=c.py"], []),
        (["--mode=sample", "--prompt", "def "], ["--workdir", "runs/mod"]),
        (["--mode", "evaluate", "--workdir=x"], []),
        (["--mode=import", "--from", "models/m"], []),
        (["--mode", "convert", "--from=runs/a", "--to", "mod"], []),
    ],
)
def test_local_has_defaults_and_the_user_wins(stub, given, expected):
    result = call(BASH, LAUNCH / "local.sh", *given, EFX_VENV=stub)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[:-1] == ["-P", "-m", "efx.main", *expected, *given]


def test_local_resumes_a_run_with_its_own_config(stub, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    result = call(BASH, LAUNCH / "local.sh", "--workdir", tmp_path, EFX_VENV=stub)
    assert result.stdout.splitlines()[:-1] == ["-P", "-m", "efx.main", "--workdir", str(tmp_path)]


def test_local_from_another_folder(stub, tmp_path):
    tree = tmp_path / "a tree"
    shutil.copytree(LAUNCH, tree / "launch")
    result = call(tree / "launch" / "local.sh", cwd=tmp_path, EFX_VENV=stub, STUB_STATUS=3)
    assert result.returncode == 3
    assert f"{tree}/configs/mod.py" in result.stdout.splitlines()
    assert f"{tree}/runs/mod" in result.stdout.splitlines()


def test_test_script_passes_arguments_and_status(stub, tmp_path):
    command = (BASH, LAUNCH / "test.sh", "--extras", "dev,interop", "-k", "a and b")
    result = call(*command, cwd=tmp_path, EFX_VENV=stub, STUB_STATUS=5)
    assert result.returncode == 5  # pytest's "no tests collected" must not pass
    options = "-n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart=0".split()
    expected = ["-m", "pytest", *options, "-k", "a and b", "EFX_EXTRAS=dev,interop"]
    assert result.stdout.splitlines() == expected


def test_ci_switches_the_extras_on(stub):
    result = call(BASH, ROOT / ".ci" / "run", EFX_VENV=stub, STUB_STATUS=1, CI="true")
    assert result.returncode == 1
    extras = result.stdout.splitlines()[-1].removeprefix("EFX_EXTRAS=").split(",")
    assert {"dev", "interop", "notebooks", "report", "tpu"} <= set(extras)


# ---- multiprocess.sh ---------------------------------------------------------------------------


# Process 1 shows its arguments in a file and, with FAIL, fails; process 0 would go on for minutes.
PEERS = """#!/bin/sh
case "$*" in
  -c*) echo 3.11.9 ;;
  *environment.py*) echo "$0" ;;
  *--process_id=0*) [ -z "$FAIL" ] || exec sleep 300; printf '%s\\n' "$@" ;;
  *) printf '%s\\n' "$@" >"$TMPDIR/one"; [ -z "$FAIL" ] || { echo broken; exit 7; } ;;
esac
"""


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

    result = call(BASH, LAUNCH / "multiprocess.sh", 2, FAIL=1, **env)  # gives up after 120 s
    assert result.returncode == 7
    assert "broken" in result.stderr and "status 7" in result.stderr.splitlines()[-1]
    assert "number of processes" in one_error(call(BASH, LAUNCH / "multiprocess.sh", "--help"))
