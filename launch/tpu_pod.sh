#!/usr/bin/env bash
# Trains on Cloud TPUs, one slice of any size or several: one process per worker, JAX's own
# distributed runtime.
#
#   launch/tpu_pod.sh STEP --name NAME --zone ZONE [options] [-- arguments of efx.main]
#
# STEP     create   ask for the TPU (a queued resource) and wait until it is there
#          copy     copy this tree to every worker and install its requirements there
#          run      start efx on every worker; goes on when this machine disconnects
#          logs     follow the logs until training ends; exit status is training's
#          stop     let efx save and end on every worker; the TPU stays
#          delete   delete the TPU and its disks; not while efx runs or runs are on these disks.
#                   Nothing else is looked for there: other files go with it
#          all      create, copy, run, logs, and again when the TPU has been preempted, a process
#                   has been lost, or copying or starting has failed; then delete, if --delete-after
#                   is given. Started again, it goes on where it is
#
# --name, --zone   which TPU
# --type           create: its type, as in v5litepod-16 (see
#                  `gcloud compute tpus accelerator-types list`)
# --slices         create: how many of that type, joined by the data-centre network (default: 1).
#                  Between them only the mesh axis data goes: --config.mesh.data is a multiple of N
# --version        create: software version of the TPU (default: the one that belongs to the type)
# --spot           create: a preemptible TPU
# --setup          copy: a command for every worker, such as one that mounts storage. It runs at each
#                  try, also on a TPU that has done it
# --extras         copy, run: extras of pyproject.toml to install beside tpu, as in wandb,hf. With
#                  gs:// or s3:// in the arguments of efx.main, gcs or s3 is installed too
# --worker         logs: one worker, 3, or 1:3 for one of slice 1 (default: all)
# --tries          all: how often to start, the first time included (default: 5)
# --delete-after   all: delete the TPU at the end, whatever that is: training that has ended well or
#                  not, tries that are used up, an error, Ctrl-C or another signal. Where efx still
#                  runs, it saves and ends first. Refused like the step delete; --save and --discard
#                  are for it too. Buckets and mounted storage stay as they are
# --save           delete: copy the runs that are on the TPU's own disks to this folder first
# --discard        delete: whatever is on its disks, and even while efx runs
# --project        Google Cloud project (default: gcloud's)
# --dry-run        print each command and run none
#
#   launch/tpu_pod.sh all --name efx --zone us-west4-a --type v5litepod-16 --spot \
#     --setup 'mountpoint -q /mnt || sudo mount 10.0.0.2:/vol /mnt' \
#     -- --config configs/mod.py --workdir /mnt/runs/mod
#
# With several workers, --workdir must be storage that all of them see (a mounted bucket, Filestore):
# each writes its part of a checkpoint. What is on the TPU's own disks goes when it is preempted or
# deleted.
#
# The exit status is training's. Final are 0, done or saved on request; 1, it had to stop; 2, bad
# input; 3, a loss that is not finite at the end. `all` starts again after 75, another process was
# lost, or storage or a remote text could not be reached; 134, aborted (JAX's runtime does it when a
# process is lost); 137, killed (by a lack of memory, for example); 139, crashed; 143, stopped by a
# signal before it could save; unless the step stop requested it. With several processes a final
# status decides: it is why the others end with 75 or 134. This script itself ends with 1 where
# training was cut off, with 2 for bad input, and with 129, 130, 143 after SIGHUP, SIGINT, SIGTERM.
#
# EFX_POLL    seconds between two looks at the TPU (default: 30)
# EFX_PAUSE   seconds before the next try on a TPU that is still there, or to delete it: time for
#             ssh keys to arrive and networks to recover (default: 60)
set -euo pipefail

root="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
name='' zone='' type='' version='' project='' spot='' dry='' delete_after='' setup='' save=''
discard='' extras='' slices=1 worker=all tries=5
poll="${EFX_POLL:-30}"
pause="${EFX_PAUSE:-60}"
patience=20 # looks without an answer before giving up

