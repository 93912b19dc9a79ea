#!/usr/bin/env bash
# Starts the ranks of this node with torchrun. Type the same command on every node:
#   NODE0=10.0.0.1 run/torchrun_node.sh playground/distributed_data_parallel_torchrun.py --epochs 1
# The nodes find each other at NODE0. torchrun numbers the ranks by itself, so rank 0, which prints,
# may be on any node.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# --- EDIT ---
NODES=${NODES:-2}              # number of nodes; 1:2 means one node, and a second one may join
GPUS=${GPUS:-2}                # processes on this node, one for each GPU
NODE0=${NODE0:-}               # address or name of one node, as the other nodes reach it
PORT=${PORT:-29500}            # a free port of that node
RESTARTS=${RESTARTS:-0}        # how often all ranks are started again after a failure
RDZV_ID=${RDZV_ID:-playground} # name of this run; nodes with another name do not take part in it
WAIT=${WAIT:-120}              # seconds to wait for the other nodes
PYTHON=${PYTHON:-.venv/bin/python}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # threads of each process; 1 is torchrun's default
# ------------
NODE0=${NODE0//$'\r'/} # as in a file that was written on Windows

fail() { echo "error: $2" >&2 && exit "$1"; }
if [ $# -eq 0 ] || [ -z "$NODE0" ]; then
    example="NODE0=10.0.0.1 $0 playground/distributed_data_parallel_torchrun.py"
    fail 2 "a lesson and NODE0 are needed: $example"
fi
[ -f "$1" ] || fail 2 "there is no lesson $1: choose one of playground/*.py, before its flags"
source run/lesson.sh
! why=$(why_not "$1") || fail 2 "$why"
type "$PYTHON" &>/dev/null || fail 1 "$PYTHON is missing: run/setup.sh"

# Only the node that has the address NODE0 can listen there. torchrun gets two things from this
# program: whether this is that node, and the address at which the others reach this node. torchrun
# itself would use the host's own name, which may lead to 127.0.1.1 or to no address.
where='
import errno, socket, sys
name, port = sys.argv[1], int(sys.argv[2])
try:
    address = socket.gethostbyname(name)
except (OSError, UnicodeError):
    sys.exit(f"error: {name} has no address here: set NODE0 to an address, as in NODE0=10.0.0.1")
try:
    socket.create_server((address, port)).close()
    print(1, name if address.startswith("127.") else address)
except OSError as error:
    if error.errno == errno.EADDRINUSE:
        free = f"choose another one on all nodes, as in PORT={port + 1}"
        sys.exit(f"error: port {port} is in use on this node: {free}")
    route = socket.socket(type=socket.SOCK_DGRAM)
    if route.connect_ex((address, port)):  # this sends nothing
        sys.exit(f"error: no route to {address} from here: check NODE0 and the network")
    print(0, route.getsockname()[0])
'
read -r is_host address < <("$PYTHON" -c "$where" "$NODE0" "$PORT") || exit 1

# On a CPU, messages use gloo. It would log a warning for each address without a name, so its log is
# switched off. On GPUs the log stays on, because NCCL writes there why it ends a process.
on_cpu() {
    case " $* " in
        *" --device cpu "* | *" --device=cpu "*) return 0 ;;
    esac
    ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null
}
if on_cpu "$@"; then
    export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-FATAL}
fi

# Each start gets a store of its own. In the old one, the new ranks would find old addresses.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
command=("$PYTHON" -m torch.distributed.run --nnodes "$NODES" --nproc-per-node "$GPUS"
    --max-restarts "$RESTARTS" --rdzv-backend c10d --rdzv-id "$RDZV_ID"
    --rdzv-endpoint "$NODE0:$PORT" --local-addr "$address"
    --rdzv-conf "is_host=$is_host,join_timeout=$WAIT,read_timeout=$WAIT"
    # The system ends a rank whose torchrun has ended, also by kill -9.
    --no-python setpriv --pdeathsig KILL "$PYTHON" -u "$@")
echo "+ ${command[*]}" >&2

trap '' USR1 # Slurm sends it before the time limit; only the ranks handle it, not torchrun

# torchrun has a session of its own, so Ctrl-C reaches only this script. The script then asks
# torchrun, once, to end its ranks.
setsid setpriv --pdeathsig TERM "${command[@]}" &
trap 'kill $!; wait $! || true; echo interrupted >&2; exit 130' INT
trap 'kill $!; wait $! || true; exit 143' TERM
same="start all nodes within $WAIT s, each once, with the same NODE0 and PORT"
wait $! || fail $? "look for the first error above, or $same"
