#!/bin/sh
# The three foreign models on a GPU: demur and pyautoattack, cudnn.benchmark on and off.
#
#   TEST=test.npz TRAIN=train.npz OUT=out sh benchmarks/foreign_gpu.sh resnet18
#   TEST=test.npz TRAIN=train.npz OUT=out sh benchmarks/foreign_gpu.sh wideresnet
#   TEST=test.npz TRAIN=train.npz OUT=out sh benchmarks/foreign_gpu.sh vit
#
# Each call takes less than 600 s. It trains the net against FGSM and measures what fits; the same
# call with the same OUT continues. The npz files hold uint8 x (N, 3, 32, 32) and y (N). Further
# options go to foreign_models.py: --tiny tries the script on a CPU.
set -eu
model=$1
shift
epochs=6
if [ "$model" = vit ]; then epochs=10; fi
mkdir -p "$OUT/nets"
exec timeout 595 "${PYTHON:-python3}" benchmarks/foreign_models.py --only "$model" \
  --images "$TEST" --train "$TRAIN" --nets "$OUT/nets" --epochs "$epochs" --count 1000 \
  --measure "ours;pyautoattack, benchmark;ours, benchmark;ours, second call;pyautoattack;reject, standard;reject, fast" \
  --seconds 560 -o "$OUT/foreign-$model.json" "$@"
