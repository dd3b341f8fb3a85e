"""Slurm and GKE: jobs that are told to stop, save and are started again, against stand-ins."""

import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from test_launch import BASH, LAUNCH, PYTHON, ROOT, call, one_error, script

SLURM = Path(__file__).parent / "stand_ins" / "slurm"
SBATCH = LAUNCH / "gpu_slurm.sbatch"
JOBSET = LAUNCH / "gke_jobset.yaml"

# Stands for an environment's Python. What efx does is the word of $PLAN that belongs to the number
# of times it has been started as this process; `told` is SIGTERM to process 0 alone, for the others
# end with it. A number is the status that all end with, 2:75 that of process 0 and of the others.
TRAINER = (
    PYTHON
    + r"""me="$STORAGE/${SLURM_PROCID:-0}"
printf '%s\n' "$@" >"$me.words"
echo start >>"$me.starts"
echo "$XLA_PYTHON_CLIENT_MEM_FRACTION" >"$me.fraction"
case "$(echo "$PLAN" | cut -d ' ' -f "$(wc -l <"$me.starts")")" in
  told)
    [ "$me" = "$STORAGE/0" ] || exit 0
    trap 'echo saved >>"$me.saved"; exit 0' TERM
    ps -o args= -p "$PPID" | grep -q scheduled.sh || exit 5
    kill -TERM "$PPID"
    for _ in $(seq 2000); do sleep 0.05; done ;;
  failed) exit 3 ;;
  killed) kill -KILL $$ ;;
  [0-9]*)
    statuses=$(echo "$PLAN" | cut -d ' ' -f "$(wc -l <"$me.starts")")
    [ "$me" = "$STORAGE/0" ] && exit "${statuses%:*}" || exit "${statuses#*:}" ;;
  *) exit 0 ;;
esac
"""
)


class Machine:
    """Where the trainer is efx and the tools of schedulers are stand-ins."""

    def __init__(self, folder):
        self.storage = folder / "storage"
        self.slurm = folder / "slurm"
        self.tools = folder / "tools"
        for made in (self.storage, self.slurm, self.tools):
            made.mkdir()
        for name in ("sbatch", "srun", "squeue", "scontrol"):
            (self.tools / name).symlink_to(SLURM)
        (self.slurm / "state").write_text("RUNNING\n")
        trainer = script(folder / "venv" / "bin" / "python", TRAINER)
        (self.tools / "python3.11").symlink_to(trainer)
        self.env = {
            "STORAGE": self.storage,
            "SLURM": self.slurm,
            "TASKS": 2,
            "EFX_VENV": trainer.parent.parent,
            "PATH": f"{self.tools}:{os.environ['PATH']}",
        }

    def call(self, *command, **env):
        return call(*command, **{**self.env, **env})

    def starts(self):
        """How often each process was started."""
        found = sorted(self.storage.glob("*.starts"))
        return [len(path.read_text().splitlines()) for path in found]

    def words(self, process=0):
        return (self.storage / f"{process}.words").read_text().splitlines()


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


# ---- scheduled.sh ------------------------------------------------------------------------------


def test_told_to_stop_is_not_done(machine):
    """efx saves and ends with 0; a scheduler has to see that it is to be started again."""
    scheduled = (BASH, LAUNCH / "scheduled.sh", "--workdir", "x y")
    statuses = [machine.call(*scheduled, PLAN="told failed done").returncode for _ in range(3)]
    assert statuses == [143, 3, 0]
    assert (machine.storage / "0.saved").exists()
    assert machine.words()[-2:] == ["--workdir", "x y"]


def test_of_several_statuses_a_final_one_is_the_highest(machine):
    """For a scheduler that tells only the highest one; a status by itself stays what it is."""
    scheduled = (BASH, LAUNCH / "scheduled.sh")
    plan = "1 2 3 75 134 137 139 0"

    def statuses(**env):
        (machine.storage / "0.starts").unlink(missing_ok=True)
        return [machine.call(*scheduled, PLAN=plan, **env).returncode for _ in plan.split()]

    assert statuses() == [1, 2, 3, 75, 134, 137, 139, 0]
    assert statuses(EFX_FINAL_FIRST="yes") == [201, 202, 203, 75, 134, 137, 139, 0]


def test_storage_that_cannot_rename_folders_is_refused(machine, tmp_path):
    bucket = tmp_path / "a bucket"
    scheduled = (BASH, LAUNCH / "scheduled.sh")
    assert machine.call(*scheduled, PLAN="done", EFX_STORAGE=bucket).returncode == 0
    assert machine.starts() == [1] and not list(bucket.iterdir())
    script(machine.tools / "mv", "#!/bin/sh\necho 'Too many open files' >&2; exit 1\n")
    line = one_error(machine.call(*scheduled, PLAN="done", EFX_STORAGE=bucket))
    assert "hierarchical namespace" in line and str(bucket) in line
    assert machine.starts() == [1] and not list(bucket.iterdir())


