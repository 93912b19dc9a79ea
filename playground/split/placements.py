"""Placements: what each rank has of a tensor, and which messages follow from that.

Run it:
    torchrun --standalone --nproc-per-node 2 playground/split/placements.py

A DTensor is one tensor that several ranks hold together. Its placement says what each rank has: all
of it (R, replicate), a shard of its rows or columns (S0, S1), or a term, where the tensor is the
sum of all terms (P, partial). The lesson first prints [[1, 2], [3, 4]] with each placement:
            R                 S0        S1          P
    rank 0  [[1, 2], [3, 4]]  [[1, 2]]  [[1], [3]]  [[2, 3], [4, 5]]
    rank 1  [[1, 2], [3, 4]]  [[3, 4]]  [[2], [4]]  [[-1, -1], [-1, -1]]

You write the program of a single process, and DTensor makes the calls that the placements require.
If each rank adds up its own rows (S0), it has a term of the sum, so the result is P, and nothing is
sent. But the ReLU of a sum is not the sum of the ReLUs, so `relu` of P makes an all_reduce first.
In the same columns, these lines show how the result is placed, and what was sent:
    a.sum(0)       R   P              S0             P
    relu(a)        R   S0             S1             R all_reduce

Many kinds of parallelism are choices of placements, and of moves between them, which `redistribute`
makes. Here is y = ReLU(x a) b in four of them:
    parallelism  x      a      b      y   forward                     backward
    data         S0     R (P)  R (P)  S0  -                           2 all_reduce
    tensor       R (P)  S1     S0     R   all_reduce                  all_reduce
    sequence     S0     S1     S0     S0  all_gather, reduce_scatter  all_gather, reduce_scatter
    FSDP         S0     S0     S0     S0  2 all_gather                2 reduce_scatter

R (P) is a replicated tensor whose gradient is P, because each rank has used it with its own rows of
x, or its own columns of a. It stays P until an all_reduce moves it to R, in `compute_gradients`.
(DDP does this for the parameters, and divides by n. Tensor parallelism does it for the input of a
pair of layers.) In `backward()`, `redistribute` itself makes an all_gather where it made a
reduce_scatter, and nothing for P to R. Where it made an all_gather, it makes a reduce_scatter,
because the gradient here is P. (Of a gradient that is R, each rank keeps its shard, without a
message.)

Try breaking it, in a copy beside it. Predict the lines that change before you run it:
  1. For tensor parallelism, write the placements [R, S0, S1]. Is y still right? What is sent?
  2. Add "softmax(a, 0)" to OPERATIONS. Which placements need a message now?
Builds on: collectives.py
The next lesson, `message_gradients.py`, shows what `backward()` sends for each message.
"""

import os
import sys
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # find common/ from any folder
from common import flags

# NEW: the placements. A DTensor has one for each axis of its mesh, a grid of ranks. Here the mesh
# has a single axis.
R = Replicate()  # each rank has the whole tensor
S0 = Shard(0)  # each rank has some rows
S1 = Shard(1)  # each rank has some columns
P = Partial()  # each rank has a term, and the tensor is the sum of all terms
NAMES = {R: "R", S0: "S0", S1: "S1", P: "P"}


def place(tensor, placement, mesh):
    """Return a DTensor that equals a tensor. This rank keeps of it what the placement says."""
    if placement != P:
        # NEW: each rank gets its part of rank 0's tensor, whatever it has passed itself.
        return distribute_tensor(tensor, mesh, [placement])
    if dist.get_rank() == 0:
        term = tensor + dist.get_world_size() - 1
    else:
        term = -torch.ones_like(tensor)
    # NEW: each rank keeps what it has passed. Nothing is sent, and nothing is checked.
    return DTensor.from_local(term, mesh, [placement])


def move(tensor, placement):
    """Return the same tensor, placed differently. In one process, there is nothing to do."""
    if isinstance(tensor, DTensor):
        return tensor.redistribute(placements=[placement])  # NEW: sends what this requires
    return tensor


# They send, in this order: nothing (a rank only drops some rows), an all_gather, a reduce_scatter,
# an all_reduce.
MOVES = [(R, S0), (S0, R), (P, S0), (P, R)]

