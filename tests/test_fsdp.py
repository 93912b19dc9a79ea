"""The FSDP lesson: what rank 0 holds, the exercises, and what goes wrong in silence.

What PyTorch's own classes do without an error is tried in `pitfalls`, in one run.
"""

import argparse
import json
import re
import textwrap

import pytest
import torch
import torch.distributed as dist
from conftest import DIGITS, epochs, lesson_path, ranks, single_gpu, train
from forked import in_ranks, join
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F

from common.models import MODELS

LESSON = "fully_sharded_data_parallel"
SHORT = (*DIGITS, "--batch_size", 120)


def held(out):
    """Return the bytes that rank 0 holds, by the names that the lesson prints."""
    found = re.findall(r"^rank 0 holds +([\d,]+) bytes of (.+)$", out, re.M)
    return {name: int(number.replace(",", "")) for number, name in found}


@pytest.mark.parametrize(
    ("model", "processes", "keep"), [("mlp", 3, False), ("cnn", 2, False), ("mlp", 2, True)]
)
def test_the_bytes_that_rank_0_holds(model, processes, keep):
    """Its rows of each parameter, as many gradients, twice as much in Adam, and whole layers."""
    flags = (*SHORT, "--epochs", 1, "--model", model, *["--keep_weights"] * keep)
    parameters = list(MODELS[model]().parameters())
    own = sum(each.chunk(processes)[0].nbytes for each in parameters)
    whole = sum(each.nbytes for each in parameters)
    assert held(train(LESSON, *flags, processes=processes).stdout) == {
        "the parameters' shards": own,
        "whole layers": whole if keep else 0,
        "gradients": own,
        "Adam's averages": 2 * own,
    }


def counting_rank(rank, world_size, port, results):
    """Count the messages of a step, with and without --keep_weights."""
    import fully_sharded_data_parallel as lesson

    join(rank, world_size, port)
    for keep in (False, True):
        model = MODELS["mlp"]()
        lesson.shard(model, argparse.Namespace(device="cpu", timeout=60, keep_weights=keep))
        with CommDebugMode() as messages:
            F.cross_entropy(model(torch.randn(2, 1, 28, 28)), torch.arange(2)).backward()
        counts = {str(name): count for name, count in messages.get_comm_counts().items()}
        results[rank, keep] = counts
    dist.barrier()
    dist.destroy_process_group()


def test_the_messages_of_a_step():
    """Four layers are gathered twice, or once, and each gets its gradients in one message."""
    gathers = "c10d._allgather_base_"
    reduces = "c10d._reduce_scatter_base_"
    results = in_ranks(counting_rank, 2)
    for rank in range(2):
        assert results[rank, False] == {gathers: 8, reduces: 4}
        assert results[rank, True] == {gathers: 4, reduces: 4}


def two_epochs(copy):
    """Run a changed copy of the lesson on two ranks. Returns its output."""
    return train(copy, *SHORT, "--epochs", 2, processes=2).stdout


def test_an_optimizer_made_too_early(change):
    """Exercise 1: its parameters get no gradients, so nothing moves, without an error."""
    made = (
        "    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)\n"
    )
    shard = "        shard(model, args)  # NEW: this also moves"
    out = two_epochs(change(LESSON, (made, ""), (shard, f"    {made}{shard}")))
    first, second = epochs(out)
    assert second["test"] == first["test"]
    assert second["loss"] == pytest.approx(first["loss"], abs=0.01)
    assert held(out)["Adam's averages"] == 0


def test_only_the_whole_model_is_sharded(change):
    """Exercise 2: the numbers are right, but the model stays whole after a test."""
    copy = change(LESSON, ("    for layer in model.layers:  #", "    for layer in []:  #"))
    out = two_epochs(copy)
    expected = [line["loss"] for line in single_gpu(*SHORT, "--epochs", 2)]
    assert [line["loss"] for line in epochs(out)] == pytest.approx(expected, abs=2e-4)
    assert held(out) == {
        "the parameters' shards": 118_420,
        "whole layers": 236_840,
        "gradients": 118_420,
        "Adam's averages": 236_840,
    }


def test_a_different_seed_on_each_rank(change):
    """Exercise 3: shards of two models are trained as one, see also `pitfalls`."""
    seed = "    torch.manual_seed(args.seed"
    out = two_epochs(change(LESSON, (f"{seed})", f"{seed} + rank)")))
    assert abs(epochs(out)[0]["loss"] - single_gpu(*SHORT, "--epochs", 2)[0]["loss"]) > 1e-3


EPOCH = "        train_loader.sampler.set_epoch(epoch)"


