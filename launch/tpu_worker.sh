#!/usr/bin/env bash
# The part of tpu_pod.sh that runs on a TPU worker, called by ssh:
#
#   install [COMMAND]    end efx; install Python 3.11 and the requirements (EFX_EXTRAS); run COMMAND
#   start [ARGUMENT...]  start efx with these arguments in the background; it outlives ssh
#   state                print "efx-state " and none (not started, or cut off), running, or the status
#   follow LINES         print the log from its first (LINES is +1) or next (0) line until efx ends
#   stop                 let efx save and end; kill it after EFX_STOP_SECONDS (default: 600)
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
worker="$(hostname)" # such as t1v-n-1a2b3c4d-w-0

# efx and the shell that waits for it hold this lock. A process id may be reused after a reboot.
running() {
  [ -e efx.lock ] && ! flock --shared --nonblock efx.lock true
}

install() {
  stop # an efx that waits for workers that are gone
  local apt=(sudo apt-get -qq -o DPkg::Lock::Timeout=600) # a new machine updates itself for minutes
  for _ in 1 2 3 4; do
    bash launch/environment.sh >/dev/null && bash -c "${1:-:}" && return
    echo "efx: $worker: installing Python 3.11; trying again" >&2 # most TPU versions have 3.10
    { "${apt[@]}" update && "${apt[@]}" install -y python3.11 python3.11-venv >/dev/null; } ||
      sleep "${EFX_PAUSE:-20}"
  done
  echo "efx: error: $worker: installation failed; the reason is above" >&2
  return 1
}

start() {
  exec 9>efx.lock
  flock --wait 5 9 || { echo "efx: error: $worker: efx is already running" >&2 && return 1; }
  rm -f efx.pid efx.status efx.stopped
  # A machine that shuts down ends this shell by SIGTERM too: no status is written, so the run
  # counts as cut off, although efx saves and ends with 0. After `stop` no failure restarts efx.
  # shellcheck disable=SC2016  # for the shell that is started
  setsid nohup bash -c 'bash launch/local.sh --distributed "$@" >efx.log 2>&1 &
echo $! >efx.pid
wait $! && status=0 || status=$?
[ "$status" -eq 0 ] || [ ! -e efx.stopped ] || status=1
echo "$status" >efx.status' efx "$@" </dev/null >/dev/null 2>&1 &
  until [ -s efx.pid ]; do sleep 0.1; done
}

state() {
  echo "efx-state $({ running && echo running; } || cat efx.status 2>/dev/null || echo none)"
}

follow() {
  local until_end=()
  ! running || until_end=(-F --pid="$(cat efx.pid)" --sleep-interval=0.3)
  tail ${until_end[@]+"${until_end[@]}"} -n "$1" efx.log | sed -u "s|^|[$worker] |"
}

stop() {
  running || return 0
  touch efx.stopped
  kill -TERM "$(cat efx.pid)" 2>/dev/null || true
  flock --shared --wait "${EFX_STOP_SECONDS:-600}" efx.lock true && return
  kill -KILL "$(cat efx.pid)"
  echo "efx: $worker: efx did not end and was killed; its last checkpoint is valid" >&2
}

"$@"
