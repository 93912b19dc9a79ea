"""How save_and_resume is checked: a run is killed, and another number of ranks resumes it."""

import contextlib
import copy
import json
import os
import resource
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from judging.single import of_all_ranks
from judging.traffic import uncounted
from torch import nn

CASES = {
    "Adam, no random numbers": {"kind": "adam", "seeded": True},
    "SGD with momentum, a frozen bias": {"kind": "sgd"},
}
RUNG_1 = "for what the lesson saves"
RUNG_2 = "random numbers, a frozen parameter, and ranks that see an old file."
TOLERANCE = {"rtol": 1e-7, "atol": 1e-9}  # another number of ranks adds up in another order
PATH = "checkpoint.pt"
NOTES = "notes.json"
KILLED = 3  # the epoch in which the first run ends
EPOCHS = 5
IMAGES = 12
BATCH = 6
COMPLETE = "complete at any time"
HINTS = """
The next epochs depend on five things: parameters, buffers, the optimizer's state, the random
numbers, and how many epochs are done. All of them belong in the file.

model.state_dict(), optimizer.state_dict() and torch.get_rng_state(); the reverse is
load_state_dict(...) and torch.set_rng_state(...). torch.save(state, path), torch.load(path),
os.path.exists(path). os.replace(old, new) renames a file in one step.
dist.broadcast_object_list([value], src=0) sends what rank 0 has in a list to all ranks.

done = 0
rank 0 asks whether there is a file, and broadcasts the answer
if there is: load it on each rank, and restore the five things
for each epoch from `done` on: train_epoch(epoch)
    rank 0 saves the five things to another file, and then renames it to `path`
"""


class Killed(BaseException):
    """Stands for the end of a process. It is a BaseException, so that `except Exception` fails."""


