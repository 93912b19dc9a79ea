r"""Reinforcement learning: weights go from trainers to a generator, and its text comes back.

Run it on a trainer and a generator (with more processes, there are more trainers):
    torchrun --standalone --nproc-per-node 2 playground/language/trainer_and_generator.py

A model writes rows of text, each row gets a reward (here the part of its bytes that are vowels),
and training makes rows of high reward more likely. It prints, with the first row of a step:
    step 10/40  reward 0.089  ratio 1 +- 0.000, 0.057  | ?o|????:n??r?a????K??9??
    step 40/40  reward 0.996  ratio 1 +- 0.000, 0.001  | eeeeeeeeeeeeeeeeeeeeeeee
    40 steps in 6.36 s
Writing takes a forward() for each token. It is fastest with whole parameters, in a program made for
it, such as vLLM. Training shards them. So some ranks only train, one only writes, and in a step:

    1. The trainers gather the parameters, one at a time. Trainer 0 sends them: 158,336 bytes.
    2. The generator writes 32 rows of 24 bytes. It sends them to all trainers, with the logarithms
       of their probabilities: 9,472 bytes.
    3. The trainers compute the advantage of each row: its reward less the mean of the rows with the
       same prompt (here: all), divided by their standard deviation (GRPO,
       https://arxiv.org/abs/2402.03300). It is the factor of the gradient that makes a row more
       likely. With it they update the model twice.

In the second update, the model is no longer the one that wrote the rows. So each byte counts by the
ratio of its new probability and the old one, and an update gains nothing by moving it beyond 0.8 or
1.2 (PPO, https://arxiv.org/abs/1707.06347). The lines above have the mean distance of the ratios
from 1, in both updates.

The trainers wait while the generator writes, and it waits while they train. With `--stale` they
work at the same time, the trainers on the rows of the step before. These were written by an older
model, so the ratio is not 1 in the first update either:
    step 40/40  reward 0.770  ratio 1 +- 0.114, 0.133  | eooeo?o?ea?uiua?aeeoaooa
    40 steps in 4.58 s
With `--double`, any number of trainers prints the same twelve digits.

Try breaking it, in a copy beside it:
  1. Send and receive the weights in the first step only. What do the ratios tell?
  2. With `--stale`, write `(new - new.detach()).exp()`. What is gained, and what is lost?
  3. Compute the advantages from `rows[own]` alone. With which numbers of trainers is it wrong?
  4. In `write`, add `torch.autocast("cpu", torch.bfloat16)` to `no_grad()`. What do the ratios say?
  5. Let only trainer 0 of two call `full_tensor()`. Where does each rank wait?

Builds on: fully_sharded_data_parallel.py
This is the last lesson. `playground/pages/choosing.md` says which parallelism is for which model.
"""

import os
import re
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # find common/ from any folder
from common import flags
from common.models import Language

TOKENS = 24  # the bytes that are written in a row


def check_weights(model):
    """Refuse models whose weights differ in shape or dtype. All ranks call this once."""
    mine = [(each.shape, each.dtype) for each in model.state_dict().values()]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if any(each != mine for each in everyone):  # gloo would fill a part, without an error
        raise ValueError("the weights of the ranks have different shapes or dtypes")


def send_weights(model, generator):
    """As a trainer, gather each tensor of the model. Trainer 0 sends it to the rank `generator`."""
    # NEW: the state has the parameters and, if there are any, the buffers, such as batch norm's.
    for tensor in model.state_dict().values():
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()  # all trainers must call this
        if dist.get_rank() == 0:
            dist.send(tensor, dst=generator)


def receive_weights(model):
    """As the generator, overwrite the model with the weights of the trainers."""
    for tensor in model.state_dict().values():  # FSDP keeps the names and their order
        dist.recv(tensor, src=0)


def write(model, rows, old, random):
    """Fill `rows`, after their first byte, and `old` with the logarithms of their probabilities."""
    for position in range(old.shape[1]):
        # NEW: a program made for this would keep the keys and values of earlier bytes.
        with torch.no_grad():
            scores = model(rows[:, : position + 1])[:, :, -1].log_softmax(dim=1)
        written = torch.multinomial(scores.exp(), 1, generator=random)
        rows[:, position + 1] = written[:, 0]
        old[:, position] = scores.gather(1, written)[:, 0]


def reward(rows):
    """Return the part of vowels in each row, from 0 to 1, shape (N,)."""
    vowels = torch.tensor(list(b"aeiou"), device=rows.device)
    return torch.isin(rows[:, 1:], vowels).double().mean(dim=1)


def update(model, optimizer, rows, old, own):
    """Make two updates with this trainer's rows. Returns how far the ratio was from 1 in both."""
    rewards = reward(rows)
    # NEW: every trainer has all rows, for their mean and their deviation.
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    rows, old, advantages = rows[own], old[own], advantages[own, None].to(old.dtype)
    apart = []
    for _ in range(2):
        new = -F.cross_entropy(model(rows[:, :-1]), rows[:, 1:], reduction="none")
        # NEW: where this is 1, its gradient is not 0, but that of `new`.
        ratio = (new - old).exp()
        # NEW: the smaller term counts. The clipped one has no gradient outside 0.8 to 1.2.
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        optimizer.zero_grad()
        (-gain.mean()).backward()  # trainers have equally many rows, so FSDP's average is the mean
        optimizer.step()
        apart.append((ratio.detach() - 1).abs().mean())
    return torch.stack(apart)