# ---- Slurm -------------------------------------------------------------------------------------


def test_slurm_starts_one_process_per_gpu(machine):
    text = SBATCH.read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", text, flags=re.M))
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    assert "requeue" in options and options["signal"] == "TERM@300"
    done = machine.call("sbatch", SBATCH, "--config=c.py", PLAN="done")
    assert done.returncode == 0, done.stderr
    assert machine.starts() == [1, 1]
    given = (machine.slurm / "srun").read_text().split()
    assert {"--gpu-bind=none", f"--cpus-per-task={options['cpus-per-task']}"} <= set(given)
    assert machine.words(1)[-2:] == ["--distributed", "--config=c.py"]
    result = machine.call(BASH, SBATCH, SLURM_SUBMIT_DIR=machine.storage)
    assert "is not the efx repository" in one_error(result)


def test_slurm_processes_have_all_cores_of_a_task(machine):
    """Since Slurm 22.05 srun does not take the number from the job."""
    done = machine.call("sbatch", SBATCH, PLAN="done", SLURM_CPUS_PER_TASK=12)
    assert done.returncode == 0, done.stderr
    assert "--cpus-per-task=12" in (machine.slurm / "srun").read_text().split()


@pytest.mark.parametrize(
    "env, fraction",
    [
        ({}, "0.92"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}, "0.5"),
        ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, ""),  # JAX refuses both
        ({"SLURM_NTASKS_PER_NODE": "16"}, ""),  # processes that share GPUs
    ],
)
def test_slurm_processes_take_their_gpu(machine, monkeypatch, env, fraction):
    for name in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    assert machine.call("sbatch", SBATCH, PLAN="done", **env).returncode == 0
    assert (machine.storage / "1.fraction").read_text().strip() == fraction


@pytest.mark.parametrize(
    "plan, state, tries, status, starts",
    [
        ("told told done", "RUNNING", 100, 0, 3),
        ("told told done", "RUNNING", 2, 143, 2),
        ("told told done", "CANCELLED", 100, 143, 1),
        ("failed done", "RUNNING", 100, 3, 1),
        ("75 killed 134 139 253 done", "RUNNING", 100, 0, 6),
        ("75:134 75 done", "RUNNING", 2, 75, 2),
        ("137 done", "CANCELLED", 100, 137, 1),
        ("1:75 done", "RUNNING", 100, 1, 1),
        ("134:2 done", "RUNNING", 100, 2, 1),
        ("1 done", "RUNNING", 100, 1, 1),
    ],
)
def test_slurm_queues_a_stopped_job_again(machine, plan, state, tries, status, starts):
    """Not without end, not one that the user has cancelled, and not one where a process has failed
    by itself, whatever the others make of that."""
    (machine.slurm / "state").write_text(state + "\n")
    done = machine.call("sbatch", SBATCH, PLAN=plan, EFX_TRIES=tries)
    assert done.returncode == status, done.stderr
    assert machine.starts() == [starts, starts]
    assert done.stderr.count("; requeued to resume") == starts - 1


@pytest.mark.parametrize("silent, starts", [(2, 2), (9, 1)])
def test_slurm_that_does_not_answer_is_asked_again(machine, silent, starts):
    """The job was not queued again then, and nothing said so."""
    asked = machine.slurm / "asked"
    (machine.tools / "squeue").unlink()
    script(
        machine.tools / "squeue",
        f'#!/bin/sh\necho >>"{asked}"\n[ "$(wc -l <"{asked}")" -gt {silent} ] && echo RUNNING\n',
    )
    done = machine.call("sbatch", SBATCH, PLAN="told done", EFX_PAUSE=0)
    assert machine.starts() == [starts, starts]
    assert done.returncode == (0 if starts == 2 else 143)
    said = "; requeued to resume" if starts == 2 else "squeue does not respond"
    assert said in done.stderr, done.stderr


# ---- GKE ---------------------------------------------------------------------------------------


