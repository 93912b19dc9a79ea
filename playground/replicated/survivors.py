r"""Survivors (optional): when a rank is killed, the others continue, and new ranks can join.

Run it. Of processes 0, 1 and 2, process 1 kills itself before step 17, and the others continue:
    python playground/replicated/survivors.py --kill 1 17 \
        --double --dataset digits --batch_size 120 --epochs 2

Among others, it prints these lines (process ids and times differ):
    process 4242: rank 0 of 3 from step 0, formed in 0.5 s
    process 4242: rank 0 of 2 from step 17, formed in 0.5 s
    epoch 2/2  loss 1.406419734911  train 72.43%  test 85.19%  0.56 s  2,571 images/s
The loss is that of `single_gpu.py` with the same flags, to the last digit. A step is a batch of
training or of the test; the steps are counted from 0, over all epochs.

Or kill a process yourself from another terminal, with `kill -9` and one of the process ids:
    python playground/replicated/survivors.py --epochs 30
Add a rank from another terminal, or with `-ip <ip of machine 1>` from a machine that you trust:
    python playground/replicated/survivors.py --join

In data parallelism, each rank has all that a run consists of. So when a rank dies, only one step is
lost. In the other ranks, `all_reduce` raises an error. They leave their process group, form a new
one, and compute the step again, each with a larger part of the batch. A new group begins with the
state of the rank that has done the most steps.

No rank can tell a dead process from a slow one, but all must agree on the members of the next
group. So the groups are numbered, and a store, which is a server of keys and values, holds the
newest number. Each process that is alive signs in there. Half a second later (--grace), the first
of them closes the list. A process that finds itself left out asks for another group.

The run ends with the command that started it, which holds the store, so long runs still need
checkpoints. If a machine fails, the others wait for --timeout seconds or more. With NCCL, PyTorch
by default ends a process whose message fails, and the library torchft handles that. DDP is tied to
its group, so with DDP, make it anew in each group.

Try breaking it, in a copy beside it, with `--epochs 30` if you pause or join:
  1. Pause process 0, the first number behind `processes`, for 15 seconds (`kill -STOP`, then `kill
     -CONT`). Which processes train meanwhile? Then let rank 0 always send its state, and pause it
     again. What is lost?
  2. Leave out `optimizer.load_state_dict(...)`. Do the losses change when a rank dies? Do they
     change when one joins?
  3. In `compute`, divide the loss by `labels.numel() * dist.get_world_size()`, which averages the
     ranks' means, as DDP does. Which losses are right: with --batch_size 120, or with 128?
Builds on: resumable.py
The next lesson, `resnet.py`, trains a larger model on colour images.
"""

import functools
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

# Hide C++ back traces; Python raises the same errors. PyTorch reads this when it is imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # find common/ from any folder
from common import flags
from common.data import fetch, load
from common.models import make_model


def agree(keys, me, args):
    """Return the numbers of the processes in a group, in order: the same list on all of them."""
    keys.append("signed in", f"{me} ")
    time.sleep(args.grace)
    signed_in = keys.get("signed in")
    # NEW: compare_set(key, expected, new) sets a key only if it has the expected value. Here "" is
    # expected, which means that there is no such key yet. It returns the value that the key has
    # then. So the first process that calls it makes the list, and all others receive the same one.
    # (The list of the first group is there from the beginning.)
    members = keys.compare_set("members", "", signed_in)
    return sorted(int(number) for number in members.split())


def ask_for_next(store, group):
    """Ask for the group after this one. If several processes do, the number grows only once."""
    store.compare_set("group", str(group), str(group + 1))


def send_state(model, optimizer, progress):
    """Give all ranks the state of the rank that has done the most steps."""
    steps = [None] * dist.get_world_size()
    dist.all_gather_object(steps, progress["step"])
    # NEW: this is what a checkpoint contains, but it comes from another rank.
    state = [(model.state_dict(), optimizer.state_dict(), progress)]
    dist.broadcast_object_list(state, src=steps.index(max(steps)))
    model_state, optimizer_state, newest = state[0]
    model.load_state_dict(model_state)
    optimizer.load_state_dict(optimizer_state)
    progress.update(newest)


