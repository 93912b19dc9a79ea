#!/usr/bin/env bash
# Runs the ranks of a lesson on one NVIDIA GPU, with real messages of NCCL:
#   run/one_gpu.sh 2 playground/distributed_data_parallel.py --dataset digits
# NCCL refuses two ranks on a GPU if their hosts have the same name. Here each rank has a name of
# its own, so NCCL takes them for two nodes, which talk through sockets. Numbers, memory, errors and
# hangs are real. Seconds are not: the ranks take turns on the GPU.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh run/one_gpu.sh, where sh is dash
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# --- EDIT ---
PYTHON=${PYTHON:-.venv/bin/python}
DEVICE=${DEVICE:-cuda} # cpu: to try this without a GPU
# ------------
: "${2:?"the lesson is missing: $0 2 playground/distributed_data_parallel.py"}"
if ! command -v "$PYTHON" >/dev/null; then
    echo "error: there is no $PYTHON: start run/setup.sh, or PYTHON=python" >&2
    exit 1
fi

# What each rank does: it is the only one of its node, and uses the only GPU.
rank='export NCCL_HOSTID=rank$RANK LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 '
rank+='NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1; '
if grep -q complete_nodes "$2"; then # it starts the ranks of its node itself, and knows no torchrun
    rank+='node=$RANK; unset RANK TORCHELASTIC_USE_AGENT_STORE; '
    rank+='set -- "$@" -n $WORLD_SIZE -g 1 -nr $node -ip 127.0.0.1 --port $((MASTER_PORT + 1)); '
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
set -x
exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$1" --no-python \
    bash -c "$rank"'exec "$@"' rank "$PYTHON" "${@:2}" --device "$DEVICE"