class Net(nn.Module):
    """A model whose output depends on a buffer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 200)
        self.last = nn.Linear(200, 1)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, inputs):
        return self.last(torch.tanh(self.first(inputs))) / (1 + self.seen / IMAGES)


def make(kind, seed):
    torch.manual_seed(seed)
    model = Net().double()
    if kind == "adam":
        return model, torch.optim.Adam(model.parameters(), lr=0.01)
    model.first.bias.requires_grad_(False)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def train(model, optimizer, epoch, seeded, rank=0, world_size=1):
    """Train one epoch. Returns the order of the images.

    If it is seeded, the order comes from a generator with the epoch as its seed, as in the lesson.
    Otherwise it comes from PyTorch's random numbers.
    """
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(IMAGES, 4, generator=generator, dtype=torch.float64)
    targets = torch.randn(IMAGES, 1, generator=generator, dtype=torch.float64)
    draws = torch.Generator().manual_seed(int(epoch)) if seeded else None
    order = torch.randperm(IMAGES, generator=draws)
    for batch in order.split(BATCH):
        mine = batch[rank::world_size]
        optimizer.zero_grad()
        loss = (model(inputs[mine]) - targets[mine]).square().sum() / BATCH
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None and world_size > 1:
                with uncounted():
                    dist.all_reduce(parameter.grad)
        optimizer.step()
        model.seen += len(batch)
    for group in optimizer.param_groups:
        group["lr"] *= 0.9  # as a scheduler does
    return order


def state_of(model, optimizer):
    """Return copies of what the next epochs depend on, by name."""
    found = {"parameters": dict(model.named_parameters()), "buffers": dict(model.named_buffers())}
    return copy.deepcopy(found | {"optimizer": optimizer.state_dict()})


def same_epoch(epoch):
    """Raise an error if the ranks do not train the same epoch."""
    for rank, (first, other) in enumerate(pairwise(of_all_ranks(int(epoch)))):
        if first != other:
            words = f"rank {rank} trains epoch {first}, but rank {rank + 1} trains epoch {other}"
            raise RuntimeError(words)


def only_rank_0_writes():
    """Let no other rank write a file of more than 4 KB. A checkpoint is longer."""
    if dist.get_rank() > 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that it is an error, not the end
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, most))


def see_an_old_file():
    """Let this rank see an empty file instead of the checkpoint, as in a network folder."""
    folder = Path(f"rank{dist.get_rank()}")
    folder.mkdir()
    os.chdir(folder)
    Path(PATH).touch()


def first(save_and_resume, rank, world_size, kind, seeded=False):
    """Train until the run is killed. Note in a file what became of the checkpoints.

    If it is seeded (see train), all ranks see the same files, too.
    """
    model, optimizer = make(kind, seed=0)
    only_rank_0_writes()
    if rank > 0 and not seeded:
        see_an_old_file()
    deleted = []

    def note_deleted(event, args):
        if event == "os.remove":
            deleted.append(args[0])

    sys.addaudithook(note_deleted)
    orders = []
    before = {}  # another name of each checkpoint, and what was in it
    unsaved = []

    def train_epoch(epoch):
        same_epoch(epoch)
        if rank == 0 and os.path.exists(PATH):
            new = Path(PATH).read_bytes()
            if new in before.values():
                unsaved.append(epoch)
            elif epoch < KILLED:
                os.link(PATH, f"before{epoch}")
                before[f"before{epoch}"] = new
        if epoch == KILLED:
            raise Killed
        orders.append(train(model, optimizer, epoch, seeded, rank, world_size))

    with contextlib.suppress(Killed):
        save_and_resume(PATH, model, optimizer, EPOCHS, train_epoch)
    if rank == 0:
        state = COMPLETE
        if any(Path(path).read_bytes() != each for path, each in before.items()):
            state = "overwritten in place"
        elif any(os.path.basename(os.fspath(path)) == PATH for path in deleted):
            state = "deleted before the next one has its name"
        if unsaved or not os.path.exists(PATH):
            state = "not saved after each epoch"
        Path(NOTES).write_text(json.dumps([state, [order.tolist() for order in orders]]))


def again(save_and_resume, rank, world_size, kind, seeded=False):
    model, optimizer = make(kind, seed=50 + rank)
    only_rank_0_writes()
    trained = []
    restored = []
    orders = []

    def train_epoch(epoch):
        same_epoch(epoch)
        if not trained:
            restored.append(state_of(model, optimizer))
        trained.append(int(epoch))
        orders.append(train(model, optimizer, epoch, seeded, rank, world_size))

    save_and_resume(PATH, model, optimizer, EPOCHS, train_epoch)
    state, earlier = json.loads(Path(NOTES).read_text())
    orders = [torch.tensor(order) for order in earlier] + orders
    return results(state, trained, restored, orders, model)


def results(state, trained, restored, orders, model):
    """Return what is compared. `orders` are those of all epochs, `restored` is a list with one."""
    found = {"the file": state, "the order before the restart": orders[:KILLED]}
    found["the epochs after the restart"] = trained
    for part in ("parameters", "buffers", "optimizer"):
        found[f"the restored {part}"] = restored[0][part] if restored else None
    found["the order after the restart"] = orders[KILLED:]
    found["the parameters at the end"] = dict(model.named_parameters())
    return found


def expected(rank, world_size, kind, seeded=False):
    model, optimizer = make(kind, seed=0)
    orders = []
    for epoch in range(EPOCHS):
        if epoch == KILLED:
            restored = state_of(model, optimizer)
        orders.append(train(model, optimizer, epoch, seeded))
    trained = list(range(KILLED, EPOCHS))
    return results(COMPLETE, trained, [restored], orders, model)


def runs(world_size):
    """Return what runs: a training that is killed, and then one with another number of ranks."""
    return [(first, world_size), (again, world_size + 1)]


def save_and_resume(path, model, optimizer, epochs, train_epoch):
    """Why: os.replace renames the finished file in one step, so `path` is always complete."""
    # In a network folder, ranks may see different files for a moment. So rank 0 decides for all.
    resumes = [os.path.exists(path)]
    dist.broadcast_object_list(resumes, src=0)
    done = 0
    if resumes[0]:
        state = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        done = state["done"]
    for epoch in range(done, epochs):
        train_epoch(epoch)
        if dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"random": torch.get_rng_state(), "done": epoch + 1}
            unfinished = f"{path}.{time.time_ns()}"  # a name that no other process uses
            torch.save(state, unfinished)
            os.replace(unfinished, path)


SAVES = "CRASH.*(File too large|file write failed|unexpected pos)"
WORDS = {
    SAVES: "Here, only rank 0 can write files.",
    "CRASH.*rank [1-9]: EOFError": "In the first run, this rank sees an empty file, but rank 0 "
    "sees none. Rank 0 must decide for all.",
    "CRASH.*trains epoch": "All ranks must load the file.",
    "the file: (overwritten|deleted)": "If the run is killed at this moment, no complete file is "
    "left. Write a different file, and rename it with os.replace() when it is complete.",
    r"restart: \[0, 1": "Training starts from the beginning. The file says how many epochs are "
    "done.",
    r"restart: \[2, 3": "The last epoch is trained twice. Save the number of the next epoch.",
    "the restored optimizer": "The optimizer's state has its averages and its learning rate: "
    "optimizer.state_dict() has all of it.",
    "the order after": "The random numbers differ after the restart. Their state after the last "
    "epoch belongs in the file, and all ranks must set it.",
}
MISTAKES = {
    "The optimizer's state has its averages and its learning rate": (
        *('        optimizer.load_state_dict(state["optimizer"])\n', ""),
    ),
    "The random numbers differ after the restart.": (
        *('        torch.set_rng_state(state["random"])\n', ""),
    ),
    "Training starts from the beginning.": ('        done = state["done"]\n', ""),
    "The last epoch is trained twice.": ("epoch + 1", "epoch"),
    "If the run is killed at this moment, no complete file is left.": (
        *('f"{path}.{time.time_ns()}"', "path"),
    ),
    "deleted before the next one has its name": (
        "os.replace(unfinished, path)",
        "os.path.exists(path) and os.remove(path)\n            os.rename(unfinished, path)",
    ),
    WORDS[SAVES]: ("        if dist.get_rank() == 0:", "        if True:"),
}
