# Read by the scripts beside it: how a lesson is started, and which variables travel to other nodes.

# Whether it starts its ranks itself: a line of code begins with mp.spawn( or launch(, maybe with "ranks = " before it.
spawns() { grep -Eq '^ *(\w+ = )?(mp\.spawn|launch)\(' "$1"; }

# Whether a launcher can tell it which rank it is: it names these variables, or joins a group without starting ranks.
takes_rank() {
    grep -Eq "[\"'](LOCAL_)?RANK[\"']" "$1" || { ! spawns "$1" && grep -Eq '^ *(\w+\.)*init_process_group\(' "$1"; }
}

# Say why a launcher that starts every rank can't start this lesson, and what can; status 1 if it can.
why_not() {
    local other=playground/distributed_data_parallel_torchrun.py
    if takes_rank "$1"; then
        return 1
    elif spawns "$1"; then
        echo "$1 starts its own processes: HOSTS=\"${HOSTS:-node0 node1}\" run/two_nodes_ssh.sh $1, or use $other"
    else
        echo "$1 is a single process: python $1, or use $other"
    fi
}

# Put NAME=VALUE of each variable that goes with a lesson to other nodes into the array `travelling`.
# CUDA_VISIBLE_DEVICES stays here: another node has other GPUs.
pack() {
    local name
    travelling=()
    for name in $(compgen -e | grep -E '^((NCCL|GLOO|TORCH)_|OMP_NUM_THREADS$)' || true); do
        travelling+=("$name=${!name}")
    done
}
