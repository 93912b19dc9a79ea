"""first_difference.py: the words on planted faults, and none where there is no fault.

test_parity.py compares the other lessons with single_gpu.py by the same function, in float64.
"""

import os
import re
import shutil
import sys
import textwrap
from contextlib import nullcontext
from pathlib import Path

import first_difference
import pytest
import torch
import torch.distributed as dist
from launch import SHORT, Job, ranks, run
from lessons import ROOT
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from watch_ranks.ranks import call
from watch_ranks.steps import Notes, sums_of

TOOL = "first_difference"
README = (ROOT / "README.md").read_text()
# Each fault, and a part of what is said about it.
FAULTS = {
    "none": ("equal up to rounding: 4 steps",),
    "none, compiled": ("equal up to rounding: 4 steps",),
    "seed": ("step 1, value of 0.weight and 3 more, on rank 1 of 2", "start differently"),
    "sampler": ("step 2, gradient", "ranks have 6, 6, of which 0, 6 are not", "See the sampler"),
    "labels": ("step 1, gradient", "On rank 1, the outputs are equal", "See labels"),
    "sum": ("step 1, gradient", "on all 2 ranks, alike", "2 times", "average over the ranks"),
    "divided": ("on all 2 ranks, alike", "expected, divided by 2", "average over the ranks"),
    "micro-batches": ("It is 2 times", "another scale", "number of micro-batches"),
    "scaled": ("It is 2 times", "On ranks 0 and 1", "another scale", "See the loss"),
    "unequal": ("On ranks 0 and 1, the outputs are equal", "means of unequal parts"),
    "one message": ("gradient of 2.bias, on all 2 ranks, which differ", "mean would be right"),
    "zeros": ("step 1, gradient", "or one of zeros", "zero_grad()"),
    "zero_grad": ("step 2, gradient", "is right", "zero_grad()"),
    "lr": ("step 1, lr, on rank 1: [0.02], in the first run [0.01]",),
    "changed": ("step 3, value of 2.weight, on rank 1 of 2", "the last step of the optimizer"),
    "nan, fsdp": ("in the shards of all ranks together", "by inf", "On rank 1, the outputs are"),
    "scaled, fsdp": ("It is 2 times", "another scale"),
    "left out": ("other optimizers: the second run has no 2.bias",),
    "stuck": ("step 2, value of 2.bias, on rank 1 of 2", "not changed in the last step"),
    "dropout": ("equal inputs have other outputs", "equal random numbers", "Dropout may differ."),
    "bias": ("equal inputs have other outputs", "by the same numbers", "See biases"),
    "clipped": ("It is 0.7 times", "all gradients are scaled alike", "and clipping"),
    "own factors": ("a factor of its own: 0.5, 0.25.", "See clipping"),
    "further loss": ("gradient of 2.weight and 1 more", "other gradients", "See further losses"),
    "last": ("after the last step, value of 0.weight, on rank 1 of 2", "what changes parameters"),
    "wide": ("error: another model: 0.weight has 45 numbers, in the first run 40",),
    "early": ("error: the first run has 4 steps, the ranks of the other one [3, 3]",),
}

NONE = "the ranks agree: 8 steps, 6 tensors"
# What the ranks of one run show of a fault: the status, and parts of the words.
AMONG_RANKS = {
    "none": (0, NONE),
    "no DDP": (1, "step 1 leaves", "gradients differed", "called in this step: none."),
    "module": (1, "step 1 leaves", "See the average", "from step 2 on, modules begin with diff"),
    "later": (1, "step 3 leaves", "gradients differed", "called in this step: none."),
    "twice": (1, "step 1 leaves", "gradients differed", "all_reduce (91) last"),
    "head": (1, "step 1 leaves the ranks with different tensors: 3.weight and 1 more of 6,"),
    "own state": (1, "step 1 leaves", "See the optimizer's state"),
    "own parameters": (1, "the ranks start with", "0.weight of 6,", "DDP has made them equal"),
    "own rate": (1, "step 1, lr, on rank 1: [0.02], on rank 0 [0.01]."),
    "own buffers": (1, "from step 2 on", "1.running_mean and 1 more of 2,", "broadcast_buffers"),
    "same images": (1, "the ranks read the same examples in 8 of 8 steps", "the same work"),
    "same epoch": (3, "steps 5 to 8 read what step 1 and after have read", "see set_epoch()"),
    "local SGD": (3, "step 1 leaves", "Before step 3 they are equal again"),
    "broadcast": (3, "in 8 of 8 steps, the ranks have different gradients, first in step 1: 0.w"),
    "closure": (1, "step 1 leaves", "0.weight and 5 more of 6", "loss that the closure returns"),
    "seeds": (3, "the ranks start with different tensors: 0.weight", "Right for shards"),
    "last step": (1, "step 8 leaves", "gradients differed", "called in this step: none."),
    "after training": (3, "step 8 leaves", "if a rank changes its model after training"),
    "own seeds": (3, "by step 4, 20 of 63 examples are read 2 times or more (20 by several ranks)"),
    "dropout": (3, "all ranks draw equal random numbers in each step"),
    "unused output": (0, NONE),
    "fewer": (1, "the ranks began 6, 5 steps, and ended 5, 5."),
    "FSDP": (0, "the ranks make equal steps: 8. Their tensors are shards"),
}


