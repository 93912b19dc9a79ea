#!/usr/bin/env bash
# A PBS job. It starts the lesson on its nodes with run/two_nodes_ssh.sh. Type the command in the
# checkout, which must be visible on all nodes. qsub passes no arguments to a script, so the lesson
# and its flags are in a variable:
#   LESSON="playground/distributed_data_parallel.py --epochs 1" qsub -V run/pbs.sh
# The output is in playground.o<job>. qstat shows the job's state, and qdel <job> ends it.
# --- EDIT ---  (ppn: processes on each node, one for each GPU. OpenPBS also has
#                -l select=2:ncpus=2:mpiprocs=2)
#PBS -N playground
#PBS -l nodes=2:ppn=2
#PBS -l walltime=00:30:00
#PBS -j oe
LESSON=${LESSON:-}                  # the lesson and its flags, which are split at spaces
export PORT=${PORT:-}               # a free port of the first node; empty: from the job's number
export SSH=${SSH:-ssh}              # it must work with a key between the job's nodes
export PYTHON=${PYTHON:-.venv/bin/python}
# ------------
set -euo pipefail

fail() { echo "error: $2" >&2 && exit "$1"; }
again='LESSON="playground/distributed_data_parallel.py --epochs 1" qsub -V run/pbs.sh'
[ -f "${PBS_NODEFILE:-}" ] || fail 1 "no node file, so this is not inside a PBS job: $again"
# PBS runs a copy of this file in a folder of its own. This is the folder where qsub was typed:
cd "${PBS_O_WORKDIR:-.}"
[ -f run/two_nodes_ssh.sh ] ||
    fail 1 "$PWD is not the checkout: cd <checkout> and type the same qsub there"
if [ $# -eq 0 ]; then
    read -ra words <<<"$LESSON"
    set -- "${words[@]}"
fi
[ $# -gt 0 ] || fail 2 "no lesson: $again"
[ -f "$1" ] || fail 2 "there is no lesson $1: choose one of playground/*.py, before its flags"

# For each process that may be started, the file has a line with the name of its node.
HOSTS=$(awk '!seen[$0]++' "$PBS_NODEFILE" | paste -sd ' ')
GPUS=$(sort "$PBS_NODEFILE" | uniq -c | awk '{print $1}' | sort -u)
[[ $GPUS =~ ^[0-9]+$ ]] ||
    fail 1 "the nodes have different numbers of processes: qsub -l nodes=2:ppn=2 ..."
number=${PBS_JOBID:-0}
# Two jobs on one node then have different ports.
export HOSTS GPUS PORT=${PORT:-$((12000 + ${number%%[!0-9]*} % 20000))}
set -x
exec run/two_nodes_ssh.sh "$@"
