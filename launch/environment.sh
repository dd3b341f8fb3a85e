#!/usr/bin/env bash
# Prints the path of a Python that has all that efx needs. The first time, and whenever
# requirements.txt has changed, it builds or updates a virtual environment for it; the scripts
# beside it call it first.
#
#   launch/environment.sh
#
# EFX_PYTHON   the Python to build the environment with (default: the first of python3.11,
#              python3.12, python3.13, python3, python that is 3.11 or newer)
# EFX_VENV     where the environment is (default: .venv in the repository)
# EFX_EXTRAS   extras of pyproject.toml to install too, such as dev,interop or tpu
set -euo pipefail

root="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${EFX_VENV:-$root/.venv}"
found=''

# Whether $1 is a Python that will do; if it runs but is too old, remembers its version in `found`.
usable() {
  local version
  # Older Pythons must be able to parse this too.
  version="$("$1" -c 'import sys; print(".".join(map(str, sys.version_info[:3])))' 2>/dev/null)" ||
    return 1
  case "$version" in
    3.1[1-9].* | 3.[2-9][0-9].*) return 0 ;;
    *) found="$found; $1 is Python $version" && return 1 ;;
  esac
}

if [ -n "${EFX_PYTHON:-}" ]; then
  candidates=("$EFX_PYTHON")
else
  # The environment's own Python first: it is there every time but the first.
  candidates=("$venv/bin/python" python3.11 python3.12 python3.13 python3 python)
fi
for candidate in "${candidates[@]}"; do
  if usable "$candidate"; then
    exec "$candidate" "$root/launch/environment.py" "$venv" "${EFX_EXTRAS:-}"
  fi
done
tried="${EFX_PYTHON:+EFX_PYTHON=$EFX_PYTHON}"
tried="${tried:-python3.11, python3.12, python3.13, python3, python}$found"
echo "efx: error: Python 3.11 or newer not found: tried $tried;" \
  "install it, or set EFX_PYTHON=PATH" >&2
exit 2
