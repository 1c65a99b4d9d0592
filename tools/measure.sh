#!/bin/sh
# Reproduce the numbers of docs/speed.md, benchmarks/ and results/ on a GPU, one stage at a time.
#
#   sh tools/measure.sh check OUT                    compare the weights of the fast and the plain engine
#   sh tools/measure.sh speed OUT                    ResNet-18: engines, batch sizes, head, attack
#   sh tools/measure.sh wide OUT                     WideResNet-34-10: seconds per epoch and memory
#   sh tools/measure.sh attacks OUT DATA RUN         peer comparison of attacks on 1,000 images
#   sh tools/measure.sh rejection OUT DATA RUN       RejectAutoAttack beside simpler attacks on 100 images
#   sh tools/measure.sh run OUT DATA NAME RECIPE [KEY=VALUE ...]     train, attack, archive
set -eu
stage=$1 out=$2
shift 2
demur() { ${PYTHON:-python3} -m demur "$@"; }
mkdir -p "$out"

case $stage in
check) python benchmarks/engine_check.py -o "$out/check.json" ;;
speed) python benchmarks/speed.py -o "$out/resnet18.json" ;;
wide) python benchmarks/speed.py cifar10-pgdat-rr 'net=WideResNet()' --only fast,eval --steps 30 -o "$out/wideresnet.json" ;;
attacks) python benchmarks/peer_attacks.py "$2" --data "$1" --n 1000 --only autoattack,pgd-100 -o "$out/attacks.json" ;;
rejection) python benchmarks/peer_rejection.py "$2" --data "$1" --n 100 -o "$out/rejection.json" ;;
run)
  data=$1 run=$out/$2
  shift 2
  demur train "$@" --data "$data" --out "$run"
  demur attack "$run" clean pgd-10 pgd-100 pgd-100:restarts=10 --keep-images 0 --data "$data"
  demur export "$run" --archive --data "$data" -o "$out/archive/$(basename "$run")"
  ;;
*)
  echo "there is no stage $stage; use check, speed, wide, attacks, rejection or run" >&2
  exit 2
  ;;
esac
