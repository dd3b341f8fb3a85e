"""tpu_pod.sh: its dry run, and whole launches with a stand-in for gcloud."""

import os
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from test_launch import BASH, LAUNCH, PYTHON, ROOT, call, one_error, script

GCLOUD = Path(__file__).parent / "stand_ins" / "gcloud"
TPU = ["--name", "pod", "--zone", "us-west4-a"]
ALL = ("all", "--type=v5litepod-16")
WORKDIR = ("--", "--workdir=gs://bucket/mod")

# Stands for an environment's Python on a worker. The n-th start does the n-th word of
# $STORAGE/plan, or the last one; a number is the status of all workers, 2:75 that of the first and
# of the others.
TRAINER = (
    PYTHON
    + r"""me="$STORAGE/$WORKER"
printf '%s\n' "$EFX_EXTRAS" "$@" >"$me.words"
trap 'echo saved >>"$me.saved"; echo saved; exit 0' TERM
echo start >>"$me.starts"
count=$(wc -l <"$me.starts")
action=$(tr ' ' '\n' <"$STORAGE/plan" | head -n "$count" | tail -n 1)
echo "start $count: $action"
case "$action" in
  preempted)
    until [ -e "$STORAGE/preempted" ]; do sleep 0.05; done
    kill -TERM 0 ;;   # to all processes, as when a machine shuts down
  rebooted) [ "$WORKER" = pod.0 ] || kill -TERM 0 ;;
  finished) exit 0 ;;
  killed) kill -KILL $$ ;;
  [0-9]*)
    [ "$WORKER" != pod.0 ] || action="${action%:*}"
    exit "${action#*:}" ;;
  hangs) trap '' TERM; touch "$me.hangs" ;;
esac
for _ in $(seq 2000); do sleep 0.05; done
"""
)


def default_signals():
    """Tests in the background ignore these, and a shell cannot trap an ignored signal."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


class Cloud:
    """A cloud in a folder, of slices with two workers each, and a tree to launch from."""

    def __init__(self, folder):
        self.folder, self.storage = folder / "cloud", folder / "storage"
        self.tree, tools = folder / "tree", folder / "tools"
        for made in (self.folder, self.storage, tools):
            made.mkdir()
        shutil.copytree(LAUNCH, self.tree / "launch")
        shutil.copy(ROOT / "pyproject.toml", self.tree)
        (tools / "gcloud").symlink_to(GCLOUD)
        script(tools / "python3.11", "#!/bin/sh\n")
        script(tools / "hostname", '#!/bin/sh\necho "$WORKER"\n')
        self.env = {
            "CLOUD": self.folder,
            "STORAGE": self.storage,
            "WORKERS": 2,
            "EFX_VENV": script(folder / "venv" / "bin" / "python", TRAINER).parent.parent,
            "EFX_POLL": "0.1",
            "EFX_PAUSE": "0",
            "TMPDIR": folder,
            "PATH": f"{tools}:{os.environ['PATH']}",
        }
        self.next("ACTIVE")

    def next(self, *states):
        """The states that the next queued resource goes through."""
        (self.folder / "next").write_text("\n".join(states) + "\n")

    def plan(self, *actions):
        (self.storage / "plan").write_text(" ".join(actions))

    def command(self, step, *arguments):
        return [BASH, self.tree / "launch" / "tpu_pod.sh", step, *TPU, *arguments]

    def step(self, *words, **env):
        return call(*self.command(*words), **{**self.env, **env})

    def background(self, *words):
        """The step as a running process."""
        return subprocess.Popen(
            self.command(*words),
            env=os.environ | {key: str(value) for key, value in self.env.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=default_signals,
        )

    def preempt(self):
        """Takes all slices away; the request is ACTIVE for a while longer."""
        for path in self.folder.glob("nodes/*/state"):
            new = path.with_suffix(".new")  # no reader finds half a file
            new.write_text("PREEMPTED\n")
            new.replace(path)
        (self.storage / "preempted").touch()

    def calls(self, *words):
        """The calls of gcloud that contain all words."""
        calls = (self.folder / "calls").read_text().splitlines()
        return [each for each in calls if all(word in each for word in words)]

    def starts(self):
        """{worker: how often efx was started there}."""
        found = self.storage.glob("*.starts")
        return {path.stem: len(path.read_text().splitlines()) for path in found}

    def saved(self):
        return [(self.storage / f"pod.{worker}.saved").exists() for worker in range(2)]

    def exists(self):
        return (self.folder / "request").exists()

    def wait_for(self, *paths):
        """Waits until these files exist, absolute or in the storage."""
        limit = time.monotonic() + 60
        while not all((self.storage / path).exists() for path in paths):
            assert time.monotonic() < limit, paths
            time.sleep(0.05)


def follow(launch):
    """Waits until a launch prints efx's log."""
    while "start 1" not in (line := launch.stdout.readline()):
        assert line, "the launch ended"


