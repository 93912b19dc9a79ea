#!/usr/bin/env bash
# Is this machine fit to join a run on several? One line for each check: ok, or FIX with what to do; status 1 with a FIX.
# Type it on every node before the run; with hosts, it compares this one with those, over ssh.
#   NODE0=10.0.0.1 run/check_node.sh
#   NODE0=10.0.0.1 run/check_node.sh node1 node2
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# --- EDIT ---
NODE0=${NODE0:-$(hostname)}         # address or name of node 0, as you will give it to -ip
PORT=${PORT:-8888}                  # its port
SSH=${SSH:-ssh}                     # or "ssh -p 2222"
CHECKOUT=${CHECKOUT:-$PWD}          # the project's folder on the other hosts
PYTHON=${PYTHON:-.venv/bin/python}  # runs the lessons, here and there
# ------------

export LC_ALL=C PATH=$PATH:/usr/sbin:/sbin # messages in English; where ip may be
status=0
ok() { echo "ok    $*"; }
fix() { echo "FIX   $1: $2" && status=1; }
address_of() { getent ahostsv4 "$1" | awk 'NR == 1 { print $1 }' || true; }

[ -x "$(command -v ip)" ] || { echo "error: there is no program ip: sudo apt-get install iproute2" >&2 && exit 1; }

# The way to node 0
name=$(hostname)
mine=$(address_of "$name")
node0=$(address_of "$NODE0")
route=$(ip -o -4 route get "${node0:-none}" 2>/dev/null || true) # as in "10.0.0.1 dev eth0 src 10.0.0.2"
device=$(sed -n 's/.* dev \([^ ]*\) .*/\1/p' <<<"$route")
if [ -z "$node0" ]; then
    fix "the name $NODE0 leads nowhere" "correct NODE0, or add the name to /etc/hosts"
elif [[ $node0 == 127.* ]]; then
    fix "$NODE0 leads to $node0, each machine's own" "set NODE0 to the address that the other nodes know"
elif [[ $route == local* ]]; then # this machine is node 0
    device=$(ip -o -4 address show to "$node0" | awk 'NR == 1 { print $2 }')
    if [ -n "$(ss -Htln "sport = :$PORT")" ]; then
        fix "port $PORT is taken" "choose another, with PORT here and --port for the lessons"
    else
        ok "this is node 0, and its port $PORT is free"
    fi
elif why=$(timeout 3 bash -c 'exec 3<>/dev/tcp/$0/$1' "$node0" "$PORT" 2>&1); then
    ok "$NODE0 listens on port $PORT"
elif [[ $why == *refused* ]]; then
    ok "$NODE0 can be reached; on port $PORT nothing listens yet"
else
    fix "no answer from port $PORT of $NODE0 ($node0) in 3 s" "correct NODE0, or let TCP through the firewalls"
fi

# Where this machine listens
if [ -n "$device" ] && [ "$device" != lo ]; then
    others=$(ip -o -4 address show up scope global | awk -v mine="$device" '$2 != mine { print $2 }' | sort -u | xargs)
    for variable in GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME; do
        if [ "${!variable:-}" = "$device" ]; then
            ok "$variable is $device, which leads to $NODE0"
        elif [ -n "${!variable:-}" ]; then
            fix "$variable is ${!variable}, but $device leads to $NODE0" "export $variable=$device"
        elif [ -n "$others" ]; then
            fix "$device leads to $NODE0, but there is $others as well" "export $variable=$device"
        elif [ $variable = GLOO_SOCKET_IFNAME ] && [[ ${mine:-127.} == 127.* ]]; then
            fix "this host's name, $name, leads to ${mine:-nowhere}" "export $variable=$device, or correct /etc/hosts"
        else
            ok "$variable isn't needed: $device is the only network"
        fi
    done
fi

# What runs here
ask='
import platform, torch
gpus = range(torch.cuda.device_count())
print(f"Python {platform.python_version()}, torch {torch.__version__}, GPUs: {len(gpus)}", end="")
for gpu in gpus:
    try:
        torch.zeros(1, device=gpu)  # an old driver still lists GPUs that it lets nobody use
    except Exception as error:
        print(f", but GPU {gpu} does not work ({str(error).splitlines()[0]})", end="")
        break
print()
'
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true) # and no parts of one, which follow it with MIG
if ! here=$("$PYTHON" - <<<"$ask" 2>/dev/null); then
    fix "$PYTHON can't import torch" run/setup.sh
elif [[ $here == *"does not work"* ]]; then
    fix "$here" "update its driver, or install a torch that fits it: https://pytorch.org/get-started"
elif [ "${here##* }" != "$gpus" ]; then
    fix "nvidia-smi lists $gpus GPUs, torch finds ${here##* }" "unset CUDA_VISIBLE_DEVICES, end MIG, update the driver"
elif [ "$gpus" = 0 ]; then
    ok "$here: the lessons run on the CPU, with gloo"
else
    ok "$here"
fi

# What differs there
read -ra ssh <<<"$SSH -o BatchMode=yes -o ConnectTimeout=10"
for host in "$@"; do
    before=$(date +%s)
    if ! now=$("${ssh[@]}" "$host" date +%s 2>&1); then
        fix "can't log in to $host ($(tail -n 1 <<<"${now//$'\r'/}"))" "try it alone: $SSH $host"
        continue
    fi
    behind=$((before - ${now##*$'\n'}))
    if [ ${behind#-} -le $(($(date +%s) - before + 2)) ]; then
        ok "$host has the same time"
    else
        fix "the clock of $host differs by about ${behind#-} s" "set both by NTP: sudo timedatectl set-ntp true"
    fi
    printf -v there 'cd %q && %q -' "$CHECKOUT" "$PYTHON"
    if ! there=$("${ssh[@]}" "$host" "$there" <<<"$ask" 2>/dev/null); then
        fix "$host can't run $PYTHON with torch in $CHECKOUT" "$SSH $host $CHECKOUT/run/setup.sh"
    elif [ "$there" = "$here" ]; then
        ok "$host has the same"
    else
        fix "$host has $there, not ${here:-what is missing here}" "install the same there, or see what hides its GPUs"
    fi
done
exit $status
