#!/usr/bin/env bash
# Prints the path of a Python with efx's requirements, in a virtual environment that it creates the
# first time and updates when the pinned versions have changed. The other scripts call it first.
#
# EFX_PYTHON   the Python to create it with (default: the first of python3.11, python3.12,
#              python3.13, python3, python that is 3.11 or newer)
# EFX_VENV     its path (default: .venv in the repository)
# EFX_EXTRAS   extras of pyproject.toml to install too, such as dev,interop or tpu
set -euo pipefail

root="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${EFX_VENV:-$root/.venv}"
candidates=("$venv/bin/python" python3.11 python3.12 python3.13 python3 python)
if [ -n "${EFX_PYTHON:-}" ]; then candidates=("$EFX_PYTHON"); fi
for candidate in "${candidates[@]}"; do
  if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    exec "$candidate" "$root/launch/environment.py" "$venv" "${EFX_EXTRAS:-}"
  fi
done
tried="${EFX_PYTHON:+EFX_PYTHON=}${candidates[*]}"
echo "efx: error: no Python 3.11 or newer: tried $tried; install it, or set EFX_PYTHON=PATH" >&2
exit 2
