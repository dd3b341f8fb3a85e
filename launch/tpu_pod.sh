#!/usr/bin/env bash
# Trains on a Cloud TPU slice of any size: one process per worker, JAX's own distributed runtime.
#
#   launch/tpu_pod.sh STEP --name NAME --zone ZONE --type TYPE [options] [-- arguments of efx.main]
#
# STEP     create   make the TPU
#          copy     copy this tree to every worker and install its requirements there
#          run      start efx on every worker; goes on when this machine disconnects
#          logs     follow worker 0's log until training ends; exit status is training's
#          delete   delete the TPU and its disks
#          all      create, copy, run, logs; then delete, if --delete-after is given
#
# --name, --zone   which TPU; --type is needed to create, as in v5litepod-16 (see
#                  `gcloud compute tpus accelerator-types list`)
# --version        software version of the TPU (default: the one that belongs to the type)
# --project        Google Cloud project (default: gcloud's)
# --spot           create a preemptible TPU
# --delete-after   let `all` delete the TPU when training has ended, well or not
# --dry-run        print each command and run none
#
#   launch/tpu_pod.sh all --name efx --zone us-west4-a --type v5litepod-16 -- \
#     --config configs/mod.py --workdir /mnt/runs/mod
#
# With several workers, --workdir must be storage that all of them see (a mounted bucket, Filestore):
# each writes its part of a checkpoint. The files of a TPU go when it is deleted.
set -euo pipefail

root="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
name='' zone='' type='' version='' project='' spot='' dry='' delete_after='' archive=''

fail() {
  echo "efx: error: $1" >&2
  exit 2
}

steps='create, copy, run, logs, delete, all'
step="${1:-}"
case "$step" in
  create | copy | run | logs | delete | all) shift ;;
  -h | --help) sed -n '2,/^set -/{s/^# \{0,1\}//;/^set -/d;p;}' "${BASH_SOURCE[0]}" && exit ;;
  *) fail "the first argument is the step, one of $steps; got '$step'" ;;
esac
while [ $# -gt 0 ]; do
  option="${1%%=*}"
  case "$option" in
    --) shift && break ;;
    --name | --zone | --type | --version | --project)
      if [ "$option" = "$1" ]; then
        [ $# -gt 1 ] || fail "$option needs a value"
        value="$2" && shift
      else
        value="${1#*=}"
      fi
      case "$value" in '' | -*) fail "$option needs a value; got '$value'" ;; esac
      printf -v "${option#--}" '%s' "$value"
      ;;
    --spot) spot=yes ;;
    --dry-run) dry=yes ;;
    --delete-after) delete_after=yes ;;
    *) fail "unknown option $1; arguments of efx.main go after --" ;;
  esac
  shift
done
[ -n "$name" ] || fail "--name is missing"
[ -n "$zone" ] || fail "--zone is missing"
case "$step" in
  create | all) [ -n "$type" ] || fail "--type is missing, as in --type v5litepod-16" ;;
esac
[ -n "$dry" ] || command -v gcloud >/dev/null ||
  fail "gcloud is not installed; it is part of the Google Cloud CLI (or see the commands: --dry-run)"

if [ -z "$version" ]; then
  case "$type" in
    v5litepod-*) version=v2-alpha-tpuv5-lite ;;
    v5p-*) version=v2-alpha-tpuv5 ;;
    v6e-*) version=v2-alpha-tpuv6e ;;
    *) version=tpu-ubuntu2204-base ;;
  esac
fi
where=(--zone="$zone")
[ -z "$project" ] || where+=(--project="$project")

# $1 as one word of a shell.
quote() {
  case "$1" in
    '' | *[!a-zA-Z0-9_.,:/=@%+-]*) printf "'%s'" "$(printf %s "$1" | sed "s/'/'\\\\''/g")" ;;
    *) printf %s "$1" ;;
  esac
}

# Runs a command, or prints it so that it can be pasted.
run() {
  local word separator=''
  if [ -z "$dry" ]; then
    "$@"
    return
  fi
  for word in "$@"; do
    printf %s "$separator" && quote "$word" && separator=' '
  done
  echo
}

tpu() {
  run gcloud compute tpus tpu-vm "$@" "${where[@]}"
}

create() {
  tpu create "$name" --accelerator-type="$type" --version="$version" ${spot:+--spot}
}

# Most TPU software versions come with Python 3.10, and efx needs 3.11.
install='cd efx &&
{ command -v python3.11 || python3 -c "import sys, ensurepip; sys.exit(sys.version_info < (3, 11))" ||
  { sudo apt-get -qq update && sudo apt-get -qq install -y python3.11 python3.11-venv; }; } >/dev/null &&
EFX_EXTRAS=tpu bash launch/environment.sh'

copy() {
  if [ -n "$dry" ]; then
    archive=efx.tar.gz
  else
    archive="$(mktemp "${TMPDIR:-/tmp}/efx.XXXXXX")"
  fi
  run tar -czf "$archive" -C "$root" --exclude=./.venv --exclude=./runs --exclude=__pycache__ .
  tpu scp "$archive" "$name:efx.tar.gz" --worker=all
  tpu ssh "$name" --worker=all --command='mkdir -p efx && tar -xzf efx.tar.gz -C efx'
  tpu ssh "$name" --worker=all --command="$install"
}

start() {
  local launch='EFX_EXTRAS=tpu bash launch/local.sh --distributed' argument
  for argument in "$@"; do launch+=" $(quote "$argument")"; done
  # A shell in between outlives the connection and notes how training ended.
  # shellcheck disable=SC2016  # what is in single quotes is for the worker's shell
  launch='echo $$ >efx.pid; '"$launch"' >efx.log 2>&1; echo $? >efx.status'
  # shellcheck disable=SC2016
  tpu ssh "$name" --worker=all --command='cd efx || exit
if kill -0 "$(cat efx.pid 2>/dev/null)" 2>/dev/null; then echo "efx runs here already" >&2; exit 1; fi
rm -f efx.pid efx.log efx.status
setsid nohup bash -c '"$(quote "$launch")"' </dev/null >/dev/null 2>&1 &'
}

logs() {
  # shellcheck disable=SC2016
  tpu ssh "$name" --worker=0 --command='cd efx || exit
for second in $(seq 30); do [ -f efx.log ] && break; sleep 1; done
[ -f efx.log ] || { echo "efx: error: no run has been started here" >&2; exit 1; }
tail --pid="$(cat efx.pid)" -n +1 -F efx.log
exit "$(cat efx.status 2>/dev/null || echo 1)"'
}

delete() {
  tpu delete "$name" --quiet
}

# Whatever happens: no archive is left behind, and nobody pays for a TPU unawares.
finish() {
  local status=$?
  trap - EXIT
  if [ -z "$dry" ]; then
    [ -z "$archive" ] || rm -f -- "$archive"
    if [ "$step" != delete ] && [ -z "$deleted" ]; then
      echo "efx: if TPU $name exists, it costs money until it is deleted:" \
        "launch/tpu_pod.sh delete --name $name ${where[*]}" >&2
    fi
  fi
  exit "$status"
}
deleted=''
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

case "$step" in
  run) start "$@" ;;
  all)
    create
    copy
    start "$@"
    status=0
    logs || status=$?
    if [ -n "$delete_after" ]; then
      delete
      deleted=yes
    fi
    exit "$status"
    ;;
  *) "$step" ;;
esac
