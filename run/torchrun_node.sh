#!/usr/bin/env bash
# Starts the ranks of this node with torchrun. Type the same command on every node:
#   NODE0=10.0.0.1 run/torchrun_node.sh playground/distributed_data_parallel_torchrun.py --epochs 1
# The nodes find each other at NODE0. torchrun numbers the ranks by itself, so rank 0, which prints,
# may be on any node.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh run/torchrun_node.sh, where sh is dash
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { echo "error: $*" >&2 && exit 1; }

# --- EDIT ---
NODES=${NODES:-2}              # number of nodes; 1:2 means one node, and a second one may join
GPUS=${GPUS:-2}                # processes on this node, one for each GPU
NODE0=${NODE0:-}               # address or name of one node, as the other nodes reach it
PORT=${PORT:-29500}            # a free port of that node
RESTARTS=${RESTARTS:-0}        # how often all ranks are started again after a failure
RDZV_ID=${RDZV_ID:-$(id -un)-$(basename "${1:-}")} # only nodes with the same name meet
WAIT=${WAIT:-120}              # seconds to wait for the other nodes
PYTHON=${PYTHON:-.venv/bin/python}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # threads of each process; 1 is torchrun's default
# ------------
NODE0=${NODE0//$'\r'/} # as in a file that was written on Windows
: "${NODE0:?"is missing: NODE0=10.0.0.1 $0 playground/distributed_data_parallel_torchrun.py"}"
: "${1:?"the lesson is missing: $0 playground/distributed_data_parallel_torchrun.py"}"
command -v "$PYTHON" >/dev/null || fail "there is no $PYTHON: start run/setup.sh, or PYTHON=python"

# torchrun is told whether this is the node at NODE0, and where the others reach this node. gloo is
# told its network interface. By themselves they would use the name of this host, which may lead to
# 127.0.1.1 or to no address. (A UDP socket that connects sends nothing. It only learns its own
# address.)
where='import psutil, socket, sys
try:
    node0, udp = socket.gethostbyname(sys.argv[1]), socket.socket(type=socket.SOCK_DGRAM)
except socket.gaierror as error:
    sys.exit(f"error: NODE0={sys.argv[1]}: {error.strerror}")
udp.connect((node0, 1))
own = udp.getsockname()[0]
print(int(own in (node0, "127.0.0.1")), sys.argv[1] if own == "127.0.0.1" else own)
print(*[name for name, all in psutil.net_if_addrs().items() if own in [a.address for a in all]])'
{ read -r is_host address && read -r interface; } < <("$PYTHON" -c "$where" "$NODE0") || exit 1
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}

# After a restart, the ranks would find old addresses in the store of the start before.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR} # no warning of each address without a name
set -x
# The system ends a rank whose torchrun has ended, also by kill -9.
exec "$PYTHON" -m torch.distributed.run --nnodes "$NODES" --nproc-per-node "$GPUS" \
    --max-restarts "$RESTARTS" --rdzv-backend c10d --rdzv-id "$RDZV_ID" \
    --rdzv-endpoint "$NODE0:$PORT" --local-addr "$address" \
    --rdzv-conf "is_host=$is_host,join_timeout=$WAIT,read_timeout=$WAIT" \
    --no-python setpriv --pdeathsig KILL "$PYTHON" -u "$@"
