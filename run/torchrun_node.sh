#!/usr/bin/env bash
# One node's share of a run under torchrun. Type the same command on every node:
#   NODE0=10.0.0.1 run/torchrun_node.sh playground/distributed_data_parallel_torchrun.py --epochs 1
# The nodes meet at NODE0. torchrun numbers the ranks itself: rank 0, which prints, may be on any node.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# --- EDIT ---
NODES=${NODES:-2}              # machines; 1:2 starts with one after 30 s, a second may join, or leave if RESTARTS allow
GPUS=${GPUS:-2}                # processes on this node, one per GPU
NODE0=${NODE0:-}               # address or name of the node where all meet, as the others reach it
PORT=${PORT:-29500}            # a port that is free there
RESTARTS=${RESTARTS:-0}        # how often all ranks start again after one has failed
RDZV_ID=${RDZV_ID:-playground} # the name of this run: nodes with different ones don't meet
WAIT=${WAIT:-120}              # seconds to wait for the other nodes
PYTHON=${PYTHON:-.venv/bin/python}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # threads of each process, as torchrun has it if nothing is said
# ------------

fail() { echo "error: $2" >&2 && exit "$1"; }
if [ $# -eq 0 ] || [ -z "$NODE0" ]; then
    fail 2 "a lesson and NODE0 are needed: NODE0=10.0.0.1 $0 playground/distributed_data_parallel_torchrun.py"
fi
[ -f "$1" ] || fail 2 "there is no lesson $1: choose one of playground/*.py, before all flags"
source run/lesson.sh
! why=$(why_not "$1") || fail 2 "$why"
type "$PYTHON" &>/dev/null || fail 1 "$PYTHON is missing: run/setup.sh"
getent ahostsv4 "$NODE0" >/dev/null || fail 1 "$NODE0 has no address here: set NODE0 to one, as in NODE0=10.0.0.1"

# Only node 0 can listen at NODE0. torchrun is told who does, and where the others find this node, because it would
# ask this host's own name, which may lead to 127.0.1.1 or nowhere.
where='
import errno, socket, sys
address, port = socket.gethostbyname(sys.argv[1]), int(sys.argv[2])
try:
    socket.create_server((address, port)).close()
    print(1, sys.argv[1] if address.startswith("127.") else address)
except OSError as error:
    if error.errno == errno.EADDRINUSE:
        sys.exit(f"error: port {port} is in use on this node: choose another on all nodes, as in PORT={port + 1}")
    route = socket.socket(type=socket.SOCK_DGRAM)
    if route.connect_ex((address, port)):  # sends nothing
        sys.exit(f"error: no route to {address} from here: check NODE0 and the network")
    print(0, route.getsockname()[0])
'
read -r is_host address < <("$PYTHON" -c "$where" "$NODE0" "$PORT") || exit 1

export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-FATAL} # else it warns of each address that has no name
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # else no restart on several nodes: new ranks would look for the old store
command=("$PYTHON" -m torch.distributed.run --nnodes "$NODES" --nproc-per-node "$GPUS" --max-restarts "$RESTARTS"
    --rdzv-backend c10d --rdzv-id "$RDZV_ID" --rdzv-endpoint "$NODE0:$PORT" --local-addr "$address"
    --rdzv-conf "is_host=$is_host,join_timeout=$WAIT,read_timeout=$WAIT" "$@") # flags in front would be torchrun's
echo "+ ${command[*]}" >&2

# In a session of its own: Ctrl-C reaches this script only, which asks torchrun once to end its ranks.
setsid setpriv --pdeathsig TERM "${command[@]}" &
trap 'kill $!; wait $! || true; echo interrupted >&2; exit 130' INT
trap 'kill $!; wait $! || true; exit 143' TERM
wait $! || fail $? "look for the first error above; or start all nodes within $WAIT s, with one NODE0 and PORT"
