"""Two or three ranks with messages that gloo and NCCL treat differently: python on_nccl.py NAME.

Their lines are what `watch.py --nccl` shows. With --device cuda, they run with NCCL.
"""

import argparse
import os
import tempfile
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SIZE = int(os.environ.get("SIZE", "4"))  # NCCL has buffers for small messages


def numbers(count=1, value=1.0):
    """Return a tensor."""
    return torch.full((SIZE * count,), value, device=DEVICE)


def wait(*requests):
    """Wait for messages."""
    for request in requests:
        request.wait()


def send_batch(*messages):
    """Start messages in a batch, and wait for them: a call, a tensor, the other rank and a tag."""
    wait(
        *dist.batch_isend_irecv([dist.P2POp(*message[:3], tag=message[3]) for message in messages])
    )


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
    calls = [(dist.send, (rank + 1) % 3), (dist.recv, (rank - 1) % 3)]
    for call, other in calls if rank else calls[::-1]:
        call(numbers(), other)


def isends_first(rank):
    """Both start to send, and then to receive."""
    wait(dist.isend(numbers(), 1 - rank), dist.irecv(numbers(), 1 - rank))


def batch(rank):
    """Both send and receive in a batch."""
    send_batch(*((call, numbers(), 1 - rank, 0) for call in (dist.isend, dist.irecv)))


def batch_in_another_order(rank):
    """Rank 0 sends the short tensor first, and rank 1 receives the long one first."""
    call, counts = (dist.irecv, (2, 1)) if rank else (dist.isend, (1, 2))
    send_batch(*((call, numbers(count), 1 - rank, count) for count in counts))


def tags(rank):
    """Two messages of one size are told apart by their tags."""
    call, order = (dist.irecv, (2, 1)) if rank else (dist.isend, (1, 2))
    messages = [(call, numbers(1, float(tag)), 1 - rank, tag) for tag in order]
    send_batch(*messages)
    if rank == 1:
        found = [tensor[0].item() for _, tensor, *_ in messages]
        assert found == [2.0, 1.0], found


def batch_meets_call(rank):
    """Rank 0 sends in a batch, and rank 1 receives without one."""
    if rank == 0:
        send_batch((dist.isend, numbers(), 1, 0))
    else:
        dist.recv(numbers(), 0)


def two_groups(rank, reverse=True, async_op=True):
    """Call all_reduce in two groups, on rank 1 in another order, and wait at the end."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    requests = []
    for group in groups[::-1] if reverse and rank else groups:
        requests.append(dist.all_reduce(numbers(), group=group, async_op=async_op))
    wait(*filter(None, requests))


groups_in_another_order = two_groups
groups_in_another_order_waiting = partial(two_groups, async_op=False)
groups_in_one_order = partial(two_groups, reverse=False)


def collectives_in_another_order(rank):
    """Rank 1 calls broadcast before all_reduce."""
    calls = [dist.all_reduce, lambda tensor: dist.broadcast(tensor, 0)]
    for call in calls[::-1] if rank else calls:
        call(numbers())


def shapes(rank):
    """Rank 1 has a longer tensor."""
    dist.all_reduce(numbers(1 + rank))


def dtypes(rank):
    """Rank 1 has integers of the same size."""
    dist.all_reduce(numbers().int() if rank else numbers())


def barrier_in_a_branch(rank):
    """Only rank 0 calls barrier."""
    if rank == 0:
        dist.barrier()
    dist.all_reduce(numbers())


def interleaved(rank):
    """An all_reduce and a message travel at once: in another order on rank 1."""
    if rank == 0:
        wait(dist.all_reduce(numbers(), async_op=True), dist.isend(numbers(), 1))
    else:
        wait(dist.irecv(numbers(), 0), dist.all_reduce(numbers(), async_op=True))


def coalesced_on_one(rank):
    """Rank 0 starts two all_reduces in one call, and rank 1 in two."""
    together = dist.distributed_c10d._coalescing_manager
    with nullcontext() if rank else together():
        dist.all_reduce(numbers())
        dist.all_reduce(numbers())


def to_itself(rank):
    """Each rank sends to itself, and then receives."""
    wait(dist.isend(numbers(), rank), dist.irecv(numbers(), rank))


def to_itself_in_a_batch(rank):
    """The same in a batch."""
    send_batch(*((call, numbers(), rank, 0) for call in (dist.isend, dist.irecv)))


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