def regroup(store, me, model, optimizer, progress, args):
    """Form a group with the processes that are there. Returns its number."""
    start = time.perf_counter()
    while True:
        if dist.is_initialized():
            # NEW: this closes the connections, so ranks that wait for this one get an error, too.
            dist.destroy_process_group()
        group = store.add("group", 0)  # adding 0 reads the number
        # NEW: each group has keys of its own, so no rank finds the addresses of an earlier one.
        keys = dist.PrefixStore(f"group {group}", store)
        members = agree(keys, me, args)
        if me in members:
            wait = timedelta(seconds=args.timeout)
            rank, world_size = members.index(me), len(members)
            try:
                dist.init_process_group(
                    "gloo", store=keys, rank=rank, world_size=world_size, timeout=wait
                )
                send_state(model, optimizer, progress)
            except RuntimeError as error:  # NEW: a process has died since it signed in
                say(f"no group: {error}")
                reset_names()
            else:
                seconds = time.perf_counter() - start
                step = progress["step"]
                say(f"rank {rank} of {world_size} from step {step}, formed in {seconds:.1f} s")
                return group
        ask_for_next(store, group)


def train(local_rank, args):
    """As one of the processes, train with the ranks that are there, until all steps are done."""
    store = dist.TCPStore(args.ip, args.port, timeout=timedelta(seconds=args.timeout))
    me = local_rank  # NEW: the number of this process. It stays the same, but its rank changes
    if args.join:
        me = store.add("processes", 1) - 1
    torch.set_num_threads(max(1, torch.get_num_threads() // args.gpus))
    dtype = torch.float64 if args.double else torch.float32
    train_set, test_set = load(args.dataset, args.data_dir, dtype)
    data = {"train": train_set, "test": test_set}
    sizes = len(train_set), len(test_set)
    steps = len(batches_of(0, *sizes, args.batch_size))  # of an epoch, with those of its test
    torch.manual_seed(args.seed)
    model = make_model(args)
    torch.manual_seed(args.seed + me)  # dropout, if there is any, must differ between ranks
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)
    # NEW: the steps that are done, when this epoch began, and for its training and its test the
    # sums of loss, correct and images.
    progress = {"step": 0, "began": time.time()}
    progress["train"] = torch.zeros(3, dtype=torch.float64)
    progress["test"] = torch.zeros(3, dtype=torch.float64)
    group = None
    # A rank that was paused may come back after the end. Then the store has the last line already.
    while progress["step"] < args.epochs * steps and not store.check([f"epoch {args.epochs}"]):
        if store.add("group", 0) != group:  # NEW: a process has asked for another group
            group = regroup(store, me, model, optimizer, progress, args)
        if [me, progress["step"]] == args.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        epoch, step = divmod(progress["step"], steps)
        # NEW: each rank knows the global batch. Its part of it depends on its present rank.
        part, positions = batches_of(args.seed + epoch, *sizes, args.batch_size)[step]
        model.train(part == "train")
        sums = compute(model, optimizer, data[part], positions)
        tensors = [sums]
        if model.training:
            tensors += [each.grad for each in model.parameters() if each.requires_grad]
        try:
            for tensor in tensors:
                dist.all_reduce(tensor)
        except RuntimeError as error:  # NEW: a rank is dead, is silent, or has left the group
            say(f"step {progress['step']} failed: {error}")
            ask_for_next(store, group)
            # NEW: no parameter has changed yet, so the step can be computed again. But regroup only
            # after this block: until it ends, the error refers to the old group and keeps it open.
            continue
        if model.training:
            optimizer.step()
        progress[part] += sums
        progress["step"] += 1
        if step + 1 == steps:
            end_epoch(store, progress, epoch + 1, args)
    if dist.is_initialized():
        dist.destroy_process_group()


def join_run(local_rank, args):
    """Train as a process that joins. The run may end a moment before this process notices."""
    try:
        train(local_rank, args)
    except dist.DistNetworkError:
        say("the store is gone, so the run has ended")


# You can stop here: what follows computes a batch, makes the list of batches, and prints lines.


def compute(model, optimizer, data, positions):
    """Compute this rank's part of a global batch; in training, also its part of the gradients.

    Returns three sums over the part: the loss, the number classified correctly, the number of
    images.
    """
    own = positions[dist.get_rank() :: dist.get_world_size()]  # the parts may differ by one image
    images, labels = data.images[own], data.labels[own]
    with torch.set_grad_enabled(model.training):
        logits = model(images)
        loss = F.cross_entropy(logits, labels, reduction="sum")
    if model.training:
        optimizer.zero_grad()
        # Each rank divides by the size of the global batch. So the sum of the gradients is that of
        # the batch's mean loss, whatever the sizes of the parts are.
        (loss / data.labels[positions].numel()).backward()
    correct = (logits.argmax(dim=1) == labels).sum()
    return torch.tensor([loss.detach(), correct, labels.numel()], dtype=torch.float64)


@functools.lru_cache(maxsize=1)  # it keeps the list of the present epoch
def batches_of(seed, train_size, test_size, batch_size):
    """Return the global batches of an epoch: "train" or "test", and positions in that set."""
    # The order is that of single_gpu.py.
    order = torch.randperm(train_size, generator=torch.Generator().manual_seed(seed))
    whole = train_size // batch_size
    batches = [("train", batch) for batch in order.split(batch_size)[:whole]]
    return batches + [("test", batch) for batch in torch.arange(test_size).split(1000)]


def end_epoch(store, progress, epoch, args):
    """Write the line of an epoch to the store, as all ranks do. Begin the next one."""
    loss, correct, images = progress["train"].tolist()
    _, test_correct, test_images = progress["test"].tolist()
    seconds = time.time() - progress["began"]  # also of the test, and of forming groups
    digits = 12 if args.double else 4
    store.set(
        f"epoch {epoch}",
        f"epoch {epoch}/{args.epochs}  loss {loss / images:.{digits}f}"
        f"  train {correct / images:.2%}  test {test_correct / test_images:.2%}"
        f"  {seconds:.2f} s  {images / seconds:,.0f} {args.unit}/s",
    )
    progress["began"] = time.time()
    progress["train"].zero_()
    progress["test"].zero_()


def say(text):
    """Print a line with this process's id."""
    print(f"process {os.getpid()}: {text}", flush=True)


def reset_names():
    """Let this process's next group have the name that it has on the other ranks.

    PyTorch names a group by a counter of this process. A failed init_process_group() counts, too,
    and only destroying a group resets it. So this makes one of a single rank, to be destroyed.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def open_store(args):
    """Start the store in this process, or with --join find it."""
    wait = timedelta(seconds=args.timeout)
    try:
        return dist.TCPStore(args.ip, args.port, is_master=not args.join, timeout=wait)
    except dist.DistError as error:
        if args.join:
            error.add_note(f"There is no run at -ip {args.ip} --port {args.port}.")
        else:
            error.add_note(f"The store cannot listen at --port {args.port}: use a free one.")
        raise


OWN_FLAGS = ("data_dir", "gpus", "ip", "join", "kill", "port")  # may differ between commands


def share_flags(store, args):
    """Write to the store what the processes of this and of other commands must know."""
    of_run = {name: value for name, value in vars(args).items() if name not in OWN_FLAGS}
    # The first group consists of the processes that this command starts.
    first = " ".join(str(number) for number in range(args.gpus))
    dist.PrefixStore("group 0", store).set("members", first)
    store.add("processes", args.gpus)
    store.set("flags", json.dumps(of_run))


def follow(store, context, args):
    """Print the lines of the epochs, until all are done, or no process is left."""
    processes = context.processes
    epoch = 1
    while epoch <= args.epochs:
        if store.check([f"epoch {epoch}"]):
            print(store.get(f"epoch {epoch}").decode(), flush=True)
            epoch += 1
        elif any(process.is_alive() for process in processes):
            time.sleep(0.1)
        else:
            context.join()  # raises the error of the first process that has failed
    for process in processes:
        process.join(args.timeout)


def main():
    """Read the flags, start the store and the processes, and wait until the run is done."""
    parser = flags.ranks(__doc__)
    add = parser.add_mutually_exclusive_group().add_argument
    add("-g", "--gpus", type=flags.positive, default=3, help="processes to start; default: 3")
    add("--join", action="store_true", help="add a process to a run, with the flags of the run")
    add = parser.add_argument
    add("-ip", "--ip", default="127.0.0.1", help="address of the run's first machine, for --join")
    add("--port", type=flags.port, default=29500, help="port of the store")
    add("--grace", type=flags.number, default=0.5, help="seconds to sign in, longer than a step")
    add("--kill", type=int, nargs=2, metavar=("PROCESS", "STEP"), help="this process dies there")
    parser.set_defaults(device="cpu", timeout=10)
    args = parser.parse_args()
    parser.check_no_launcher()
    if args.device != "cpu":
        parser.error("this lesson sends by gloo: use --device cpu")
    if args.kill and args.kill[0] not in range(args.gpus):
        parser.error(f"--kill: the processes are 0 to {args.gpus - 1}")
    store = open_store(args)
    if args.join:
        vars(args).update(json.loads(store.get("flags")))
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    if not args.join:
        share_flags(store, args)
    try:
        if args.join:
            mp.spawn(join_run, (args,))
        else:
            # NEW: with join=False, a rank that fails does not end the others.
            context = mp.spawn(train, (args,), args.gpus, join=False)
            print("processes", *context.pids(), flush=True)
            follow(store, context, args)
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        for process in mp.active_children():
            process.kill()  # no rank outlives this process


if __name__ == "__main__":
    main()
