#!/usr/bin/env bash
# Watch two processes train a network on MNIST. Flags go to the lesson: run/quickstart.sh --model cnn
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
run/setup.sh
count='import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)'
gpus=$(.venv/bin/python -W ignore -c "$count") # of nvidia-smi's list some may be hidden, or of no use to torch
if [ "$gpus" -lt 2 ]; then
    set -- --device cpu "$@" # two processes need two GPUs, or none
fi
echo "+ python playground/distributed_data_parallel.py -g 2 $*" >&2
exec .venv/bin/python playground/distributed_data_parallel.py -g 2 "$@"