class TwoOutputs(nn.Sequential):
    """Returns two outputs, as models do that compute their loss themselves."""

    def forward(self, x):
        """Return the scores two times."""
        scores = super().forward(x)
        return scores, scores.clone()


def train_in_ddp(rank, fault, folder):
    """Train with DDP, with a fault of those that train in silence."""
    Notes(folder, 100)
    torch.manual_seed(rank if fault == "seeds" else 0)
    kind = TwoOutputs if fault == "unused output" else nn.Sequential
    own = kind(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    model = own
    if fault == "FSDP":
        own[1] = nn.LayerNorm(8)
        fully_shard(model)
    elif fault not in ("no DDP", "local SGD", "broadcast", "seeds", "closure"):
        if fault == "dropout":
            own[1] = nn.Dropout(0.5)
        options = {"find_unused_parameters": True} if fault in ("head", "unused output") else {}
        sends = fault not in ("own buffers", "twice")
        model = DistributedDataParallel(own, broadcast_buffers=sends, **options)
    if fault == "head":
        own[3] = nn.Linear(8, 3)
    if fault == "own parameters" and rank == 1:
        own[0].weight.data += 1
    rate = 0.02 if fault == "own rate" and rank == 1 else 0.01
    optimizer = torch.optim.Adam(own.parameters(), rate)
    if fault == "closure":
        optimizer = torch.optim.LBFGS(own.parameters(), max_iter=2)
    if fault == "own state" and rank == 0:
        for parameter in own.parameters():
            kept = {name: torch.ones_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.tensor(5.0), **kept}
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(64, 5, generator=generator)
    labels = torch.randint(3, (64,), generator=generator)
    for step in range(8):
        if fault == "fewer" and rank == 1 and step == 5:
            return
        if step % 4 == 0 and fault != "same epoch" or step == 0:
            order = torch.randperm(64, generator=generator)
        chosen = order[16 * (step % 4) :][:16][0 if fault == "same images" else rank :: 2]
        if fault == "own seeds":
            own_order = torch.Generator().manual_seed(2 * (step // 4) + rank)
            chosen = torch.randperm(64, generator=own_order)[16 * (step % 4) :][rank:16:2]
        parts = chosen.chunk(2) if fault == "twice" else [chosen]
        skips = fault == "module" or (fault, step) in (("later", 2), ("last step", 7))
        forward = own if skips else model

        def losses_of(forward=forward, parts=parts):
            optimizer.zero_grad()
            outputs = [forward(images[part]) for part in parts]
            if fault == "unused output":
                outputs = [used for _, used in outputs]
            losses = list(map(F.cross_entropy, outputs, [labels[part] for part in parts]))
            for loss in losses:
                loss.backward()
            return losses[0]

        if fault == "closure":
            optimizer.step(losses_of)
        else:
            losses_of()
            optimizer.step()
        for parameter in own.parameters() if fault == "local SGD" and step % 2 else ():
            dist.all_reduce(parameter.data)
            parameter.data /= 2
        for parameter in own.parameters() if fault == "broadcast" else ():
            dist.broadcast(parameter.data, src=0)
    if fault == "after training" and rank == 0:
        own[0].weight.data += 1


def train(rank, fault, size, folder):
    """Train a small model by hand, or by FSDP, with a fault on rank 1 or on all ranks."""
    Notes(folder, 100)
    torch.manual_seed(rank if fault == "seed" else 0)
    kind = nn.Dropout(0.5) if fault == "dropout" else nn.Tanh()
    model = nn.Sequential(nn.Linear(5, 9 if fault == "wide" else 8), kind, nn.Linear(8, 3))
    if fault == "wide":
        model[2] = nn.Linear(9, 3)
    model.double()
    if "compiled" in fault:
        model.compile(backend="aot_eager")
    if "fsdp" in fault:
        fully_shard(model)
    faulty = rank == size - 1
    trained = list(model.parameters())[: 3 if fault == "left out" else 4]
    if fault == "detached":
        model[0].register_forward_hook(lambda module, _, output: output.detach())
    if fault == "bias":
        model[2].register_forward_hook(lambda module, _, output: output + module.bias.detach())
    optimizer = torch.optim.Adam(trained, 0.02 if fault == "lr" and faulty else 0.01)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(60, 5, generator=generator).double()
    labels = torch.randint(3, (60,), generator=generator)
    for step in range(3 if fault == "early" else 4):
        start = 12 * step + 12 * (fault == "sampler" and faulty and step == 1)
        own = torch.arange(start, start + 12).chunk(size)[rank]
        targets = labels[own].roll(1) if fault == "labels" and faulty else labels[own]
        parts = (own[:3], own[3:]) if fault == "micro-batches" else (own,)
        if fault == "unequal":
            parts = (own[:1], own[1:])
        if fault != "zero_grad":
            optimizer.zero_grad()
        for part in parts:
            loss = F.cross_entropy(model(images[part]), targets[torch.isin(own, part)])
            factor = {"unequal": 0.5, "scaled": 2}.get(fault.partition(",")[0], 1)
            if fault == "further loss":
                loss = loss + 0.1 * model[2](torch.ones(8).double()).sum()
            factor = float("nan") if fault.startswith("nan") and faulty else factor
            (factor * loss).backward()
        by_hand = "fsdp" not in fault and fault != "detached"
        for number, parameter in enumerate(model.parameters() if by_hand else ()):
            if size > 1 and not (fault == "one message" and number == 3):
                dist.all_reduce(parameter.grad)
                parameter.grad /= {"sum": 1, "divided": size * size}.get(fault, size)
            parameter.grad *= {"clipped": 0.7, "own factors": 0.5 ** (rank + 1)}.get(fault, 1)
        if fault == "zeros":
            optimizer.zero_grad()
        bias = model[2].bias.detach().clone()
        optimizer.step()
        if fault == "stuck" and faulty:
            model[2].bias.data = bias
        if fault == "changed" and faulty and step == 1:
            model[2].weight.data[0, 0] += 1e-6
    if fault == "last" and faulty:
        model[0].weight.data += 1


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The notes of the run of one process."""
    folder = tmp_path_factory.mktemp("alone")
    call(train, 1, "none", 1, folder)
    return first_difference.read(folder)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_words_on_a_fault(fault, alone, tmp_path):
    """Two ranks with a fault, and one process without."""
    call(train, 2, fault, 2, tmp_path)
    try:
        status, words = first_difference.compare(alone, first_difference.read(tmp_path))
    except SystemExit as error:
        status, words = 1, error.code
    assert status == (not fault.startswith("none"))
    for part in FAULTS[fault]:
        assert part in words, words


@pytest.mark.parametrize("fault", AMONG_RANKS)
def test_the_ranks_of_one_run(fault, tmp_path):
    """No other run is needed to see that the ranks drift apart."""
    with pytest.raises(RuntimeError) if fault == "fewer" else nullcontext():
        call(train_in_ddp, 2, fault, tmp_path)
    right, *parts = AMONG_RANKS[fault]
    status, words = first_difference.compare_ranks(tmp_path)
    assert status == right, words
    for part in parts:
        assert part in words, words


# What the only rank of a run shows of a fault.
ALONE = {
    "none": (0, "one rank: 4 steps, 4 tensors. All that is trained has gradients"),
    "zero_grad": (3, "in 3 of 4 steps, backward() begins with the gradients of the step before"),
    "zeros": (1, "no tensor of the optimizer has a gradient in any step"),
    "detached": (3, "2 of 4 trained tensors have no gradient in any step: 0.bias and 1 more."),
    "stuck": (3, "1 of 4 trained tensors have gradients, and do not change: 2.bias."),
}


@pytest.mark.parametrize("fault", ALONE)
def test_one_process(fault, tmp_path):
    """What is never trained is told without any other rank or run."""
    call(train, 1, fault, 1, tmp_path)
    right, words = ALONE[fault]
    status, said = first_difference.compare_ranks(tmp_path)
    assert (status, words in said) == (right, True), said


class Agent(nn.Module):
    """An actor and a critic, which are called by themselves while data is made."""

    def __init__(self):
        super().__init__()
        self.actor, self.critic = nn.Sequential(nn.Linear(3, 2)), nn.Sequential(nn.Linear(3, 2))
        for part in (self.actor, self.critic):  # no start tells their biases apart
            nn.init.zeros_(part[0].bias)

    def forward(self, states):
        """Return a loss."""
        return self.actor(states).square().mean() + self.critic(states).exp().mean()


def act(rank, world_size, folder):
    """Act, and then learn from this rank's part of what all have seen."""
    Notes(folder, 9)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    agent, states = Agent(), torch.randn(6, 3)
    agent.actor(states), agent.critic(states)
    model = DistributedDataParallel(agent) if world_size > 1 else agent.forward
    optimizer = torch.optim.SGD(agent.parameters(), lr=0.1)
    for _ in range(3):
        model(states[rank::world_size]).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_parts_that_are_called_by_themselves(tmp_path):
    """Their parameters have the names of the whole model, and inputs are counted once."""
    for folder, world_size in (("one", 1), ("two", 2)):
        (tmp_path / folder).mkdir()
        call(act, world_size, world_size, tmp_path / folder)
    status, said = first_difference.compare(
        *map(first_difference.read, (tmp_path / "one", tmp_path / "two"))
    )
    assert (status, said.partition(":")[0]) == (0, "equal up to rounding"), said


def test_the_fault_of_readme(tmp_path):
    """README's commands print what it shows."""
    for name in ("museum", "tools"):
        shutil.copytree(ROOT / "playground" / name, tmp_path / "playground" / name)
    block, shown = re.search(
        r"^((?:    .+\n)+)\nThe last command prints:\n\n((?:    .+\n)+)", README, re.M
    ).groups()
    bin_first = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = Job("bash", "-ec", textwrap.dedent(block), cwd=tmp_path, env={"PATH": bin_first}).wait()
    *_, found = done.stdout.partition("step 1 ")
    assert f"step 1 {found}" == textwrap.dedent(shown), done.stderr


def test_in_front_of_lessons(tmp_path, capsys, monkeypatch):
    """The lesson starts its ranks, or a launcher does. In float32, only rounding differs."""
    run(TOOL, "note", tmp_path / "one", ROOT / "playground/single_gpu.py", *SHORT)
    lesson = ROOT / "playground/distributed_data_parallel.py"
    done = run(TOOL, "note", tmp_path / "two", lesson, *SHORT, "-g", 2)
    assert "loss 2.1236  train 42.64%" in done.stdout
    by_launcher = ROOT / "playground/distributed_data_parallel_torchrun.py"
    three = ("note", tmp_path / "three", by_launcher, *SHORT)
    for job in ranks(TOOL, *three, processes=3):
        assert job.wait().returncode == 0
    for folder in ("two", "three"):
        argv = ["first_difference.py", "compare", str(tmp_path / "one"), str(tmp_path / folder)]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as end:
            first_difference.main()
        assert end.value.code == 0
        assert capsys.readouterr().out.startswith("equal up to rounding: 12 steps")


def test_the_names_of_stages():
    """Two stages count their layers from 0, and their norms all start alike."""
    layers = [nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)) for _ in range(4)]
    stages = nn.Sequential(*layers), nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:])
    whole, *ranks = [
        [{"value of": {name: sums_of(each) for name, each in stage.named_parameters()}}]
        for stage in stages
    ]
    names = first_difference.names_of([whole], ranks)
    for offset, own in zip((0, 2), names, strict=True):
        assert own == {name: f"{int(name[0]) + offset}{name[1:]}" for name in own}
        assert own.keys() == ranks[offset // 2][0]["value of"].keys()


def test_no_step(tmp_path):
    """One line says that there is nothing to compare: a step that is cut off does not count."""
    (tmp_path / "rank0.jsonl").write_text('{"ranks": 1')
    with pytest.raises(SystemExit, match="error: .* has no step of an optimizer of rank 0"):
        first_difference.read(tmp_path)
