#!/usr/bin/env bash
# local.sh under a scheduler that ends it by SIGTERM and may start it again: Slurm, Kubernetes.
#
#   launch/scheduled.sh [arguments of local.sh]
#
# On SIGTERM efx saves and ends with 0, which a scheduler takes for "done". This ends with 143 then,
# else as efx does. EFX_STORAGE is a mounted folder where runs are: nothing starts if folders in it
# cannot be renamed, since a checkpoint is written aside and then renamed.
set -euo pipefail

root="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
if [ -n "${EFX_STORAGE:-}" ]; then
  probe="$EFX_STORAGE/.efx-probe-$(hostname)-$$"
  renamed=''
  if mkdir -p "$probe" && : >"$probe/file" && mv "$probe" "$probe-renamed"; then renamed=yes; fi 2>/dev/null
  rm -rf -- "$probe" "$probe-renamed"
  if [ -z "$renamed" ]; then
    echo "efx: error: folders in EFX_STORAGE=$EFX_STORAGE cannot be made and renamed, as checkpoints" \
      "need; a Cloud Storage bucket has to have a hierarchical namespace" >&2
    exit 2
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
exit "$status"
