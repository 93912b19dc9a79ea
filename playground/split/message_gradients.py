"""The gradient of a message: what `backward()` sends, because `forward()` has sent something.

Run it:
    torchrun --standalone --nproc-per-node 2 playground/split/message_gradients.py

Autograd does not see messages. So a program must say what the gradient of a message is: another
message. For pairs of messages that turn a rank's numbers x into y, this prints the gradient of x on
each rank. It is right if it equals the measured growth of the sum of all ranks' losses when that
number of x grows by 1:
    each rank has a loss of its own    rank 0    rank 1
    to_next         to_previous        [10, 20]  [1, 2]    right
    all_to_all      all_to_all         [1, 10]   [2, 20]   right
    all_gather      reduce_scatter     [11, 22]  [33, 44]  right
    reduce_scatter  all_gather         [1, 10]   [1, 10]   right
    all_reduce      all_reduce         [11, 22]  [11, 22]  right
    all_reduce      None               [1, 2]    [10, 20]  wrong

The loss is y[0] + 2 y[1] + 3 y[2] + ... on rank 0, ten times that on rank 1, and so on. So the
digits of a gradient show which ranks it comes from. For example, all_gather puts the first number
of rank 0 into y[0] on both ranks, so its gradient is 1 + 10. (None: autograd takes y for a copy.)

`backward()` sends against the arrows of `forward()`. The gradient of a number comes back from the
rank that has received it. If several ranks have received it, their gradients are added up. And each
term of a sum gets the gradient of the sum, so all_gather and reduce_scatter are a pair.

Above, the whole loss is the sum of the ranks' losses, as in data parallelism. But if all ranks
compute the same loss, it counts once. Each knows the whole gradient of y, so n copies are wrong:
    all ranks have the same loss       rank 0  rank 1
    all_reduce      nothing            [1, 2]  [1, 2]  right
    all_gather      own_chunk          [1, 2]  [3, 4]  right
    all_reduce      all_reduce         [2, 4]  [2, 4]  wrong

Last, x may be one tensor of which each rank has a copy, like DDP's parameters. In `forward()`,
nothing is sent, but each rank's use adds to the gradient. (DDP then divides by n.)
    x is the same on all ranks         rank 0    rank 1
    nothing         all_reduce         [11, 22]  [11, 22]  right
    own_chunk       all_gather         [1, 10]   [1, 10]   right

In the letters of `placements.py`: the gradient of P is R, and that of S is S. torchtitan splits R
in two: with I, all ranks have the same gradient, and with R, each has a term of it. (In DTensor,
`to_local(grad_placements=...)` says which.) In tensor parallelism, a pair of layers begins with
(nothing, all_reduce), I to R, and ends with (all_reduce, nothing), P to I.

Try breaking it, in a copy beside it. Predict what changes, and run it with 2 and with 3 ranks:
  1. In `to_previous`, shift by 1, as `to_next` does. Why is this no fault with 2 ranks?
  2. In the first table, beside all_gather, write own_chunk. Whose digits are missing?
  3. Add all_gather, reduce_scatter to the second table. How many times too large is the gradient?
  4. Write `broadcast`, which gives all ranks the x of rank 0, and the message for its gradient.
Builds on: placements.py
The next lesson, `tensor_parallel.py`, splits a model's layers by hand and with DTensor.
"""

import os
import sys
import warnings
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # find common/ from any folder
from common import flags


class Message(torch.autograd.Function):
    """A message with a gradient.

    An autograd.Function is a function with a gradient of our own. Its `apply` calls forward().
    Later, autograd calls backward() with the gradient of the output, and takes what it returns as
    the gradient of the input. What backward() needs, forward() keeps in `ctx`.
    """

    @staticmethod
    def forward(ctx, x, send, send_back, group):
        """Send x. Returns what arrives. `group` has the ranks that take part; None: all."""
        ctx.back = (send_back, send, group)
        return send(x.contiguous(), group)  # messages need contiguous memory

    @staticmethod
    def backward(ctx, gradient):
        """Send the gradient of what has arrived. Returns the gradient of x."""
        # NEW: the gradient of a message is a message, which has a gradient, too.
        gradient = Message.apply(gradient, *ctx.back)
        return gradient, None, None, None  # the other arguments of forward() have no gradient


# Each of these functions sends x, and returns what arrives. None of them changes x. It must have
# the same shape on all ranks. Otherwise gloo may return garbage without an error.
def nothing(x, group):
    """Return x itself."""
    return x


def all_reduce(x, group):
    """Return the sum of all ranks' tensors."""
    total = x.clone()  # all_reduce overwrites its tensor, and autograd may need x elsewhere
    dist.all_reduce(total, group=group)
    return total


