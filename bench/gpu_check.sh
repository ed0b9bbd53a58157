#!/usr/bin/env bash
# What has to be true on a GPU, in one command of a few minutes: the pair tests of the CUDA paths, then
# a frame of the full-size model with random weights, setting by setting. Builds nothing, needs no ROS:
#   bench/gpu_check.sh [FOLDER_FOR_RESULTS]
# Needs torch with CUDA, numpy, pillow, pyyaml, safetensors and pytest. The last line is JSON.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
out="${1:-$root/gpu_check}"
python="${PYTHON:-python3}"
mkdir -p "$out"
cd "$root"
export PYTHONPATH="$root:$root/test" PYTHONUNBUFFERED=1

"$python" -c 'import torch; print(torch.__version__, torch.cuda.get_device_name(0))'
"$python" -m pytest -q -p no:cacheprovider test/test_static_runner.py test/test_engine.py \
  test/test_pi05.py test/test_drafting.py 2>&1 | tee "$out/tests.log"
for cameras in 3 2; do
  timeout 150 "$python" bench/bench_frame.py --preset pi05 --workload aloha --cameras "$cameras" \
    --device cuda --dtype bfloat16 --frames 12 --no-memory | tee "$out/frame_$cameras.log"
done
