"""The hybrid lesson: the numbers of one process on every mesh, its messages, and its exercises."""

import re
import textwrap

import pytest
from conftest import DIGITS, ROOT, epochs, fails, losses, one_line, ranks, run, single_gpu, train

LESSON = "hybrid_parallel"
TWO_EPOCHS = (*DIGITS, "--batch_size", 120, "--epochs", 2)
HSDP = ("--kind", "hsdp")
ROW = r"^(\w+) +(all_reduce|all_gather|reduce_scatter) +(\d+) +(\d+) +([\d,]+) +([\d,]+)$"


def assert_equal(processes, network, *own):
    """Train a network of these sizes on a mesh, and compare it with single_gpu.py."""
    flags = [*TWO_EPOCHS, "--double"]
    flags += [word for name, value in network.items() for word in (f"--{name}", value)]
    right = [line["loss"] for line in single_gpu(*flags)]
    done = train(LESSON, *flags, *own, processes=processes)
    assert not done.stderr
    assert losses(done.stdout) == pytest.approx(right, abs=1e-10)


@pytest.mark.parametrize(
    ("processes", "mesh", "network"),
    [
        (1, "1x1", {}),
        (2, "1x2", {"model": "cnn"}),
        (4, "2x2", {"model": "cnn", "layers": 2}),  # its last linear layer has no partner
        (3, "3x1", {"width": 50}),
        (3, "1x3", {"width": 66, "layers": 5}),
    ],
)
def test_numbers_are_those_of_one_process(processes, mesh, network):
    """The losses of single_gpu.py, to 1e-10, and nothing on stderr."""
    assert_equal(processes, network, "--mesh", mesh)


@pytest.mark.parametrize(
    ("processes", "mesh", "network"),
    [
        (1, "1x1", {}),
        (4, "2x2", {"model": "cnn"}),
        (3, "1x3", {"width": 50}),  # 50 rows, which 3 ranks cannot divide
    ],
)
def test_numbers_with_replicas(processes, mesh, network):
    """--kind hsdp agrees with one process, too."""
    assert_equal(processes, network, *HSDP, "--mesh", mesh)


def axes(out):
    """Return the table of messages: the numbers of each axis and collective."""
    rows = re.findall(ROW, out, re.M)
    return {row[:2]: [int(number.replace(",", "")) for number in row[2:]] for row in rows}


def shown_mesh(out, down, across):
    """Return the ranks in the printed mesh, row by row, and check its titles."""
    [titles] = re.findall(rf"^ +({across} 0.*)$", out, re.M)
    rows = re.findall(rf"^{down} \d +(rank.*)$", out, re.M)
    mesh = [[int(rank) for rank in re.findall(r"rank (\d)", row)] for row in rows]
    assert titles.split() == [word for i in range(len(mesh[0])) for word in (across, str(i))]
    return mesh


SPLIT = [784 * 64 + 64, 64 * 64, 64 * 64 + 64, 64 * 10]  # numbers in parameters along tp
WHOLE = 64 + 10  # and in the biases of the second layers of pairs
ALL = sum(SPLIT) + WHOLE


