"""How keep_training is checked: processes are killed while it trains."""

import contextlib
import copy
import os
import signal
from datetime import timedelta

import torch
import torch.distributed as dist
from judging.traffic import Forbidden, uncounted
from torch import nn

# The members of each group, in the order of their ranks. "all" are the ranks of the check, "new" is
# the last of them, which joins late, "old" are the others, and letters are processes to be killed.
CASES = {
    "one rank is killed": {"groups": ["a all", "all"]},
    "one is killed, and a new one joins": {"groups": ["a old", "new old"]},
    "a second one is killed while the state is sent": {
        "groups": ["a b old", "new b old", "new old"]
    },
}
WORLD_SIZES = (3, 4)
JOIN = False  # run() forms the groups
TOLERANCE = {"rtol": 1e-9, "atol": 1e-11}  # other ranks add up in another order
STEPS = 5
KILLED = 2  # the step in which "a" is killed
IMAGES = 7  # of a global batch: more on some ranks than on others
COMPUTED = "the steps computed"
HINTS = """
Which three things does a new rank need, to do what the others will do? Which rank has them? And
what may be raised while they are sent?

dist.all_gather_object(list, number) tells how many steps each rank has done, and
dist.broadcast_object_list([object], src=rank) sends the objects in that rank's list to all others.
model.state_dict(), optimizer.state_dict(), and load_state_dict() of both.

step = 0
while step < steps:
    try, or with contextlib.suppress(RuntimeError):
        the rank that has done the most steps sends its model, its optimizer and `step` to all
        while step < steps:
            gradients(step), and an all_reduce of each parameter's gradient
            optimizer.step(), and only now count the step
    if that has failed: regroup(), but after the except block
"""


def make(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    return model, torch.optim.Adam(model.parameters(), lr=0.05)


def compute(model, step, rank=0, world_size=1):
    """Compute a rank's part of the gradients of a step."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(IMAGES, 4, generator=generator, dtype=torch.float64)
    targets = torch.randn(IMAGES, 1, generator=generator, dtype=torch.float64)
    model.zero_grad(set_to_none=False)
    own = slice(rank, None, world_size)
    ((model(inputs[own]) - targets[own]).square().sum() / IMAGES).backward()


def state_of(model, optimizer, computed):
    """Return copies of what a rank has at the end, by name."""
    found = {COMPUTED: computed, "optimizer": optimizer.state_dict()}
    return copy.deepcopy(found | {"parameters": dict(model.named_parameters())})


def members_of(groups, world_size):
    """Return the members of each group, a list of lists."""
    everyone = [str(rank) for rank in range(world_size)]
    lists = {"all": everyone, "old": everyone[:-1], "new": everyone[-1:]}
    return [sum((lists.get(word, [word]) for word in words.split()), []) for words in groups]


class Member:
    """What keep_training gets in one of the processes.

    Args:
        name: its number as text, or a letter.
        groups: the members of each group.
    """

    def __init__(self, name, groups):
        self.name = name
        self.groups = groups
        self.number = next(i for i, members in enumerate(groups) if name in members)
        self.store = dist.FileStore("store")
        self.computed = []
        self.model, self.optimizer = make(seed=self.number)  # that of a new rank differs

    def form(self):
        """Form the present group."""
        if dist.is_initialized():
            dist.destroy_process_group()
        members = self.groups[self.number]
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"group {self.number}", self.store),
            rank=members.index(self.name),
            world_size=len(members),
            timeout=timedelta(seconds=600),
        )
        self.store.set(self.key(self.name), "formed")

    def key(self, name):
        """Return the key under which a process notes that it has formed the present group."""
        return f"{name} in group {self.number}"

    def regroup(self):
        """Form the next group."""
        self.number += 1
        if self.number == len(self.groups):
            words = "regroup() is called, although no rank was killed since the last call"
            raise Forbidden(f"{words}: have all ranks done the same steps?")
        self.form()
        if self.name == "b":
            # Not while the others still connect: the group is formed, and fails afterwards.
            self.store.wait([self.key(name) for name in self.groups[self.number]])
            os.kill(os.getpid(), signal.SIGKILL)

    def gradients(self, step):
        """Compute the gradients of a step as a member of the present group, or be killed."""
        if self.name == "a" and step == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        self.computed.append(int(step))
        compute(self.model, step, dist.get_rank(), dist.get_world_size())

    def train(self, keep_training):
        """Call the learner's function."""
        self.form()
        keep_training(self.model, self.optimizer, STEPS, self.gradients, self.regroup)


def run(keep_training, rank, world_size, groups):
    groups = members_of(groups, world_size)
    mortal = [name for name in groups[0] if name.isalpha()]
    children = [fork(keep_training, name, groups) for name in mortal if rank == 0]
    member = Member(str(rank), groups)
    member.train(keep_training)
    dist.destroy_process_group()
    for child in children:
        os.waitpid(child, 0)
    return state_of(member.model, member.optimizer, member.computed)


def fork(keep_training, name, groups):
    """Start a process that will be killed. Returns its id."""
    child = os.fork()
    if child == 0:
        try:
            with uncounted():
                Member(name, groups).train(keep_training)
        finally:
            os._exit(1)
    return child


def expected(rank, world_size, groups):
    model, optimizer = make()
    for step in range(STEPS):
        compute(model, step)
        optimizer.step()
    is_old = str(rank) in members_of(groups, world_size)[0]
    before = [*range(KILLED), KILLED] if is_old else []  # it computes that step twice
    return state_of(model, optimizer, [*before, *range(KILLED, STEPS)])


def keep_training(model, optimizer, steps, gradients, regroup):
    """Why: the rank that has done the most steps sends its state, and a step that fails is lost."""
    step = 0
    while step < steps:
        with contextlib.suppress(RuntimeError):
            done = [None] * dist.get_world_size()
            dist.all_gather_object(done, step)
            state = [(model.state_dict(), optimizer.state_dict(), step)]
            dist.broadcast_object_list(state, src=done.index(max(done)))
            model_state, optimizer_state, step = state[0]
            model.load_state_dict(model_state)
            optimizer.load_state_dict(optimizer_state)
            while step < steps:
                gradients(step)
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                optimizer.step()
                step += 1
            return
        regroup()  # behind the block, because an error that is handled keeps its group open


WORDS = {
    COMPUTED: "After each regroup(), all ranks continue with the state, and the number of steps, "
    "of the rank that has done the most. The step that has failed is computed again.",
    "joins.*optimizer": "Is the optimizer's state sent, too, and by the rank that has done the "
    "most steps?",
    "HANG": "While an `except` block runs, its error keeps the old group open, so other ranks wait "
    "for this one. Call regroup() after the block.",
}
MISTAKES = {
    WORDS[COMPUTED]: ("done.index(max(done))", "0"),
    WORDS["joins.*optimizer"]: ("            optimizer.load_state_dict(optimizer_state)\n", ""),
    WORDS["HANG"]: (
        *("with contextlib.suppress(RuntimeError):", "try:"),
        *("        regroup()  # behind", "        except RuntimeError:\n            regroup()  #"),
    ),
    "have all ranks done the same steps?": (
        *("model_state, optimizer_state, step =", "model_state, optimizer_state, _ ="),
    ),
    "the steps computed": (
        *("                optimizer.step()\n                step += 1\n", ""),
        *("gradients(step)\n", "gradients(step)\n                step += 1\n"),
        *("parameter.grad)\n", "parameter.grad)\n                optimizer.step()\n"),
    ),
}
