#!/usr/bin/env bash
# Rehearses a run on two or more nodes with one machine. The nodes, node0 (10.77.0.1), node1
# (10.77.0.2) and so on, exist as long as the run. Each has its own address and host name. They share
# the disk and the cores, and they reach only each other.
# A lesson that starts its own processes gets -n, -g, -nr and -ip. Other lessons are started by
# run/torchrun_node.sh.
#   run/rehearse_two_nodes.sh                               # the DDP lesson, on the CPU
#   run/rehearse_two_nodes.sh playground/X.py --epochs 1    # another lesson, with its flags
#   run/rehearse_two_nodes.sh my_script.py --its_flags      # any other script
#   run/rehearse_two_nodes.sh COMMAND...                    # any command
#   NODES=4 GPUS=1 run/rehearse_two_nodes.sh                # four nodes, with one process on each
# Your flags come last, so they replace the script's: try -ip 10.77.0.9. A command has the variables
# NODE_RANK, which is 0 on the first node, and NODE0, which is 10.77.0.1.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh run/rehearse_two_nodes.sh, where sh is dash
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# --- EDIT ---
NODES=${NODES:-2}                   # number of nodes
GPUS=${GPUS:-2}                     # processes on each node
BANDWIDTH=${BANDWIDTH:-}            # limit of what a node sends, as in 100mbit; empty: no limit
NAMES_AT=${NAMES_AT:-}              # 127.0.1.1: where hosts' names lead on Debian; empty: to them
PYTHON=${PYTHON:-.venv/bin/python}  # runs the lesson
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # threads of each process: the nodes share the cores
# ------------

fail() { echo "error: $*" >&2 && exit 1; }

# First the script starts itself again, in namespaces that exist as long as it runs.
if [ -z "${REHEARSAL:-}" ]; then
    [ $# -gt 0 ] || set -- playground/distributed_data_parallel.py
    [[ $1 != *.py ]] || command -v "$PYTHON" >/dev/null ||
        fail "there is no $PYTHON: start run/setup.sh, or PYTHON=python"
    PATH=$PATH:/usr/sbin:/sbin # ip and tc may be there
    [ -x "$(command -v ip)" ] || fail "there is no program ip: sudo apt-get install iproute2"
    inside=(unshare --net --mount --pid --fork --mount-proc --kill-child)
    [ "$(id -u)" = 0 ] || inside+=(--map-root-user) # root for these namespaces only
    why=$("${inside[@]}" mount -t tmpfs tmpfs /run 2>&1) ||
        fail "networks cannot be made here (${why%%$'\n'*}): use sudo, or docker's --privileged"
    # When this process ends, even by kill -9, unshare ends. Then the first process inside ends, and
    # with it all others there.
    REHEARSAL=yes setpriv --pdeathsig KILL "${inside[@]}" run/rehearse_two_nodes.sh "$@" &
    trap 'kill -KILL $!; exit 130' INT
    trap 'kill -KILL $!; exit 143' TERM HUP
    wait $!
    exit
fi

mount -t tmpfs tmpfs /run # ip netns writes the names of the networks there
echo "127.0.0.1 localhost" >/run/hosts
ip link add switch type bridge # a virtual cable leads from it to the eth0 of each node
ip link set switch up
for ((node = 0; node < NODES; node++)); do
    echo "${NAMES_AT:-10.77.0.$((node + 1))} node$node" >>/run/hosts
    ip netns add node$node
    ip link add port$node type veth peer name eth0 netns node$node
    ip link set port$node master switch up
done
mount --bind /run/hosts /etc/hosts
for ((node = 0; node < NODES; node++)); do
    ip -n node$node address add 10.77.0.$((node + 1))/24 dev eth0
    ip -n node$node link set lo up
    ip -n node$node link set eth0 up
    [ -z "$BANDWIDTH" ] ||
        tc -n node$node qdisc add dev eth0 root tbf rate "$BANDWIDTH" burst 256kb latency 50ms
done

for ((node = 0; node < NODES; node++)); do
    if [[ $1 != *.py ]]; then
        command=("$1")
    elif grep -q '"-nr"' "$1"; then # it starts its ranks itself
        command=("$PYTHON" "$1" -n "$NODES" -g "$GPUS" -nr "$node" -ip 10.77.0.1)
    elif grep -Eq '\b(mp\.spawn|launch)\(' "$1"; then # no lesson, so its flags are not known
        command=("$PYTHON" "$1")
    else
        command=(env NODES="$NODES" GPUS="$GPUS" PYTHON="$PYTHON" run/torchrun_node.sh "$1")
    fi
    [[ $1 != *.py ]] || ! grep -q "^from common" "$1" || command+=(--device cpu) # a lesson
    command+=("${@:2}")
    echo "+ node$node: ${command[*]}" >&2
    named=(unshare --uts sh -c 'hostname "$0"; exec "$@"' "node$node")
    NODE0=10.77.0.1 NODE_RANK=$node ip netns exec node$node "${named[@]}" "${command[@]}" 2>&1 |
        sed -u "s/^/node$node: /" &
done
# Wait for all nodes, in any order. If one has failed, the script ends, and with it the others.
for ((node = 0; node < NODES; node++)); do
    wait -n
done
