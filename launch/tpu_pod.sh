#!/usr/bin/env bash
# Trains on Cloud TPUs, one slice or several: one process per worker, connected by JAX's runtime.
#
#   launch/tpu_pod.sh STEP --name NAME --zone ZONE [options] [-- arguments of efx.main]
#
# STEP     create   request the TPU (a queued resource) and wait for it
#          run      copy this tree to every worker, install its requirements, and start efx; it
#                   continues when this machine disconnects
#          logs     follow the logs until training ends; exit with its status
#          stop     let efx save and end on every worker; the TPU stays
#          delete   stop, then delete the TPU and its disks; --yes: runs on them included
#          all      create, run, logs; again after a preemption, a lost process, or a failure to
#                   create, copy or start. Called again, it continues
#
# --name, --zone   the TPU
# --project        Google Cloud project (default: gcloud's)
# --type           create, all: accelerator type, such as v5litepod-16
# --version        create, all: TPU software version (default: the one for the type)
# --spot           create, all: a preemptible TPU
# --slices         create, all: number of slices (default: 1). --config.mesh.data is a multiple of it:
#                  no other mesh axis spans slices
# --setup          run, all: a command for every worker, such as a mount; it runs at each try
# --extras         run, all: extras of pyproject.toml besides tpu, as in wandb,hf; gcs and s3 are
#                  added where the arguments of efx.main name gs:// or s3://
# --worker         logs, all: number of the worker whose log to follow (default: all)
# --tries          all: number of starts at most (default: 5)
# --delete-after   all: delete the TPU at the end, also after an error or a signal
# --dry-run        print the commands and run none
#
#   launch/tpu_pod.sh all --name efx --zone us-west4-a --type v5litepod-16 --spot \
#     --setup 'mountpoint -q /mnt || sudo mount 10.0.0.2:/vol /mnt' \
#     -- --config configs/mod.py --workdir /mnt/runs/mod
#
# --workdir must be storage that all workers see (gs://, a mounted bucket, Filestore): the TPU's own
# disks are lost with it. The exit status is training's (scheduled.sh lists them); 1 if the last of
# --tries could not start it, 2 for an error of this script, and 129, 130 or 143 after a signal.
# EFX_POLL, EFX_PAUSE: seconds between two requests of the state (30) and before another try (60).
set -euo pipefail

root="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
name='' zone='' project='' type='' version='' slices=1 setup='' extras='' worker=all tries=5
spot='' delete_after='' dry_run='' yes=''

say() { echo "efx: $*" >&2; }
fail() { say "error: $*"; exit 2; }

step="${1:-}"
case "$step" in
  create | run | logs | stop | delete | all) shift ;;
  -h | --help) sed -n '2,/^set -/{s/^# \{0,1\}//;/^set -/d;p;}' "${BASH_SOURCE[0]}" && exit ;;
  *) fail "unknown step '$step'; use create, run, logs, stop, delete or all" ;;
esac
while [ $# -gt 0 ]; do
  case "$1" in
    --) shift && break ;;
    --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
    --spot) spot=yes && shift ;;
    --delete-after) delete_after=yes && shift ;;
    --dry-run) dry_run=yes && shift ;;
    --yes) yes=yes && shift ;;
    --name | --zone | --project | --type | --version | --slices | --setup | --extras | --worker | \
      --tries)
      case "${2:-}" in '' | -*) fail "$1='${2:-}': give a value" ;; esac
      printf -v "${1#--}" '%s' "$2"
      shift 2
      ;;
    *) fail "unknown option $1; give arguments of efx.main after --" ;;
  esac
done
[ -n "$name" ] && [ -n "$zone" ] || fail "give both --name and --zone, as in --zone us-west4-a"
case "$slices$tries" in *[!0-9]*) fail "--slices=$slices --tries=$tries: give numbers" ;; esac
case "$step$type" in create | all) fail "--type is missing, as in --type v5litepod-16" ;; esac
[ -n "$dry_run" ] || command -v gcloud >/dev/null ||
  fail "gcloud is not installed; install the Google Cloud CLI, or print the commands with --dry-run"
