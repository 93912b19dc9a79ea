#!/usr/bin/env bash
# Tries the lessons on this machine's NVIDIA GPUs, in ten minutes at most, and writes a page of
# Markdown: the versions, the tests that fail, the speed of single_gpu.py and of a bare loop, how much
# of what the GPU could compute language_model.py uses (MFU), and which kernels attention chooses.
#   run/gpu.sh          # writes gpu.md, and what the tests print to gpu.log
#   run/gpu.sh my.md    # writes my.md and my.log
# Its status is 1 if a test fails, and 2 if PyTorch finds no GPU.
set -euo pipefail
page=$(realpath -m "${1:-$(dirname "${BASH_SOURCE[0]}")/../gpu.md}")
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# --- EDIT ---
PYTHON=${PYTHON:-}     # runs the tests, and needs tests/all.txt; empty: that of .venv
JOBS=${JOBS:-$(nproc)} # tests at a time
LIMIT=${LIMIT:-310}    # seconds for the tests, which are then interrupted
# ------------

if [ -z "$PYTHON" ]; then
    run/setup.sh tests/all.txt
    PYTHON=.venv/bin/python
fi
# Two columns of a table, a line for each row.
ask='
import platform, torch
if torch.cuda.is_available():
    gpus = range(torch.cuda.device_count())
    print("| GPUs |", ", ".join(map(torch.cuda.get_device_name, gpus)), "|")
    print("| Python, torch |", f"{platform.python_version()}, {torch.__version__} |")
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    print("| CUDA, NCCL |", f"{torch.version.cuda}, {nccl} |")
'
versions=$("$PYTHON" -W ignore -c "$ask")
if [ -z "$versions" ]; then
    echo "error: PyTorch finds no GPU: run/gpu.sh needs an NVIDIA GPU and its driver" >&2
    exit 2
fi
log=${page%.md}.log

# The training speed of the program that is given, in images/s: that of its fastest epoch.
speed() {
    local lines
    lines=$(timeout 45 "$PYTHON" "$@" 2>&1) || true
    printf '%s\n' "+ $*" "$lines" >>"$log"
    sed -n 's/.*  \([0-9,]*\) images\/s$/\1/p' <<<"$lines" | tr -d , | sort -n | tail -n 1
}
: >"$log"
echo "Measuring the speed ..." >&2
data=$(timeout 30 "$PYTHON" -c 'from common.data import *; print(fetch(None, DATA_DIR))' || true)
data=${data:-digits}
lesson=$(speed playground/single_gpu.py --device cuda --dataset "$data" --epochs 5)
bare=$(speed tests/programs/bare.py single_gpu "$data" data 128 5 cuda)
model=(playground/language/language_model.py --width 2048 --layers 12 --heads 16)
model+=(--batch_size 512 --rows 64 --epochs 2 --sample 1 --device cuda)
language=$(timeout 60 "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 1 \
    "${model[@]}" 2>&1 | tee -a "$log" | sed -n 's/.* s  \(.*MFU [0-9.]*%\) .*/\1/p') || true
attention=$(timeout 45 "$PYTHON" tests/programs/attention.py cuda 2>>"$log") || true

echo "Running the tests ($LIMIT s at most) ..." >&2
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null || echo unknown)
status=0
timeout --signal INT --kill-after 30 "$LIMIT" "$PYTHON" -m pytest tests/test_gpu.py \
    --verbose -n "$JOBS" --dist worksteal >>"$log" 2>&1 || status=$?
count() { grep -c "^\[gw.* $1 " "$log" || true; }
{
    echo "# The lessons on GPUs"
    echo
    echo "| what | value |"
    echo "|---|---|"
    echo "| date | $(date -u +%F) |"
    echo "| commit | $(git rev-parse --short HEAD 2>/dev/null || echo unknown) |"
    echo "$versions"
    echo "| driver | ${driver%%$'\n'*} |"
    echo "| single_gpu.py on $data | ${lesson:-failed} images/s |"
    echo "| a bare loop on $data | ${bare:-failed} images/s |"
    echo "| language_model.py, 0.6 billion parameters | $(tail -n 1 <<<"${language:-failed}") |"
    echo "${attention:-| attention | failed |}"
    echo "| tests in test_gpu.py | $(sed -n 's/.*workers \[\([0-9]*\) items\].*/\1/p' "$log") |"
    for outcome in PASSED FAILED SKIPPED ERROR; do
        echo "| ${outcome,,} | $(count $outcome) |"
    done
    echo
    if [ $status = 124 ] || [ $status = 137 ]; then
        echo "The tests were interrupted after $LIMIT s."
        echo
    fi
    sed -nE 's/^\[gw.* (FAILED|ERROR) (.*)/- \1: `\2`/p' "$log"
} >"$page"
echo "Please send $page. What the tests printed is in $log." >&2
[ $status = 0 ] || exit 1
