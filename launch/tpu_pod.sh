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
#          delete   stop, then delete the TPU and its disks, runs on them included
#          all      create, run, logs; again after a preemption, a lost process, or a failure to
#                   create, copy or start. Called again, it continues
#
# --name, --zone   the TPU
# --project        Google Cloud project (default: gcloud's)
# --type           create, all: accelerator type, such as v5litepod-16
# --version        create, all: TPU software version (default: the one for the type)
# --spot           create, all: a preemptible TPU
# --slices         number of slices, the same for every step (default: 1). --config.mesh.data is a
#                  multiple of it: no other mesh axis spans slices
# --setup          run, all: a command for every worker, such as a mount; it runs at each try
# --extras         run, all: extras of pyproject.toml besides tpu, as in wandb,hf; gcs and s3 are
#                  added where the arguments of efx.main name gs:// or s3://
# --worker         logs, all: number of the worker whose log to follow (default: all)
# --tries          all: number of starts at most (default: 5)
# --delete-after   all: delete the TPU at the end, also after an error or a signal
# --dry-run        print the commands and run none; states are not requested
#
#   launch/tpu_pod.sh all --name efx --zone us-west4-a --type v5litepod-16 --spot \
#     --setup 'mountpoint -q /mnt || sudo mount 10.0.0.2:/vol /mnt' \
#     -- --config configs/mod.py --workdir /mnt/runs/mod
#
# --workdir must be storage that all workers see (gs://, a mounted bucket, Filestore): the TPU's own
# disks are lost with it. The exit status is training's, of the process that ended with a final one
# if there is any (scheduled.sh lists them), since the others were lost because of it; else 1 after
# --tries tries, 2 for an error of this script, and 129, 130 or 143 after a signal.
# EFX_POLL: seconds between two requests of the state (default: 30). EFX_PAUSE: seconds before
# another try (default: 60).
set -euo pipefail

root="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
name='' zone='' project='' type='' version='' slices=1 setup='' extras='' worker=all tries=5
spot='' delete_after='' dry_run=''

say() {
  echo "efx: $*" >&2
}

fail() {
  say "error: $*"
  exit 2
}

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
workdir_flag='--?workdir[= ](gs://|/)'
[ -z "$delete_after" ] || [[ "$*" =~ $workdir_flag ]] ||
  fail "--delete-after deletes the run too; give --workdir gs://BUCKET/FOLDER or a mounted folder"
extras="tpu${extras:+,$extras}"
case "$*" in *gs://*) extras+=,gcs ;; esac
case "$*" in *s3://*) extras+=,s3 ;; esac
for extra in ${extras//,/ }; do # before the TPU costs money
  grep -q "^$extra = \[" "$root/pyproject.toml" ||
    fail "--extras: unknown extra '$extra'; pyproject.toml has the list"
done
case "$version$type" in
  v5litepod-*) version=v2-alpha-tpuv5-lite ;;
  v5p-*) version=v2-alpha-tpuv5 ;;
  v6e-*) version=v2-alpha-tpuv6e ;;
esac
nodes=(--node-id="$name") names=("$name")
if [ "$slices" -gt 1 ]; then
  nodes=(--node-count="$slices" --node-prefix="$name") names=()
  for ((slice = 0; slice < slices; slice++)); do names+=("$name-$slice"); done
fi
where=(--zone="$zone" ${project:+--project="$project"})
archive=efx.tar.gz children=() requested='' state=''
patience=1 # the first failure of gcloud is final: it may be the account

tpus() {
  if [ -n "$dry_run" ]; then
    printf '%q ' gcloud compute tpus "$@" "${where[@]}" && echo
  else
    gcloud compute tpus "$@" "${where[@]}"
  fi
}

# Runs a command on workers of a slice. The flag makes ssh notice a machine that is gone.
ssh_to() {
  tpus tpu-vm ssh "$1" --worker="$2" --command="$3" --ssh-flag=-oServerAliveInterval=30
}

# The command line of a step of tpu_worker.sh.
on_worker() {
  echo "EFX_EXTRAS=$extras bash efx/launch/tpu_worker.sh$(printf ' %q' "$@")"
}

# Runs a function for all slices at once.
each_slice() {
  local slice child status=0
  for slice in "${names[@]}"; do
    if [ -n "$dry_run" ]; then "$1" "$slice" "${@:2}" && continue; fi
    set -m # a process group, so that `finish` ends ssh too
    "$1" "$slice" "${@:2}" </dev/null &
    set +m
    children+=("$!")
  done
  for child in ${children[@]+"${children[@]}"}; do wait "$child" || status=$?; done
  children=()
  return "$status"
}

install() {
  tpus tpu-vm scp "$archive" "$1:efx.tar.gz" --worker=all && ssh_to "$1" all \
    "mkdir -p efx && tar -xzf efx.tar.gz -C efx && $(on_worker install "$setup")"
}

start() { ssh_to "$1" all "$(on_worker start "${@:2}")"; }

follow() { ssh_to "$1" "$worker" "$(on_worker follow "$2" "$1")"; }

stop() { ssh_to "$1" all "[ ! -e efx ] || $(on_worker stop)"; }

