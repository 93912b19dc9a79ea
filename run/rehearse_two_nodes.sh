#!/usr/bin/env bash
# Rehearses a run on two nodes with one machine. The nodes, node0 (10.77.0.1) and node1 (10.77.0.2),
# exist as long as the run. Each has its own address, host name and process ids. They share the disk
# and the cores, and they reach only each other.
# A lesson that starts its own processes gets -n, -g, -nr and -ip. Other lessons are started by
# run/torchrun_node.sh.
#   run/rehearse_two_nodes.sh                               # the DDP lesson, on the CPU
#   run/rehearse_two_nodes.sh playground/X.py --epochs 1    # another lesson, with its flags
#   run/rehearse_two_nodes.sh COMMAND...                    # any command
# Your flags come last, so they replace the script's: try -ip 10.77.0.9. A command has the variables
# NODE_RANK, which is 0 or 1, and NODE0, which is 10.77.0.1.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source run/lesson.sh

# --- EDIT ---
GPUS=${GPUS:-2}                     # processes on each node
BANDWIDTH=${BANDWIDTH:-}            # limit of what a node sends, as in 100mbit; empty: no limit
DELAY=${DELAY:-}                    # time that a message takes, as in 20ms; empty: none
PYTHON=${PYTHON:-.venv/bin/python}  # runs the lesson
# ------------

fail() {
    echo "error: $*" >&2
    exit 1
}

# First the script starts itself again, in namespaces that exist as long as it runs.
if [ -z "${REHEARSAL:-}" ]; then
    [ $# -gt 0 ] || set -- playground/distributed_data_parallel.py
    PATH=$PATH:/usr/sbin:/sbin # ip and tc may be there
    [[ $1 != *.py || -f $1 ]] || fail "there is no $1: choose one of playground/*.py"
    [[ $1 != *.py || -x $(command -v "$PYTHON") ]] || fail "there is no $PYTHON: run/setup.sh"
    [[ $1 != *.py ]] || spawns "$1" || takes_rank "$1" || fail "$(why_not "$1")"
    [ -x "$(command -v ip)" ] || fail "there is no program ip: sudo apt-get install iproute2"
    inside=(unshare --net --mount --pid --fork --mount-proc --kill-child)
    [ "$(id -u)" = 0 ] || inside+=(--map-root-user) # root for these namespaces only
    if ! why=$("${inside[@]}" mount -t tmpfs tmpfs /run 2>&1); then
        advice="sudo run/rehearse_two_nodes.sh $*"
        [ "$(id -u)" != 0 ] || advice="leave this container, or start it with --privileged"
        fail "networks cannot be made here (${why%%$'\n'*}): $advice"
    fi
    # When this process ends, even by kill -9, unshare ends. Then the first process inside ends, and
    # with it all others there.
    REHEARSAL=yes setpriv --pdeathsig KILL "${inside[@]}" run/rehearse_two_nodes.sh "$@" &
    trap 'kill -KILL $!; exit 130' INT
    trap 'kill -KILL $!; exit 143' TERM HUP
    wait $!
    exit
fi

mount -t tmpfs tmpfs /run # ip netns writes the names of the networks there
printf '%s\n' "127.0.0.1 localhost" "10.77.0.1 node0" "10.77.0.2 node1" >/run/hosts
mount --bind /run/hosts /etc/hosts
ip netns add node0
ip netns add node1
ip link add eth0 netns node0 type veth peer name eth0 netns node1 # a virtual cable, eth0 to eth0
shape=(tbf rate "$BANDWIDTH" burst 256kb latency 50ms)
[ -z "$DELAY" ] || shape=(netem delay "$DELAY" ${BANDWIDTH:+rate "$BANDWIDTH"})
for node in 0 1; do
    ip -n node$node address add 10.77.0.$((node + 1))/24 dev eth0
    ip -n node$node link set lo up
    ip -n node$node link set eth0 up
    [ -n "$BANDWIDTH$DELAY" ] || continue
    if ! why=$(tc -n node$node qdisc add dev eth0 root "${shape[@]}" 2>&1); then
        advice="use other values of BANDWIDTH and DELAY, or none"
        fail "this kernel refuses ${shape[*]} (${why%%$'\n'*}): $advice"
    fi
done

for node in 0 1; do
    if [[ $1 != *.py ]]; then
        command=("$@")
    elif spawns "$1"; then
        command=("$PYTHON" "$1" -n 2 -g "$GPUS" -nr "$node" -ip 10.77.0.1 --device cpu "${@:2}")
    else
        command=(env NODES=2 GPUS="$GPUS" PYTHON="$PYTHON" run/torchrun_node.sh "$1")
        command+=(--device cpu "${@:2}")
    fi
    echo "+ node$node: ${command[*]}" >&2
    named=(unshare --uts sh -c 'hostname "$0"; exec "$@"' "node$node")
    NODE0=10.77.0.1 NODE_RANK=$node ip netns exec node$node "${named[@]}" "${command[@]}" 2>&1 |
        sed -u "s/^/node$node: /" &
done
# Wait for both nodes, in any order. If the first one has failed, the script ends, and with it the
# other node.
wait -n
wait -n
