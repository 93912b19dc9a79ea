"""Two or three ranks with messages that gloo and NCCL treat differently: python on_nccl.py NAME.

Their lines are what `watch.py --nccl` shows. With --device cuda, they run with NCCL.
"""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SIZE = int(os.environ.get("SIZE", "4"))  # NCCL has buffers for small messages


def numbers(count=1, value=1.0):
    """Return a tensor."""
    return torch.full((SIZE * count,), value, device=DEVICE)


def sends_first(rank):
    """Both send, and then receive."""
    dist.send(numbers(), 1 - rank)
    dist.recv(numbers(), 1 - rank)


def ring(rank):
    """Three ranks send to the right, and then receive from the left."""
    dist.send(numbers(), (rank + 1) % 3)
    dist.recv(numbers(), (rank - 1) % 3)


def chain(rank):
    """Rank 0 receives first, so that the last one can send."""
    if rank == 0:
        dist.recv(numbers(), 2)
        dist.send(numbers(), 1)
    else:
        dist.send(numbers(), (rank + 1) % 3)
        dist.recv(numbers(), rank - 1)


def isends_first(rank):
    """Both start to send, and then to receive."""
    requests = [dist.isend(numbers(), 1 - rank), dist.irecv(numbers(), 1 - rank)]
    for request in requests:
        request.wait()


def batch(rank):
    """Both send and receive in a batch."""
    ops = [dist.P2POp(dist.isend, numbers(), 1 - rank), dist.P2POp(dist.irecv, numbers(), 1 - rank)]
    for request in dist.batch_isend_irecv(ops):
        request.wait()


def batch_in_another_order(rank):
    """Rank 0 sends the short tensor first, and rank 1 receives the long one first."""
    call = dist.isend if rank == 0 else dist.irecv
    counts = (1, 2) if rank == 0 else (2, 1)
    ops = [dist.P2POp(call, numbers(count), 1 - rank, tag=count) for count in counts]
    for request in dist.batch_isend_irecv(ops):
        request.wait()


def tags(rank):
    """Two messages of one size are told apart by their tags."""
    order = (1, 2) if rank == 0 else (2, 1)
    call = dist.isend if rank == 0 else dist.irecv
    ops = [dist.P2POp(call, numbers(1, tag), 1 - rank, tag=tag) for tag in order]
    for request in dist.batch_isend_irecv(ops):
        request.wait()
    if rank == 1:
        found = [op.tensor[0].item() for op in ops]
        assert found == [2.0, 1.0], found


def batch_meets_call(rank):
    """Rank 0 sends in a batch, and rank 1 receives without one."""
    if rank == 0:
        [request] = dist.batch_isend_irecv([dist.P2POp(dist.isend, numbers(), 1)])
        request.wait()
    else:
        dist.recv(numbers(), 0)


def groups_in_another_order(rank):
    """Rank 1 uses two groups in another order, and nobody waits in between."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    requests = []
    for group in groups if rank == 0 else groups[::-1]:
        requests.append(dist.all_reduce(numbers(), group=group, async_op=True))
    for request in requests:
        request.wait()


def groups_in_another_order_waiting(rank):
    """The same, and each rank waits for one before the other."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for group in groups if rank == 0 else groups[::-1]:
        dist.all_reduce(numbers(), group=group)


def groups_in_one_order(rank):
    """Two groups in the same order, and nobody waits in between."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    requests = [dist.all_reduce(numbers(), group=group, async_op=True) for group in groups]
    for request in requests:
        request.wait()


def collectives_in_another_order(rank):
    """Rank 1 calls broadcast before all_reduce."""
    calls = [dist.all_reduce, lambda tensor: dist.broadcast(tensor, 0)]
    for call in calls if rank == 0 else calls[::-1]:
        call(numbers())


def shapes(rank):
    """Rank 1 has a longer tensor."""
    dist.all_reduce(numbers(1 + rank))


def dtypes(rank):
    """Rank 1 has integers of the same size."""
    dist.all_reduce(numbers() if rank == 0 else numbers().int())


def barrier_in_a_branch(rank):
    """Only rank 0 calls barrier."""
    if rank == 0:
        dist.barrier()
    dist.all_reduce(numbers())


def interleaved(rank):
    """An all_reduce and a message travel at once: in another order on rank 1."""
    if rank == 0:
        requests = [dist.all_reduce(numbers(), async_op=True), dist.isend(numbers(), 1)]
    else:
        requests = [dist.irecv(numbers(), 0), dist.all_reduce(numbers(), async_op=True)]
    for request in requests:
        request.wait()


def coalesced_on_one(rank):
    """Rank 0 starts two all_reduces in one call, and rank 1 in two."""
    if rank == 0:
        with dist.distributed_c10d._coalescing_manager():
            dist.all_reduce(numbers())
            dist.all_reduce(numbers())
    else:
        dist.all_reduce(numbers())
        dist.all_reduce(numbers())


def to_itself(rank):
    """Each rank sends to itself, and then receives."""
    requests = [dist.isend(numbers(), rank), dist.irecv(numbers(), rank)]
    for request in requests:
        request.wait()


def to_itself_in_a_batch(rank):
    """The same in a batch."""
    ops = [dist.P2POp(dist.isend, numbers(), rank), dist.P2POp(dist.irecv, numbers(), rank)]
    for request in dist.batch_isend_irecv(ops):
        request.wait()


def run(rank, args, where, size):
    """Join the group, and send messages."""
    global DEVICE
    DEVICE = args.device
    named = {}
    if args.device == "cuda":
        os.environ["NCCL_HOSTID"] = f"rank{rank}"  # so that ranks may share a GPU
        torch.cuda.set_device(0)
        named = {"device_id": torch.device("cuda", 0)} if args.eager else {}
    backend = "nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, where, rank=rank, world_size=size, **named)
    print(f"rank {rank} joined", flush=True)
    if not args.first:
        dist.all_reduce(numbers())
    globals()[args.name](rank)
    if args.device == "cuda":
        torch.cuda.synchronize()
    print(f"rank {rank} ends", flush=True)


def main():
    """Start the ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--eager", action="store_true", help="with a device_id")
    parser.add_argument("--first", action="store_true", help="without a collective before")
    args = parser.parse_args()
    if "RANK" in os.environ:
        run(int(os.environ["RANK"]), args, "env://", int(os.environ["WORLD_SIZE"]))
        return
    size = 3 if args.name in ("ring", "chain") else 2
    try:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(run, (args, f"file://{folder}/store", size), size)
    finally:
        for process in mp.active_children():
            process.kill()


if __name__ == "__main__":
    main()
