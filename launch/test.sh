#!/usr/bin/env bash
# Runs the test suite on this machine, with nothing but Python 3.11 or newer installed.
#
#   ./launch/test.sh                                       # tests of an extra not installed skip
#   ./launch/test.sh --all                                 # and the slow ones
#   ./launch/test.sh --family mod_options                   # all properties of a row of tests/families.py
#   ./launch/test.sh --extras dev,interop,notebooks        # install these and test them too
#   ./launch/test.sh tests/house -k einsum                  # any arguments of pytest
#
# Two processes (-n overrides it) take a file each at a time, since its tests share models and runs,
# in the order of the files, since those with few tests take the longest. One that dies fails the
# run: a replacement may wait forever for tests that are done. EFX_EXTRAS=... sets the extras too.
# The lints (ruff, import directions, shellcheck) are tests where the extra `dev` is installed.
set -euo pipefail

root="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
arguments=()
tier=(-m 'not slow')
dist=loadfile
while [ $# -gt 0 ]; do
  case "$1" in
    --extras)
      [ $# -gt 1 ] || { echo "efx: error: --extras: give a list such as dev,interop" >&2; exit 2; }
      export EFX_EXTRAS="$2"
      shift
      ;;
    --extras=*) export EFX_EXTRAS="${1#*=}" ;;
    --all) tier=() ;;
    --family)
      [ $# -gt 1 ] || { echo "efx: error: --family: no name; use a row of tests/families.py" >&2; exit 2; }
      tier=(--family "$2" tests/contract)
      dist=load
      shift
      ;;
    *) arguments+=("$1") ;;
  esac
  shift
done

python="$(bash "$root/launch/environment.sh")"
cd -- "$root"
exec "$python" -m pytest -n 2 --dist "$dist" --no-loadscope-reorder --max-worker-restart=0 \
  ${tier[@]+"${tier[@]}"} ${arguments[@]+"${arguments[@]}"}
