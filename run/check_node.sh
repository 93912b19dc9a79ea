#!/usr/bin/env bash
# Checks whether this machine is ready for a run on several machines: the route to node 0, its port,
# and torch. It prints a line for each: "ok", or "FIX" and what to do. With a FIX its status is 1.
# Type it on every node. If hosts are given, it also compares their torch with this one over ssh.
#   NODE0=10.0.0.1 run/check_node.sh node1 node2
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh run/check_node.sh, where sh is dash
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# --- EDIT ---
NODE0=${NODE0:-$(hostname)}         # address or name of node 0, as you will give it to -ip
PORT=${PORT:-29500}                  # its port
SSH=${SSH:-ssh}                     # or "ssh -p 2222"
CHECKOUT=${CHECKOUT:-$PWD}          # the project's folder on the other hosts
PYTHON=${PYTHON:-.venv/bin/python}  # runs the lessons, on this machine and on the others
# ------------
PATH=$PATH:/usr/sbin:/sbin # ip may be there
status=0
ok() { echo "ok    $*"; }
fix() { echo "FIX   $1: $2" && status=1; }

address=$(getent ahostsv4 "$NODE0" | awk 'NR == 1 { print $1 }' || true)
route=$(ip -o -4 route get "${address:-none}" 2>/dev/null || true) # as "10.0.0.1 dev eth0 src ..."
own=${route#* src } # this machine's address there
device=$(ip -o -4 address show to "${own%% *}" 2>/dev/null | awk 'NR == 1 { print $2 }' || true)
if [ -z "$route" ]; then
    fix "no route leads to $NODE0" "correct NODE0, or add the name to /etc/hosts"
elif [[ $route == "local 127."* ]]; then
    fix "with $NODE0, every machine reaches itself" "set NODE0 to an address that all nodes reach"
elif [[ $route == local* ]] && [ -n "$(ss -Htln "sport = :$PORT")" ]; then
    fix "port $PORT is in use" "choose another one, with PORT here and --port for the lessons"
elif [[ $route == local* ]]; then
    ok "this is node 0, and its port $PORT is free"
elif why=$(LC_ALL=C timeout 3 bash -c 'exec 3<>/dev/tcp/$0/$1' "$NODE0" "$PORT" 2>&1) ||
    [[ $why == *refused* ]]; then # it answers, even if nothing listens there yet
    ok "$device leads to $NODE0, and its port $PORT answers"
else
    fix "no answer from port $PORT of $NODE0 in 3 s" "correct NODE0, or allow TCP in the firewalls"
fi
named=$(getent ahostsv4 "$(hostname)" | awk 'NR == 1 { print $1 }' || true)
if [[ $named == 127.* && -z ${GLOO_SOCKET_IFNAME:-} && -n $device ]]; then
    ok "this host's name leads to $named, so the lessons let gloo use $device. In a script of your" \
        "own: export GLOO_SOCKET_IFNAME=$device"
fi

ask='import platform as p, torch
print(f"Python {p.python_version()}, torch {torch.__version__}, GPUs: {torch.cuda.device_count()}")'
if here=$("$PYTHON" -c "$ask" 2>&1); then ok "$here"; else fix "${here##*$'\n'}" run/setup.sh; fi
read -ra ssh <<<"$SSH -o BatchMode=yes -o ConnectTimeout=10"
for host in "$@"; do
    look="cd ${CHECKOUT@Q} && ${PYTHON@Q} -"
    if ! there=$("${ssh[@]}" "$host" "$look" <<<"$ask" 2>&1 | tr -d '\r'); then
        fix "$host cannot run torch (${there##*$'\n'})" "try $SSH $host $CHECKOUT/run/setup.sh"
    elif [ "$there" = "$here" ]; then
        ok "$host has the same"
    else
        fix "$host has $there" "install the same on all nodes, or make hidden GPUs visible"
    fi
done
exit $status
