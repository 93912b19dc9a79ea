"""The hybrid lesson: gradients of one process on every mesh, who is where, who sends what, and its exercises."""

import re
import textwrap

import pytest
from conftest import DIGITS, ROOT, epochs, ranks, single_gpu, train
from test_tensor_parallel import assert_whole, change, fails  # noqa: F401 - change is a fixture
from test_timeline import ONE_STEP, assert_one_line

LESSON = "hybrid_parallel"
TWO_EPOCHS = (*DIGITS, "--batch_size", 120, "--epochs", 2)
ROW = r"^(tp|dp) +(all_reduce|all_gather|reduce_scatter) +(\d+) +(\d+) +([\d,]+)$"


@pytest.mark.parametrize(
    ("processes", "mesh", "network"),
    [
        (1, "1x1", {}),
        (2, "2x1", {}),
        (2, "1x2", {"model": "cnn"}),
        (4, "2x2", {}),
        (4, "2x2", {"model": "cnn", "layers": 2}),  # a linear layer without a partner, which only fully_shard has
        (3, "3x1", {"width": 50}),
        (3, "1x3", {"width": 66, "layers": 5}),
    ],
)
def test_gradients_are_those_of_one_process(processes, mesh, network, tmp_path):
    """To 1e-12 after one step with all 1,500 images; the checkpoint has everything whole."""
    flags = [word for name, value in network.items() for word in (f"--{name}", value)]
    done = train(LESSON, *ONE_STEP, *flags, "--mesh", mesh, "-s", tmp_path / "c.pt", processes=processes)
    assert not done.stderr
    assert_whole(tmp_path / "c.pt", network)


def axes(out):
    """Return the table of messages: for each axis and collective, counted, predicted and bytes."""
    return {row[:2]: tuple(int(number.replace(",", "")) for number in row[2:]) for row in re.findall(ROW, out, re.M)}


@pytest.mark.parametrize(
    ("processes", "flags", "shape", "messages"),
    [
        (4, (), (2, 2), (3, 8, 4)),  # two pairs of layers, and none for the images' gradient; four layers
        (2, (), (1, 2), (3, 0, 0)),
        (2, ("--mesh", "2x1"), (2, 1), (0, 8, 4)),
        (2, ("--model", "cnn", "--mesh", "1x2"), (1, 2), (2, 0, 0)),
    ],
)
def test_who_is_where_and_who_sends_what(processes, flags, shape, messages):
    """The grid has all ranks, one after the other; messages are those predicted; bytes follow the formulas."""
    out = train(LESSON, *DIGITS, "--batch_size", 120, "--epochs", 1, *flags, processes=processes).stdout
    dp, tp = shape
    assert re.findall(r"^ +(tp 0.*)$", out, re.M)[0].split() == [word for i in range(tp) for word in ("tp", str(i))]
    lines = [re.findall(r"rank (\d)", line) for line in re.findall(r"^dp \d  (rank.*)$", out, re.M)]
    assert lines == [[str(row * tp + column) for column in range(tp)] for row in range(dp)]
    table = axes(out)
    assert list(table) == [("tp", "all_reduce"), ("dp", "all_gather"), ("dp", "reduce_scatter")]
    assert [counted for counted, _, _ in table.values()] == [predicted for _, predicted, _ in table.values()]
    assert [counted for counted, _, _ in table.values()] == list(messages)
    if "cnn" in flags:
        return
    cut, whole = [784 * 64 + 64, 64 * 64, 64 * 64 + 64, 64 * 10], 64 + 10  # numbers in weights; biases of rows
    piece, ends = 4 * (sum(cut) // tp + whole), 120 // dp * (64 + 64 + 10)
    assert table["tp", "all_reduce"][2] == 2 * (tp - 1) * ends * 4 // tp
    assert table["dp", "all_gather"][2] == 2 * table["dp", "reduce_scatter"][2] == 2 * piece * (dp - 1) // dp


@pytest.mark.parametrize(
    ("ranks", "flags", "words"),
    [
        (4, ("--mesh", "3x2"), ("--mesh 3x2 can't hold 4 processes", "--mesh 4x1 or 2x2 or 1x4")),
        (6, ("--mesh", "6"), ("6x1 or 3x2 or 2x3 or 1x6",)),
        (3, ("--mesh", "1x3"), ("--width 64 can't be shared by 3 ranks of a tp group", "use --width 63")),
        (7, (), ("--batch_size 120 can't be shared by 7 ranks of a dp group", "use --batch_size 119")),
    ],
)
def test_flags_that_cannot_work(ranks, flags, words, main):
    """Status 2 and one line that says what to type."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": f"{ranks}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    assert_one_line(main(LESSON, *DIGITS, "--batch_size", 120, *flags, env=env), words)


CLIP = "            torch.nn.utils.clip_grad_norm_(model.parameters(), 1)\n"
STEP = "            optimizer.step()\n"


def test_clipping_where_all_weights_are_on_both_axes(change):  # noqa: F811
    """Exercise 1: every layer of the MLP is in the plan."""
    copy = change((STEP, CLIP + STEP), lesson=LESSON)
    assert len(epochs(train(copy, *TWO_EPOCHS, processes=4).stdout)) == 2


def test_clipping_where_some_weights_are_on_one_axis(change):  # noqa: F811
    """Exercise 1: the CNN's convolutions are not."""
    copy = change((STEP, CLIP + STEP), lesson=LESSON)
    assert "must have the same mesh" in fails(copy, *TWO_EPOCHS, "--model", "cnn", processes=4)


def test_clipping_with_convolutions_whole_on_tp(change):  # noqa: F811
    """Exercise 1: what its answer says, before the first fully_shard. The numbers are those of the FSDP lesson."""
    answer = (ROOT / "playground" / "README.md").read_text()
    [cure] = re.findall(r"^       (for layer in model.modules\(\):\n(?: {8,}.*\n)+)", answer, re.M)
    cure = textwrap.indent(textwrap.dedent(f"       {cure}"), "    ")
    first = "    for layer in (*model.stage1, *model.stage2):"
    imported = "from torch.distributed.tensor.parallel import"
    more = f"from torch.distributed.tensor import DTensor, Replicate, distribute_module\n{imported}"
    copy = change((STEP, CLIP + STEP), (first, cure + first), (imported, more), lesson=LESSON)
    found = epochs(train(copy, *TWO_EPOCHS, "--model", "cnn", processes=4).stdout)
    flags = (*TWO_EPOCHS, "--model", "cnn", "--clip", 1)
    expected = epochs(train("fully_sharded_data_parallel", *flags, processes=2).stdout)
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in expected], abs=1.01e-4)


