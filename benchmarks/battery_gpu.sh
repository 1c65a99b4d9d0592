#!/bin/bash
# PGD-AT + RR (36 epochs) and its battery on one H200. Run in the root of a checkout:
#   bash benchmarks/battery_gpu.sh STAGE...     stages: train battery pack status; several run in turn
# Everything resumes: finished trainings, epochs, attacks, and batches of attacks are not repeated.
#   LIMIT    seconds after which nothing new is started and a running step is stopped (default 520);
#            pack and status run in any case
#   DATA, RUNS, OUT, DEVICE, PYTHON; TINY=1 tries the script on digits on a CPU
set -u -o pipefail
begin=$SECONDS
LIMIT=${LIMIT:-520} DATA=${DATA:-$HOME/cifar10} RUNS=${RUNS:-$HOME/runs} DEVICE=${DEVICE:-cuda}
PYTHON=${PYTHON:-python3} OUT=${OUT:-$HOME/out} TINY=${TINY:-}
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$HOME/inductor} PYTHONUNBUFFERED=1
RUN=$RUNS/pgdat-rr-seed0 LOGS=$RUNS/logs DONE=$RUNS/done
mkdir -p "$RUNS" "$LOGS" "$DONE" "$OUT"
# the recipe of the cells at the scale short: the same digest as results/methods-cifar10/pgdat-rr-seed0
RECIPE="cifar10-pgdat-rr-short data.split=paper ema=0 schedule.warmup=0.3"
ALL=10000 REJECT=1000 CW=500 ADAPTIVE=1000 S1000="" SCW="" SADAPT="" SREJ=""
if [ -n "$TINY" ]; then
  RECIPE="digits-pgdat-rr width=8 epochs=1 attack.steps=2 validation_attack.steps=2"
  ALL=64 REJECT=16 CW=8 ADAPTIVE=16 S1000=":steps=20" SCW=":steps=20,searches=2" SADAPT=",steps=3"
  SREJ=",version=fast"
fi
demur() { $PYTHON -m demur "$@"; }
left() { echo $((LIMIT - (SECONDS - begin))); }

# step NAME COMMAND...: skip if done; stop at the limit; print seconds; keep the log
failed=0
step() {
  local name=$1 start=$SECONDS rc; shift
  if [ -e "$DONE/$name" ]; then echo "== $name: done before"; return 0; fi
  if [ "$(left)" -lt 20 ]; then echo "== $name: not started, $(left) s left"; return 1; fi
  timeout -k 10 "$(left)" $PYTHON -m demur "$@" >>"$LOGS/$name.log" 2>&1; rc=$?
  tr '\r' '\n' <"$LOGS/$name.log" | grep -v '^ *$' | tail -n "${SHOW:-4}" | cut -c1-200
  echo "== $name: rc $rc, $((SECONDS - start)) s"
  if [ $rc = 0 ]; then echo $((SECONDS - start)) >"$DONE/$name"; else failed=1; fi
  return $rc
}
attack() {  # attack NAME N ATTACK...
  local name=$1 n=$2; shift 2
  step "$name" attack "$RUN" "$@" --n "$n" --keep-images 0 --no-keep-features --device "$DEVICE" --data "$DATA"
}

train() {
  # shellcheck disable=SC2086
  step train train $RECIPE --out "$RUN" --device "$DEVICE" --data "$DATA"
}

threshold() {  # threshold Con|RCon: 95% of the correct predictions on the clean test images accepted
  $PYTHON - "$RUN" "$1" <<'P'
import sys
from demur.calibrate import TPR
from demur.evaluate import values
from demur.rejectors import Con, RCon
from demur.runs import Run
run, name = Run(__import__("pathlib").Path(sys.argv[1])), sys.argv[2]
(record,) = [r for r in run.records("test") if r.label == "clean"]
print(repr(float(TPR(0.95).threshold(values({"Con": Con(), "RCon": RCon()}[name], record), record.correct))))
P
}