OPERATIONS = {
    "a + a": lambda a: a + a,
    "a * a": lambda a: a * a,  # if a is P, one factor becomes R, and R times a term is a term
    "a.sum(0)": lambda a: a.sum(0),  # a vector, so what was sharded by columns is now S0
    "relu(a)": lambda a: a.relu(),
    "softmax(a, 1)": lambda a: a.softmax(1),  # needs whole rows
}


# Each of these functions computes y = ReLU(x a) b, on one rank or on many.
def data_parallel(x, a, b):
    """Each rank has some rows of x, which are images, and all parameters."""
    return (x @ a).relu() @ b  # NEW: S0 @ R is S0, so nothing is sent


def tensor_parallel(x, a, b):
    """Each rank has all images, some columns of a, and the matching rows of b."""
    terms = (x @ a).relu() @ b  # NEW: R @ S1 is S1, and S1 @ S0 is P, without a message
    return move(terms, R)


def sequence_parallel(x, a, b):
    """Tensor parallelism, but outside the pair each rank has some rows of x and y: tokens."""
    terms = (move(x, R) @ a).relu() @ b
    return move(terms, S0)


def fully_sharded(x, a, b):
    """As data_parallel, but each rank keeps only some rows of the parameters."""
    # (FSDP also frees them after use, and gathers them once more in backward().)
    hidden = (x @ move(a, R)).relu()
    return hidden @ move(b, R)


KINDS = {  # and the placements of x, a and b
    "data": (data_parallel, [S0, R, R]),
    "tensor": (tensor_parallel, [R, S1, S0]),
    "sequence": (sequence_parallel, [S0, S1, S0]),
    "FSDP": (fully_sharded, [S0, S0, S0]),
}


def watch(function, *inputs):
    """Call a function. Return its result, and the collectives that this rank has called for it."""
    with CommDebugMode() as mode:  # NEW: counts collectives, here those of DTensor
        result = function(*inputs)
    calls = []
    for call, times in mode.get_comm_counts().items():
        name = call.__name__.removesuffix("_tensor").removesuffix("_into")
        calls.append(name if times == 1 else f"{times} {name}")
    return result, ", ".join(sorted(calls))


def compute_gradients(y, inputs):
    """Return the gradients of a loss, and keep them in .grad, placed as their tensors are."""
    gradients = torch.autograd.grad(y.square().sum(), inputs)
    for tensor, gradient in zip(inputs, gradients, strict=True):
        tensor.grad = move(gradient, tensor.placements[0])  # NEW: P becomes R, by an all_reduce
    return gradients


def talk(args):
    """Show the placements, and what operations and kinds of parallelism send."""
    rank, device = join(args)
    torch.set_default_device(device)
    torch.manual_seed(0)  # all ranks draw the same tensors, to compare with
    mesh = dist.init_device_mesh(args.device, (dist.get_world_size(),))  # all ranks, in a row
    # The group of a mesh may have PyTorch's own timeout: 30 minutes (gloo) or 10 (NCCL).
    mesh.get_group().set_timeout(timedelta(seconds=args.timeout))
    show_placements(rank, mesh)
    size = 2 * mesh.size()
    x, a, b = torch.randn(3, size, size, dtype=torch.double)
    show_operations(a, b, mesh)
    show_kinds([x, a, b], mesh)
    dist.barrier()  # DTensor keeps the group, and without this Python may abort at exit
    dist.destroy_process_group()


# You can stop here: what follows only prints, compares with one process, and reads the flags.


def show_placements(rank, mesh):
    """Print what each rank has of one tensor."""
    n = mesh.size()
    whole = torch.arange(n * n).reshape(n, n) + 1
    row = [f"rank {rank}"]
    for placement in NAMES:
        row.append(str(place(whole, placement, mesh).to_local().tolist()))
    rows = [None] * n
    dist.all_gather_object(rows, row)
    show([["", *NAMES.values()], *rows])