fail() {
  echo "efx: error: $*" >&2
  exit 2
}

steps='create, copy, run, logs, stop, delete, all'
step="${1:-}"
case "$step" in
  create | copy | run | logs | stop | delete | all) shift ;;
  -h | --help) sed -n '2,/^set -/{s/^# \{0,1\}//;/^set -/d;p;}' "${BASH_SOURCE[0]}" && exit ;;
  *) fail "unknown step '$step'; the first argument is one of $steps" ;;
esac
while [ $# -gt 0 ]; do
  option="${1%%=*}"
  case "$option" in
    --) shift && break ;;
    --name | --zone | --type | --version | --project | --slices | --setup | --extras | --worker | \
      --tries | --save)
      if [ "$option" = "$1" ]; then
        [ $# -gt 1 ] || fail "$option: give a value"
        value="$2" && shift
      else
        value="${1#*=}"
      fi
      case "$value" in '' | -*) fail "$option='$value': give a value" ;; esac
      printf -v "${option#--}" '%s' "$value"
      ;;
    --spot | --dry-run | --delete-after | --discard)
      [ "$option" = "$1" ] || fail "$1: $option takes no value"
      case "$option" in
        --spot) spot=yes ;;
        --dry-run) dry=yes ;;
        --delete-after) delete_after=yes ;;
        --discard) discard=yes ;;
      esac
      ;;
    *) fail "unknown option $1; give arguments of efx.main after --" ;;
  esac
  shift
done
[ -n "$name" ] || fail "--name is missing, as in --name efx"
[ -n "$zone" ] || fail "--zone is missing, as in --zone us-west4-a"
case "$name" in *[!a-z0-9-]*) fail "--name=$name: use only a-z, 0-9 and -" ;; esac
for option in slices tries; do
  case "${!option}" in
    *[!0-9]* | 0*) fail "--$option=${!option}: must be at least 1" ;;
  esac
done
case "$worker" in
  all) ;;
  *[!0-9:]* | *:*:* | :* | *:) fail "--worker=$worker: give all, a number, or SLICE:NUMBER" ;;
esac
case "$step" in
  create | all) [ -n "$type" ] || fail "--type is missing, as in --type v5litepod-16" ;;
esac
case "$extras" in
  *[!a-z0-9,]*) fail "--extras=$extras: give a list such as wandb,hf" ;;
esac
[ -n "$dry" ] || command -v gcloud >/dev/null ||
  fail "gcloud is not installed; install the Google Cloud CLI, or print the commands with --dry-run"

if [ -z "$version" ]; then
  case "$type" in
    v5litepod-*) version=v2-alpha-tpuv5-lite ;;
    v5p-*) version=v2-alpha-tpuv5 ;;
    v6e-*) version=v2-alpha-tpuv6e ;;
    *) version=tpu-ubuntu2204-base ;;
  esac
fi
# What efx needs on the workers, and where its run is.
extras="tpu${extras:+,$extras}" workdir='' previous=''
for word in "$@"; do
  case "$word" in *gs://*) extras+=,gcs ;; esac
  case "$word" in *s3://*) extras+=,s3 ;; esac
  case "$previous" in --workdir | -workdir) workdir="$word" ;; esac
  case "$word" in --workdir=* | -workdir=*) workdir="${word#*=}" ;; esac
  previous="$word"
done
# Each once, in their order.
words="$extras" extras=''
while [ -n "$words" ]; do
  word="${words%%,*}"
  words="${words#"$word"}" words="${words#,}"
  case ",$extras," in *",$word,"*) ;; *) extras+="${extras:+,}$word" ;; esac