on_disk='' # a command for the workers: remember that a run is on their own disks
workdir_elsewhere='--?workdir[= ](gs://|/)'
[[ "$*" =~ $workdir_elsewhere ]] || on_disk='touch efx/on_disk; '
[ -z "$delete_after" ] || [ -z "$on_disk" ] ||
  fail "--delete-after deletes the run too; give --workdir gs://BUCKET/FOLDER or a mounted folder"
for extra in ${extras//,/ }; do # before the TPU costs money
  grep -q "^$extra = \[" "$root/pyproject.toml" || fail "--extras: unknown extra '$extra'"
done
extras="tpu${extras:+,$extras}"
case "$*" in *gs://*) extras+=,gcs ;; esac
case "$*" in *s3://*) extras+=,s3 ;; esac
case "$version$type" in
  v5litepod-*) version=v2-alpha-tpuv5-lite ;;
  v5p-*) version=v2-alpha-tpuv5 ;;
  v6e-*) version=v2-alpha-tpuv6e ;;
esac
where=(--zone="$zone" ${project:+--project="$project"})

tpus() { gcloud compute tpus "$@" "${where[@]}"; }

# Runs a command on all workers, or on worker $2 of each slice. The ssh flag notices lost machines.
on_workers() {
  tpus queued-resources ssh "$name" --node=all --worker="${2:-all}" --batch-size=all \
    --ssh-flag=-oServerAliveInterval=30 --command="$1"
}

# The command line of a step of tpu_worker.sh.
worker_step() {
  echo "EFX_EXTRAS=$extras bash efx/launch/tpu_worker.sh$(printf ' %q' "$@")"
}

# Prints ABSENT without a request; its state until it is ACTIVE; the state of a slice that is not
# READY; else that of training: none (not started, or cut off, on a worker), running, or the
# smallest exit status other than 0: those from 75 on mean that another process was lost.
request_state() {
  local found
  found="$(tpus queued-resources list --filter="name~/$name\$" --format='value(state.state)')" ||
    return
  [ "$found" = ACTIVE ] || { echo "${found:-ABSENT}" && return; }
  found="$(tpus tpu-vm list --filter="queuedResource~/$name\$" --format='value(state)')" || return
  ! grep -vxm 1 READY <<<"$found" || return 0
  found="$(on_workers "$(worker_step state) 2>/dev/null || echo efx-state none" |
    sed -n 's/^efx-state //p')" && [ -n "$found" ] || return
  sort -n <<<"$found" | grep -vxm 1 0 || echo 0 # words sort before numbers
}

# Sets `state`; tries again while gcloud or ssh fails.
update_state() {
  for _ in {1..20}; do
    state="$(request_state)" && return
    sleep "${EFX_POLL:-30}"
  done
  fail "TPU $name: cannot get its state; gcloud's errors are above, and training may be running"
}

# Whether the TPU is there, so that `state` is that of training.
is_up() {
  case "$state" in none | running | [0-9]*) ;; *) return 1 ;; esac
}

request() {
  local nodes=(--node-id="$name")
  [ "$slices" -eq 1 ] || nodes=(--node-count="$slices" --node-prefix="$name")
  state=REQUESTED # for a signal that comes meanwhile
  tpus queued-resources create "$name" "${nodes[@]}" --accelerator-type="$type" \
    --runtime-version="${version:-tpu-ubuntu2204-base}" ${spot:+--spot}
}

# Requests the TPU if there is none and waits for it; returns 1 if that fails.
create() {
  local new=''
  while update_state && ! is_up; do
    say "TPU $name: $state"
    case "$new$state" in
      newFAILED | newSUSPENDED | newPREEMPTED | newTERMINATED)
        tpus queued-resources describe "$name" >&2
        return 1
        ;;
      ABSENT | FAILED | SUSPENDED | PREEMPTED | TERMINATED)
        [ "$state" = ABSENT ] || tpus queued-resources delete "$name" --force --quiet || return
        request || return
        new=new
        ;;
    esac
    sleep "${EFX_POLL:-30}"
  done
}