def all_gather(x, group):
    """Return the tensors of all ranks, one after another in dimension 0. (gloo takes no stack.)"""
    whole = x.new_empty(dist.get_world_size(group) * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(whole, x, group=group)
    return whole


def reduce_scatter(x, group):
    """Return this rank's chunk of the sum of all ranks' tensors."""
    chunk = x.new_empty(len(x) // dist.get_world_size(group), *x.shape[1:])
    dist.reduce_scatter_tensor(chunk, x, group=group)
    return chunk


def own_chunk(x, group):
    """Return this rank's chunk. Nothing is sent."""
    return x.chunk(dist.get_world_size(group))[dist.get_rank(group)]


def all_to_all(x, group):
    """Send chunk r to rank r. Returns what arrives, chunk r from rank r."""
    arrived = torch.empty_like(x)
    dist.all_to_all_single(arrived, x, group=group)
    return arrived


def shift(x, by, group):
    """Send x to the rank that is `by` further in a ring. Returns what arrives from the other."""
    rank = dist.get_rank(group)
    n = dist.get_world_size(group)
    if n == 1:
        return x
    arrived = torch.empty_like(x)
    receive = dist.P2POp(dist.irecv, arrived, group=group, group_peer=(rank - by) % n)
    send = dist.P2POp(dist.isend, x, group=group, group_peer=(rank + by) % n)
    # Receive first. With gloo, the two directions would otherwise take turns.
    for request in dist.batch_isend_irecv([receive, send]):
        request.wait()
    return arrived


def to_next(x, group):
    """Send x to rank r + 1. Returns what rank r - 1 has sent."""
    return shift(x, 1, group)


def to_previous(x, group):
    """Send x to rank r - 1. Returns what rank r + 1 has sent."""
    return shift(x, -1, group)


OWN_LOSSES = [
    (to_next, to_previous),
    (all_to_all, all_to_all),
    (all_gather, reduce_scatter),
    (reduce_scatter, all_gather),
    (all_reduce, all_reduce),
    (all_reduce, None),  # without Message
]
SAME_LOSS = [(all_reduce, nothing), (all_gather, own_chunk), (all_reduce, all_reduce)]
SAME_X = [(nothing, all_reduce), (own_chunk, all_gather)]


def loss_of(y, same_loss):
    """Return the loss of this rank, or one that is the same on all ranks."""
    factors = torch.arange(1.0, len(y) + 1)  # the gradient of y
    if not same_loss:
        factors *= 10 ** dist.get_rank()
    return (factors * y).sum()


def gradient(send, send_back, same_loss):
    """Return the gradient of x on this rank, by autograd."""
    x = torch.zeros(dist.get_world_size(), requires_grad=True)
    if send_back is None:
        y = send(x, None)
    else:
        y = Message.apply(x, send, send_back, None)
    loss_of(y, same_loss).backward()
    return x.grad


def talk(args):
    """Try each pair, and print the gradients of all ranks."""
    _, device = join(args)
    torch.set_default_device(device)
    show("each rank has a loss of its own", OWN_LOSSES)
    show("all ranks have the same loss", SAME_LOSS, same_loss=True)
    show("x is the same on all ranks", SAME_X, same_x=True)
    dist.destroy_process_group()


# You can stop here: what follows measures how much the loss grows, prints, and reads the flags.


def growth(send, same_loss, same_x):
    """Return how much the loss grows if a number of x on this rank grows from 0 to 1."""
    n = dist.get_world_size()
    grown = torch.zeros(n)
    for rank in range(n):
        for index in range(n):
            x = torch.zeros(n)
            if same_x or rank == dist.get_rank():
                x[index] = 1
            loss = loss_of(send(x, None), same_loss)  # where x is 0, it is 0
            if not same_loss:
                dist.all_reduce(loss)
            if rank == dist.get_rank():
                grown[index] = loss
    return grown


def show(title, pairs, same_loss=False, same_x=False):
    """Print the gradients of all ranks, and whether they are right."""
    rows = [[title, *(f"rank {rank}" for rank in range(dist.get_world_size()))]]
    for send, send_back in pairs:
        name = send_back.__name__ if send_back else "None"
        row = [f"{send.__name__:<14}  {name:<17}"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an autograd kernel was not registered
            found = gradient(send, send_back, same_loss)
        fits = found.equal(growth(send, same_loss, same_x))
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (str(found.int().tolist()), fits))
        numbers, fit_on_rank = zip(*everyone, strict=True)
        verdict = "right" if all(fit_on_rank) else "wrong"
        rows.append([*row, *numbers, verdict])
    if dist.get_rank() == 0:
        columns = zip_longest(*rows, fillvalue="")
        widths = [max(map(len, column)) for column in columns]
        for row in rows:
            words = [word.ljust(width) for word, width in zip(row, widths, strict=False)]
            print("  ".join(words).rstrip(), flush=True)


@record  # writes the traceback of an error to a file, and torchrun's report shows it
def main():
    """Read the flags, and compare gradients as one of the ranks."""
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
