#!/usr/bin/env bash
# Checks whether this machine is ready for a run on several machines. It prints a line for each
# check: "ok", or "FIX" and what to do. With a FIX its status is 1. Type it on every node before the
# run. If hosts are given, it also compares them with this machine over ssh.
#   NODE0=10.0.0.1 run/check_node.sh
#   NODE0=10.0.0.1 run/check_node.sh node1 node2
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# --- EDIT ---
NODE0=${NODE0:-$(hostname)}         # address or name of node 0, as you will give it to -ip
PORT=${PORT:-8888}                  # its port
SSH=${SSH:-ssh}                     # or "ssh -p 2222"
CHECKOUT=${CHECKOUT:-$PWD}          # the project's folder on the other hosts
PYTHON=${PYTHON:-.venv/bin/python}  # runs the lessons, on this machine and on the others
# ------------

export LC_ALL=C                    # messages are in English
export PATH=$PATH:/usr/sbin:/sbin  # ip may be there
status=0
ok() { echo "ok    $*"; }
fix() { echo "FIX   $1: $2" && status=1; }
address_of() {
    if [[ $1 =~ ^[0-9.]+$ ]]; then # without a network, getent finds none for it
        echo "$1"
    else
        getent ahostsv4 "$1" | awk 'NR == 1 { print $1 }' || true
    fi
}

if ! [ -x "$(command -v ip)" ]; then
    echo "error: there is no program ip: sudo apt-get install iproute2" >&2
    exit 1
fi

# Can node 0 be reached?
name=$(hostname)
mine=$(address_of "$name")
node0=$(address_of "$NODE0")
# It prints a route such as "10.0.0.1 dev eth0 src 10.0.0.2".
route=$(ip -o -4 route get "${node0:-none}" 2>/dev/null || true)
device=$(sed -n 's/.* dev \([^ ]*\) .*/\1/p' <<<"$route")
if [ -z "$node0" ]; then
    fix "the name $NODE0 has no address" "correct NODE0, or add the name to /etc/hosts"
elif [[ $node0 == 127.* ]]; then
    fix "with $node0, the address of $NODE0, every machine reaches itself" \
        "set NODE0 to the address at which the other nodes reach node 0"
elif [[ $route == local* ]]; then # this machine is node 0
    device=$(ip -o -4 address show to "$node0" | awk 'NR == 1 { print $2 }')
    if [ -n "$(ss -Htln "sport = :$PORT")" ]; then
        fix "port $PORT is in use" "choose another one, with PORT here and --port for the lessons"
    else
        ok "this is node 0, and its port $PORT is free"
    fi
elif why=$(timeout 3 bash -c 'exec 3<>/dev/tcp/$0/$1' "$node0" "$PORT" 2>&1); then
    ok "$NODE0 listens on port $PORT"
elif [[ $why == *refused* ]]; then
    ok "$NODE0 can be reached, and nothing listens on port $PORT yet"
else
    fix "no answer from port $PORT of $NODE0 ($node0) in 3 s" \
        "correct NODE0, or allow TCP in the firewalls"
fi

# Which network interface will gloo and NCCL choose?
if [ -n "$device" ] && [ "$device" != lo ]; then
    others=$(ip -o -4 address show up scope global |
        awk -v mine="$device" '$2 != mine { print $2 }' | sort -u | xargs)
    for variable in GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME; do
        if [ "${!variable:-}" = "$device" ]; then
            ok "$variable is $device, which leads to $NODE0"
        elif [ -n "${!variable:-}" ]; then
            fix "$variable is ${!variable}, but $device leads to $NODE0" "export $variable=$device"
        elif [ -n "$others" ]; then
            fix "$device leads to $NODE0, but there are other networks ($others)" \
                "export $variable=$device"
        elif [ $variable = GLOO_SOCKET_IFNAME ] && [[ ${mine:-127.} == 127.* ]]; then
            fix "gloo would listen at the address of this host's name, $name: ${mine:-none}" \
                "export $variable=$device, or correct /etc/hosts"
        else
            ok "$variable is not needed, because $device is the only network"
        fi
    done
fi

# Which versions and GPUs are on this machine?
ask='
import platform, torch
gpus = range(torch.cuda.device_count())
print(f"Python {platform.python_version()}, torch {torch.__version__}, GPUs: {len(gpus)}", end="")
for gpu in gpus:
    try:
        torch.zeros(1, device=gpu)  # an old driver lists GPUs, but they cannot be used
    except Exception as error:
        print(f", but GPU {gpu} does not work ({str(error).splitlines()[0]})", end="")
        break
print()
'
# With MIG, nvidia-smi also lists parts of a GPU. Their lines begin with spaces and do not count.
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
if ! here=$("$PYTHON" - <<<"$ask" 2>/dev/null); then
    fix "$PYTHON cannot import torch" run/setup.sh
elif [[ $here == *"does not work"* ]]; then
    fix "$here" "update its driver, or install a torch that fits: https://pytorch.org/get-started"
elif [ "${here##* }" != "$gpus" ]; then
    fix "nvidia-smi lists $gpus GPUs, but torch finds ${here##* }" \
        "unset CUDA_VISIBLE_DEVICES, switch off MIG, or update the driver"
elif [ "$gpus" = 0 ]; then
    ok "$here: the lessons run on the CPU, with gloo"
else
    ok "$here"
fi

# Which clocks, versions and GPUs do the other hosts have?
read -ra ssh <<<"$SSH -o BatchMode=yes -o ConnectTimeout=10"
for host in "$@"; do
    before=$(date +%s)
    if ! now=$("${ssh[@]}" "$host" date +%s 2>&1); then
        fix "cannot log in to $host ($(tail -n 1 <<<"${now//$'\r'/}"))" "try this alone: $SSH $host"
        continue
    fi
    behind=$((before - ${now##*$'\n'}))
    if [ ${behind#-} -le $(($(date +%s) - before + 2)) ]; then
        ok "$host has the same time"
    else
        fix "the clock of $host differs by about ${behind#-} s" \
            "set both clocks by NTP: sudo timedatectl set-ntp true"
    fi
    printf -v there 'cd %q && %q -' "$CHECKOUT" "$PYTHON"
    if ! there=$("${ssh[@]}" "$host" "$there" <<<"$ask" 2>/dev/null); then
        fix "$host cannot run $PYTHON with torch in $CHECKOUT" "$SSH $host $CHECKOUT/run/setup.sh"
    elif [ "$there" = "$here" ]; then
        ok "$host has the same versions and GPUs"
    else
        fix "$host has $there, this machine has ${here:-no torch}" \
            "install the same on both, or make hidden GPUs visible"
    fi
done
exit $status
