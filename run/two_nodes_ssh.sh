#!/usr/bin/env bash
# Starts a lesson on every node over ssh, from one of the nodes or from your laptop. The nodes need
# the project in the same folder, and ssh must work with a key. The first failure, Ctrl-C and the
# end of this script stop all nodes: ssh -tt gives the lesson a terminal, which ends with ssh.
#   HOSTS="10.0.0.1 10.0.0.2" run/two_nodes_ssh.sh playground/distributed_data_parallel.py
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh run/two_nodes_ssh.sh, where sh is dash
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# --- EDIT ---
HOSTS=${HOSTS:-node0 node1}         # one or more; the first one is node 0
GPUS=${GPUS:-2}                     # processes on each node
IP=${IP:-}                          # address at which the other nodes reach node 0; empty: HOSTS's
PORT=${PORT:-29500}                  # a free port of node 0
SSH=${SSH:-ssh}                     # or "ssh -p 2222"
CHECKOUT=${CHECKOUT:-$PWD}          # the project's folder on the nodes
PYTHON=${PYTHON:-.venv/bin/python}  # runs the lesson there
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # threads of each process
# ------------
lesson=${1:?"the lesson is missing: $0 playground/distributed_data_parallel.py"}

read -ra hosts <<<"${HOSTS//$'\r'/}" # as in a file that was written on Windows
read -ra ssh <<<"$SSH -tt -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5"
IP=${IP:-${hosts[0]#*@}}
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR} # no warning of each address without a name
readarray -t passed < <(env | grep -E '^(OMP_NUM_THREADS=|(NCCL|GLOO|TORCH)_)')
trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
for node in "${!hosts[@]}"; do
    if grep -q '"-nr"' "$lesson"; then # it starts its ranks itself
        command=("$lesson" -n ${#hosts[@]} -g "$GPUS" -nr "$node" -ip "$IP" --port "$PORT")
    else
        command=(-m torch.distributed.run --nnodes ${#hosts[@]} --nproc-per-node "$GPUS"
            --node-rank "$node" --master-addr "$IP" --master-port "$PORT" "$lesson")
    fi
    command=(env "${passed[@]}" "$PYTHON" "${command[@]}" "${@:2}")
    echo "+ ${hosts[node]}: cd $CHECKOUT; ${command[*]}" >&2
    # Through cat, because a lesson that writes to a terminal shows progress bars.
    missing="echo error: there is no $PYTHON: start run/setup.sh, or PYTHON=python"
    line="cd ${CHECKOUT@Q} && { command -v ${PYTHON@Q} >/dev/null || { $missing; exit 1; }; } &&"
    line+=" ${command[*]@Q} 2>&1 | cat"
    setpriv --pdeathsig TERM "${ssh[@]}" "${hosts[node]}" "bash -o pipefail -c ${line@Q}" \
        </dev/null 2>&1 | sed -u "s/^/${hosts[node]}: /; s/\r$//" &
done
for _ in "${hosts[@]}"; do
    wait -n # for any node; a failure ends the script, and with it all nodes
done
