"""The FSDP lesson: the numbers of one process, tables that count right, checkpoints for any number of ranks.

What PyTorch's own pieces do in silence, and the lesson and its README warn of, is tried in `pitfalls`, in one go.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import DIGITS, epochs, torchrun, train
from nodes import sh, small_disk
from test_break_it import change  # noqa: F401 - a fixture
from test_errors import one_line
from test_parity import result, single
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler

from common.data import load, whole_batch
from common.models import MODELS

LESSON = "fully_sharded_data_parallel"
SHORT = (*DIGITS, "--batch_size", 120)
TABLE = r"^(rank \d+|formula|DDP) +([\d, ]+)$"
MESSAGES = r"^messages of a step: (\d+) all_gather, (\d+) reduce_scatter, (\d+) all_reduce\."


def tables(text):
    """Return the rows of the table of bytes by name, and the numbers of the three kinds of messages."""
    rows = {name: [int(word.replace(",", "")) for word in row.split()] for name, row in re.findall(TABLE, text, re.M)}
    return rows, [int(count) for count in re.search(MESSAGES, text, re.M).groups()]


def layers_of(model):
    """Return the layers that have weights."""
    return [layer for layer in model.modules() if list(layer.parameters(recurse=False))]


def failed(*flags, processes=1):
    """Run the lesson, which has to end with status 1. Returns it with stdout and stderr."""
    return train(LESSON, *flags, processes=processes, status=1)


@pytest.mark.parametrize(("model", "processes", "keep"), [("mlp", 3, False), ("cnn", 2, False), ("mlp", 2, True)])
def test_the_tables_count_what_is_there(model, processes, keep):
    """Each rank's chunk of each weight's rows, twice that in Adam and a number of steps; 16 bytes a weight in all."""
    flags = (*SHORT, "--epochs", 1, "--model", model, *["--keep_weights"] * keep)
    rows, messages = tables(train(LESSON, *flags, processes=processes).stdout)
    network = MODELS[model]()
    weights, layers = list(network.parameters()), layers_of(network)
    whole = [sum(weight.nbytes for weight in layer.parameters()) for layer in layers]
    gathered = [sum(whole[: number + 1]) for number in range(len(whole))] if keep else whole
    for rank in range(processes):
        chunks = [weight.chunk(processes)[rank] for weight in weights]
        mine = sum(chunk.numel() for chunk in chunks) * 4
        expected = [mine, mine, 2 * mine + 4 * len(weights), 4 * mine + 4 * len(weights)]
        assert rows[f"rank {rank}"] == [*expected, *gathered]
    total = sum(weight.numel() for weight in weights)
    assert rows["DDP"] == [4 * total, 4 * total, 8 * total, 16 * total]
    assert rows["formula"] == [count // processes for count in rows["DDP"]]
    assert len(rows) == processes + 2
    assert messages == [len(layers) * (1 if keep else 2), len(layers), 0]


def test_bfloat16():
    """Gathered in half the bytes, kept in float32; the losses are near those of float32, and others."""
    lines, checkpoint = result(LESSON, "--precision", "bf16", processes=2)
    expected, weights = single("--model", "mlp")
    for line, right in zip(lines, expected, strict=True):
        assert 1e-5 < abs(line["loss"] - right["loss"]) < 0.03
    assert all(weight.dtype == torch.float32 for weight in checkpoint["model"].values())
    apart = [(checkpoint["model"][name] - weight).abs().max().item() for name, weight in weights["model"].items()]
    assert 1e-5 < max(apart) < 0.05
    rows, _ = tables(train(LESSON, *SHORT, "--epochs", 1, "--precision", "bf16", processes=2).stdout)
    assert rows["rank 0"][:2] == rows["formula"][:2]  # shards and their gradients are in float32
    assert rows["rank 0"][4:] == [
        sum(weight.nbytes for weight in layer.parameters()) // 2 for layer in layers_of(MODELS["mlp"]())
    ]


def clipped(clip):
    """Train two epochs in float64 in a plain loop that clips. Returns the weights, and each epoch's mean norm."""
    torch.manual_seed(0)
    train_set, _ = load("digits", None)
    model, order, norms = MODELS["mlp"](), torch.Generator(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-6, fused=True)
    sampler = RandomSampler(train_set, generator=order)
    for epoch in range(2):
        order.manual_seed(epoch)
        for images, labels in DataLoader(train_set, 120, sampler=sampler, drop_last=True, collate_fn=whole_batch):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            gradients = torch.cat([weight.grad.flatten() for weight in model.parameters()])
            norms.append(gradients.square().sum().sqrt())
            for weight in model.parameters():
                weight.grad *= min(1, clip / (norms[-1] + 1e-6))
            optimizer.step()
    return model.state_dict(), torch.stack(norms).view(2, -1).mean(dim=1).tolist()