done
# A wrong one would be found on every worker of a TPU that is paid for by then.
for word in ${extras//,/ }; do
  [ ! -e "$root/pyproject.toml" ] || grep -q "^$word = \[" "$root/pyproject.toml" ||
    fail "--extras: unknown extra '$word'; pyproject.toml has the list"
done
# A machine that is gone does not close a connection; asked every 30 seconds, ssh notices.
alive=(--ssh-flag=-oServerAliveInterval=30)
where=(--zone="$zone")
[ -z "$project" ] || where+=(--project="$project")

# ---- commands ----------------------------------------------------------------------------------

scratch="$(mktemp -d "${TMPDIR:-/tmp}/efx-tpu.XXXXXX")"
children=() deleted='' here='' # here: the TPU has been asked for or found

# Whatever happens: nothing is left behind here, and nobody pays for a TPU unawares.
finish() {
  ending=$?
  trap - EXIT
  set +e
  stop_children
  if [ "$step" = all ] && [ -n "$delete_after" ] && [ -n "$here" ]; then
    trap 'leave 130' INT # a second one ends this too
    trap 'leave 143' TERM
    trap 'leave 129' HUP
    # In a shell of its own: in a trap `return` tells the status from before the trap.
    if (clear_up); then deleted=yes; elif [ "$ending" -eq 0 ]; then ending=2; fi
  fi
  leave "$ending"
}

leave() {
  rm -rf -- "$scratch"
  if [ -z "$dry" ] && [ -z "$deleted" ]; then
    say "TPU $name costs money until it is deleted, if it exists; delete it with" \
      "launch/tpu_pod.sh delete --name $name ${where[*]}"
  fi
  exit "$1"
}

stop_children() {
  local child
  for child in ${children[@]+"${children[@]}"}; do kill -- "-$child" 2>/dev/null || true; done
  children=()
}

# The terminal is gone, and what is written there would be an error; a file still takes it.
hang_up() {
  say "the terminal is gone (SIGHUP)" || exec >/dev/null 2>&1
  exit 129
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap hang_up HUP

say() {
  echo "efx: $*" >&2
}

# $1 as one word of a shell.
quote() {
  case "$1" in
    '' | *[!a-zA-Z0-9_.,:/=@%+-]*) printf "'%s'" "$(printf %s "$1" | sed "s/'/'\\\\''/g")" ;;
    *) printf %s "$1" ;;
  esac
}

# A command as one line that can be pasted.
show() {
  local word separator=''
  for word in "$@"; do
    printf %s "$separator" && quote "$word" && separator=' '
  done
  echo
}

run() {
  if [ -n "$dry" ]; then show "$@"; else "$@" 3>&-; fi
}

gcloud_tpus() {
  run gcloud compute tpus "$@" "${where[@]}"
}

# What gcloud answers. A dry run shows each question once and takes $1 for the answer.
exec 3>&1
ask() {
  local line
  if [ -z "$dry" ]; then
    gcloud_tpus "${@:2}" </dev/null
    return
  fi
  line="$(gcloud_tpus "${@:2}")"
  if ! grep -qxF -- "$line" "$scratch/asked" 2>/dev/null; then
    echo "$line" | tee -a "$scratch/asked" >&3
  fi
  printf '%b' "$1"
}

# The shell command of a step of tpu_worker.sh.
worker_step() {
  case "$1" in install | start) printf '%s ' "EFX_EXTRAS=$extras" ;; esac
  show bash efx/launch/tpu_worker.sh "$@"
}

# ---- the TPU and what runs on it ---------------------------------------------------------------

# A line for each slice: its name, its state.
slices() {
  local assumed="$name\tREADY\n" index
  if [ "$slices" -gt 1 ]; then
    assumed=''
    for ((index = 0; index < slices; index++)); do assumed+="$name-$index\tREADY\n"; done
  fi
  ask "$assumed" tpu-vm list --filter="queuedResource~/$name\$" \
    --format='value(name.basename(),state)'
}

