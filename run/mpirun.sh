#!/usr/bin/env bash
# Starts a lesson on every node with the mpirun of Open MPI or MPICH, which reaches the nodes over
# ssh. MPI only starts the ranks. Their messages use gloo or NCCL. The nodes need the project in the
# same folder, and ssh must work with a key.
#   HOSTS="node0 node1" run/mpirun.sh playground/distributed_data_parallel_torchrun.py --epochs 1
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh run/mpirun.sh, where sh is dash
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# --- EDIT ---
HOSTS=${HOSTS:-node0 node1}        # one or more; the first one has rank 0
GPUS=${GPUS:-2}                    # processes on each node, one for each GPU
PORT=${PORT:-29500}                 # a free port of the first host
MPIRUN=${MPIRUN:-mpirun}           # or mpirun.openmpi, mpiexec.hydra, a path
SSH=${SSH:-ssh}                    # or "ssh -p 2222"
PYTHON=${PYTHON:-.venv/bin/python} # runs the lesson on the nodes
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# ------------
: "${1:?"the lesson is missing: $0 playground/distributed_data_parallel_torchrun.py"}"
if ! command -v "$PYTHON" >/dev/null; then
    echo "error: there is no $PYTHON: start run/setup.sh, or PYTHON=python" >&2
    exit 1
fi

read -ra hosts <<<"${HOSTS//$'\r'/}" # as in a file that was written on Windows
ranks=$((${#hosts[@]} * GPUS))
readarray -t passed < <(env | grep -E '^(OMP_NUM_THREADS=|(NCCL|GLOO|TORCH)_)')
passed+=(MASTER_ADDR="${hosts[0]}" MASTER_PORT="$PORT" LOCAL_WORLD_SIZE="$GPUS")
# On each process, this sets the variables that a lesson reads, from those that MPI sets. Open MPI's
# are used first, because Slurm also sets some of MPICH's.
rank='export RANK=${OMPI_COMM_WORLD_RANK:-$PMI_RANK} '
rank+='WORLD_SIZE=${OMPI_COMM_WORLD_SIZE:-$PMI_SIZE} '
rank+='LOCAL_RANK=${OMPI_COMM_WORLD_LOCAL_RANK:-$MPI_LOCALRANKID}; '
rank+='export GROUP_RANK=$((RANK / LOCAL_WORLD_SIZE)); exec "$@"'
if "$MPIRUN" --version | grep -Eq "OpenRTE|Open MPI"; then
    command=("$MPIRUN" -np "$ranks" --host "$(IFS=,; echo "${hosts[*]/%/:$GPUS}")" --bind-to none)
    command+=(--mca plm_rsh_agent "$SSH")
    [ "$(id -u)" != 0 ] || command+=(--allow-run-as-root)
else # MPICH, whose -launcher-exec takes no flags of ssh
    read -ra ssh <<<"$SSH"
    export HYDRA_LAUNCHER_EXTRA_ARGS=${ssh[*]:1}
    command=("$MPIRUN" -n "$ranks" -hosts "$(IFS=,; echo "${hosts[*]}")" -ppn "$GPUS" -genvnone)
    command+=(-launcher ssh -launcher-exec "$(type -P "${ssh[0]}")")
    for host in "${hosts[@]:1}"; do # MPICH would wait forever for a host that it cannot reach
        "${ssh[@]}" -o BatchMode=yes -o ConnectTimeout=10 "$host" true </dev/null
    done
fi
set -x
exec "${command[@]}" -wdir "$PWD" env "${passed[@]}" bash -c "$rank" rank "$PYTHON" "$@"