# Prints ABSENT without a request; its state until it is ACTIVE; the state of a slice that is not
# READY; else that of training: none (not started), running, lost (cut off), or the exit status.
request_state() {
  local found states='' slice retry='' final=''
  found="$(tpus queued-resources list --filter="name~/$name\$" --format='value(state.state)')" ||
    return
  [ "$found" = ACTIVE ] || { echo "${found:-ABSENT}" && return; }
  found="$(tpus tpu-vm list --filter="queuedResource~/$name\$" --format='value(state)')" || return
  for found in $found; do
    [ "$found" = READY ] || { echo "$found" && return; }
  done
  for slice in "${names[@]}"; do
    states+=" $(ssh_to "$slice" all "$(on_worker state) 2>/dev/null || echo efx-state none" |
      sed -n 's/^efx-state //p' | tr '\n' ' ')" || return
  done
  [ -n "${states// /}" ] || return
  for found in $states; do
    case "$found" in
      75 | 134 | 137 | 139 | 143) retry="$found" ;;
      [1-9]*) final="$found" ;;
    esac
  done
  case " $states " in
    *' lost '* | *' none '*[0-9r]* | *[0-9r]*' none '*) echo lost ;;
    *' none '*) echo none ;;
    *' running '*) echo running ;;
    *) echo "${final:-${retry:-0}}" ;;
  esac
}

# Sets `state`; tries again while gcloud or ssh fails.
update_state() {
  local try
  for ((try = 1; try <= patience; try++)); do
    state="$(request_state)" && patience=20 && return
    sleep "${EFX_POLL:-30}"
  done
  fail "TPU $name: cannot get its state; gcloud's errors are above, and training may be running"
}

# Requests the TPU if there is none and waits for it; returns 1 if that fails. Sets `state`.
create() {
  local before='' new=''
  while :; do
    update_state
    [ "$state" = "$before" ] || say "TPU $name: $state"
    before="$state"
    [ "$state" = ABSENT ] || requested=yes
    case "$new$state" in
      *none | *running | *lost | *[0-9]) return ;;
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

request() {
  requested=yes # a signal may come while it is
  tpus queued-resources create "$name" "${nodes[@]}" --accelerator-type="$type" \
    --runtime-version="${version:-tpu-ubuntu2204-base}" ${spot:+--spot}
}

# Starts efx on all workers, once all are installed: those that start wait for the others.
run() {
  case "$state" in
    running) fail "efx is already running on TPU $name; use the step stop first" ;;
    lost) each_slice stop || return ;; # workers that wait for the others
    none | [0-9]*) ;;
    *) fail "TPU $name is $state; use the step create first" ;;
  esac
  tar -czf "$archive" -C "$root" --exclude=./.venv --exclude=./runs --exclude=__pycache__ . &&
    each_slice install && each_slice start "$@"
}

# Follows the logs until training ends or is cut off; `state` is its exit status or the cause.
watch() {
  local lines=+1
  while :; do
    each_slice follow "$lines" || true
    lines=0
    update_state
    [ "$state" = running ] || return 0
    sleep "${EFX_POLL:-30}"
  done
}

all() {
  local try status=1
  for ((try = 1; try <= tries; try++)); do
    if [ "$try" -gt 1 ]; then
      sleep "${EFX_PAUSE:-60}"
      say "try $try of $tries; training resumes from its newest checkpoint"
    fi
    status=1
    if create && { [ "$state" = running ] || run "$@"; }; then
      watch
      case "$state" in
        ABSENT | DELETING) fail "TPU $name was deleted" ;;
        75 | 134 | 137 | 139 | 143) status="$state" ;;
        [0-9]*) exit "$state" ;;
      esac
      say "training was cut off: $state"
    else
      say "this try failed; the reason is above"
    fi
  done
  say "error: no more starts after --tries=$tries"
  exit "$status"
}

delete() {
  case "$state" in
    '' | none | running | lost | [0-9]*)
      each_slice stop || say "cannot stop efx; its last checkpoint is valid"
      ;;
  esac
  say "deleting TPU $name and its disks"
  tpus queued-resources delete "$name" --force --quiet
}

# Ends ssh; then deletes the TPU or says that it costs money.
finish() {
  local status=$? child
  trap - EXIT INT TERM HUP
  set +e
  for child in ${children[@]+"${children[@]}"}; do kill -- "-$child" 2>/dev/null; done
  children=()
  rm -f -- "$archive"
  if [ "$step$delete_after$requested" = allyesyes ]; then
    delete && exit "$status"
    [ "$status" -ne 0 ] || status=2
  fi
  [ -n "$dry_run" ] || [ "$step$status" = delete0 ] ||
    say "TPU $name costs money until launch/tpu_pod.sh delete --name $name ${where[*]}"
  exit "$status"
}

trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'say SIGHUP || exec >/dev/null 2>&1; exit 129' HUP # without a terminal each message would fail
if [ -n "$dry_run" ]; then # no state is requested
  tar() { printf '%q ' tar "$@" && echo; }
  state=0
  create() { request; }
  update_state() { :; }
  watch() { each_slice follow +1; }
else
  archive="$(mktemp "${TMPDIR:-/tmp}/efx-tpu.XXXXXX")"
fi
case "$step" in
  create) create || fail "cannot create TPU $name; gcloud's errors are above" ;;
  run) update_state && run "$@" ;;
  logs)
    update_state
    watch
    case "$state" in [0-9]*) exit "$state" ;; esac
    fail "training was not started or was cut off on TPU $name: $state; use the step run or all"
    ;;
  stop) each_slice stop ;;
  delete) delete ;;
  all) all "$@" ;;
esac
