"""tpu_pod.sh: its dry run, and all of it against a stand-in for gcloud that plays the cloud."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from test_launch import BASH, LAUNCH, PYTHON, call, one_error, script

GCLOUD = Path(__file__).parent / "stand_ins" / "gcloud"
TPU = ["--name", "pod", "--zone", "us-west4-a"]

# Stands for an environment's Python on a worker. What efx does is the word of $STORAGE/plan that
# belongs to the number of times it has been started there; the last one counts for all later. A
# number is the status that all end with, 2:75 that of the first worker and of the others.
TRAINER = (
    PYTHON
    + r"""me="$STORAGE/$SLICE.$WORKER"
printf '%s\n' "$@" >"$me.words"
echo "$EFX_EXTRAS" >"$me.extras"
trap 'echo saved >>"$me.saved"; echo saved; exit 0' TERM
echo start >>"$me.starts"
count=$(wc -l <"$me.starts")
action=$(tr ' ' '\n' <"$STORAGE/plan" | head -n "$count" | tail -n 1)
echo "start $count: $action"
case "$action" in
  preempted)
    # The cloud takes everything away at once, when all have started, and once: the first worker
    # plays it, and no reader finds half a file. The others end when it is done.
    taken="$STORAGE/preempted.$count"
    case "$SLICE.$WORKER" in
      pod.0 | pod-0.0)
        for _ in $(seq 600); do
          begun=0
          for each in "$STORAGE"/*.starts; do
            [ "$(wc -l <"$each")" -lt "$count" ] || begun=$((begun + 1))
          done
          [ "$begun" -lt "$TOGETHER" ] || break
          sleep 0.05
        done
        for slice in "$CLOUD"/nodes/*; do
          echo PREEMPTED >"$slice/new" && mv "$slice/new" "$slice/state"
        done
        echo SUSPENDED >"$CLOUD/new" && mv "$CLOUD/new" "$CLOUD/request"
        touch "$taken" ;;
      *) for _ in $(seq 1200); do [ ! -e "$taken" ] || break; sleep 0.05; done ;;
    esac
    kill -TERM 0 ;;   # as a machine that shuts down does, to all processes
  rebooted) [ "$WORKER" = 0 ] || kill -TERM 0 ;;
  finished) exit 0 ;;
  failed) exit 3 ;;
  killed) kill -KILL $$ ;;
  [0-9]*)
    case "$SLICE.$WORKER" in pod.0 | pod-0.0) action="${action%:*}" ;; esac
    exit "${action#*:}" ;;
  hangs) trap '' TERM; touch "$me.hangs" ;;
esac
for _ in $(seq 2000); do sleep 0.05; done
"""
)


@pytest.fixture(autouse=True)
def no_real_cloud(monkeypatch, tmp_path):
    """Whatever a test does, it never reaches the gcloud of this machine."""
    script(tmp_path / "no cloud" / "gcloud", "#!/bin/sh\necho called >&2; exit 9\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'no cloud'}:{os.environ['PATH']}")


class Cloud:
    """A cloud in a folder, of slices with `workers` workers each, and a tree to launch from."""

    def __init__(self, folder, workers, slices=1):
        self.folder, self.storage = folder / "cloud", folder / "storage"
        self.tree, tools = folder / "tree", folder / "tools"
        self.folder.mkdir()
        self.storage.mkdir()
        shutil.copytree(LAUNCH, self.tree / "launch")
        tools.mkdir()
        (tools / "gcloud").symlink_to(GCLOUD)
        script(tools / "python3.11", "#!/bin/sh\n")
        script(tools / "hostname", '#!/bin/sh\necho "t1v-n-1a2b-w-$WORKER"\n')
        self.env = {
            "CLOUD": self.folder,
            "STORAGE": self.storage,
            "WORKERS": workers,
            "TOGETHER": workers * slices,
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

    def step(self, name, *arguments, **env):
        command = (BASH, self.tree / "launch" / "tpu_pod.sh", name, *TPU, *arguments)
        return call(*command, **{**self.env, **env})

    def background(self, name, *arguments, **env):
        """The step as a process that has not ended."""
        command = [BASH, self.tree / "launch" / "tpu_pod.sh", name, *TPU, *arguments]
        env = os.environ | {key: str(value) for key, value in {**self.env, **env}.items()}
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command,
            env=env,
            stdout=pipe,
            stderr=subprocess.STDOUT,
            text=True,
            # Under nohup the tests ignore it, and a shell cannot catch what it is told to ignore.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )

    def trouble(self, *calls):
        """Calls of gcloud that fail, each once and in this order, by what they hold."""
        (self.folder / "trouble").write_text("".join(f"{each}\n" for each in calls))

    def calls(self, *words):
        """The calls of gcloud that hold all words."""
        calls = (self.folder / "calls").read_text().splitlines()
        return [each for each in calls if all(word in each for word in words)]

    def starts(self):
        """{worker: how often efx was started there}."""
        found = self.storage.glob("*.starts")
        return {path.stem: len(path.read_text().splitlines()) for path in found}

    def wait_for(self, path):
        limit = time.monotonic() + 60
        while not (self.storage / path).exists():  # or an absolute one
            assert time.monotonic() < limit, path
            time.sleep(0.05)


@pytest.fixture
def cloud(tmp_path):
    """One slice of two workers."""
    made = Cloud(tmp_path, workers=2)
    yield made
    if (made.folder / "nodes").exists():
        made.step("stop")
    assert not list(tmp_path.glob("efx-tpu.*")), "temporary files were left behind"


# ---- dry runs and arguments --------------------------------------------------------------------


def dry_run(*arguments):
    """The commands that tpu_pod.sh would run, as lists of words: its output pasted into a shell."""
    step, *options = arguments
    printed = call(BASH, LAUNCH / "tpu_pod.sh", step, "--dry-run", *options)
    assert printed.returncode == 0, printed.stderr
    show = r"""{ printf '%s\0' "$FUNCNAME" "$@"; printf '\n\0'; }"""
    pasted = call(BASH, "-c", f"gcloud() {show}; tar() {show}; mkdir() {show}\n{printed.stdout}")
    assert pasted.returncode == 0 and not pasted.stderr, pasted.stderr
    return [command.split("\0")[:-1] for command in pasted.stdout.split("\n\0")[:-1]]


def test_dry_run_prints_the_sequence():
    pod = (*TPU, "--type=v5litepod-16", "--project", "lab", "--spot", "--delete-after")
    commands = dry_run("all", *pod, "--setup", "mount it", "--", "--prompt", "it's")
    gcloud = [command for command in commands if command[0] == "gcloud"]
    assert all(command[1:3] == ["compute", "tpus"] for command in gcloud)
    assert all({"--zone=us-west4-a", "--project=lab"} <= set(command) for command in gcloud)
    steps = [" ".join(command[3:5]) for command in gcloud]
    asks = ["queued-resources list", "tpu-vm list"]
    copies = ["tpu-vm scp", "tpu-vm ssh", "tpu-vm ssh"]
    assert steps == [
        *asks, "queued-resources create", "tpu-vm ssh", *copies, "tpu-vm ssh", "tpu-vm ssh",
        "tpu-vm ssh", "queued-resources delete",
    ]  # fmt: skip
    create, ssh = gcloud[2], [command[7] for command in gcloud if command[4] == "ssh"]
    assert {"pod", "--node-id=pod", "--accelerator-type=v5litepod-16", "--spot"} <= set(create)
    assert "--runtime-version=v2-alpha-tpuv5-lite" in create
    assert all("--worker=all" in command for command in gcloud if command[4] in ("ssh", "scp"))
    worker = "bash efx/launch/tpu_worker.sh"
    assert ssh[2:5] == [
        f"--command=EFX_EXTRAS=tpu {worker} install 'mount it'",
        f"--command=EFX_EXTRAS=tpu {worker} start --prompt 'it'\\''s'",
        f"--command={worker} follow +1 pod",
    ]
    tar = next(command for command in commands if command[0] == "tar")
    assert tar[2] == gcloud[4][5]
    assert "--quiet" in gcloud[-1] and "--force" in gcloud[-1]


def test_dry_run_of_single_steps():
    slices = (*TPU, "--type=v6e-8", "--slices=3")
    create = dry_run("create", *slices)[-1]
    assert {"--node-count=3", "--node-prefix=pod", "--runtime-version=v2-alpha-tpuv6e"} <= {*create}
    stops = dry_run("stop", *slices)
    assert [each[5] for each in stops if each[4] == "ssh"] == ["pod-0", "pod-1", "pod-2"]
    one = dry_run("logs", *slices, "--worker", "2:5")
    assert [each[5:7] for each in one if "follow" in " ".join(each)] == [["pod-2", "--worker=5"]]
    assert [each[4] for each in dry_run("delete", *TPU)] == ["list", "list", "ssh", "delete"]
    saved = dry_run("delete", *TPU, "--save", "kept here")
    assert [each[4] for each in saved if each[0] == "gcloud"][2:] == ["ssh", "scp", "delete"]
    assert all("kept here" in each[-1 if each[0] == "mkdir" else 7] for each in saved[3:5])
    assert [each[4] for each in dry_run("delete", *TPU, "--discard")] == ["delete"]


@pytest.mark.parametrize(
    "options, arguments, extras",
    [
        ([], ["--workdir", "/mnt/runs/a"], "tpu"),
        ([], ["--workdir", "gs://b/a"], "tpu,gcs"),
        ([], ["--workdir=gs://b/a", "--config.data.source=text:s3://c/t"], "tpu,gcs,s3"),
        (["--extras", "wandb,tpu,gcs"], ["--workdir=gs://b/a"], "tpu,wandb,gcs"),
        (["--extras=hf"], [], "tpu,hf"),
    ],
)
def test_workers_install_what_the_arguments_need(options, arguments, extras):
    commands = dry_run("all", *TPU, "--type=v6e-8", *options, "--", *arguments)
    found = re.findall(r"EFX_EXTRAS=(\S+) bash \S+ (install|start)", str(commands))
    assert found == [(extras, "install"), (extras, "start")]


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["fly"], "'fly'"),
        (["create", *TPU], "--type"),
        (["run", "--name", "pod"], "--zone"),
        (["run", "--name", "my_pod", "--zone", "z"], "--name=my_pod"),
        (["run", *TPU, "--config=x"], "--config=x"),
        (["run", "--name", "--zone", "z"], "--name='--zone': give a value"),
        (["all", *TPU, "--type=v6e-8", "--tries", "0"], "--tries"),
        (["all", *TPU, "--type=v6e-8", "--slices=two"], "--slices=two"),
        (["logs", *TPU, "--worker", "first"], "--worker=first"),
        (["delete", *TPU, "--discard=no"], "--discard=no: --discard takes no value"),
        (["run", *TPU, "--dry-run=false"], "--dry-run=false: --dry-run takes no value"),
        (["copy", *TPU, "--extras", "hf wandb"], "--extras"),
        (["copy", *TPU, "--extras=hf,wandbb"], "'wandbb'"),
    ],
)
def test_bad_arguments(arguments, named):
    assert named in one_error(call(BASH, LAUNCH / "tpu_pod.sh", *arguments))


def test_without_gcloud(tmp_path):
    for name in ("bash", "dirname"):
        (tmp_path / name).symlink_to(shutil.which(name))
    line = one_error(call(BASH, LAUNCH / "tpu_pod.sh", "run", *TPU, PATH=tmp_path))
    assert "gcloud is not installed" in line


# ---- the cloud ---------------------------------------------------------------------------------


def test_create_waits_and_says_the_state(cloud):
    cloud.next("CREATING", "WAITING_FOR_RESOURCES", "WAITING_FOR_RESOURCES", "ACTIVE")
    created = cloud.step("create", "--type=v5litepod-16")
    assert created.returncode == 0, created.stderr
    said = [line for line in created.stderr.splitlines() if "is " in line and "TPU pod is" in line]
    states = ["ABSENT", "CREATING", "WAITING_FOR_RESOURCES", "ACTIVE"]
    assert said == [f"efx: TPU pod is {state}" for state in states]
    assert "delete --name pod --zone=us-west4-a" in created.stderr.splitlines()[-1]
    again = cloud.step("create", "--type=v5litepod-16")
    assert again.returncode == 0 and len(cloud.calls("queued-resources create")) == 1
    assert "not found" not in cloud.step("stop").stderr

    # One that has failed before is asked for anew; one that fails now is not, and it says why.
    (cloud.folder / "request").write_text("FAILED\n")
    (cloud.folder / "nodes/pod/state").write_text("PREEMPTED\n")
    cloud.next("PROVISIONING", "FAILED")
    failed = cloud.step("create", "--type=v5litepod-16")
    assert failed.returncode == 2
    assert len(cloud.calls("queued-resources create")) == 2
    assert "no quota for you" in failed.stderr and "the request for TPU pod failed" in failed.stderr


def test_preempted_twice_training_goes_on_to_its_end(tmp_path):
    """Two slices of two workers; the arguments arrive as they were given, every time."""
    cloud = Cloud(tmp_path, workers=2, slices=2)
    cloud.plan("preempted", "preempted", "finished")
    cloud.next("WAITING_FOR_RESOURCES", "ACTIVE")
    prompt = 'it\'s "a" $HOME `b`'
    options = ("--type=v5litepod-16", "--slices=2", "--delete-after", "--setup", "touch mounted")
    done = cloud.step("all", *options, "--", "--config", "c.py", "--prompt", prompt)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert cloud.starts() == dict.fromkeys(("pod-0.0", "pod-0.1", "pod-1.0", "pod-1.1"), 3)
    assert len(cloud.calls("queued-resources create", "--node-count=2")) == 3
    assert len(cloud.calls("queued-resources delete")) == 3  # what was preempted, and at the end
    assert not (cloud.folder / "nodes").exists() and "costs money" not in done.stderr
    assert "try 3 of 5" in done.stderr
    words = (cloud.storage / "pod-1.1.words").read_text().splitlines()
    assert words[:4] == ["-P", "-m", "efx.main", "--workdir"]
    assert words[5:] == ["--distributed", "--config", "c.py", "--prompt", prompt]
    for worker in ("pod-0:0", "pod-0:1", "pod-1:0", "pod-1:1"):
        assert f"[{worker}] start 3: finished" in done.stdout.splitlines()


def test_tries_are_bounded(cloud):
    cloud.plan("preempted")
    given_up = cloud.step("all", "--type=v5litepod-16", "--tries=2")
    assert given_up.returncode == 1
    assert "after --tries=2 tries" in given_up.stderr and "costs money" in given_up.stderr
    assert set(cloud.starts().values()) == {2}


@pytest.mark.parametrize("status", ["1", "2", "3", "2:75", "134:1"])
def test_a_failure_of_training_is_final(cloud, status):
    """Also that of one worker alone, which the others have lost then."""
    cloud.plan(status, "finished")
    failed = cloud.step("all", "--type=v5litepod-16")
    assert failed.returncode == min(map(int, status.split(":")))
    assert set(cloud.starts().values()) == {1}
    assert "costs money until it is deleted" in failed.stderr


def test_a_lost_process_is_started_again(cloud):
    cloud.plan("75:134", "killed", "143", "finished")
    done = cloud.step("all", "--type=v5litepod-16", "--", "--workdir", "gs://bucket/mod")
    assert done.returncode == 0, done.stderr
    assert set(cloud.starts().values()) == {4}
    assert len(cloud.calls("queued-resources create")) == 1
    assert (cloud.storage / "pod.1.extras").read_text() == "tpu,gcs\n"

    cloud.plan("75")
    given_up = cloud.step("all", "--type=v5litepod-16", "--tries=2", "--delete-after")
    assert given_up.returncode == 75 and "after --tries=2 tries" in given_up.stderr
    assert set(cloud.starts().values()) == {6}
    assert not (cloud.folder / "nodes").exists()


@pytest.mark.parametrize(
    "trouble",
    [
        ["tpu-vm scp"],
        ["tpu_worker.sh install", "tpu_worker.sh install"],
        ["tpu_worker.sh start", "queued-resources list", "tpu-vm list"],
    ],
)
def test_copying_and_starting_are_tried_again(cloud, trouble):
    cloud.plan("finished")
    cloud.trouble(*trouble)
    done = cloud.step("all", "--type=v5litepod-16", "--delete-after")
    assert done.returncode == 0, done.stderr
    assert cloud.starts() == {"pod.0": 1, "pod.1": 1}
    assert not (cloud.folder / "nodes").exists() and "costs money" not in done.stderr


def test_a_start_that_reached_one_worker_only_is_made_anew(cloud):
    """The other one still has the status of the last time; what runs would wait for it in vain."""
    cloud.plan("75", "waits")
    lines = (cloud.tree / "launch" / "tpu_worker.sh").read_text()
    once = '[ "$WORKER$(cat "$STORAGE/pod.1.starts" 2>/dev/null)" != 1start ] || [ -e ../once ]'
    broken = f"start() {{\n  {once} || {{ touch ../once && return 1; }}\n"
    script(cloud.tree / "launch" / "tpu_worker.sh", lines.replace("start() {\n", broken))
    follower = cloud.background("all", "--type=v5litepod-16")
    while "[pod:1] start 2: waits" not in (line := follower.stdout.readline()):
        assert line, "`all` ended"
    limit = time.monotonic() + 60
    while cloud.starts()["pod.0"] < 3 and time.monotonic() < limit:  # it starts at the same time
        time.sleep(0.05)
    assert cloud.starts() == {"pod.0": 3, "pod.1": 2}
    assert cloud.step("stop").returncode == 0
    assert follower.communicate(timeout=60) and follower.returncode == 0


@pytest.mark.parametrize("delete", [True, False])
def test_copying_that_always_fails_leaves_nothing_to_pay(cloud, delete):
    cloud.trouble(*["tpu-vm scp"] * 9)
    options = ("--type=v5litepod-16", "--tries=3", *["--delete-after"] * delete)
    failed = cloud.step("all", *options, "--", "--workdir=gs://bucket/mod")
    assert failed.returncode == 1
    assert len(cloud.calls("tpu-vm scp")) == 3
    assert (cloud.folder / "nodes").exists() != delete
    last = failed.stderr.splitlines()[-1]
    if delete:
        assert "TPU pod and its own disks are deleted" in last and "in gs://bucket/mod" in last
    else:
        assert "costs money until it is deleted" in last


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_deletes(cloud, number):
    cloud.plan("waits")
    running = cloud.background(
        "all", "--type=v5litepod-16", "--delete-after", "--", "--workdir", "/mnt/runs/mod"
    )
    cloud.wait_for("pod.0.starts")
    cloud.wait_for("pod.1.starts")
    running.send_signal(number)
    said = running.communicate(timeout=60)[0]
    assert running.returncode == 128 + number, said
    assert (cloud.storage / "pod.0.saved").exists() and (cloud.storage / "pod.1.saved").exists()
    assert not (cloud.folder / "nodes").exists() and "costs money" not in said
    assert "any checkpoints are in /mnt/runs/mod" in said.splitlines()[-1]


def test_a_signal_without_delete_after_lets_it_run(cloud):
    cloud.plan("waits")
    running = cloud.background("all", "--type=v5litepod-16")
    cloud.wait_for("pod.0.starts")
    running.send_signal(signal.SIGTERM)
    assert "costs money" in running.communicate(timeout=60)[0]
    assert running.returncode == 143 and not (cloud.storage / "pod.0.saved").exists()


def test_a_signal_takes_back_what_was_only_asked_for(cloud):
    """It would be given, and paid for, when nobody waits for it any more."""
    cloud.next("WAITING_FOR_RESOURCES")
    waiting = cloud.background("all", "--type=v5litepod-16", "--delete-after")
    cloud.wait_for(cloud.folder / "request")
    waiting.send_signal(signal.SIGTERM)
    assert waiting.communicate(timeout=60) and waiting.returncode == 143
    assert not (cloud.folder / "request").exists()


def test_deleting_at_the_end_is_tried_again_and_keeps_runs(cloud, tmp_path):
    cloud.plan("3")
    run = cloud.folder / "nodes/pod/0/efx/runs/mod/run.json"
    script(run, "{}")
    options = ("--type=v5litepod-16", "--delete-after")
    failed = cloud.step("all", *options)
    assert failed.returncode == 3 and run.exists()
    assert "would be lost" in failed.stderr and "costs money" in failed.stderr
    cloud.plan("finished")
    refused = cloud.step("all", *options)
    assert refused.returncode == 2 and run.exists(), "it has not done what it was asked for"
    cloud.trouble("queued-resources delete")
    saved = cloud.step("all", *options, "--save", tmp_path / "kept")
    assert saved.returncode == 0 and not run.exists()
    assert (tmp_path / f"kept/pod-0{run}").exists()
    assert f"their runs are in {tmp_path / 'kept'}" in saved.stderr


def test_gcloud_that_fails_after_a_preemption_is_asked_again(cloud):
    """The first time it is an error: it may be what was asked for."""
    cloud.trouble("queued-resources create pod")
    refused = cloud.step("all", "--type=v5litepod-16", "--delete-after")
    assert refused.returncode == 2 and "cannot request TPU pod" in refused.stderr
    assert not cloud.calls("queued-resources delete")
    cloud.plan("preempted", "finished")
    cloud.trouble("queued-resources delete", "queued-resources create pod")
    done = cloud.step("all", "--type=v5litepod-16")
    assert done.returncode == 0, done.stderr
    assert "try 4 of 5" in done.stderr


def test_one_worker_that_rebooted_restarts_all(cloud):
    """The other one, which waits for its peer, is stopped; the TPU is the same one."""
    cloud.plan("rebooted", "finished")
    done = cloud.step("all", "--type=v5litepod-16", "--worker=1")
    assert done.returncode == 0, done.stderr
    assert set(cloud.starts().values()) == {2}
    assert (cloud.storage / "pod.0.saved").exists()
    assert len(cloud.calls("queued-resources create")) == 1


def test_stop_delete_and_the_runs_on_own_disks(cloud, tmp_path):
    cloud.plan("waits")
    assert "TPU pod not found" in cloud.step("logs").stderr
    for step in (["create", "--type=v5litepod-16"], ["copy"]):
        assert cloud.step(*step).returncode == 0
    assert "no run was started" in cloud.step("logs").stderr
    assert cloud.step("run").returncode == 0
    again = cloud.step("run")
    assert again.returncode == 1 and "already running" in again.stderr
    cloud.wait_for("pod.1.starts")
    refused = cloud.step("delete")
    assert refused.returncode == 2 and "efx is running on TPU pod" in refused.stderr

    # Started again, `all` follows what runs; the stop of another terminal ends it.
    follower = cloud.background("all", "--type=v5litepod-16", "--worker=1")
    while "start 1" not in (line := follower.stdout.readline()):
        assert line, "`all` ended"
    assert line == "start 1: waits\n"
    stopped = cloud.step("stop")
    assert stopped.returncode == 0 and stopped.stdout.count("efx: ended on worker") == 2
    assert follower.communicate(timeout=60)[0].startswith("saved\n")
    assert follower.returncode == 0 and set(cloud.starts().values()) == {1}
    assert (cloud.storage / "pod.0.saved").exists() and (cloud.storage / "pod.1.saved").exists()

    home = cloud.folder / "nodes/pod/1"
    run = home / "efx/runs/my mod"
    script(run / "run.json", "{}")
    script(run / "checkpoints/9/state", "weights")
    refused = cloud.step("delete")
    assert refused.returncode == 2 and f"pod:{run}" in refused.stderr
    assert not cloud.calls("queued-resources delete")
    (cloud.folder / "nodes/pod/state").write_text("REPAIRING\n")  # no answer is no permission
    unseen = cloud.step("delete")
    assert unseen.returncode == 2 and "cannot see the disks" in unseen.stderr
    (cloud.folder / "nodes/pod/state").write_text("READY\n")
    saved = cloud.step("delete", "--save", tmp_path / "kept")
    assert saved.returncode == 0, saved.stderr
    assert "deleting TPU pod and all files on its own disks" in saved.stderr
    assert (tmp_path / f"kept/pod-1{run}/checkpoints/9/state").read_text() == "weights"
    assert not (cloud.folder / "nodes").exists()


def test_efx_that_does_not_end_is_killed(cloud):
    """And that counts as its end: `all` in another terminal does not start it again."""
    cloud.plan("hangs")
    other = cloud.background("all", "--type=v5litepod-16")
    cloud.wait_for("pod.0.hangs")
    cloud.wait_for("pod.1.hangs")
    stopped = cloud.step("stop", EFX_STOP_SECONDS=0)
    assert stopped.returncode == 0 and stopped.stderr.count("was killed") == 2
    assert cloud.step("logs").returncode == 137
    assert other.communicate(timeout=60) and other.returncode == 137
    assert set(cloud.starts().values()) == {1}


# ---- tpu_worker.sh -----------------------------------------------------------------------------


def worker_tools(tmp_path, failures):
    """A worker without Python 3.11, whose apt-get fails so often; (PATH, what was called)."""
    tools, calls = tmp_path / "tools", tmp_path / "calls"
    tools.mkdir()
    for name in ("bash", "dirname", "sleep", "hostname", "wc", "grep"):
        (tools / name).symlink_to(shutil.which(name))
    script(tools / "python3", "#!/bin/sh\nexit 1\n")
    script(
        tools / "sudo",
        f'#!/bin/sh\necho "$*" >>"{calls}"\n[ "$(wc -l <"{calls}")" -gt {failures} ]\n',
    )
    return tools, calls


def install(tmp_path, failures, python):
    tools, calls = worker_tools(tmp_path, failures)
    done = call(
        *(tools / "bash", LAUNCH / "tpu_worker.sh", "install", f"echo mounted >>{tmp_path}/setup"),
        **dict(PATH=tools, EFX_PAUSE=0, EFX_VENV=script(python, PYTHON).parent.parent),
    )
    return done, calls.read_text().splitlines()


def test_a_new_machine_may_have_its_packages_locked(tmp_path):
    done, calls = install(tmp_path, 2, tmp_path / "venv" / "bin" / "python")
    assert done.returncode == 0, done.stderr
    assert [line.split()[4] for line in calls] == ["update", "update", "update", "install"]
    assert all("-o DPkg::Lock::Timeout=600" in line for line in calls)
    assert (tmp_path / "setup").read_text() == "mounted\n"


def test_packages_that_cannot_be_had_are_an_error_in_the_end(tmp_path):
    done, calls = install(tmp_path, 99, tmp_path / "venv" / "bin" / "python")
    assert done.returncode == 1 and len(calls) == 4
    assert not (tmp_path / "setup").exists()


def test_discard_deletes_all_the_same(cloud):
    assert cloud.step("create", "--type=v5litepod-8").returncode == 0
    script(cloud.folder / "nodes/pod/0/efx/runs/mod/run.json", "{}")
    assert cloud.step("delete").returncode == 2
    assert cloud.step("delete", "--discard").returncode == 0
    assert not (cloud.folder / "nodes").exists()