@pytest.mark.parametrize("lesson", [LESSON, "fully_sharded_checkpoints", "tensor_parallel"])
def test_a_rank_that_does_nothing_beside_unused_gpus(lesson, change):
    """--timeout holds for the group of the mesh, too.

    On a machine with GPUs, a mesh of CPUs has a group of its own, with a timeout of half an hour.
    """
    text = lesson_path(lesson).read_text()
    [(line, indent)] = re.findall(r"^(( +)mesh = dist.init_device_mesh.*\n)", text, re.M)
    group = "assert mesh.get_group() is not dist.group.WORLD\n"
    lines = ["torch.cuda.is_available = lambda: True\n", line.lstrip(), group]
    lines.append("torch.cuda.is_available = lambda: False\n")
    sleep = f"        time.sleep(9999 * (rank == 1))\n{EPOCH}"
    copy = change(lesson, (line, textwrap.indent("".join(lines), indent)), (EPOCH, sleep))
    flags = (*SHORT, "--timeout", 5, *["--by", "dtensor"] * (lesson == "tensor_parallel"))
    jobs = ranks(copy, *flags, processes=2)
    try:
        end = jobs[0].wait(200)
    finally:
        for job in jobs:
            job.kill()
    assert end.returncode == 1 and "Timed out" in end.stderr, end.stderr


PITFALLS = """
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from common.models import MODELS

dist.init_process_group("gloo")
rank = dist.get_rank()
found = {}
mesh = dist.init_device_mesh("cpu", (2,))
images = torch.randn(8, 1, 28, 28, generator=torch.Generator().manual_seed(rank))
labels = torch.arange(8)


def mlp(seed=0):
    torch.manual_seed(seed)
    return MODELS["mlp"]()


def shard(model, **options):
    for layer in [each for each in model.modules() if list(each.parameters(recurse=False))]:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def adam(model):
    return torch.optim.Adam(model.parameters(), eps=1e-6, fused=True)


def step(model, optimizer):
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()


def whole(model):
    return [parameter.full_tensor() for parameter in model.parameters()]


def apart(model, other):
    pairs = zip(whole(model), whole(other))
    return max((one - two).abs().max().item() for one, two in pairs)


def told(function, *args):
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def counted(model):
    with CommDebugMode() as messages:
        F.cross_entropy(model(images), labels).backward()
    return {str(name): count for name, count in messages.get_comm_counts().items()}


# 1: an optimizer that was made too early
model = mlp()
early = adam(model)
shard(model)
step(model, early)
found["moved"] = apart(model, shard(mlp()))

# 2: a different seed on each rank
first = whole(shard(mlp(seed=rank)))[0]
found["rows of"] = []
for number, part in enumerate(first.chunk(2)):
    drawn = [mlp(seed).stage1[1].weight.chunk(2)[number] for seed in (0, 1)]
    found["rows of"].append([torch.equal(part, each) for each in drawn])

# 3: a model made on the meta device, with equal seeds
with torch.device("meta"):
    model = MODELS["mlp"]()
shard(model).to_empty(device="cpu")
torch.manual_seed(0)
for layer in model.modules():
    if hasattr(layer, "reset_parameters"):
        layer.reset_parameters()
first = whole(model)[0]
found["meta"] = [torch.equal(*first.chunk(2)), torch.equal(first, mlp().stage1[1].weight)]

# 4, 5: forward() without hooks; only the root, which stays whole after a pass without gradients
model = fully_shard(mlp(), mesh=mesh)
found["forward"] = told(model.forward, images)
with torch.no_grad():
    model(images)
found["root keeps"] = not any(isinstance(each, DTensor) for each in model.parameters())

# 6: the optimizer's state, asked for before the first step
one = shard(mlp())
other = shard(mlp())
plain = adam(one)
asked = adam(other)
get_optimizer_state_dict(other, asked)
found["steps"] = [state["step"].item() for state in asked.state.values()]
step(one, plain)
step(other, asked)
found["asked"] = apart(one, other)
model = shard(mlp())
optimizer = adam(model)
F.cross_entropy(model(images), labels).backward()
found["state"] = len(get_optimizer_state_dict(model, optimizer)["state"])

# 8: the norm of the gradients: over all ranks, and over the shards of this one
norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor().item()
gradients = [parameter.grad for parameter in model.parameters()]
full = torch.stack([each.full_tensor().norm() for each in gradients]).norm().item()
shards = torch.stack([each.to_local().norm() for each in gradients]).norm().item()
found["norms"] = [norm, full, shards]

# 9: tied parameters
tied = nn.Sequential(nn.Flatten(), nn.Linear(784, 784), nn.Linear(784, 784))
tied[2].weight = tied[1].weight
found["tied"] = told(shard(tied), images)
tied = nn.Sequential(nn.Flatten(), nn.Linear(784, 784), nn.Linear(784, 784))
tied[2].weight = tied[1].weight
fully_shard([tied[1], tied[2]], mesh=mesh)
found["tied in one group"] = told(fully_shard(tied, mesh=mesh), images)

# 10: batch norm in bfloat16, and with a policy of its own in float32
def normed():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))


narrow = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
wide = MixedPrecisionPolicy(torch.float32, torch.float32, torch.bfloat16)
found["batch norm"] = told(shard(normed(), mp_policy=narrow), images)
model = normed()
fully_shard(model[2], mesh=mesh, mp_policy=wide)
for layer in (model[1], model[3], model):
    fully_shard(layer, mesh=mesh, mp_policy=narrow)
found["batch norm in float32"] = told(model, images)

# 13: gradients of two batches that add up
model = shard(mlp())
found["no_sync"] = hasattr(model, "no_sync")
found["accumulated"] = []
for sync in (False, True):
    model.set_requires_gradient_sync(sync)
    found["accumulated"].append(counted(model))

# the buckets of DDP: less than 1 MiB, and the second step of 8 MiB of gradients
found["DDP"] = counted(DistributedDataParallel(mlp()))
layers = [nn.Linear(784, 784) for _ in range(4)]
wide = DistributedDataParallel(nn.Sequential(nn.Flatten(), *layers))
counted(wide)
found["wide DDP"] = counted(wide)
dist.barrier()
if rank == 0:
    print(json.dumps(found))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def pitfalls(tmp_path_factory):
    """What PyTorch does without this lesson's precautions, on two ranks."""
    path = tmp_path_factory.mktemp("pitfalls") / "pitfalls.py"
    path.write_text(PITFALLS)
    done = [job.wait() for job in ranks(path, processes=2)]
    assert not any(each.returncode for each in done), done
    return json.loads(done[0].stdout.splitlines()[-1])