# ABSENT if the TPU has not been asked for; ACTIVE if all of it is there; else the state of what is
# in the way: of the request, such as WAITING_FOR_RESOURCES, or of a slice, such as PREEMPTED.
state() {
  local request list slice condition
  request="$(ask ACTIVE queued-resources list --filter="name~/$name\$" \
    --format='value(state.state)')" || return
  if [ "$request" = ACTIVE ]; then
    list="$(slices)" || return
    while read -r slice condition; do
      [ "$condition" = READY ] || request="${condition:-EMPTY}"
    done <<<"$list"
  fi
  echo "${request:-ABSENT}"
}

# Does something for all slices at once: calls $1 with a slice and the other arguments.
each_slice() {
  local list slice child status=0
  list="$(slices)" || return
  [ -n "$list" ] || fail "TPU $name not found in this zone and project; use the step create first"
  while read -r slice _; do
    if [ -n "$dry" ]; then
      "$1" "$slice" "${@:2}"
      continue
    fi
    set -m # a process group of its own, so that `finish` reaches ssh
    "$1" "$slice" "${@:2}" </dev/null &
    set +m
    children+=($!)
  done <<<"$list"
  for child in ${children[@]+"${children[@]}"}; do wait "$child" || status=$?; done
  children=()
  return "$status"
}

# A step of tpu_worker.sh on all workers of a slice.
on_workers() {
  gcloud_tpus tpu-vm ssh "$1" --worker=all --command="$(worker_step "${@:2}")" "${alive[@]}"
}

# What has become of training: none (never started), running, lost (cut off on some worker), or its
# exit status, which " stopped" follows where the step stop has ended it.
training() {
  local list slice said='' word none='' lost='' running='' ended='' stopped='' again='' status=0
  list="$(slices)" || return
  while read -r slice _; do
    said+=" $(ask 'efx-state 0' tpu-vm ssh "$slice" --worker=all \
      --command="$(worker_step state) 2>/dev/null || echo efx-state none" "${alive[@]}" |
      sed -n 's/^efx-state //p')" || return
  done <<<"$list"
  for word in $said; do
    case "$word" in
      none) none=yes ;;
      lost) lost=yes ;;
      running) running=yes ;;
      stopped) stopped=' stopped' ;;
      0) ended=yes ;;
      # Behind one that is final: the others ended so because of that one.
      75 | 134 | 137 | 139 | 143) ended=yes again="${again:-$word}" ;;
      *) ended=yes && { [ "$status" -ne 0 ] || status="$word"; } ;;
    esac
  done
  if [ -n "$lost" ] || { [ -n "$none" ] && [ -n "$running$ended" ]; }; then
    echo lost
  elif [ -n "$none" ]; then
    echo none
  elif [ -n "$running" ]; then
    echo running
  elif [ -n "$ended" ]; then
    [ "$status" -ne 0 ] || status="${again:-0}"
    echo "$status$stopped"
  else
    return 1
  fi
}

# ---- steps -------------------------------------------------------------------------------------

# Returns 1 if the TPU was preempted before it was used; `verdict` is its state then. Also if gcloud
# fails once the TPU has been there before; `verdict` is empty then.
create() {
  local before='' nodes=(--node-id="$name") asked='' known silent=0
  [ "$slices" -eq 1 ] || nodes=(--node-count="$slices" --node-prefix="$name")
  while :; do
    if ! verdict="$(state)"; then
      # The first question is about the account too; later ones come over hours.
      [ -n "$before$here" ] && [ $((silent += 1)) -lt "$patience" ] ||
        fail "gcloud does not respond; its output is above"
      sleep "$poll"
      continue
    fi
    silent=0
    [ -z "$dry" ] || [ -n "$asked" ] || verdict=ABSENT
    [ "$verdict" = "$before" ] || [ -n "$dry" ] || say "TPU $name is $verdict"
    before="$verdict"
    [ "$verdict" = ABSENT ] || here=yes
    case "$asked$verdict" in
      *ACTIVE) return ;;
      ABSENT | FAILED | SUSPENDED | PREEMPTED | TERMINATED)
        [ "$verdict" = ABSENT ] || delete || trouble "cannot delete the rest of TPU $name" ||
          return
        known="$here" here=yes # for a signal while it is asked for
        gcloud_tpus queued-resources create "$name" "${nodes[@]}" --accelerator-type="$type" \
          --runtime-version="$version" ${spot:+--spot} ||
          { here="$known" && trouble "cannot request TPU $name"; } || return
        asked=asked
        continue
        ;;
      askedFAILED)
        gcloud_tpus queued-resources describe "$name" >&2
        fail "the request for TPU $name failed; gcloud's output is above"
        ;;
      askedSUSPENDED | askedPREEMPTED | askedTERMINATED) return 1 ;;
      *EMPTY | *STOPPED) fail "TPU $name is $verdict; delete it" ;;
    esac
    sleep "$poll"
  done
}

