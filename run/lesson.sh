# The scripts beside this file read it. It has functions for two questions: how a lesson is started,
# and which variables are passed to other nodes.

# Whether the lesson starts its ranks itself: a line of code begins with mp.spawn( or launch(. An
# assignment, such as "ranks = ", may be before it.
spawns() { grep -Eq '^ *(\w+ = )?(mp\.spawn|launch)\(' "$1"; }

# Whether a launcher can tell the lesson its rank: the lesson reads RANK or LOCAL_RANK, or it joins
# a process group without starting ranks. (With the backend "fake", there are no other ranks.)
takes_rank() {
    grep -Eq "[\"'](LOCAL_)?RANK[\"']" "$1" && return
    ! spawns "$1" && ! grep -q '_group("fake"' "$1" && grep -Eq '^ *(\w+\.)*init_process_group\(' "$1"
}

# Prints why a launcher cannot start this lesson, and what can. The status is 1 if a launcher can.
why_not() {
    local other=playground/distributed_data_parallel_torchrun.py
    local ssh="HOSTS=\"${HOSTS:-node0 node1}\" run/two_nodes_ssh.sh $1"
    if takes_rank "$1"; then
        return 1
    elif spawns "$1"; then
        echo "$1 starts its own processes: $ssh, or use $other"
    else
        echo "$1 is a single process: python $1, or use $other"
    fi
}

# Puts NAME=VALUE of each variable that is passed to other nodes into the array `passed`.
# CUDA_VISIBLE_DEVICES is not passed, because another node may have other GPUs.
pack() {
    local name
    passed=()
    for name in $(compgen -e | grep -E '^((NCCL|GLOO|TORCH)_|OMP_NUM_THREADS$)' || true); do
        passed+=("$name=${!name}")
    done
}