@pytest.mark.parametrize("processes", [2, 3])
def test_clipping(processes, tmp_path):
    """By the norm over all ranks, which is printed: the weights of a plain loop that clips, to 1e-12 in float64."""
    torch.set_default_dtype(torch.float64)
    try:
        weights, norms = clipped(0.5)
    finally:
        torch.set_default_dtype(torch.float32)
    flags = (*SHORT, "--epochs", 2, "--double", "--clip", 0.5, "-s", tmp_path / "c.pt")
    out = train(LESSON, *flags, processes=processes).stdout
    found = torch.load(tmp_path / "c.pt", weights_only=True)["model"]
    unclipped = single("--double", "--model", "mlp")[1]["model"]
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, atol=1e-12, rtol=0)
    assert max((unclipped[name] - weight).abs().max() for name, weight in weights.items()) > 1e-4
    assert [float(norm) for norm in re.findall(r"images/s  norm ([\d.]+)$", out, re.M)] == pytest.approx(
        norms, abs=6e-5
    )


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A folder with sharded checkpoints of two ranks, after one epoch and after two."""
    folder = tmp_path_factory.mktemp("fsdp") / "run"
    train(LESSON, *SHORT, "--epochs", 2, "--double", "--run_dir", folder, processes=2)
    return folder


@pytest.fixture
def broken(run_dir, tmp_path):
    """A copy of it, to be damaged."""
    return shutil.copytree(run_dir, tmp_path / "run")


def test_a_checkpoint_is_loaded_by_another_number_of_ranks(tmp_path):
    """An epoch by 2 ranks, one by 3, one by 2 again: weights and Adam's state of one process that made all three."""
    for done, processes in enumerate((2, 3, 2)):
        flags = ("--epochs", done + 1, "--double", "--run_dir", tmp_path / "run", "-s", tmp_path / f"{done}.pt")
        out = train(LESSON, *SHORT, *flags, processes=processes).stdout
        assert re.findall(r"^epoch (\d)", out, re.M) == [str(done + 1)]
        pieces = {path.name for path in (tmp_path / "run" / f"epoch-000{done + 1}").iterdir()}
        assert pieces == {".metadata", *(f"__{rank}_0.distcp" for rank in range(processes))}
    train("single_gpu", *SHORT, "--epochs", 3, "--double", "-s", tmp_path / "one.pt")
    found, expected = (torch.load(tmp_path / name, weights_only=True) for name in ("2.pt", "one.pt"))
    for name, weight in expected["model"].items():
        torch.testing.assert_close(found["model"][name], weight, atol=1e-12, rtol=0)
    states = zip(found["optimizer"]["state"].values(), expected["optimizer"]["state"].values(), strict=True)
    for state, right in states:
        assert state.keys() == right.keys() == {"step", "exp_avg", "exp_avg_sq"}
        for name, value in right.items():
            torch.testing.assert_close(state[name], value, atol=1e-12, rtol=0)


