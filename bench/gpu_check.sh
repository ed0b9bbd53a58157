#!/usr/bin/env bash
# What has to be true on a GPU, in one command of a few minutes: the pair tests of the CUDA paths, then
# the full-size model with random weights, setting by setting and as texts grow in number. Builds
# nothing, needs no ROS:
#   bench/gpu_check.sh [FOLDER_FOR_RESULTS]
# Needs torch with CUDA, numpy, pillow, pyyaml, safetensors, matplotlib and pytest; with nvidia-ml-py it
# reads energy too. The last line of every log is JSON. DEVICE=cpu PRESET=dummy tries the script itself.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
out="${1:-$root/gpu_check}"
python="${PYTHON:-python3}"
device="${DEVICE:-cuda}"
model=(--preset "${PRESET:-pi05}" --device "$device" --dtype bfloat16)
mkdir -p "$out"
cd "$root"
export PYTHONPATH="$root:$root/test" PYTHONUNBUFFERED=1

"$python" -c 'import torch; print(torch.__version__, torch.cuda.is_available() and torch.cuda.get_device_name())'
timeout 90 "$python" -m pytest -q -p no:cacheprovider -m cuda test/test_static_runner.py test/test_continuation.py \
  2>&1 | tee "$out/tests.log"
for cameras in 3 2; do
  timeout 130 "$python" bench/bench_frame.py "${model[@]}" --workload aloha --cameras "$cameras" \
    --frames 12 --no-memory 2>&1 | tee "$out/frame_$cameras.log"
done
timeout 80 "$python" bench/bench_scale.py "${model[@]}" --out "$out" 2>&1 | tee "$out/scale.log"
if [[ "$device" == cuda ]] && grep -q '"runner": "ModelRunner"' "$out"/frame_*.log; then
  echo 'CUDA graphs are off; the warnings above say why.' >&2
  exit 1
fi