corruptions() {  # five processes: making the images takes CPU time, not GPU time
  if [ -e "$DONE/corruptions" ]; then echo "== corruptions: done before"; return 0; fi
  if [ "$(left)" -lt 60 ]; then echo "== corruptions: not started, $(left) s left"; return 1; fi
  local start=$SECONDS pids="" s rc=0
  for s in 1 2 3 4 5; do
    OMP_NUM_THREADS=2 timeout -k 10 "$(left)" $PYTHON -m demur attack "$RUN" "corruptions:severity=$s" --n "$ALL" \
      --keep-images 0 --no-keep-features --engine plain --device "$DEVICE" --data "$DATA" >>"$LOGS/corruptions-$s.log" 2>&1 &
    pids="$pids $!"
  done
  for s in $pids; do wait "$s" || rc=1; done
  tail -qn 1 "$LOGS"/corruptions-*.log | cut -c1-200
  echo "== corruptions: rc $rc, $((SECONDS - start)) s, $(ls "$RUN"/records | grep -c 'corruption.*\.json') of 75 records"
  if [ $rc = 0 ]; then echo $((SECONDS - start)) >"$DONE/corruptions"; else failed=1; fi
  return $rc
}

battery() {
  if [ ! -e "$RUN/checkpoint.json" ]; then echo "== battery: not trained yet"; failed=1; return 1; fi
  attack basics "$ALL" clean pgd-10 pgd-100 || return 1
  local con rcon
  con=$(threshold Con) && rcon=$(threshold RCon) || { echo "== thresholds failed"; failed=1; return 1; }
  echo "== thresholds on clean test images: Con $con, R-Con $rcon"
  attack reject-con "$REJECT" "reject-autoattack:criterion=AcceptedError(Con(), $con)$SREJ"
  attack reject-rcon "$REJECT" "reject-autoattack:criterion=AcceptedError(RCon(), $rcon)$SREJ"
  corruptions
  attack pgd-1000 "$ALL" "pgd-1000$S1000"
  attack cw-linf "$CW" "cw-linf$SCW" "cw-adaptive-linf$SCW"
  attack cw-l2 "$CW" "cw$SCW" "cw-adaptive$SCW"
  local name eta texts
  for name in ce-log-score ce-rr con-rr con-log-score targets-rr; do
    texts=()
    for eta in 0.1 0.3 1 3 10 30 100; do texts+=("adaptive-$name:eta=$eta,restarts=1$SADAPT"); done
    attack "adaptive-$name" "$ADAPTIVE" "${texts[@]}"
  done
  attack autoattack "$REJECT" autoattack
  true
}

status() {
  echo "== $(ls "$RUN"/records 2>/dev/null | grep -c '\.json$') records; $((SECONDS - begin)) s of this call"
  for f in "$DONE"/*; do [ -e "$f" ] && echo "   $(basename "$f") $(cat "$f") s"; done
  true
}

pack() {  # scores-only archive and fp16 weights, in parts of 15 MB under OUT
  local start=$SECONDS home=$RUNS/home
  rm -rf "$home" "$OUT"/part.*; mkdir -p "$home"
  $PYTHON -m demur archive "$RUN" -o "$home/pgdat-rr-seed0" --only R-Con --device cpu --data "$DATA" 2>&1 | tail -n 1 || failed=1
  # where the archive fails, the records travel as they are
  [ -d "$home/pgdat-rr-seed0" ] || cp -r "$RUN/records" "$home/records"
  $PYTHON - "$RUN" "$home" <<'P' || failed=1
import sys
from pathlib import Path
from safetensors.torch import load_file, save_file
run, home = map(Path, sys.argv[1:])
if (run / "model.safetensors").exists():
    half = {k: v.half() if v.is_floating_point() else v for k, v in load_file(run / "model.safetensors").items()}
    save_file({k: v.contiguous() for k, v in half.items()}, home / "model-fp16.safetensors")
P
  cp -r "$LOGS" "$home/logs"; cp -r "$DONE" "$home/done"; cp "$RUN"/{recipe.txt,checkpoint.json,metrics.jsonl} "$home" 2>/dev/null
  tar c -C "$home" . | split -b 15M - "$OUT/part."
  echo "== pack: $((SECONDS - start)) s, $(cat "$OUT"/part.* | wc -c) bytes in $(ls "$OUT" | grep -c '^part') parts"
}

for stage in "$@"; do
  case $stage in
  train | battery | pack | status) "$stage" ;;
  *) echo "there is no stage $stage; use train, battery, pack or status" >&2; exit 2 ;;
  esac
done
exit $failed
