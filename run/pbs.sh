#!/usr/bin/env bash
# A PBS job, which starts the lesson on its nodes with run/two_nodes_ssh.sh. Type in the checkout, which all nodes must
# see; qsub passes no arguments, so the lesson and its flags are in a variable:
#   qsub -v LESSON="playground/distributed_data_parallel.py --epochs 1" run/pbs.sh
# Its output is in playground.o<job>; qstat shows its state, qdel <job> ends it.
# --- EDIT ---  ppn: processes on each node, one per GPU. In OpenPBS also: -l select=2:ncpus=2:mpiprocs=2
#PBS -N playground
#PBS -l nodes=2:ppn=2
#PBS -l walltime=00:30:00
#PBS -j oe
LESSON=${LESSON:-}                  # split at spaces
export PORT=${PORT:-}               # a free port of the first node; empty: one made from the job's number
export SSH=${SSH:-ssh}              # the job's nodes must let you in with a key
export PYTHON=${PYTHON:-.venv/bin/python}
# ------------
set -euo pipefail

fail() { echo "error: $2" >&2 && exit "$1"; }
again='qsub -v LESSON="playground/distributed_data_parallel.py --epochs 1" run/pbs.sh'
[ -f "${PBS_NODEFILE:-}" ] || fail 1 "no node file, so this is not inside a PBS job: $again"
cd "${PBS_O_WORKDIR:-.}" # where qsub was typed: PBS runs a copy of this file, from a folder of its own
[ -f run/two_nodes_ssh.sh ] || fail 1 "$PWD is not the checkout: cd <checkout> and type the same qsub there"
if [ $# -eq 0 ]; then
    read -ra words <<<"$LESSON"
    set -- "${words[@]}"
fi
[ $# -gt 0 ] || fail 2 "no lesson: $again"
[ -f "$1" ] || fail 2 "there is no lesson $1: choose one of playground/*.py, before its flags"

# The file has a line for each process that PBS lets us start: its node's name.
HOSTS=$(awk '!seen[$0]++' "$PBS_NODEFILE" | paste -sd ' ')
GPUS=$(sort "$PBS_NODEFILE" | uniq -c | awk '{print $1}' | sort -u)
[[ $GPUS =~ ^[0-9]+$ ]] || fail 1 "the nodes have different numbers of processes: qsub -l nodes=2:ppn=2 ..."
number=${PBS_JOBID:-0}
export HOSTS GPUS PORT=${PORT:-$((12000 + ${number%%[!0-9]*} % 20000))} # two jobs on one node differ
set -x
exec run/two_nodes_ssh.sh "$@"