@pytest.fixture
def cloud(tmp_path):
    made = Cloud(tmp_path)
    yield made
    if made.exists():
        made.step("stop")
    assert not list(tmp_path.glob("efx-tpu.*")), "temporary files were left behind"


# ---- dry runs and arguments --------------------------------------------------------------------


def dry_run(step, *options):
    """The commands that tpu_pod.sh would run, as lists of words."""
    printed = call(BASH, LAUNCH / "tpu_pod.sh", step, "--dry-run", *TPU, *options)
    assert printed.returncode == 0, printed.stderr
    return [shlex.split(line) for line in printed.stdout.splitlines()]


def test_the_dry_run_prints_the_commands():
    options = (*ALL[1:], "--project=lab", "--spot", "--delete-after", "--setup", "mount it")
    arguments = ("--workdir=gs://b/a", "--x=text:s3://c/t", "--prompt", "it's")
    commands = dry_run("all", *options, "--extras=wandb", "--worker=5", "--", *arguments)
    create, scp, install, start, followed, stop, delete = [
        set(command) for command in commands if command[0] == "gcloud"
    ]
    for command in (create, scp, install, start, followed, stop, delete):
        assert {"--zone=us-west4-a", "--project=lab"} <= command
    assert {"create", "--node-id=pod", "--accelerator-type=v5litepod-16", "--spot"} <= create
    assert "--runtime-version=v2-alpha-tpuv5-lite" in create
    assert "scp" in scp and "delete" in delete
    worker = "EFX_EXTRAS=tpu,wandb,gcs,s3 bash efx/launch/tpu_worker.sh"
    for command, words in (
        (install, r"install mount\ it"),
        (start, r"start --workdir=gs://b/a --x=text:s3://c/t --prompt it\'s"),
        (followed, "follow +1"),
        (stop, "stop"),
    ):
        assert {"ssh", "--node=all"} <= command
        assert any(word.endswith(f"{worker} {words}") for word in command)
        assert ("--worker=5" in command) == (command is followed)
    (create,) = dry_run("create", "--type=v6e-8", "--slices=3")
    assert {"--node-count=3", "--node-prefix=pod", "--runtime-version=v2-alpha-tpuv6e"} <= {*create}


def test_bad_arguments_are_refused(tmp_path):
    for name in ("bash", "dirname", "grep"):
        (tmp_path / name).symlink_to(shutil.which(name))
    for arguments, named in (
        (["run", *TPU], "gcloud"),  # which is not installed here
        (["fly"], "'fly'"),
        (["create", *TPU], "--type"),
        (["run", "--name", "pod"], "--zone"),
        (["run", *TPU, "--config=x"], "--config"),
        (["run", "--name", "--zone", "z"], "--name='--zone'"),
        ([*ALL, *TPU, "--slices=two"], "--slices=two"),
        (["run", *TPU, "--dry-run", "--extras=hf,wandbb"], "'wandbb'"),
        ([*ALL, *TPU, "--dry-run", "--delete-after", "--", "--workdir", "runs/a"], "--workdir"),
    ):
        one_error(call(BASH, LAUNCH / "tpu_pod.sh", *arguments, PATH=tmp_path), named)


# ---- the cloud ---------------------------------------------------------------------------------


