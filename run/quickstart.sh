#!/usr/bin/env bash
# Trains a model on MNIST with two processes. Flags are passed to the lesson:
#   run/quickstart.sh --model cnn
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh run/quickstart.sh, where sh is dash
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
run/setup.sh
echo "loading PyTorch, the first time for up to a minute ..." >&2
# torch is asked, because nvidia-smi also lists GPUs that are hidden or that torch cannot use.
count='import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)'
gpus=$(.venv/bin/python -W ignore -c "$count")
if [ "$gpus" -lt 2 ]; then
    set -- --device cpu "$@" # two processes need two GPUs, or the CPU
fi
echo "+ python playground/distributed_data_parallel.py -g 2 $*" >&2
lesson=(.venv/bin/python playground/distributed_data_parallel.py -g 2 "$@")
if command -v setpriv >/dev/null; then # only Linux has it
    lesson=(setpriv --pdeathsig TERM "${lesson[@]}") # the lesson ends if this script is killed
fi
"${lesson[@]}"
cat >&2 <<'END'

These were two processes. Next, in this terminal:
    source .venv/bin/activate
    python playground/blocking_p2p.py     # the text in this file explains what it prints
END
