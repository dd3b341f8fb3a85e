#!/usr/bin/env bash
# local.sh under a scheduler that ends it by SIGTERM and may start it again: Slurm, Kubernetes.
#
#   launch/scheduled.sh [arguments of local.sh]
#
# On SIGTERM efx saves and ends with 0, which a scheduler takes for "done". This ends with 143 then,
# else as efx does:
#
#   0              done
#   1, 2, 3        it had to stop, bad input, a loss that is not finite at the end: starting again
#                  ends in the same way
#   75             another process of the run was lost, or storage or a remote text could not be reached
#   134, 137, 139  aborted (JAX's runtime does it when a process is lost), killed (by a lack of
#                  memory, for example), crashed
#   143            told to stop
#
# After 75 and higher ones the same command goes on from the newest checkpoint.
#
# EFX_STORAGE      a mounted folder where runs are: nothing starts if folders in it cannot be
#                  renamed, since a checkpoint is written aside and then renamed
# EFX_FINAL_FIRST  adds 200 to 1, 2 and 3, for a scheduler that tells only the highest status of all
#                  processes: the others lose one that fails, and end with 75 or 134
set -euo pipefail

end() {
  case "${EFX_FINAL_FIRST:+$1}" in
    [123]) exit $((200 + $1)) ;;
    *) exit "$1" ;;
  esac
}

root="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
if [ -n "${EFX_STORAGE:-}" ]; then
  probe="$EFX_STORAGE/.efx-probe-$(hostname)-$$"
  renamed=''
  if mkdir -p "$probe" && : >"$probe/file" && mv "$probe" "$probe-renamed"; then renamed=yes; fi 2>/dev/null
  rm -rf -- "$probe" "$probe-renamed"
  if [ -z "$renamed" ]; then
    echo "efx: error: EFX_STORAGE=$EFX_STORAGE: cannot create and rename a folder there, as" \
      "checkpoints require; give a writable folder, or a bucket with a hierarchical namespace" >&2
    end 2
  fi
fi

told='' efx=''
stop() {
  told=yes
  [ -z "$efx" ] || kill -TERM "$efx" 2>/dev/null || true
}
trap stop TERM
bash "$root/launch/local.sh" "$@" &
efx=$!
[ -z "$told" ] || stop
status=0
wait "$efx" || status=$?
# A signal ends `wait` early.
while kill -0 "$efx" 2>/dev/null; do
  status=0
  wait "$efx" || status=$?
done
if [ -n "$told" ] && [ "$status" -eq 0 ]; then status=143; fi
end "$status"