def test_create_waits_for_the_tpu_or_prints_why_it_failed(cloud):
    cloud.next("CREATING", "WAITING_FOR_RESOURCES", "ACTIVE")
    missing = cloud.step("run")
    assert missing.returncode == 2 and "step create" in missing.stderr
    for _ in range(2):
        created = cloud.step("create", "--type=v5litepod-16")
        assert created.returncode == 0, created.stderr
        assert len(cloud.calls("queued-resources create")) == 1

    # A request that ended earlier is repeated; one that fails now is an error with its reason.
    (cloud.folder / "request").write_text("SUSPENDED\n")
    cloud.next("PROVISIONING", "FAILED")
    failed = cloud.step("create", "--type=v5litepod-16")
    assert failed.returncode == 2 and "no quota for you" in failed.stderr
    assert len(cloud.calls("queued-resources create")) == 2


def test_a_preempted_run_is_resumed_to_its_end(cloud):
    """Two slices; each start has the same arguments."""
    cloud.plan("preempted", "finished")
    cloud.next("WAITING_FOR_RESOURCES", "ACTIVE")
    prompt = 'it\'s "a" $HOME `b`'
    running = cloud.background(*ALL, "--slices=2", "--delete-after", *WORKDIR, "--prompt", prompt)
    workers = ("pod-0.0", "pod-0.1", "pod-1.0", "pod-1.1")
    cloud.wait_for(*(f"{worker}.starts" for worker in workers))
    cloud.preempt()
    printed = running.communicate(timeout=60)[0]
    assert running.returncode == 0, printed
    assert cloud.starts() == dict.fromkeys(workers, 2)
    assert len(cloud.calls("queued-resources create", "--node-count=2")) == 2
    assert len(cloud.calls("queued-resources delete")) == 2  # after the preemption, and at the end
    assert not cloud.exists() and "costs money" not in printed
    extras, *words = (cloud.storage / "pod-1.1.words").read_text().splitlines()
    assert extras == "tpu,gcs"
    assert words[-4:] == ["--distributed", *WORKDIR[1:], "--prompt", prompt]
    assert "[pod-1.1] start 2: finished" in printed.splitlines()


@pytest.mark.parametrize(
    "plan, status, starts",
    [
        ("2:75 finished", 2, 1),  # the failure of one worker is final
        pytest.param("75:134 killed 143 finished", 0, 4, marks=pytest.mark.slow),
        pytest.param("75", 75, 5, marks=pytest.mark.slow),
        # The other worker, which waits for its peer, is stopped.
        pytest.param("rebooted finished", 0, 2, marks=pytest.mark.slow),
    ],
)
def test_lost_processes_are_started_again_and_failed_ones_not(cloud, plan, status, starts):
    cloud.plan(plan)
    done = cloud.step(*ALL, "--worker=1", *WORKDIR)
    assert done.returncode == status and "costs money" in done.stderr, done.stderr
    assert cloud.starts() == {"pod.0": starts, "pod.1": starts}
    assert len(cloud.calls("queued-resources create")) == 1
    assert cloud.step("logs").returncode == status


