"""Slurm and GKE: jobs that are signalled, save and are started again, with stand-ins."""

import os
import re
from pathlib import Path

import pytest
import yaml
from test_launch import BASH, LAUNCH, PYTHON, ROOT, call, one_error, script

SLURM = Path(__file__).parent / "stand_ins" / "slurm"
SBATCH = LAUNCH / "gpu_slurm.sbatch"
JOBSET = LAUNCH / "gke_jobset.yaml"

# Stands for an environment's Python. The n-th start of a process does the n-th word of $PLAN: with
# `term` SIGTERM reaches process 0 alone, and the others end; a number is the status of all
# processes, 2:75 that of process 0 and of the others.
TRAINER = (
    PYTHON
    + r"""me="$STORAGE/${SLURM_PROCID:-0}"
printf '%s\n' "$@" >"$me.words"
echo start >>"$me.starts"
echo "$XLA_PYTHON_CLIENT_MEM_FRACTION" >"$me.fraction"
case "$(echo "$PLAN" | cut -d ' ' -f "$(wc -l <"$me.starts")")" in
  term)
    [ "$me" = "$STORAGE/0" ] || exit 0
    parent() { ps -o args= -p "$PPID" | grep -q scheduled.sh; } # not so when it is a zombie
    trap 'sleep 0.3; parent && echo saved >>"$me.saved"; exit 0' TERM
    parent || exit 5
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
    """A machine whose efx is TRAINER and whose scheduler tools are stand-ins."""

    def __init__(self, folder):
        self.storage, self.slurm = folder / "storage", folder / "slurm"
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


def test_a_run_that_was_signalled_is_not_done(machine):
    """efx saves and ends with 0; the scheduler needs another status to start it again."""
    scheduled = (BASH, LAUNCH / "scheduled.sh", "--workdir", "x y")
    statuses = [machine.call(*scheduled, PLAN="term failed done").returncode for _ in range(3)]
    assert statuses == [143, 3, 0]
    assert (machine.storage / "0.saved").exists()
    assert machine.words()[-2:] == ["--workdir", "x y"]


def test_storage_that_cannot_rename_folders_is_refused(machine, tmp_path):
    bucket = tmp_path / "a bucket"
    scheduled = (BASH, LAUNCH / "scheduled.sh")
    assert machine.call(*scheduled, PLAN="done", EFX_STORAGE=bucket).returncode == 0
    # A bucket without a hierarchical namespace renames empty folders alone.
    script(machine.tools / "mv", '#!/bin/sh\n[ -z "$(ls "$1")" ] && exec /bin/mv "$@"\n')
    one_error(machine.call(*scheduled, PLAN="done", EFX_STORAGE=bucket), str(bucket))
    assert machine.starts() == [1] and not list(bucket.iterdir())


# ---- Slurm -------------------------------------------------------------------------------------


def test_slurm_starts_one_process_per_gpu_with_all_cores_of_its_task(machine):
    text = SBATCH.read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", text, flags=re.M))
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    assert "requeue" in options and options["signal"] == "TERM@300"
    env = dict(PLAN="done", SLURM_CPUS_PER_TASK=12)
    done = machine.call("sbatch", SBATCH, "--config=c.py", **env)
    assert done.returncode == 0, done.stderr
    assert machine.starts() == [1, 1]
    # Since Slurm 22.05 srun does not take the number of cores from the job.
    given = (machine.slurm / "srun").read_text().split()
    assert {"--gpu-bind=none", "--cpus-per-task=12"} <= set(given)
    assert machine.words(1)[-2:] == ["--distributed", "--config=c.py"]
    job = dict(SLURM_JOB_ID=7, SLURM_SUBMIT_DIR=machine.storage)
    one_error(machine.call(BASH, SBATCH, **job), str(machine.storage))


def test_slurm_job_outside_of_slurm_runs_nothing(machine):
    one_error(machine.call(SBATCH), "sbatch", "--dry-run")
    printed = machine.call(SBATCH, "--dry-run", "--config=a b").stdout
    assert re.search(r"^sbatch .* --config=a\\ b", printed)
    assert re.search(r"(?m)^env .*srun ", printed)
    assert machine.starts() == [] and not list(machine.slurm.glob("s[cr]*"))


def test_slurm_processes_allocate_their_gpu(machine):
    """Unless the user has set the newer name: JAX refuses both."""
    for given, fraction in (("", "0.92"), ("0.5", "")):
        env = dict(XLA_PYTHON_CLIENT_MEM_FRACTION="", XLA_CLIENT_MEM_FRACTION=given)
        assert machine.call("sbatch", SBATCH, PLAN="done done", **env).returncode == 0
        assert (machine.storage / "1.fraction").read_text().strip() == fraction


@pytest.mark.parametrize(
    "plan, state, tries, status, starts",
    [
        ("term term done", "RUNNING", 2, 143, 2),
        ("term term done", "CANCELLED", 100, 143, 1),
        ("75 killed 134 139 253 done", "RUNNING", 100, 0, 6),
        ("75:134 done", "RUNNING", 2, 0, 2),
        ("1:75 done", "RUNNING", 100, 1, 1),
        ("134:2 done", "RUNNING", 100, 2, 1),
    ],
)
def test_slurm_requeues_lost_jobs_and_not_failed_ones(machine, plan, state, tries, status, starts):
    """A failure of one process is final, whatever status the others end with."""
    (machine.slurm / "state").write_text(state + "\n")
    done = machine.call("sbatch", SBATCH, PLAN=plan, EFX_TRIES=tries)
    assert done.returncode == status, done.stderr
    assert machine.starts() == [starts, starts]


# ---- GKE ---------------------------------------------------------------------------------------


def workers(job):
    """(spec of the job, spec of its pods, their container) of a JobSet."""
    spec = job["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    return spec, pod, container


def test_the_command_in_the_jobset_makes_a_consistent_job(machine):
    (command,) = re.findall(r"(?m)^#   (sed .* \| kubectl apply -f -)$", JOBSET.read_text())
    script(machine.tools / "kubectl", '#!/bin/sh\n[ "$*" = "apply -f -" ] && cat\n')
    values = dict(image="the/image:1", bucket="the-bucket", account="the-account")
    applied = machine.call(BASH, "-c", command, **values)
    assert applied.returncode == 0, applied.stderr
    spec, pod, container = workers(yaml.safe_load(applied.stdout))
    assert container["image"] == "the/image:1"
    assert pod["serviceAccountName"] == "the-account"
    assert pod["volumes"][0]["csi"]["volumeAttributes"]["bucketName"] == "the-bucket"

    chips = container["resources"]["limits"]["google.com/tpu"] * spec["completions"]
    rows, columns = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
    assert spec["completions"] == spec["parallelism"] and chips == int(rows) * int(columns)
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    (storage,) = [each["value"] for each in container["env"] if each["name"] == "EFX_STORAGE"]
    assert storage == container["volumeMounts"][0]["mountPath"]
    assert container["args"][-1].startswith(f"{storage}/")
    assert (ROOT / container["args"][2]).is_file()  # the config, from the image


@pytest.mark.parametrize(
    "plan, statuses",
    [
        ("75 134 killed 139 term 0", [75, 134, 137, 139, 143, 0]),
        ("75 1 0", [75, 1]),
        ("75 " * 20, [75] * 11),
    ],
)
def test_the_jobset_restarts_lost_pods_and_not_failed_ones(machine, plan, statuses):
    """The pods that a JobSet starts one after another."""
    job = yaml.safe_load(JOBSET.read_text())
    (of_pod,) = workers(job)[0]["podFailurePolicy"]["rules"]
    assert (of_pod["action"], of_pod["onExitCodes"]["operator"]) == ("FailJob", "In")
    policy = job["spec"]["failurePolicy"]
    (of_job,) = policy["rules"]
    assert of_job["action"] == "FailJobSet"
    assert of_job["onJobFailureReasons"] == ["PodFailurePolicy"]
    final, seen = [0, *of_pod["onExitCodes"]["values"]], []
    while len(seen) <= policy["maxRestarts"] and not (seen and seen[-1] in final):
        seen.append(machine.call(BASH, LAUNCH / "scheduled.sh", PLAN=plan).returncode)
    assert seen == statuses