# The first time it may be what was asked for; in place of a TPU that was there, `all` tries again.
trouble() {
  [ "$step" = all ] && [ -n "$here" ] || fail "$*"
  say "$*"
  verdict=''
  return 1
}

# Lets efx save and end on the slices that are there.
halt() {
  case "$(slices)" in *READY*) (each_slice on_workers stop) || true ;; esac
}

copy() {
  local archive="$scratch/efx.tar.gz"
  [ -z "$dry" ] || archive=efx.tar.gz
  run tar -czf "$archive" -C "$root" --exclude=./.venv --exclude=./runs --exclude=__pycache__ . &&
    each_slice copy_to "$archive"
}

copy_to() {
  gcloud_tpus tpu-vm scp "$2" "$1:efx.tar.gz" --worker=all &&
    gcloud_tpus tpu-vm ssh "$1" --worker=all \
      --command='mkdir -p efx && tar -xzf efx.tar.gz -C efx' "${alive[@]}" &&
    on_workers "$1" install ${setup:+"$setup"}
}

# Follows the log of --worker.
follow() {
  local slice="$1" label="$1" number="${worker#*:}"
  case "$worker" in
    all) ;;
    *:*) [ "$slice" = "$name-${worker%:*}" ] || return 0 && label='' ;;
    *) [ "$slice" != "$name" ] || label='' ;;
  esac
  gcloud_tpus tpu-vm ssh "$slice" --worker="$number" \
    --command="$(worker_step follow "$2" ${label:+"$label"})" "${alive[@]}"
}

# Follows the logs until training has ended or has been cut off. Then `verdict` is its exit status
# or what is in the way.
watch() {
  local lines=+1 silent=0
  while :; do
    each_slice follow "$lines" || true
    lines=0
    verdict="$(state)" || verdict=''
    if [ "$verdict" = ACTIVE ]; then verdict="$(training)" || verdict=''; fi
    case "$verdict" in
      running) silent=0 ;;
      '')
        [ $((silent += 1)) -lt "$patience" ] ||
          fail "TPU $name does not respond; training may still be running"
        ;;
      *) return ;;
    esac
    sleep "$poll"
  done
}

logs() {
  watch
  case "$verdict" in
    none) fail "no run was started on TPU $name; start one with the step run" ;;
    [0-9]*) ;;
    *)
      say "training was cut off (TPU $name: $verdict); resume it with the step all"
      exit 1
      ;;
  esac
  exit "${verdict% stopped}"
}

