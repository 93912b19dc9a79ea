#!/usr/bin/env bash
# Starts a lesson on every node over ssh, from one of the nodes or from your laptop. The nodes need
# the project in the same folder, and ssh must work with a key. All nodes are stopped by the first
# failure, by Ctrl-C, and by the end of this script.
# A lesson that starts its own processes gets -n, -g, -nr, -ip and --port. Other lessons are started
# by run/torchrun_node.sh.
#   HOSTS="10.0.0.1 10.0.0.2" run/two_nodes_ssh.sh                    # the DDP lesson
#   run/two_nodes_ssh.sh playground/blocking_p2p.py --device cpu      # another one, with its flags
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# --- EDIT ---
HOSTS=${HOSTS:-node0 node1}         # one or more; the first one is node 0
GPUS=${GPUS:-2}                     # processes on each node
IP=${IP:-}                          # address at which the other nodes reach node 0; empty: HOSTS's
PORT=${PORT:-8888}                  # a free port of node 0
SSH=${SSH:-ssh}                     # or "ssh -p 2222"
CHECKOUT=${CHECKOUT:-$PWD}          # the project's folder on the nodes
PYTHON=${PYTHON:-.venv/bin/python}  # runs the lesson there
# ------------
HOSTS=${HOSTS//$'\r'/} # as in a file that was written on Windows

fail() {
    echo "error: $*" >&2
    exit 1
}

[ $# -gt 0 ] || set -- playground/distributed_data_parallel.py
[ -f "$1" ] || fail "there is no $1: choose one of playground/*.py"
source run/lesson.sh
spawns "$1" || takes_rank "$1" || fail "$(why_not "$1")"
read -ra hosts <<<"$HOSTS"
read -ra ssh <<<"$SSH -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5"
IP=${IP:-${hosts[0]#*@}}

printf -v look 'cd %q || exit 3; test -f %q || exit 3; command -v %q || exit 4' \
    "$CHECKOUT" "$1" "$PYTHON"
# All hosts are checked first, so that no node waits for one that cannot start.
for host in "${hosts[@]}"; do
    why=$("${ssh[@]}" "$host" "$look" 2>&1 </dev/null) && continue
    case "$? $why" in
        "3 "*) fail "$host has no $CHECKOUT/$1: rsync -a ./ $host:$CHECKOUT" ;;
        "4 "*) fail "$host has no $PYTHON in $CHECKOUT: $SSH $host $CHECKOUT/run/setup.sh" ;;
        *"not resolve"*) advice="correct HOSTS, or add the host to /etc/hosts" ;;
        *"verification failed"*) advice="accept its key once: $SSH $host" ;;
        *"Permission denied"*) advice="give it your key: ssh-copy-id $host" ;;
        *) advice="try this alone: $SSH $host" ;;
    esac
    why=$(tail -n 1 <<<"${why//$'\r'/}")
    fail "cannot log in to $host ($why): $advice"
done

# What each node runs. Its standard input ends when this script ends, for whatever reason, and that
# ends the lesson. `set -m` makes the lesson and its ranks a process group, which kill can end.
on_node='cd "$1"; shift; set -m; "$@" </dev/null & lesson=$!; set +m;'
# Wait for the end of the lesson, or for the end of the input.
on_node+=' cat <&0 >/dev/null & wait -n; status=$?;'
on_node+=' kill -- -$lesson 2>/dev/null && sleep 2 && kill -KILL -- -$lesson 2>/dev/null;'
on_node+=' exit $status'
# The nodes' input is the output of this process. It writes nothing, and it ends with this script,
# even after kill -9.
coproc cat
exec 3<&"${COPROC[0]}"
lifeline=$COPROC_PID
stop() {
    kill "$lifeline" 2>/dev/null || true
    wait # until the nodes have stopped
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

pack
for node in "${!hosts[@]}"; do
    if spawns "$1"; then
        command=(env "${passed[@]}" "$PYTHON" "$1" -n ${#hosts[@]} -g "$GPUS" -nr "$node")
        command+=(-ip "$IP" --port "$PORT" "${@:2}")
    else # the same on every node
        command=(env "${passed[@]}" NODES=${#hosts[@]} GPUS="$GPUS" NODE0="$IP" PORT="$PORT")
        command+=(PYTHON="$PYTHON" run/torchrun_node.sh "$@")
    fi
    echo "+ ${hosts[node]}: cd $CHECKOUT; ${command[*]}" >&2
    # ssh joins its words with spaces, so they are quoted.
    printf -v line '%q ' bash -c "$on_node" bash "$CHECKOUT" "${command[@]}"
    "${ssh[@]}" "${hosts[node]}" "$line" <&3 2>&1 | sed -u "s/^/${hosts[node]}: /" &
done
for _ in "${hosts[@]}"; do
    wait -n # for any node; a failure ends the script, and with it all nodes
done
