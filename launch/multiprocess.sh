#!/usr/bin/env bash
# Runs efx as several processes on this machine, connected over loopback, to try a multi-host run.
#
#   launch/multiprocess.sh PROCESSES [arguments of local.sh]
#   launch/multiprocess.sh 2 --cpu_devices 4 --config configs/mod.py:smoke --workdir runs/two
#
# They use the CPU unless JAX_PLATFORMS is set; one process drives all GPUs of a machine, so use
# local.sh for those. Process 0 writes to the terminal, the others to logs, printed if one fails.
# At the first failure or Ctrl-C efx saves and ends in all. Exit status: 0, or that of the process
# that failed first. EFX_PORT: the coordinator's port (default: a free one).
set -euo pipefail

root="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
count="${1:-}"
case "$count" in
  '' | *[!0-9]* | 0*)
    echo "efx: error: number of processes '$count': give a number as the first argument" >&2
    exit 2
    ;;
esac
shift

python="$(bash "$root/launch/environment.sh")"
free_port='import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
port="${EFX_PORT:-$("$python" -c "$free_port")}"
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
logs="$(mktemp -d "${TMPDIR:-/tmp}/efx-processes.XXXXXX")"
pids=() status=0
trap 'status=130' INT
trap 'status=143' TERM
for ((index = 0; index < count; index++)); do
  flags=(--coordinator_address="127.0.0.1:$port" --num_processes="$count" --process_id="$index")
  if [ "$index" -eq 0 ]; then
    bash "$root/launch/local.sh" "${flags[@]}" "$@" &
  else
    bash "$root/launch/local.sh" "${flags[@]}" "$@" >"$logs/$index.log" 2>&1 &
  fi
  pids+=($!)
done

# bash 3.2 has no `wait -n`.
while [ "$status" -eq 0 ] && [ ${#pids[@]} -gt 0 ]; do
  sleep 0.2
  for index in "${!pids[@]}"; do
    kill -0 "${pids[index]}" 2>/dev/null && continue
    wait "${pids[index]}" || status=$?
    unset "pids[index]"
  done
done
if [ "$status" -ne 0 ]; then
  if [ ${#pids[@]} -gt 0 ]; then
    kill "${pids[@]}" 2>/dev/null || true
    { sleep 20 && kill -9 "${pids[@]}"; } >/dev/null 2>&1 & # without its peers none may end
    wait "${pids[@]}" || true
    kill "$!"
  fi
  tail -n 20 "$logs"/*.log >&2 || true
  echo "efx: error: stopped with status $status (logs: $logs)" >&2
  exit "$status"
fi
rm -rf -- "$logs"
