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
export SSH=${SSH:-ssh} # it must work with a key between the job's nodes
# ------------
set -euo pipefail
: "${PBS_NODEFILE:?"this is not a PBS job: LESSON=<lesson> qsub -V $0"}"
: "${LESSON:?"is missing: LESSON=<lesson> qsub -V run/pbs.sh"}"

cd "$PBS_O_WORKDIR" # where qsub was typed; PBS runs a copy of this file in a folder of its own
# For each process that may be started, the node file has a line with the name of its node.
HOSTS=$(uniq "$PBS_NODEFILE" | paste -sd ' ')
GPUS=$(uniq -c "$PBS_NODEFILE" | awk 'NR == 1 { print $1 }')
PORT=$((12000 + ${PBS_JOBID%%[!0-9]*} % 20000)) # two jobs on one node have different ports
export HOSTS GPUS PORT
read -ra lesson <<<"$LESSON" # it is split at spaces
set -x
exec run/two_nodes_ssh.sh "${lesson[@]}"
