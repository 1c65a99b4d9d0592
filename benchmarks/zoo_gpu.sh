#!/bin/bash
# Nets for zoo/: trained at the same time on one GPU, stored with 8 bits, attacked as they are stored.
# Run in the root of a checkout; a second call resumes what the first had no time for:
#   bash benchmarks/zoo_gpu.sh SECONDS 'cifar10-pgdat-rr split=paper bn=batch' 'cifar10-trades-rr split=paper'
# A net is called like its recipe. What is finished lies in parts under OUT after every call, the
# folder for zoo/ first, then entries of the leaderboard, records without images, and fp16 weights.
# A call brings home four parts of 15 MB; `bash benchmarks/zoo_gpu.sh 0` brings the next four.
# Set for other uses:
#   DATA, RUNS, OUT, DEVICE, PYTHON; N, images of the strong attacks; REJECTORS; FIRST, more --n
set -u -o pipefail
DATA=${DATA:-$HOME/cifar10} RUNS=${RUNS:-$HOME/runs} DEVICE=${DEVICE:-cuda} PYTHON=${PYTHON:-python3}
OUT=${OUT:-$HOME/out} N=${N:-1000} REJECTORS=${REJECTORS:-R-Con Con} FIRST=${FIRST:-}
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$HOME/inductor} PYTHONUNBUFFERED=1 PYTHONPATH=.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} DEMUR_ZOO=$RUNS/zoo
END=$((SECONDS + $1)); shift
mkdir -p "$RUNS/logs" "$RUNS/zoo" "$RUNS/board" "$OUT"
if [ "$DEVICE" = cuda ] && command -v nvidia-cuda-mps-control >/dev/null; then  # several nets at a time
  export CUDA_MPS_PIPE_DIRECTORY=$HOME/mps CUDA_MPS_LOG_DIRECTORY=$HOME/mps-logs
  mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
  pgrep -f nvidia-cuda-mps-control >/dev/null || nvidia-cuda-mps-control -d
fi

demur() {  # demur LABEL WORD...: within the time that is left
  local label=$1 rc; shift
  timeout -s INT $((END > SECONDS ? END - SECONDS : 1)) $PYTHON -m demur "$@" \
    --device "$DEVICE" --data "$DATA" >>"$RUNS/logs/$label" 2>&1; rc=$?
  echo "$(date +%T) $label: demur $1 $2, rc $rc" | tee -a "$RUNS/log"
  return $rc
}

net() {  # net RECIPE CHANGE...
  local name=$1 stored=$RUNS/zoo/$1
  [ -f "$RUNS/$name/checkpoint.json" ] || demur "$name" train "$@" --out "$RUNS/$name" || return
  if [ ! -d "$stored" ]; then
    rm -rf "zoo/$name"; $PYTHON tools/zoo.py "$RUNS/$name" "$name" && mv "zoo/$name" "$stored" || return
  fi
  # shellcheck disable=SC2086
  demur "$name" attack "$stored" clean pgd-10 --keep-images 0 --no-keep-features $FIRST &&
    demur "$name" attack "$stored" autoattack --n "$N" --keep-images 0 --no-keep-features || return
  for rejector in $REJECTORS; do
    demur "$name" leaderboard add "$stored" --rejector "$rejector" --n "$N" -o "$RUNS/board"
  done
}

pack() {  # finished nets
  local home=$RUNS/home path
  rm -rf "$home" "$RUNS/parts"; mkdir -p "$home" "$RUNS/parts"
  for path in "$RUNS"/zoo/*/; do
    [ -d "$path" ] || continue
    $PYTHON - "$RUNS/$(basename "$path")" "$home" <<'P'
import sys
from pathlib import Path
from safetensors.torch import load_file, save_file
run, home = map(Path, sys.argv[1:])
tensors = load_file(run / "model.safetensors").items()
half = {k: (v.half() if v.is_floating_point() else v).contiguous() for k, v in tensors}
save_file(half, home / f"{run.name}.safetensors")
P
  done
  (cd "$RUNS" && {
    find zoo -path '*/records' -prune -o -type f -print
    find board logs log -type f
    find zoo -path '*/records/*' -type f -size -4000k
    find home -type f
  } | tar c -T - | split -b 15M - parts/part.)
}

bring() {  # as many parts as one call can
  rm -f "$OUT"/part.*
  find "$RUNS/parts" -type f | sort | head -n 4 | xargs -r mv -t "$OUT"
  echo "$(find "$RUNS/parts" -type f | wc -l) parts are left: bash benchmarks/zoo_gpu.sh 0"
}

# shellcheck disable=SC2086
for recipe in "$@"; do net $recipe & done
wait
[ $# = 0 ] || pack
bring
tail -n 1 "$RUNS"/logs/*
