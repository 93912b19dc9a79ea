#!/usr/bin/env bash
# Watch two processes train a network on MNIST. Flags go to the lesson: run/quickstart.sh --model cnn
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
run/setup.sh
if [ "$(nvidia-smi -L 2>/dev/null | wc -l)" -lt 2 ]; then
    set -- --device cpu "$@" # two processes need two GPUs, or none
fi
echo "+ python playground/distributed_data_parallel.py -g 2 $*" >&2
exec .venv/bin/python playground/distributed_data_parallel.py -g 2 "$@"