def test_what_the_exercises_warn_of(pitfalls):
    """An early optimizer moves nothing. With two seeds, each rank's rows are of its own model."""
    assert pitfalls["moved"] == 0
    assert pitfalls["rows of"] == [[True, False], [False, True]]


def test_parameters_that_are_made_on_the_meta_device(pitfalls):
    """On a CPU, equal seeds draw the same rows on all ranks, and not those of one process."""
    assert pitfalls["meta"] == [True, False]


def test_only_the_root(pitfalls):
    """forward() skips the hooks that gather. After a pass without gradients, all stays whole."""
    assert "got mixed torch.Tensor and DTensor" in pitfalls["forward"]
    assert pitfalls["root keeps"]


def test_state_that_is_asked_for_too_early(pitfalls):
    """Before the first step, Adam counts one that it never made. Before step(), there is none."""
    assert set(pitfalls["steps"]) == {1}
    assert pitfalls["asked"] > 1e-6
    assert pitfalls["state"] == 0


def test_the_norm_is_that_of_all_ranks(pitfalls):
    """full_tensor() has it. The shards of one rank have less."""
    norm, full, shards = pitfalls["norms"]
    assert norm == pytest.approx(full, rel=1e-5)
    assert shards < 0.95 * norm


def test_tied_parameters(pitfalls):
    """In two groups they are refused, with the cure; in one they work."""
    assert pitfalls["tied"].startswith("ValueError")
    assert "fully_shard([module_a, module_b])" in pitfalls["tied"]
    assert pitfalls["tied in one group"] == "no error"


def test_batch_norm_in_bfloat16(pitfalls):
    """Its buffers stay in float32, which is an error on a CPU; a policy of its own helps."""
    assert "expected scalar type BFloat16 but found Float" in pitfalls["batch norm"]
    assert pitfalls["batch norm in float32"] == "no error"


def test_accumulating_gradients(pitfalls):
    """There is no no_sync(). set_requires_gradient_sync(False) leaves out only reduce_scatter."""
    assert not pitfalls["no_sync"]
    gathers = "c10d._allgather_base_"
    reduces = "c10d._reduce_scatter_base_"
    assert pitfalls["accumulated"] == [{gathers: 8}, {gathers: 8, reduces: 4}]


def test_the_buckets_of_ddp(pitfalls):
    """One message for less than 1 MiB of gradients. The first of several has at least 1 MiB."""
    assert pitfalls["DDP"]["c10d.allreduce_"] == 1
    assert pitfalls["wide DDP"]["c10d.allreduce_"] == 2