# Starts efx on all workers, once all are installed: those that start wait for the others.
run() {
  [ "$state" != running ] || fail "efx is already running on TPU $name; use the step stop first"
  is_up || fail "TPU $name is $state; use the step create first"
  tar -czf "$archive" -C "$root" --exclude=./.venv --exclude=./runs --exclude=__pycache__ . &&
    tpus queued-resources scp "$archive" "$name:efx.tar.gz" --node=all --worker=all &&
    on_workers "mkdir -p efx && tar -xzf efx.tar.gz -C efx && $(worker_step install "$setup")" &&
    on_workers "$on_disk$(worker_step start "$@")"
}

# Follows the logs until training ends or is cut off; `state` is its exit status or the cause.
watch() {
  local lines=+1
  while :; do
    set -m # in the background for signals to interrupt it; a process group, to end ssh too
    on_workers "$(worker_step follow "$lines")" "$worker" </dev/null &
    set +m
    follower=$!
    wait "$follower" || true
    lines=0 follower=''
    update_state
    [ "$state" = running ] || return 0
    sleep "${EFX_POLL:-30}"
  done
}

stop() { on_workers "[ ! -e efx ] || $(worker_step stop)"; }

delete() {
  ! is_up || stop || say "cannot stop efx; its last checkpoint is valid"
  say "deleting TPU $name and its disks"
  tpus queued-resources delete "$name" --force --quiet
}

all() {
  local try status
  for ((try = 1; try <= tries; try++)); do
    if [ "$try" -gt 1 ]; then
      say "training was cut off or could not be started; try $try of $tries"
      sleep "${EFX_PAUSE:-60}"
    fi
    status=1
    if create && { [ "$state" = running ] || run "$@"; }; then
      watch
      case "$state" in
        ABSENT | DELETING) fail "TPU $name was deleted" ;;
        75 | 134 | 137 | 139 | 143) status="$state" ;;
        [0-9]*) exit "$state" ;;
      esac
    fi
  done
  say "error: no more starts after --tries=$tries"
  exit "$status"
}

# Ends ssh; then deletes the TPU or says that it costs money.
finish() {
  local status=$?
  trap - EXIT INT TERM HUP
  set +e
  [ -z "$follower" ] || kill -- "-$follower"
  rm -f -- "$archive"
  if [ "$step$delete_after" = allyes ] && [ "$state" != ABSENT ]; then
    delete && exit "$status"
    [ "$status" -ne 0 ] || status=2
  fi
  [ -n "$dry_run" ] || [ "$step$status" = delete0 ] ||
    say "TPU $name costs money until launch/tpu_pod.sh delete --name $name ${where[*]}"
  exit "$status"
}

archive=efx.tar.gz follower='' state=ABSENT
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exec >/dev/null 2>&1; exit 129' HUP # without a terminal each message would fail
if [ -n "$dry_run" ]; then # no state is requested
  gcloud() { printf '%q ' gcloud "$@" && echo; }
  tar() { printf '%q ' tar "$@" && echo; }
  create() { request && state=0; }
  update_state() { state=0; }
else
  archive="$(mktemp "${TMPDIR:-/tmp}/efx-tpu.XXXXXX")"
fi
case "$step" in
  create) create || fail "cannot create TPU $name; gcloud's errors are above" ;;
  run) update_state && run "$@" ;;
  logs)
    watch
    case "$state" in [0-9]*) exit "$state" ;; esac
    fail "training was not started or was cut off on TPU $name: $state; use the step run or all"
    ;;
  stop) stop ;;
  delete)
    update_state
    [ -n "$yes" ] || ! is_up || on_workers '[ ! -e efx/on_disk ]' ||
      fail "TPU $name has a run on its own disks; copy it, or delete it too with --yes"
    delete
    ;;
  all) all "$@" ;;
esac
