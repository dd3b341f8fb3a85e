#!/usr/bin/env bash
# Trains on this machine, with nothing but Python 3.11 or newer installed.
#
#   ./launch/local.sh                                     # the default: configs/mod.py:quick in runs/mod
#   ./launch/local.sh --config configs/gpt2.py            # another config, in runs/gpt2
#   ./launch/local.sh --config.steps=100 --workdir /tmp/a # any flag of efx.main
#   ./launch/local.sh --workdir runs/gpt2                 # resumes a run, with its own config
#   ./launch/local.sh --mode=sample --prompt "def "       # what runs/mod has learnt
#   ./launch/local.sh sample runs/gpt2                    # words as of efx.main: no defaults
#
# Creates .venv with the command efx the first time (options: environment.sh), then runs
# `python -m efx.main` with all arguments; --config and --workdir have defaults. Run again, it
# resumes. It works from any folder: the defaults are in the repository, other paths relative to the
# current folder.
set -euo pipefail

root="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
python="$(bash "$root/launch/environment.sh")"

# Short paths where they are equal: the log and the run directory show them.
if [ "$PWD" -ef "$root" ]; then prefix=''; else prefix="$root/"; fi

# Prints the value of the flag --NAME: value NAME "$@"
value() {
  local name="$1"
  while shift && [ $# -gt 0 ]; do
    case "$1" in
      --"$name" | -"$name") echo "${2:-}" ;;
      --"$name"=* | -"$name"=*) echo "${1#*=}" ;;
    esac
  done | tail -n 1
}
config="$(value config "$@")" workdir="$(value workdir "$@")" mode="$(value mode "$@")"

defaults=()
# An imported or converted model is not that of the config's name, so it has no default directory.
case "$mode" in import | convert) new=yes ;; *) new='' ;; esac
case "${1:--}" in -*) ;; *) new=yes mode=words ;; esac # of a MODE or RUN
if [ -z "$workdir$new" ]; then
  # configs/gpt2.py:smoke and gpt2:smoke run in runs/gpt2-smoke
  name="$(basename -- "${config:-mod.py}")"
  name="${name%.py}"
  name="${name/.py:/:}"
  name="${name/:/-}"
  defaults+=(--workdir "${prefix}runs/$name")
fi
# An existing run has its own config.
if [ -z "$config" ] && [ "${mode:-train}" = train ] && [ ! -f "${workdir:+$workdir/config.json}" ]; then
  defaults=(--config "${prefix}configs/mod.py:quick" ${defaults[@]+"${defaults[@]}"})
fi

# -P: modules come from the repository and the environment, never from the current folder.
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
EFX_COMMAND="$(printf %q "${prefix:-./}launch/local.sh")" # in the closing hints of a run
export EFX_COMMAND
exec "$python" -P -m efx.main ${defaults[@]+"${defaults[@]}"} "$@"
