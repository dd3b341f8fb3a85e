#!/usr/bin/env bash
# What tpu_pod.sh does on one worker of a TPU. It copies the tree there and calls this by ssh:
#
#   install [COMMAND]     Python 3.11 and the requirements; then COMMAND, which may mount storage
#   start [ARGUMENT...]   efx with these arguments in the background; goes on when ssh ends
#   state                 prints "efx-state " and: none (never started), running, lost (cut off), or
#                         the exit status, with "stopped" behind it if `stop` has asked for the end
#   follow LINES [NAME]   the log from its first (LINES is +1) or next (0) line on, until efx ends;
#                         with NAME, each line begins with it and the worker's number
#   stop                  lets efx save and end
#   runs                  prints "efx-run WORKER PATH" for each run that is on the worker's own disks
#
# EFX_EXTRAS       extras of pyproject.toml that efx needs (default: tpu)
# EFX_OWN_DISKS    file systems to search for runs (default: / /tmp /dev/shm)
# EFX_STOP_SECONDS how long saving may take before efx is killed (default: 600)
# EFX_PAUSE        seconds between two tries to install (default: 20)
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
export EFX_EXTRAS="${EFX_EXTRAS:-tpu}"

# The supervisor holds this lock, and efx inherits it: it is free when both have ended, whatever has
# ended them. A process id may belong to something else after a reboot.
running() {
  [ -e efx.lock ] && ! flock --shared --nonblock efx.lock true
}

# The last number in the name of a TPU's host is the worker's.
number() {
  local host
  host="$(hostname)"
  echo "${host##*-}"
}

# A command that may fail for a while: a new machine updates itself at first, which locks apt's
# lists, and an index of packages does not always answer.
persist() {
  local try
  for ((try = 1; ; try++)); do
    "$@" >/dev/null && return
    [ "$try" -lt 4 ] || return 1
    echo "efx: installation failed on worker $(number) (try $try of 4); trying again" >&2
    sleep "${EFX_PAUSE:-20}"
  done
}

apt_python() {
  # The timeout is for dpkg's lock, which an update holds for minutes.
  sudo apt-get -qq -o DPkg::Lock::Timeout=600 update &&
    sudo apt-get -qq -o DPkg::Lock::Timeout=600 install -y python3.11 python3.11-venv
}

install() {
  # Most TPU software versions come with Python 3.10, and efx needs 3.11.
  if ! command -v python3.11 >/dev/null &&
    ! python3 -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    persist apt_python
  fi
  persist bash launch/environment.sh
  [ -z "${1:-}" ] || bash -c "$1"
}

start() {
  if running; then
    echo "efx: error: efx is already running on worker $(number); stop it first" >&2
    return 1
  fi
  rm -f efx.pids efx.log efx.status efx.stopped
  # The supervisor outlives ssh and notes how efx ended. When the machine shuts down, SIGTERM ends
  # it at once and nothing is noted, although efx saves and would end with 0: that is "lost".
  # shellcheck disable=SC2016  # for the shell that is started
  setsid nohup bash -c 'exec 9>efx.lock && flock --wait 5 9 || exit
bash launch/local.sh --distributed "$@" >efx.log 2>&1 &
echo "$! $$" >efx.pids
wait $!
echo $? >efx.status' efx "$@" </dev/null >/dev/null 2>&1 &
  for ((tries = 0; tries < 100; tries++)); do
    [ ! -s efx.pids ] || return 0
    sleep 0.1
  done
  echo "efx: error: efx did not start on worker $(number)" >&2
  return 1
}

state() {
  if running; then
    echo "efx-state running"
  elif [ ! -e efx.lock ]; then
    echo "efx-state none"
  else
    echo "efx-state $([ -s efx.status ] && cat efx.status || echo lost)" \
      "$([ ! -e efx.stopped ] || echo stopped)"
  fi
}

follow() {
  local lines="$1" label='' supervisor
  [ -z "${2:-}" ] || label="[$2:$(number)] "
  if [ ! -s efx.pids ]; then
    echo "efx: error: no run was started on worker $(number)" >&2
    return 1
  fi
  read -r _ supervisor <efx.pids
  touch efx.log
  tail --pid="$supervisor" --sleep-interval=0.3 -n "$lines" -F efx.log 2>/dev/null |
    sed -u "s|^|$label|"
}

stop() {
  local pids
  if ! running; then
    echo "efx: not running on worker $(number)"
    return
  fi
  read -r -a pids <efx.pids
  touch efx.stopped # before it ends: an end that was asked for is no reason to start again
  kill -TERM "${pids[0]}" 2>/dev/null || true
  if flock --shared --wait "${EFX_STOP_SECONDS:-600}" efx.lock true; then
    echo "efx: ended on worker $(number); its log has the step of the checkpoint"
  else
    kill -KILL "${pids[@]}" 2>/dev/null || true
    echo 137 >efx.status
    echo "efx: did not end on worker $(number) and was killed; its last checkpoint is valid" >&2
  fi
}

runs() {
  local folder
  # -xdev leaves out what is mounted: buckets, Filestore, disks that outlive the TPU.
  # shellcheck disable=SC2086  # a list
  { find ${EFX_OWN_DISKS:-/ /tmp /dev/shm} -xdev -type f \( -path '*/clusters/clustering.json' \
    -o -name run.json \) 2>/dev/null || true; } | sort -u |
    while IFS= read -r folder; do
      folder="${folder%/*}"
      [ "${folder##*/}" != clusters ] || folder="${folder%/*}"
      echo "efx-run $(number) $folder"
    done
}

"$@"