@pytest.mark.parametrize(
    ("processes", "flags", "shape", "messages"),
    [
        (
            4,
            (),
            (2, 2),
            (3, 8, 4),
        ),  # two pairs, of which the first has images as input; four layers
        (2, (), (1, 2), (3, None, None)),  # an axis with a single rank is not shown
        (2, ("--mesh", "2x1"), (2, 1), (None, 8, 4)),
        (2, ("--model", "cnn", "--mesh", "1x2"), (1, 2), (2, None, None)),
    ],
)
def test_messages_of_tensor_parallelism_and_fsdp(processes, flags, shape, messages):
    """The mesh has all ranks in order; messages and bytes are those of the formulas."""
    flags = (*DIGITS, "--batch_size", 120, "--epochs", 1, *flags)
    out = train(LESSON, *flags, processes=processes).stdout
    dp, tp = shape
    mesh = shown_mesh(out, "dp", "tp")
    assert mesh == [[row * tp + column for column in range(tp)] for row in range(dp)]
    table = axes(out)
    names = [("tp", "all_reduce"), ("dp", "all_gather"), ("dp", "reduce_scatter")]
    expected = {name: n for name, n in zip(names, messages, strict=True) if n is not None}
    assert {name: row[0] for name, row in table.items()} == expected
    assert all(row[0] == row[1] and row[2] == row[3] for row in table.values())
    if "cnn" in flags:
        return
    column = 4 * (sum(SPLIT) // tp + WHOLE)
    ends = 4 * 120 // dp * (64 + 64 + 10)
    if tp > 1:
        assert table["tp", "all_reduce"][2] == 2 * (tp - 1) * ends // tp
    if dp > 1:
        assert table["dp", "all_gather"][2] == 2 * column * (dp - 1) // dp
        assert table["dp", "reduce_scatter"][2] == column * (dp - 1) // dp


@pytest.mark.parametrize("mesh", ["2x2", "1x4", "4x1"])
def test_messages_of_replicas_of_shards(mesh):
    """Parameters travel along shard, and gradients of shards along replicate."""
    flags = (*DIGITS, "--batch_size", 120, "--epochs", 1, *HSDP, "--mesh", mesh)
    out = train(LESSON, *flags, processes=4).stdout
    rows, columns = map(int, mesh.split("x"))
    ordered = [[row * columns + column for column in range(columns)] for row in range(rows)]
    assert shown_mesh(out, "replicate", "shard") == ordered
    table = axes(out)
    padded = 4 * (
        ALL + 65 * (-10 % columns)
    )  # the last layer has 10 rows, of 64 numbers and a bias
    if columns > 1:
        gathered = table.pop(("shard", "all_gather"))
        scattered = table.pop(("shard", "reduce_scatter"))
        assert gathered[:2] == [8, 8] and scattered[:2] == [4, 4]
        assert gathered[2] == 2 * scattered[2] == 2 * padded * (columns - 1) // columns
        assert gathered[3] == 2 * scattered[3] == 2 * 4 * ALL * (columns - 1) // columns
    if rows > 1:
        sent = 2 * (rows - 1) * 4 * ALL // columns // rows
        assert table.pop(("replicate", "all_reduce")) == [4, 4, sent, sent]
    assert not table


@pytest.mark.parametrize(
    ("ranks", "flags", "words"),
    [
        (4, ("--mesh", "3x2"), ("--mesh 3x2 does not have 4 processes", "4x1 or 2x2 or 1x4")),
        (6, ("--mesh", "6"), ("6x1 or 3x2 or 2x3 or 1x6",)),
        (3, ("--mesh", "1x3"), ("--width 64 cannot be divided by the 3 ranks", "use --width 63")),
        (7, (), ("--batch_size 120 cannot be divided by the 7 tp groups", "use --batch_size 119")),
        (7, HSDP, ("--batch_size 120 cannot be divided by the 7 ranks", "use --batch_size 119")),
        (2, ("--kind", "fsdp"), ("invalid choice", "hsdp")),
    ],
)
def test_flags_that_cannot_work(ranks, flags, words, main):
    """Status 2 and one line that says what to type."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": f"{ranks}"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    one_line(main(LESSON, *DIGITS, "--batch_size", 120, *flags, env=env), *words)


CLIP = "            torch.nn.utils.clip_grad_norm_(model.parameters(), 1)\n"
STEP = "            optimizer.step()\n"


def test_clipping_where_all_parameters_are_on_both_axes(change):
    """Exercise 1: every layer of the MLP is in the plan."""
    copy = change(LESSON, (STEP, CLIP + STEP))
    assert len(epochs(train(copy, *TWO_EPOCHS, processes=4).stdout)) == 2


def test_clipping_where_some_parameters_are_on_one_axis(change):
    """Exercise 1: the CNN's convolutions are not."""
    copy = change(LESSON, (STEP, CLIP + STEP))
    assert "must have the same mesh" in fails(copy, *TWO_EPOCHS, "--model", "cnn", processes=4)


def test_clipping_with_convolutions_replicated_along_tp(change):
    """Exercise 1: the cure in its answer. The numbers are those of one process that clips."""
    answers = (ROOT / "playground" / "answers.md").read_text()
    [cure] = re.findall(r"^( {7}def to_dtensor.*?\n)\n\d\. ", answers, re.M | re.S)
    cure = textwrap.indent(textwrap.dedent(cure), "    ")
    plan = "    parallelize_module(model, mesh, plan)\n"
    imported = "from torch.distributed.tensor.parallel import"
    more = "from torch.distributed.tensor import DTensor, Replicate, distribute_module\n"
    pairs = [(STEP, CLIP + STEP), (plan, plan + cure), (imported, more + imported)]
    flags = (*TWO_EPOCHS, "--model", "cnn")
    found = losses(train(change(LESSON, *pairs), *flags, processes=4).stdout)
    expected = losses(run(change("single_gpu", (STEP, CLIP + STEP)), *flags).stdout)
    assert found == pytest.approx(expected, abs=2e-4) and len(found) == 2
    assert abs(found[1] - single_gpu(*flags)[1]["loss"]) > 1e-3


def test_an_order_for_each_rank(change):
    """Exercise 2: the ranks of a tp group add up what different images gave."""
    copy = change(LESSON, ("set_epoch(epoch)", "set_epoch(epoch + rank)"))
    found = epochs(train(copy, *TWO_EPOCHS, processes=4).stdout)
    assert found[1]["loss"] > single_gpu(*TWO_EPOCHS)[1]["loss"] + 0.2


def test_fully_shard_before_the_layers_are_split(change):
    """Exercise 3: parallelize_module finds parameters that are on the other axis already."""
    split = '        split(model, mesh["tp"])\n'
    shard = '        shard(model, mesh["dp"])\n'
    copy = change(LESSON, (split, ""), (shard, shard + split))
    assert "Cannot distribute a DTensor with device mesh" in fails(copy, *TWO_EPOCHS, processes=4)


@pytest.mark.parametrize("kind", ["tp", "hsdp"])
def test_a_rank_that_does_nothing(kind, change):
    """--timeout holds for the groups of both axes, too, whose own default is half an hour."""
    line = "        train_loader.sampler.set_epoch(epoch)"
    copy = change(LESSON, (line, f"        time.sleep(9999 * (rank == 3))\n{line}"))
    flags = ("--mesh", "2x2", "--timeout", 5, "--kind", kind)
    jobs = ranks(copy, *TWO_EPOCHS, *flags, processes=4, cold=False)
    try:
        ends = [job.wait(200) for job in jobs[:3]]
    finally:
        for job in jobs:
            job.kill()
    assert [end.returncode for end in ends] == [1, 1, 1]
    for end in ends:
        place = r"error: rank \d waited at hybrid_parallel.py, line \d+: "
        assert re.fullmatch(rf"{place}.*another rank has ended, .*\n", end.stderr), end.stderr
    assert any("Timed out" in end.stderr for end in ends)
