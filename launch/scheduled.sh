#!/usr/bin/env bash
# Runs local.sh under a scheduler that ends it by SIGTERM and may start it again: Slurm, Kubernetes.
#
#   launch/scheduled.sh [arguments of local.sh]
#
# On SIGTERM efx saves and ends with 0, which a scheduler takes for "done", so this ends with 143
# instead. Exit statuses:
#
#   0              done
#   1, 2, 3        an error, bad input, a loss that is not finite: final, another start ends the same
#   75             another process of the run, storage or a remote text was lost
#   134, 137, 139  aborted (by JAX when a process is lost), killed (out of memory), crashed
#   143            stopped by a signal
#
# From 75 on the same command resumes from the newest checkpoint.
#
# EFX_STORAGE      a mounted folder with the runs; refused if it cannot rename folders, which saving
#                  a checkpoint requires
# EFX_FINAL_FIRST  adds 200 to 1, 2 and 3: Slurm reports the highest status of all processes, and
#                  those that lose a failed one end with 75 or 134
set -euo pipefail

end() {
  case "${EFX_FINAL_FIRST:+$1}" in
    [123]) exit $((200 + $1)) ;;
    *) exit "$1" ;;
  esac
}

root="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
if [ -n "${EFX_STORAGE:-}" ]; then
  probe=''
  if ! { mkdir -p "$EFX_STORAGE" && probe="$(mktemp -d "$EFX_STORAGE/.efx-probe-XXXXXX")" &&
    : >"$probe/file" && mv "$probe" "$probe-renamed"; } 2>/dev/null; then
    rm -rf -- "$probe"
    echo "efx: error: EFX_STORAGE=$EFX_STORAGE: cannot create and rename a folder there; give a" \
      "writable folder, or a bucket with a hierarchical namespace" >&2
    end 2
  fi
  rm -r -- "$probe-renamed"
fi

stopped='' status=0
bash "$root/launch/local.sh" "$@" &
trap 'stopped=yes; kill -TERM $! 2>/dev/null' TERM
wait $! || status=$?
while kill -0 $! 2>/dev/null; do # a signal has ended `wait`
  status=0
  wait $! || status=$?
done
[ -z "$stopped" ] || [ "$status" -ne 0 ] || status=143
end "$status"
