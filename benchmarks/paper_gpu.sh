#!/bin/bash
# Cells of the paper's tables that results/ leaves empty, several nets at a time on one GPU.
# Run in the root of a checkout:
#   bash benchmarks/paper_gpu.sh pgdat-rr,pgdat-ebd pgdat-snet,trades pgdat-carl,pgdat-atro
#   bash benchmarks/paper_gpu.sh pack                   scores-only archives, in parts under OUT; the
#                                                       last epoch of a net, if stored too, as NET-last
#   bash benchmarks/paper_gpu.sh weights NET NET        fp16 weights, in parts under OUT
# Each argument is a lane: its nets are trained and attacked one after the other, the lanes at the
# same time. Everything resumes. Set for other uses:
#   SCALE, DATA, RUNS, OUT, DEVICE, PYTHON, TABLES; REJECT and REJECT_N, the version and the images
#   of RejectAutoAttack on nets with RR (0: none)
set -u -o pipefail
SCALE=${SCALE:-brief} DATA=${DATA:-$HOME/cifar10} RUNS=${RUNS:-$HOME/runs} DEVICE=${DEVICE:-cuda}
PYTHON=${PYTHON:-python3} OUT=${OUT:-$HOME/out} TABLES=${TABLES:-2 3 4 7 8} REJECT=${REJECT:-standard}
REJECT_N=${REJECT_N:-1000}
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$HOME/inductor} PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
mkdir -p "$RUNS/logs" "$OUT"

say() { echo "$(date +%T) $*" | tee -a "$RUNS/log"; }

attack() {  # attack LABEL RUN ATTACK...
  local label=$1 run=$2; shift 2
  $PYTHON -m demur attack "$run" "$@" --n "$REJECT_N" --keep-images 0 --no-keep-features \
    --device "$DEVICE" --data "$DATA" >>"$RUNS/logs/$label" 2>&1
}

net() {  # train and attack one net for the tables; nets with RR also meet the strongest attacks
  local name=$1 start=$SECONDS rc run at='TPR(0.95, split="test")'
  say "$name begins"
  # shellcheck disable=SC2086
  $PYTHON -m demur paper table $TABLES --scale "$SCALE" --only "$name" --missing-from results \
    --runs "$RUNS/$name" --device "$DEVICE" --data "$DATA" >>"$RUNS/logs/$name" 2>&1
  rc=$?
  run=$(ls -d "$RUNS/$name/"*/checkpoint.json 2>/dev/null | head -n 1); run=${run%/checkpoint.json}
  say "$name: tables rc $rc, $((SECONDS - start)) s, $(ls "$run"/records/*.json 2>/dev/null | wc -l) records"
  if [ -n "$run" ] && [[ $name == *-rr ]] && [ "$REJECT_N" -gt 0 ]; then
    attack "$name" "$run" autoattack \
      "reject-autoattack:criterion=AcceptedError(Con(), $at),version=$REJECT" \
      "reject-autoattack:criterion=AcceptedError(RCon(), $at),version=$REJECT"
    say "$name: ensembles rc $?, $((SECONDS - start)) s"
  fi
}

score() {  # score RUN: the name of the head's score; demur export --archive adds what other records keep
  $PYTHON - "$1" <<'P'
import sys
from pathlib import Path
from demur.runs import Run
print(Run(Path(sys.argv[1])).recipe.head_rejector[0])
P
}

pack() {
  local home=$RUNS/home run path copy
  rm -rf "$home" "$OUT"/part.*; mkdir -p "$home"
  for run in "$RUNS"/*/*/checkpoint.json "$RUNS"/*/*/last/checkpoint.json; do
    run=${run%/checkpoint.json} path=${run#"$RUNS/"}
    [ -d "$run/records" ] || continue
    copy=$home/${path/%\/last/-last}
    mkdir -p "$(dirname "$copy")"
    $PYTHON -m demur export "$run" --archive -o "$copy" --only "$(score "$run")" --device cpu --data "$DATA" \
      >>"$RUNS/logs/${path%%/*}" 2>&1 || { say "$path: not archived"; cp -r "$run/records" "$copy-records"; }
  done
  cp -r "$RUNS/logs" "$RUNS/log" "$home"
  tar c -C "$home" . | split -b 15M - "$OUT/part."
  say "packed $(cat "$OUT"/part.* | wc -c) bytes in $(ls "$OUT" | grep -c '^part') parts"
}

weights() {  # weights NET...
  local home=$RUNS/weights name
  rm -rf "$home" "$OUT"/part.*; mkdir -p "$home"
  for name in "$@"; do
    $PYTHON - "$RUNS/$name" "$home/$name.safetensors" <<'P'
import sys
from pathlib import Path
from safetensors.torch import load_file, save_file
(path,) = Path(sys.argv[1]).glob("*/model.safetensors")
half = {k: v.half() if v.is_floating_point() else v for k, v in load_file(path).items()}
save_file({k: v.contiguous() for k, v in half.items()}, sys.argv[2])
P
  done
  tar c -C "$home" . | split -b 15M - "$OUT/part."
}

case ${1:-} in
pack) pack; exit ;;
weights) shift; weights "$@"; exit ;;
esac
for lane in "$@"; do
  (for name in ${lane//,/ }; do net "$name"; done) &
done
wait
say "all lanes are finished"
