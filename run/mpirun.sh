#!/usr/bin/env bash
# Starts a lesson on every node with the mpirun of Open MPI or MPICH, which reaches the nodes over
# ssh. MPI only starts the ranks. Their messages use gloo or NCCL. The nodes need the project in the
# same folder, and ssh must work with a key.
#   HOSTS="node0 node1" run/mpirun.sh playground/distributed_data_parallel_torchrun.py --epochs 1
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# --- EDIT ---
HOSTS=${HOSTS:-node0 node1}        # one or more; the first one has rank 0
GPUS=${GPUS:-2}                    # processes on each node, one for each GPU
PORT=${PORT:-8888}                 # a free port of the first host
MPIRUN=${MPIRUN:-mpirun}           # or mpirun.openmpi, mpiexec.hydra, a path
SSH=${SSH:-ssh}                    # or "ssh -p 2222"
PYTHON=${PYTHON:-.venv/bin/python} # runs the lesson on the nodes
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# ------------
HOSTS=${HOSTS//$'\r'/} # as in a file that was written on Windows

fail() { echo "error: $2" >&2 && exit "$1"; }
[ $# -gt 0 ] || fail 2 "no lesson: $0 playground/distributed_data_parallel_torchrun.py"
[ -f "$1" ] || fail 2 "there is no lesson $1: choose one of playground/*.py, before its flags"
source run/lesson.sh
! why=$(why_not "$1") || fail 2 "$why"
type "$MPIRUN" &>/dev/null || fail 1 "$MPIRUN is missing: sudo apt-get install openmpi-bin"
type "$PYTHON" &>/dev/null || fail 1 "$PYTHON is missing: run/setup.sh"
read -ra hosts <<<"$HOSTS"
read -ra ssh <<<"$SSH -o BatchMode=yes -o ConnectTimeout=10"
printf -v look 'test -f %q' "$PWD/$1"
for host in "${hosts[@]}"; do # MPICH would wait forever for a host that it cannot reach
    getent hosts "$host" >/dev/null ||
        fail 1 "there is no host $host: correct HOSTS, or add it to /etc/hosts"
    [[ $host != localhost && $host != "$(hostname)" ]] || continue # mpirun needs no ssh to itself
    why=$("${ssh[@]}" "$host" "$look" 2>&1 </dev/null | tr -d '\r') ||
        fail 1 "cannot log in to $host, or it has no $PWD/$1 (${why##*$'\n'}): try $SSH $host"
done

# On each process, this sets the variables that a lesson reads, from those that MPI sets. Open MPI's
# are used first, because Slurm also sets some of MPICH's.
rank='export RANK=${OMPI_COMM_WORLD_RANK:-$PMI_RANK} '
rank+='WORLD_SIZE=${OMPI_COMM_WORLD_SIZE:-$PMI_SIZE} '
rank+='LOCAL_RANK=${OMPI_COMM_WORLD_LOCAL_RANK:-$MPI_LOCALRANKID} '
rank+='MASTER_ADDR=$1 MASTER_PORT=$2 LOCAL_WORLD_SIZE=$3; '
rank+='export GROUP_RANK=$((RANK / LOCAL_WORLD_SIZE)); shift 3; exec "$@"'
pack # OMP_NUM_THREADS is passed as well
lesson=(env "${passed[@]}" bash -c "$rank" rank "${hosts[0]}" "$PORT" "$GPUS" "$PYTHON" "$@")
ranks=$((${#hosts[@]} * GPUS))
case $("$MPIRUN" --version 2>&1) in
    *"Open MPI"* | *OpenRTE*)
        slots=$(printf ",%s:$GPUS" "${hosts[@]}")
        command=("$MPIRUN" -np "$ranks" --host "${slots#,}" --bind-to none)
        command+=(--mca plm_rsh_agent "$SSH")
        [ "$(id -u)" -ne 0 ] || command+=(--allow-run-as-root)
        ;;
    *HYDRA* | *Intel*)
        names=$(printf ',%s' "${hosts[@]}")
        command=("$MPIRUN" -n "$ranks" -hosts "${names#,}" -ppn "$GPUS" -genvnone)
        read -ra ssh <<<"$SSH"
        command+=(-launcher ssh -launcher-exec "$(type -P "${ssh[0]}")")
        export HYDRA_LAUNCHER_EXTRA_ARGS=${ssh[*]:1} # -launcher-exec takes no flags
        ;;
    *)
        fail 1 "$MPIRUN is neither Open MPI's nor MPICH's: name one, as in MPIRUN=mpirun.openmpi"
        ;;
esac
command+=(-wdir "$PWD" "${lesson[@]}")
echo "+ ${command[*]@Q}" >&2

# mpirun has a session of its own, so Ctrl-C reaches only this script. The script then asks mpirun,
# once, to end its ranks.
setsid setpriv --pdeathsig TERM "${command[@]}" &
trap 'kill $!; wait $! || true; echo interrupted >&2; exit 130' INT
trap 'kill $!; wait $! || true; exit 143' TERM
wait $! || fail $? "a rank or mpirun failed: correct the first error above and type this again"
