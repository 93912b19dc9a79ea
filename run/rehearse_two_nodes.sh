#!/usr/bin/env bash
# Rehearse a run on two nodes with one machine. node0 (10.77.0.1) and node1 (10.77.0.2) exist as long as the run, each
# with an address, a host name and pids of its own. They share the disk and the cores, and reach nothing else.
# A lesson that starts its own processes gets -n, -g, -nr and -ip; others are started by run/torchrun_node.sh.
#   run/rehearse_two_nodes.sh                               # the DDP lesson, on the CPU
#   run/rehearse_two_nodes.sh playground/X.py --epochs 1    # another lesson; your flags win: try -ip 10.77.0.9
#   run/rehearse_two_nodes.sh COMMAND...                    # anything, with NODE_RANK=0 or 1 and NODE0=10.77.0.1
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source run/lesson.sh

# --- EDIT ---
GPUS=${GPUS:-2}                     # processes on each node
BANDWIDTH=${BANDWIDTH:-}            # what a node can send, as in 100mbit; empty: as much as it likes
DELAY=${DELAY:-}                    # how long a message takes, as in 20ms; empty: no time
PYTHON=${PYTHON:-.venv/bin/python}  # runs the lesson
# ------------

fail() {
    echo "error: $*" >&2
    exit 1
}

if [ -z "${REHEARSAL:-}" ]; then # start this script again, in a world of its own: namespaces that vanish with it
    [ $# -gt 0 ] || set -- playground/distributed_data_parallel.py
    PATH=$PATH:/usr/sbin:/sbin # where ip and tc may be
    [[ $1 != *.py || -f $1 ]] || fail "there is no $1: choose one of playground/*.py"
    [[ $1 != *.py || -x $(command -v "$PYTHON") ]] || fail "there is no $PYTHON: run/setup.sh"
    [[ $1 != *.py ]] || spawns "$1" || takes_rank "$1" || fail "$(why_not "$1")"
    [ -x "$(command -v ip)" ] || fail "there is no program ip: sudo apt-get install iproute2"
    world=(unshare --net --mount --pid --fork --mount-proc --kill-child)
    [ "$(id -u)" = 0 ] || world+=(--map-root-user) # root in there, in charge of these networks only
    if ! why=$("${world[@]}" mount -t tmpfs tmpfs /run 2>&1); then
        advice="sudo run/rehearse_two_nodes.sh $*"
        [ "$(id -u)" != 0 ] || advice="leave this container, or start it with --privileged"
        fail "networks can't be made here (${why%%$'\n'*}): $advice"
    fi
    # When this process ends, even by kill -9, so does unshare, and so the first process in there, and so all the others
    REHEARSAL=yes setpriv --pdeathsig KILL "${world[@]}" run/rehearse_two_nodes.sh "$@" &
    trap 'kill -KILL $!; exit 130' INT
    trap 'kill -KILL $!; exit 143' TERM HUP
    wait $!
    exit
fi

mount -t tmpfs tmpfs /run # ip netns keeps the names of the networks there
printf '%s\n' "127.0.0.1 localhost" "10.77.0.1 node0" "10.77.0.2 node1" >/run/hosts
mount --bind /run/hosts /etc/hosts
ip netns add node0
ip netns add node1
ip link add eth0 netns node0 type veth peer name eth0 netns node1 # a cable with an eth0 at each end
shape=(tbf rate "$BANDWIDTH" burst 256kb latency 50ms)
[ -z "$DELAY" ] || shape=(netem delay "$DELAY" ${BANDWIDTH:+rate "$BANDWIDTH"})
for node in 0 1; do
    ip -n node$node address add 10.77.0.$((node + 1))/24 dev eth0
    ip -n node$node link set lo up
    ip -n node$node link set eth0 up
    if [ -n "$BANDWIDTH$DELAY" ] && ! why=$(tc -n node$node qdisc add dev eth0 root "${shape[@]}" 2>&1); then
        fail "this kernel refuses ${shape[*]} (${why%%$'\n'*}): use other values of BANDWIDTH and DELAY, or none"
    fi
done

for node in 0 1; do
    if [[ $1 != *.py ]]; then
        command=("$@")
    elif spawns "$1"; then
        command=("$PYTHON" "$1" -n 2 -g "$GPUS" -nr "$node" -ip 10.77.0.1 --device cpu "${@:2}")
    else
        command=(env NODES=2 GPUS="$GPUS" PYTHON="$PYTHON" run/torchrun_node.sh "$1" --device cpu "${@:2}")
    fi
    echo "+ node$node: ${command[*]}" >&2
    NODE0=10.77.0.1 NODE_RANK=$node ip netns exec node$node \
        unshare --uts sh -c 'hostname "$0"; exec "$@"' node$node "${command[@]}" 2>&1 | sed -u "s/^/node$node: /" &
done
wait -n # for either; the first that fails ends the script, and the script the other
wait -n