@pytest.mark.parametrize(
    "trouble, status, starts",
    [
        ((" scp ",) * 9, 1, {}),
        pytest.param(
            (" scp ", "worker.sh install", "worker.sh start", "tpu-vm list"),
            0,
            {"pod.0": 1, "pod.1": 1},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_failed_calls_are_tried_again_and_the_tpu_is_deleted(cloud, trouble, status, starts):
    cloud.plan("finished")
    (cloud.folder / "trouble").write_text("\n".join([*trouble, ""]))
    assert cloud.step(*ALL, "--delete-after", *WORKDIR).returncode == status
    assert cloud.starts() == starts and not cloud.exists()


@pytest.mark.parametrize(
    "number, delete", [(signal.SIGINT, True), (signal.SIGHUP, True), (signal.SIGTERM, False)]
)
def test_a_signal_saves_and_deletes_or_leaves_the_run(cloud, number, delete):
    cloud.plan("waits")
    running = cloud.background(*ALL, *["--delete-after"] * delete, *WORKDIR)
    cloud.wait_for("pod.0.starts", "pod.1.starts")
    follow(running)
    running.send_signal(number)
    printed = running.communicate(timeout=60)[0]
    assert running.returncode == 128 + number, printed
    assert cloud.saved() == [delete, delete] and cloud.exists() != delete
    assert ("costs money" in printed) != delete


def test_a_signal_cancels_a_request_that_waits(cloud):
    """It would be granted, and paid for, after the launch has ended."""
    cloud.next("WAITING_FOR_RESOURCES")
    waiting = cloud.background(*ALL, "--delete-after", *WORKDIR)
    cloud.wait_for(cloud.folder / "request")
    waiting.send_signal(signal.SIGTERM)
    assert waiting.communicate(timeout=60) and waiting.returncode == 143 and not cloud.exists()


def test_stop_saves_and_keeps_the_tpu_and_delete_stops_first(cloud):
    cloud.plan("waits")
    assert cloud.step("create", "--type=v5litepod-16").returncode == 0
    assert cloud.step("run", *WORKDIR).returncode == 0
    cloud.wait_for("pod.0.starts", "pod.1.starts")
    second = cloud.step("run")
    assert second.returncode == 2 and "already running" in second.stderr
    follower = cloud.background(*ALL, "--worker=1")
    follow(follower)
    assert cloud.step("stop").returncode == 0
    assert follower.communicate(timeout=60)[0].startswith("[pod.1] saved\n")
    assert follower.returncode == 0 and set(cloud.starts().values()) == {1}
    assert cloud.saved() == [True, True] and cloud.exists()

    for path in cloud.storage.glob("*.s*"):
        path.unlink()
    assert cloud.step("run", *WORKDIR).returncode == 0
    cloud.wait_for("pod.0.starts", "pod.1.starts")
    assert cloud.step("delete").returncode == 0
    assert cloud.saved() == [True, True] and not cloud.exists()


@pytest.mark.parametrize("workdir", [(), ("--workdir", "runs/a")])
def test_delete_needs_yes_for_a_run_on_the_disks_of_the_tpu(cloud, workdir):
    cloud.plan("finished")
    assert cloud.step(*ALL, "--", *workdir).returncode == 0
    refused = cloud.step("delete")
    assert refused.returncode == 2 and "--yes" in refused.stderr and cloud.exists()
    assert cloud.step("delete", "--yes").returncode == 0 and not cloud.exists()


@pytest.mark.slow
def test_a_process_that_ignores_stop_is_killed_and_not_restarted(cloud):
    cloud.plan("hangs")
    other = cloud.background(*ALL)
    cloud.wait_for("pod.0.hangs", "pod.1.hangs")
    stopped = cloud.step("stop", EFX_STOP_SECONDS=0)
    assert stopped.returncode == 0 and stopped.stderr.count("was killed") == 2
    assert other.communicate(timeout=60) and other.returncode == 1
    assert set(cloud.starts().values()) == {1}


def test_a_worker_installs_python_when_its_package_lock_is_free(tmp_path):
    """A worker without Python 3.11, whose apt-get fails twice."""
    tools, calls, python = tmp_path / "tools", tmp_path / "calls", tmp_path / "venv/bin/python"
    tools.mkdir()
    for name in ("bash", "dirname", "sleep", "hostname", "wc", "cp", "mkdir"):
        (tools / name).symlink_to(shutil.which(name))
    ready = script(tmp_path / "python", PYTHON)
    install = f'[ "$(wc -l <"{calls}")" -lt 4 ] || cp {ready} {python}'
    apt = f'echo "$*" >>"{calls}"\n[ "$(wc -l <"{calls}")" -gt 2 ] && {{ {install}; }}'
    script(tools / "sudo", f"#!/bin/sh\n{apt}\n")
    python.parent.mkdir(parents=True)
    command = (tools / "bash", LAUNCH / "tpu_worker.sh", "install", f"echo a >>{tmp_path}/setup")
    done = call(*command, PATH=tools, EFX_PAUSE=0, EFX_VENV=tmp_path / "venv")
    assert done.returncode == 0, done.stderr
    lines = calls.read_text().splitlines()
    assert [line.split()[4] for line in lines] == ["update", "update", "update", "install"]
    assert (tmp_path / "setup").read_text() == "a\n"