def workers(job):
    """(spec of the job, spec of its pods, their container) of a JobSet."""
    spec = job["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    return spec, pod, container


def test_jobset_is_consistent():
    job = yaml.safe_load(JOBSET.read_text())
    assert (job["apiVersion"], job["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    spec, pod, container = workers(job)
    (exits,) = [rule["onExitCodes"] for rule in spec["podFailurePolicy"]["rules"]]
    assert exits["containerName"] == container["name"]
    chips = container["resources"]["limits"]["google.com/tpu"] * spec["completions"]
    rows, columns = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
    assert spec["completions"] == spec["parallelism"] and chips == int(rows) * int(columns)
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    (storage,) = [each["value"] for each in container["env"] if each["name"] == "EFX_STORAGE"]
    assert storage == container["volumeMounts"][0]["mountPath"]
    assert container["args"][-1].startswith(f"{storage}/")


def test_the_command_in_the_jobset_replaces_its_placeholders(machine):
    """What its first lines tell to type, run with a stand-in for kubectl."""
    text = JOBSET.read_text()
    (command,) = re.findall(r"^#   (sed .* \| kubectl apply -f -)$", text, flags=re.M)
    script(machine.tools / "kubectl", '#!/bin/sh\n[ "$*" = "apply -f -" ] && cat\n')
    values = dict(image="the/image:1", bucket="the-bucket", account="the-account")
    applied = machine.call(BASH, "-c", command, **values)
    assert applied.returncode == 0, applied.stderr
    _, pod, container = workers(yaml.safe_load(applied.stdout))
    assert container["image"] == "the/image:1"
    assert pod["serviceAccountName"] == "the-account"
    assert pod["volumes"][0]["csi"]["volumeAttributes"]["bucketName"] == "the-bucket"
    used = set(re.findall(r"(?<![\w])[A-Z]{4,}(?![\w])", str(yaml.safe_load(text))))
    assert used == set(re.findall(r"^#   ([A-Z]{4,})  ", text, flags=re.M))


def build(image, environment):
    """What docker makes of launch/Dockerfile, in the folder `image`; the words of its entry."""
    ignored = (LAUNCH / "Dockerfile.dockerignore").read_text().split()
    entry = None

    def left_out(folder, names):
        inside = Path(folder).relative_to(ROOT)
        found = [name for name in names if str(inside / name) in ignored]
        return found + [name for name in names if f"**/{name}" in ignored]

    for line in (LAUNCH / "Dockerfile").read_text().splitlines():
        word, _, rest = line.partition(" ")
        if word == "COPY":
            *sources, target = rest.split()
            for source in sources:
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, image, ignore=left_out, dirs_exist_ok=True)
                else:
                    (image / target).mkdir(parents=True, exist_ok=True)
                    shutil.copy(ROOT / source, image / target)
        elif word == "RUN":
            built = call(*shlex.split(rest), cwd=image, **environment)
            assert built.returncode == 0, built.stderr
        elif word == "ENTRYPOINT":
            entry = yaml.safe_load(rest)
        else:
            assert word in ("", "#", "FROM", "ARG", "ENV", "WORKDIR"), line
    assert not (image / ".git").exists()
    return entry


def pods(job, call, *command, **env):
    """The statuses of the pods that a JobSet makes one after another."""
    spec, *_ = workers(job)
    policy, statuses = job["spec"]["failurePolicy"], []
    while 0 not in statuses and len(statuses) <= policy["maxRestarts"]:
        status = call(*command, **env).returncode
        statuses.append(status)
        reason = "BackoffLimitExceeded"
        for rule in spec["podFailurePolicy"]["rules"]:
            exits = rule["onExitCodes"]
            assert (rule["action"], exits["operator"]) == ("FailJob", "In")
            if status in exits["values"]:
                reason = "PodFailurePolicy"
        for rule in policy["rules"]:
            if reason in rule["onJobFailureReasons"]:
                assert rule["action"] == "FailJobSet"
                return statuses
    return statuses


@pytest.mark.parametrize(
    "plan, statuses",
    [
        ("75 134 killed 139 0", [75, 134, 137, 139, 0]),
        ("75 1 0", [75, 1]),
        ("2 0", [2]),
        ("3 0", [3]),
        ("75 " * 20, [75] * 11),
    ],
)
def test_the_jobset_starts_anew_what_was_lost_and_not_what_failed(machine, plan, statuses):
    job = yaml.safe_load(JOBSET.read_text())
    assert pods(job, machine.call, BASH, LAUNCH / "scheduled.sh", PLAN=plan) == statuses


def test_the_image_runs_the_jobset_to_its_end(machine, tmp_path):
    """The Dockerfile is built by hand; a pod that fails is made anew, as JobSet does it."""
    image, bucket = tmp_path / "image", tmp_path / "bucket"
    environment = {key: value for key, value in machine.env.items() if key != "EFX_VENV"}
    entry = build(image, environment)
    job = yaml.safe_load(JOBSET.read_text())
    *_, container = workers(job)
    arguments = [word.replace("/bucket", str(bucket)) for word in container["args"]]
    environment |= dict(EFX_STORAGE=bucket, PLAN="told told done")
    assert pods(job, call, *entry, *arguments, cwd=image, **environment) == [143, 143, 0]
    assert machine.words() == ["-P", "-m", "efx.main", *arguments]
    assert (image / arguments[2]).is_file(), "the config is not in the image"