def exchange_rows(rows, old, generator):
    """Send the generator's rows, and the logarithms of their probabilities, to all trainers."""
    dist.broadcast(rows, src=generator)
    dist.broadcast(old, src=generator)


def run_generator(model, rows, old, args):
    """Write rows in each step, with the newest weights."""
    random = torch.Generator(rows.device).manual_seed(0)
    for _ in range(args.steps):
        receive_weights(model)
        write(model, rows, old, random)
        exchange_rows(rows, old, dist.get_rank())


def run_trainer(model, rows, old, trainers, args):
    """Train on the generator's rows in each step."""
    mesh = dist.DeviceMesh.from_group(trainers, args.device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=True)
    generator = dist.get_world_size() - 1
    own = slice(dist.get_rank(), None, generator)  # every n-th row, for n trainers
    apart = torch.zeros(2, dtype=old.dtype, device=rows.device)
    for step in range(args.steps):
        send_weights(model, generator)
        # NEW: while the generator is writing, `rows` are still those of the step before.
        if args.stale and step > 0:
            apart = update(model, optimizer, rows, old, own)
        exchange_rows(rows, old, generator)
        if not args.stale:
            apart = update(model, optimizer, rows, old, own)
        show_step(step, rows, apart, trainers, args)


def talk(args):
    """Be a trainer or the generator, which is the last rank."""
    rank, device = join(args)
    generator = dist.get_world_size() - 1
    # NEW: FSDP works in a group of the trainers. All ranks must call new_group().
    trainers = dist.new_group(range(generator), timeout=timedelta(seconds=args.timeout))
    torch.manual_seed(0)  # the same model on all ranks
    dtype = torch.float64 if args.double else torch.float32
    model = Language(width=32).to(device, dtype)
    check_weights(model)
    model.eval()  # with dropout, trainers and generator would have different probabilities
    rows = torch.full((args.rows, TOKENS + 1), ord("\n"), device=device)
    old = torch.zeros(args.rows, TOKENS, device=device, dtype=dtype)
    start = time.perf_counter()
    if rank == generator:
        run_generator(model, rows, old, args)
    else:
        run_trainer(model, rows, old, trainers, args)
    if rank == 0:
        print(f"{args.steps} steps in {time.perf_counter() - start:.2f} s", flush=True)
    dist.barrier()  # DTensor keeps the group, and without this Python may abort at exit
    dist.destroy_process_group()


# You can stop here: what follows only prints, and reads the flags.


def show_step(step, rows, apart, trainers, args):
    """Print the mean reward of the rows, how far both ratios were from 1, and the first row."""
    dist.all_reduce(apart, group=trainers)
    apart /= dist.get_world_size(trainers)
    if dist.get_rank() == 0 and (step + 1) % 10 == 0:
        digits = 12 if args.double else 3
        text = re.sub(rb"[^ -~]", b"?", bytes(rows[0, 1:].tolist())).decode()
        print(
            f"step {step + 1}/{args.steps}  reward {reward(rows).mean():.{digits}f}"
            f"  ratio 1 +- {apart[0]:.{digits}f}, {apart[1]:.{digits}f}  | {text}",
            flush=True,
        )


def add_flags(parser):
    """Add the flags of this lesson, which reads no data."""
    add = parser.add_argument
    add("--stale", action="store_true", help="write the next rows while the last ones train")
    add("--steps", type=flags.positive, default=40, help="how often weights are sent")
    add("--rows", type=flags.positive, default=32, help="rows that are written in a step")
    add("--double", action="store_true", help="compute in float64, and print 12 digits")
    device = flags.accelerator() if torch.accelerator.device_count() > 1 else "cpu"
    add("--device", type=flags.device, default=device, help="default: cpu with fewer than two GPUs")
    add("--timeout", type=flags.positive, default=60, help="seconds to wait for a rank")


def check_flags(parser, args, world_size):
    """Refuse a single rank, and rows that the trainers cannot divide."""
    if world_size < 2:
        parser.error("a trainer and a generator are two ranks: use --nproc-per-node 2")
    trainers = world_size - 1
    if args.rows % trainers or args.rows < 2:
        near = trainers * max(1 + (trainers == 1), round(args.rows / trainers))
        parser.error(f"{trainers} trainers cannot divide --rows {args.rows}: use --rows {near}")


@record  # writes the traceback of an error to a file, and torchrun's report shows it
def main():
    """Read the flags, and be one of the ranks."""
    parser = flags.Parser(__doc__)
    add_flags(parser)
    args = parser.parse_args()
    parser.check_torchrun(args)  # an error of one line if torchrun has not started this
    check_flags(parser, args, world_size=int(os.environ["WORLD_SIZE"]))
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