def test_a_sampler_for_all_ranks(change):  # noqa: F811
    """Exercise 2: ranks of a tp group add up activations of different images, and nobody complains."""
    copy = change(("(train_set, dp_size, dp_rank, ", "(train_set, "), lesson=LESSON)
    found = epochs(train(copy, *TWO_EPOCHS, processes=4).stdout)
    assert found[1]["loss"] > single_gpu(*TWO_EPOCHS)[1]["loss"] + 0.2


def test_fully_shard_before_the_pieces_are_cut(change):  # noqa: F811
    """Exercise 3: parallelize_module finds weights that are on the other axis already."""
    loop = """    for layer in (*model.stage1, *model.stage2):
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh["dp"])  # NEW: it adds its axis to DTensors; parallelize_module could not
"""
    first = "    linear = [name for name, layer in model.named_modules()"
    copy = change((loop, ""), (first, loop + first), lesson=LESSON)
    assert "Cannot distribute a DTensor with device mesh" in fails(copy, *TWO_EPOCHS, processes=4)


def test_a_rank_that_does_nothing(change):  # noqa: F811
    """--timeout holds for the groups of both axes, too, whose own default is half an hour."""
    line = "        sampler.set_epoch(epoch)"
    copy = change((line, f"        time.sleep(9999 * (rank == 3))\n{line}"), lesson=LESSON)
    jobs = ranks(copy, *TWO_EPOCHS, "--mesh", "2x2", "--timeout", 5, processes=4, cold=False)
    try:
        ends = [job.wait(200) for job in jobs[:3]]
    finally:
        for job in jobs:
            job.kill()
    assert [end.returncode for end in ends] == [1, 1, 1]
    for end in ends:
        assert re.fullmatch(r"error: .*another rank has ended, is in another collective, .*\n", end.stderr), end.stderr
    assert any("Timed out" in end.stderr for end in ends)
