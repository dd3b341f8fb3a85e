#!/usr/bin/env bash
# Runs efx as several processes on this machine that talk over loopback: what a cluster does, small
# enough to try a multi-host run on a laptop.
#
#   launch/multiprocess.sh PROCESSES [arguments of local.sh]
#   launch/multiprocess.sh 2 --cpu_devices 4 --config configs/mod.py:smoke --workdir runs/two
#
# The processes use the CPU unless JAX_PLATFORMS says otherwise; one process drives all of a
# machine's GPUs, so local.sh is the way to use those. Process 0 writes to the terminal, the others
# to a log each, shown if one fails. When one ends badly or Ctrl-C comes, all are stopped. Exit
# status: the first that was not 0. EFX_PORT sets the coordinator's port (default: a free one).
set -euo pipefail

root="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
count="${1:-}"
case "$count" in
  '' | *[!0-9]* | 0*)
    echo "efx: error: number of processes: '$count'; give a number from 1 on as the first argument" >&2
    exit 2
    ;;
esac
shift

python="$(bash "$root/launch/environment.sh")"
free_port='import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
port="${EFX_PORT:-$("$python" -c "$free_port")}"
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
logs="$(mktemp -d "${TMPDIR:-/tmp}/efx-processes.XXXXXX")"
pids=()

stop() {
  # SIGTERM first: efx saves a checkpoint and ends. A worker whose peers are gone cannot, so wait
  # no longer than a while.
  local tries=0
  kill "${pids[@]}" 2>/dev/null || true
  while kill -0 "${pids[@]}" 2>/dev/null && [ $((tries += 1)) -le 100 ]; do sleep 0.2; done
  kill -9 "${pids[@]}" 2>/dev/null || true
}
trap 'stop; exit 130' INT
trap 'stop; exit 143' TERM

for ((index = 0; index < count; index++)); do
  flags=(--coordinator_address="127.0.0.1:$port" --num_processes="$count" --process_id="$index")
  if [ "$index" -eq 0 ]; then
    bash "$root/launch/local.sh" "${flags[@]}" "$@" &
  else
    bash "$root/launch/local.sh" "${flags[@]}" "$@" >"$logs/$index.log" 2>&1 &
  fi
  pids+=($!)
done

# Ends when all have ended, or at the first that fails (bash 3.2 has no `wait -n`).
status=0
running=("${pids[@]}")
while [ ${#running[@]} -gt 0 ] && [ "$status" -eq 0 ]; do
  still=()
  for pid in "${running[@]}"; do
    if kill -0 "$pid" 2>/dev/null; then
      still+=("$pid")
    else
      wait "$pid" || status=$?
    fi
  done
  running=(${still[@]+"${still[@]}"})
  [ ${#running[@]} -eq 0 ] || sleep 0.2
done
if [ "$status" -ne 0 ]; then
  stop
  for log in "$logs"/*.log; do
    [ -s "$log" ] || continue
    echo "efx: last lines of process $(basename "$log" .log):" >&2
    tail -n 20 "$log" >&2
  done
  echo "efx: error: a process ended with status $status (logs: $logs)" >&2
  exit "$status"
fi
rm -rf -- "$logs"