def show_operations(a, b, mesh):
    """Print how the results of operations are placed, and what was sent for them."""
    rows = []
    for old, new in MOVES:
        result, calls = watch(move, place(a, old, mesh), new)
        torch.testing.assert_close(result.full_tensor(), a)
        rows.append([f"{NAMES[old]} to {NAMES[new]}", calls])
    show(rows)
    rows = [["", *NAMES.values()]]
    for name, function in OPERATIONS.items():
        rows.append([name, *(try_out(function, [a], [placement], mesh) for placement in NAMES)])
    for left in (R, S0, S1):
        cells = [try_out(torch.matmul, [a, b], [left, right], mesh) for right in (R, S0, S1)]
        rows.append([f"{NAMES[left]} @ b", *cells])
    show(rows)


def try_out(function, tensors, placements, mesh):
    """Return how a result is placed, and what was sent. Compare the result with one process."""
    inputs = [place(*each, mesh) for each in zip(tensors, placements, strict=True)]
    result, calls = watch(function, *inputs)
    torch.testing.assert_close(result.full_tensor(), function(*tensors))
    return f"{NAMES[result.placements[0]]} {calls}".strip()


def show_kinds(tensors, mesh):
    """Print what kinds of parallelism send. Compare y and the gradients with one process."""
    rows = [["parallelism", "x", "a", "b", "y", "forward", "backward"]]
    alone = [tensor.clone().requires_grad_() for tensor in tensors]
    for name, (function, placements) in KINDS.items():
        placed = [place(*each, mesh) for each in zip(tensors, placements, strict=True)]
        inputs = [tensor.requires_grad_() for tensor in placed]
        y, forward = watch(function, *inputs)
        gradients, backward = watch(compute_gradients, y, inputs)
        y_alone = function(*alone)
        expected = torch.autograd.grad(y_alone.square().sum(), alone)
        torch.testing.assert_close(y.full_tensor(), y_alone)
        words = [name]
        for tensor, gradient, right in zip(inputs, gradients, expected, strict=True):
            torch.testing.assert_close(gradient.full_tensor(), right)
            own = NAMES[tensor.placements[0]]
            found = NAMES[gradient.placements[0]]
            words.append(own if own == found else f"{own} ({found})")
        rows.append([*words, NAMES[y.placements[0]], forward or "-", backward or "-"])
    show(rows)


def show(rows):
    """Print rows of words in columns, on rank 0."""
    if dist.get_rank() != 0:
        return
    columns = zip_longest(*rows, fillvalue="")
    widths = [max(map(len, column)) for column in columns]
    for row in rows:
        words = [word.ljust(width) for word, width in zip(row, widths, strict=False)]
        print("  ".join(words).rstrip(), flush=True)


@record  # writes the traceback of an error to a file, and torchrun's report shows it
def main():
    """Read the flags, and show placements as one of the ranks."""
    parser = flags.Parser(__doc__)
    add = parser.add_argument
    default = flags.accelerator() if torch.accelerator.device_count() > 1 else "cpu"
    add("--device", type=flags.device, default=default, help="cpu, or a GPU for each rank")
    add("--timeout", type=flags.positive, default=60, help="seconds to wait for a rank")
    args = parser.parse_args()
    parser.check_torchrun(args)  # an error of one line if torchrun has not started this
    talk(args)


# ---------- Unchanged from distributed_data_parallel_torchrun.py ----------
# You know what follows: join(). If you copy this lesson, copy this, too.


def join(args):
    """Join the process group that torchrun describes. Returns this rank and its device."""
    local_rank = int(os.environ["LOCAL_RANK"])  # torchrun has numbered this node's processes
    device, gpu = torch.device(args.device), None  # gpu stays None on a CPU
    if args.device != "cpu":
        device = gpu = torch.device(args.device, local_rank)
        torch.accelerator.set_device_index(gpu)  # otherwise all ranks would take memory on GPU 0
    backend = dist.get_default_backend_for_device(device)  # nccl for NVIDIA's GPUs, gloo for CPUs
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout), device_id=gpu)
    rank = dist.get_rank()  # torchrun has set it, the world size and the address of rank 0
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, vars(args))
    flags.check_same(everyone)  # an error, if nodes have different flags
    if rank == 0:
        print(f"{len(everyone)} ranks, {backend}, {args.device}", flush=True)
    return rank, device


if __name__ == "__main__":
    main()