delete() {
  local now list slice condition said mark number folder held=''
  if [ -z "$discard" ]; then
    list="$(slices)" || return
    now="$(state)" || return
    [ "$now" != EMPTY ] ||
      fail "cannot see the disks of TPU $name; delete it anyway with --discard"
    while read -r slice condition; do
      case "$condition" in '' | PREEMPTED | TERMINATED | DELETING) continue ;; esac
      said="$(ask "${save:+efx-run 0 /disk/efx/runs/mod}" tpu-vm ssh "$slice" --worker=all \
        --command="[ ! -e efx ] || { $(worker_step state) && $(worker_step runs); }" \
        "${alive[@]}")" ||
        fail "cannot see the disks of TPU $slice; delete it anyway with --discard"
      case "$said" in
        *'efx-state running'*)
          fail "efx is running on TPU $slice; stop it with the step stop, or use --discard"
          ;;
      esac
      while read -r mark number folder; do
        [ "$mark" = efx-run ] || continue
        if [ -z "$save" ]; then
          held+=" $slice:$folder"
          continue
        fi
        run mkdir -p "$save/$slice-$number${folder%/*}"
        gcloud_tpus tpu-vm scp --recurse "$slice:$folder" "$save/$slice-$number${folder%/*}" \
          --worker="$number" </dev/null || fail "cannot copy $slice:$folder; nothing was deleted"
      done <<<"$said"
    done <<<"$list"
    [ -z "$held" ] || fail "runs on the TPU's own disks would be lost:$held; copy them here with" \
      "--save FOLDER, or delete them with --discard"
  fi
  say "deleting TPU $name and all files on its own disks (only runs were looked for there)"
  gcloud_tpus queued-resources delete "$name" --force --quiet
}

# `verdict` is empty, or ACTIVE, where asking for it, copying or starting has failed.
all() {
  local attempt=0 now unsure='' code
  while :; do
    attempt=$((attempt + 1))
    [ "$attempt" -eq 1 ] ||
      say "try $attempt of $tries; training resumes from its newest checkpoint"
    if create; then
      # Where starting has failed, efx may run on some workers and not on others.
      now="$(training)" || now=lost
      [ -z "$unsure" ] || now=lost
      unsure=''
      if [ "$now" = running ]; then
        say "efx is already running on TPU $name"
        watch
      elif prepare "$now" && each_slice on_workers start "$@"; then
        watch
      else
        verdict="$(state)" || verdict=''
      fi
    fi
    code=1
    case "$verdict" in
      '' | ACTIVE)
        say "this try failed; see the output above"
        unsure=yes
        ;;
      ABSENT | DELETING)
        here=''
        fail "TPU $name was deleted"
        ;;
      75 | 134 | 137 | 139 | 143)
        say "a process of the run was lost (status $verdict)"
        code="$verdict"
        ;;
      [0-9]*) exit "${verdict% stopped}" ;;
      *) say "training was cut off (TPU $name: $verdict)" ;;
    esac
    [ "$attempt" -lt "$tries" ] || break
    case "$verdict" in '' | ACTIVE | [0-9]*) sleep "$pause" ;; esac
  done
  say "error: not started again after --tries=$tries tries"
  exit "$code"
}

# Deletes the TPU at the end of `all`, when efx has saved and ended.
clear_up() {
  local now round code line
  now="$(state)"
  [ "$now" != ACTIVE ] || now="$(training)"
  case "$now" in
    '' | ABSENT | none | [0-9]*) ;;
    running)
      say "waiting for efx to save and end before TPU $name is deleted"
      halt
      ;;
    *) halt ;;
  esac
  for round in 1 2 3; do
    (delete)
    code=$?
    [ "$code" -ne 0 ] || break
    # 2: refused, for the sake of what is on its disks.
    [ "$code" -ne 2 ] && [ "$round" -lt 3 ] || return 1
    sleep "$pause"
  done
  line="TPU $name and its own disks are deleted${discard:+ with all files on them}"
  if [ -n "$save" ] && [ -e "$save" ]; then line+="; their runs are in $save"; fi
  case "$workdir" in
    *://* | /*) line+="; any checkpoints are in $workdir" ;;
    *) [ -n "$discard$save" ] || line+="; they held no runs" ;;
  esac
  [ -n "$dry" ] || say "$line"
}

# Copies the tree; where training was cut off on some workers, the others wait for them in vain.
prepare() {
  copy && { [ "$1" != lost ] || each_slice on_workers stop; }
}

case "$step" in
  run) each_slice on_workers start "$@" ;;
  stop) each_slice on_workers stop ;;
  delete)
    delete
    deleted=yes
    ;;
  *) "$step" "$@" ;;
esac