def test_the_export_is_a_plain_checkpoint(run_dir, tmp_path):
    """Written without a step by another number of ranks: any lesson's model and optimizer go on from it."""
    path = tmp_path / "plain.pt"
    out = train(LESSON, *SHORT, "--epochs", 2, "--double", "--run_dir", run_dir, "-s", path, processes=3).stdout
    assert not epochs(out)
    checkpoint = torch.load(path, weights_only=True)
    assert set(checkpoint) == {"model", "optimizer", "epoch", "args"}
    assert (checkpoint["epoch"], checkpoint["args"]["batch_size"]) == (2, 120)
    assert {type(value) for value in checkpoint["model"].values()} == {torch.Tensor}
    assert [path.name for path in tmp_path.iterdir()] == ["plain.pt"]
    _, expected = single("--double", "--model", "mlp")
    assert list(checkpoint["model"]) == list(expected["model"])
    after = []
    for state in (checkpoint, expected):
        model = MODELS["mlp"]().double()
        model.load_state_dict(state["model"])
        optimizer = torch.optim.Adam(model.parameters())
        optimizer.load_state_dict(state["optimizer"])
        assert (optimizer.param_groups[0]["eps"], len(optimizer.state)) == (1e-6, 8)
        images = torch.randn(9, 1, 28, 28, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        F.cross_entropy(model(images), torch.arange(9)).backward()
        optimizer.step()
        after.append(model.state_dict())
    for name, weight in after[1].items():
        torch.testing.assert_close(after[0][name], weight, atol=1e-12, rtol=0)


def cut_short(path):
    """Leave the first third of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])


@pytest.mark.parametrize(
    ("damage", "piece", "words"),
    [
        (Path.unlink, "__1_0.distcp", ("No such file", "__1_0.distcp")),
        (cut_short, "__1_0.distcp", ()),
        (cut_short, ".metadata", ()),
        (lambda path: path.write_bytes(b""), "__0_0.distcp", ()),
    ],
)
def test_a_piece_is_missing_or_damaged(damage, piece, words, broken):
    """One line names the folder; without it, the checkpoint before it is used."""
    damage(broken / "epoch-0002" / piece)
    done = failed(*SHORT, "--epochs", 2, "--double", "--run_dir", broken, processes=2)
    one_line(done, "epoch-0002: ", *words, "delete it")
    shutil.rmtree(broken / "epoch-0002")
    again = train(LESSON, *SHORT, "--epochs", 2, "--double", "--run_dir", broken, processes=2).stdout
    assert epochs(again) == epochs_of_two()[1:]


def test_a_full_disk(tmp_path):
    """No room for the next checkpoint: a line from each rank. With more room it goes on from the last whole one."""
    folder = tmp_path / "small"
    folder.mkdir()
    with small_disk(folder, "4m"):
        flags = (*SHORT, "--double", "--run_dir", folder / "run")
        done = failed(*flags, "--epochs", 5, processes=2)
        told = "make room, or choose another --savefile or --run_dir"
        assert re.fullmatch(f"(error: (No space left on device|a file is cut short): {told}\n)+", done.stderr)
        saved = len(epochs(done.stdout)) - 1
        assert saved > 0
        sh("mount", "-o", "remount,size=20m", folder)
        again = train(LESSON, *flags, "--epochs", saved + 1, processes=3).stdout
        assert epochs(again) == epochs(done.stdout)[saved:]


def epochs_of_two():
    """Return the epoch lines of two epochs in float64."""
    return [
        {name: pytest.approx(value, abs=1e-3) for name, value in line.items()}
        for line in single("--double", "--model", "mlp")[0]
    ]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--double", "--model", "cnn"), ("Missing key", "model.stage1.0.weight")),
        (("--double", "--width", 32), ("Size mismatch", "[64, 784]", "[32, 784]", "model.stage1.1.weight")),
        (("--double", "--layers", 4), ("model.stage1.5.weight",)),
        (("--double", "--lr", 0.5), ("it was trained with --lr 0.001",)),
        ((), ("it was trained with --double True",)),
    ],
)
def test_a_checkpoint_of_another_model(flags, words, run_dir):
    """One line says what differs."""
    one_line(failed(*SHORT, "--epochs", 3, *flags, "--run_dir", run_dir), "epoch-0002: ", *words, "use its flags")


def test_a_checkpoint_that_was_not_finished(broken):
    """Its .metadata is written last: without that, the one before it is used."""
    (broken / "epoch-0002" / ".metadata").unlink()
    out = train(LESSON, *SHORT, "--epochs", 2, "--double", "--run_dir", broken).stdout
    assert epochs(out) == epochs_of_two()[1:]
    assert (broken / "epoch-0002" / ".metadata").exists()


DROPOUT = ("--model", "cnn", "--dropout", 0.5, "--double")
DRAWN = """
        dist.all_gather_object(drawn := [None] * world_size, torch.rand(1).item())
        print("drawn:", *drawn)
        start = time.perf_counter()
"""


def test_ranks_drop_out_other_neurons(change, tmp_path):  # noqa: F811
    """Each rank and epoch draws other numbers, the same in each run, and in one that is resumed."""
    copy = change(LESSON, ("\n        start = time.perf_counter()\n", DRAWN))
    drawn, weights = [], []
    for name, counts in (("one", (2,)), ("again", (2,)), ("resumed", (1, 2))):
        for count in counts:
            flags = ("--epochs", count, "--run_dir", tmp_path / name, "-s", tmp_path / f"{name}.pt")
            out = train(copy, *SHORT, *DROPOUT, *flags, processes=2).stdout
            drawn.append(re.findall(r"0\.\d+", " ".join(re.findall(r"^drawn: (.*)", out, re.M))))
        weights.append(torch.load(tmp_path / f"{name}.pt", weights_only=True)["model"])
    assert len(set(drawn[0])) == 4  # two ranks, two epochs
    assert drawn[1] == drawn[2] + drawn[3] == drawn[0]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, atol=1e-12, rtol=0)
        torch.testing.assert_close(weights[2][name], weight, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--dropout", 0.5), ("--dropout", "--model cnn")),
        (("--dropout", 1, "--model", "cnn"), ("--dropout", "below 1")),
        (("--clip", -1), ("--clip", "0 or more")),
        (("--clip", "nan"), ("--clip", "0 or more")),
        (("--precision", "fp8"), ("--precision", "bf16")),
        (("--batch_size", 100), ("--batch_size 100", "3", "99")),
        (("--run_dir", "/proc/here"), ("--run_dir /proc/here",)),
    ],
)
def test_wrong_flags(flags, words, main):
    """Status 2, one line."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    one_line(main(LESSON, "--batch_size", 120, *flags, env=env), *words)


def test_a_missing_piece_as_a_user_sees_it(broken):
    """Under torchrun: the line stands once, before torchrun's own report."""
    (broken / "epoch-0002" / "__0_0.distcp").unlink()
    done = torchrun(LESSON, *SHORT, "--double", "--run_dir", broken).wait(150)
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "__0_0.distcp" in lines[0]


def two_epochs(copy):
    """Run a changed copy of the lesson on two ranks. Returns its output."""
    return train(copy, *SHORT, "--epochs", 2, processes=2).stdout


def test_an_optimizer_made_too_early(change):  # noqa: F811
    """Exercise 1: it has the weights from before, which have no gradients any more: no error, and nothing moves."""
    made = "    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)"
    shard, late = "    shard(model, args)  # NEW", "  # NEW: after shard, of shards\n"
    out = two_epochs(change(LESSON, (made + late, ""), (shard, f"{made}\n{shard}")))
    first, second = epochs(out)
    assert second["test"] == first["test"]
    assert second["loss"] == pytest.approx(first["loss"], abs=0.01)
    rows, _ = tables(out)
    assert rows["rank 0"][2] == 0  # Adam has no state


def test_only_the_root_is_sharded(change):  # noqa: F811
    """Exercise 2: the numbers are right, but all weights are gathered at once, in one message, until backward()."""
    out = two_epochs(change(LESSON, ("        if list(layer.parameters()):", "        if False:")))
    expected = [line["loss"] for line in single("--model", "mlp")[0]]
    assert [line["loss"] for line in epochs(out)] == pytest.approx(expected, abs=2e-4)
    rows, messages = tables(out)
    assert rows["rank 0"][4:] == [rows["DDP"][0]] * 4
    assert messages == [1, 1, 0]


def test_another_seed_on_each_rank(change):  # noqa: F811
    """Exercise 3: rows of two models are trained as one, see also `pitfalls`."""
    old = "torch.manual_seed(args.seed)  # NEW"
    out = two_epochs(change(LESSON, (old, "torch.manual_seed(args.seed + rank)  # NEW")))
    assert abs(epochs(out)[0]["loss"] - single("--model", "mlp")[0][0]["loss"]) > 1e-3


PITFALLS = """
import json
import os

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

local_rank = os.environ["LOCAL_RANK"]
dist.init_process_group("gloo")
rank, found = dist.get_rank(), {}
mesh = dist.init_device_mesh("cpu", (2,))
images, labels = torch.randn(8, 1, 28, 28, generator=torch.Generator().manual_seed(rank)), torch.arange(8)


def mlp(seed=0):
    torch.manual_seed(seed)
    return MODELS["mlp"]()


def shard(model, **options):
    for layer in [layer for layer in model.modules() if list(layer.parameters(recurse=False))]:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def adam(model):
    return torch.optim.Adam(model.parameters(), eps=1e-6, fused=True)


def step(model, optimizer):
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()


def whole(model):
    return [weight.full_tensor() for weight in model.parameters()]


def apart(model, other):
    return max((one - two).abs().max().item() for one, two in zip(whole(model), whole(other)))


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

# 2: another seed on each rank
first = whole(shard(mlp(seed=rank)))[0]
found["rows of"] = [
    [torch.equal(part, mlp(seed).stage1[1].weight.chunk(2)[number]) for seed in (0, 1)]
    for number, part in enumerate(first.chunk(2))
]

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

# 4, 5: forward() without hooks; only the root, which keeps all of its weights after a forward pass without gradients
model = fully_shard(mlp(), mesh=mesh)
found["forward"] = told(model.forward, images)
with torch.no_grad():
    model(images)
found["root keeps"] = not any(isinstance(weight, DTensor) for weight in model.parameters())

# 6: the optimizer's state, asked for before the first step
one, other = shard(mlp()), shard(mlp())
plain, asked = adam(one), adam(other)
get_optimizer_state_dict(other, asked)
found["steps"] = [state["step"].item() for state in asked.state.values()]
step(one, plain)
step(other, asked)
found["asked"] = apart(one, other)
model = shard(mlp())
optimizer = adam(model)
F.cross_entropy(model(images), labels).backward()
found["state"] = len(get_optimizer_state_dict(model, optimizer)["state"])

# 8: a norm, of all ranks and of this one's shards
norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor().item()
shards = torch.stack([weight.grad.to_local().norm() for weight in model.parameters()]).norm().item()
full = torch.stack([weight.grad.full_tensor().norm() for weight in model.parameters()]).norm().item()
found["norms"] = [norm, full, shards]

# 9: tied weights
tied = nn.Sequential(nn.Flatten(), nn.Linear(784, 784), nn.Linear(784, 784))
tied[2].weight = tied[1].weight
found["tied"] = told(shard(tied), images)
tied = nn.Sequential(nn.Flatten(), nn.Linear(784, 784), nn.Linear(784, 784))
tied[2].weight = tied[1].weight
fully_shard([tied[1], tied[2]], mesh=mesh)
found["tied in one group"] = told(fully_shard(tied, mesh=mesh), images)

# 10: batch norm in bfloat16, and with a layer of its own in float32
def normed():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))


narrow = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
found["batch norm"] = told(shard(normed(), mp_policy=narrow), images)
model = normed()
fully_shard(model[2], mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.float32, torch.float32, torch.bfloat16))
for layer in (model[1], model[3], model):
    fully_shard(layer, mesh=mesh, mp_policy=narrow)
found["batch norm in float32"] = told(model, images)

# 13: gradients of two batches that add up
model, twice = shard(mlp()), []
found["no_sync"] = hasattr(model, "no_sync")
for sync in (False, True):
    model.set_requires_gradient_sync(sync)
    twice.append(counted(model))
found["accumulated"] = twice

found["DDP"] = counted(DistributedDataParallel(mlp()))
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
    return json.loads(train(path, processes=2).stdout.splitlines()[-1])


def test_what_the_exercises_warn_of(pitfalls):
    """An early optimizer moves nothing; other seeds: the first rows are of rank 0's model, the others of rank 1's."""
    assert pitfalls["moved"] == 0
    assert pitfalls["rows of"] == [[True, False], [False, True]]


def test_weights_that_are_made_on_the_meta_device(pitfalls):
    """With equal seeds all ranks draw the same rows, and not those of one process: load a state instead."""
    assert pitfalls["meta"] == [True, False]


def test_only_the_root(pitfalls):
    """forward() skips the hooks that gather; a pass without gradients leaves all weights gathered."""
    assert "got mixed torch.Tensor and DTensor" in pitfalls["forward"]
    assert pitfalls["root keeps"]


def test_state_that_is_asked_for_too_early(pitfalls):
    """Before the first step Adam counts one that it never made; with gradients there, nothing is returned."""
    assert set(pitfalls["steps"]) == {1}
    assert pitfalls["asked"] > 1e-6
    assert pitfalls["state"] == 0


def test_the_norm_is_that_of_all_ranks(pitfalls):
    """full_tensor() has it; a rank's own shards have less."""
    norm, full, shards = pitfalls["norms"]
    assert norm == pytest.approx(full, rel=1e-5)
    assert shards < 0.95 * norm


def test_tied_weights(pitfalls):
    """In two groups they are refused, with the cure; in one they work."""
    assert pitfalls["tied"].startswith("ValueError") and "fully_shard([module_a, module_b])" in pitfalls["tied"]
    assert pitfalls["tied in one group"] == "no error"


def test_batch_norm_in_bfloat16(pitfalls):
    """The policy leaves its buffers in float32, which on a CPU ends in an error; a policy of its own helps."""
    assert "expected scalar type BFloat16 but found Float" in pitfalls["batch norm"]
    assert pitfalls["batch norm in float32"] == "no error"


def test_accumulating_gradients(pitfalls):
    """There is no no_sync(): set_requires_gradient_sync(False) leaves out reduce_scatter, but not all_gather."""
    assert not pitfalls["no_sync"]
    gathers, reduces = "c10d._allgather_base_", "c10d._reduce_scatter_base_"
    assert pitfalls["accumulated"] == [{gathers: 8}, {gathers: 8, reduces: 4}]


def test_ddp_needs_one_all_reduce(pitfalls):
    """For a model of less than 25 MB, as the table says."""
    assert pitfalls["DDP"] == {"c10d.allreduce_": 1}
