"""Three axes: the numbers of one process on every mesh, messages, clipping, and the exercises."""

import math
import re

import pytest
import torch
from conftest import DIGITS, ROOT, losses, one_line, run, single_gpu, train

LESSON = "three_axes"
STEPS = (*DIGITS, "--batch_size", 120, "--epochs", 1, "--model", "transformer", "--double")
SMALL = ("--tokens", 4, "--width", 8, "--layers", 1)
UNEVEN = ("--tokens", 7, "--width", 8, "--layers", 1)  # one rank has four tokens, the other three
ROW = r"^(\w+) (\w+): (\d+) messages, (\d+) bytes$"
# After training, a copy of the lesson counts the messages of a step.
END = "    dist.barrier()  # DTensor"
COUNT = f"""    sys.path += {[str(ROOT / "tests"), str(ROOT / "playground")]}
    from axes import show_axes

    show_axes(gradients_of, next(iter(train_loader)), mesh, flat)
{END}"""


def messages(out):
    """Return the number of messages, and the bytes, along each axis and of each kind."""
    rows = re.findall(ROW, out, re.M)
    return {row[:2]: (int(row[2]), int(row[3])) for row in rows}


def by_formula(d, c, t, fsdp):
    """Return how many messages, and bytes, sharding.md predicts for SMALL along each axis."""
    width = 8
    split = 12 * width**2 + 7 * width  # numbers in weights, and in the biases of columns
    whole = 6 * width  # in norms, and in the biases of rows
    ends = width * (784 // 4 + 1 + 4) + 2 * width + 10 * width + 10
    p = 8 * (split // t + whole + ends)
    s = 8 * 120 // d * 4 // c * width
    n = d * c
    rows = {
        ("dp", "all_reduce"): (16 + 7, 2 * (d - 1) * p / d),
        ("cp", "all_reduce"): (16 + 7, 2 * (c - 1) * p / c),
    }
    if fsdp:
        rows = {
            ("dp_cp", "all_gather"): (2 * 3, 2 * (n - 1) * p / n),
            ("dp_cp", "reduce_scatter"): (3, (n - 1) * p / n),
        }
    rows["cp", "send"] = (3 * c - 2, 2 * (3 * c - 2) * s / t)
    rows["tp", "all_reduce"] = (4, 8 * (t - 1) * s / t)
    sizes = {"dp": d, "cp": c, "tp": t, "dp_cp": n}
    return {key: row for key, row in rows.items() if sizes[key[0]] > 1}


@pytest.mark.parametrize(("mesh", "fsdp"), [((2, 2, 1), True), ((2, 2, 2), False)])
def test_numbers_and_messages(mesh, fsdp, change):
    """The losses of single_gpu.py to 1e-10, and the messages of sharding.md's formulas."""
    flags = [*STEPS, *SMALL, "--mesh", "x".join(map(str, mesh)), *["--fsdp"] * fsdp]
    done = train(change(LESSON, (END, COUNT)), *flags, processes=math.prod(mesh))
    assert not done.stderr
    [right] = single_gpu(*STEPS, *SMALL)
    assert losses(done.stdout) == pytest.approx([right["loss"]], abs=1e-10)
    table = messages(done.stdout)
    expected = by_formula(*mesh, fsdp)
    assert table.keys() == expected.keys()
    for key, (number, sent) in expected.items():
        # fully_shard adds zeros to parameters whose rows the ranks cannot divide: at most a fifth.
        most = 1.2 * sent if key[0] == "dp_cp" else sent
        assert table[key][0] == number and sent <= table[key][1] <= most


CLIP = "            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n"
STEP = "            optimizer.step()\n"


def test_clipping(change):
    """The norm is that of the whole model, on any mesh: the losses of one process that clips.

    With unequal numbers of tokens, too. The norm costs one message along tp.
    """
    [right] = losses(run(change("single_gpu", (STEP, CLIP + STEP)), *STEPS, *UNEVEN).stdout)
    [unclipped] = single_gpu(*STEPS, *UNEVEN)
    assert abs(right - unclipped["loss"]) > 1e-4
    copy = change(LESSON, (END, COUNT))
    for flags in (("--mesh", "1x2x2"), ("--mesh", "2x1x2", "--fsdp")):
        done = train(copy, *STEPS, *UNEVEN, "--clip", 0.1, *flags, processes=4)
        assert losses(done.stdout) == pytest.approx([right], abs=1e-10)
        assert messages(done.stdout)["tp", "all_reduce"][0] == 4 + 1


@pytest.mark.parametrize(
    ("ranks", "flags", "words"),
    [
        (8, ("--mesh", "2x2"), ("--mesh 2x2 does not have 3 axes", "use --mesh 8x1x1")),
        (6, ("--mesh", "1x1x6"), ("6 ranks along tp", "use --heads 6 --width 30")),
        (4, ("--mesh", "1x4x1", "--tokens", 2), ("--tokens 2", "along cp: use --tokens 4")),
        (7, (), ("7 ranks cannot divide --batch_size 128: use 126",)),
        (2, ("--model", "cnn"), ("--model cnn has no tokens", "use --model transformer")),
    ],
)
def test_flags_that_cannot_work(ranks, flags, words, main):
    """Status 2 and one line that says what to type."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": f"{ranks}"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    one_line(main(LESSON, *DIGITS, *flags, env=env), *words)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    if not has_last:\n", "    if False:\n"),  # 1
        ('[mesh.get_group("dp"), mesh.get_group("cp")]', '[mesh.get_group("dp")]'),  # 2
    ],
)
def test_wrong_without_an_error(old, new, change):
    """Exercises 1 and 2: the loss differs."""
    flags = (*STEPS, *SMALL, "--mesh", "1x2x1")
    [found] = losses(train(change(LESSON, (old, new)), *flags, processes=2).stdout)
    [right] = single_gpu(*STEPS, *SMALL)
    assert abs(found - right["loss"]) > 1e-4


def test_clipping_by_the_norm_of_a_part(change, tmp_path):
    """Exercise 3: what is a replica along tp, such as LayerNorm, differs between its ranks."""
    copy = change(LESSON, ("    dist.all_reduce(squares, group=tp_group)\n", ""))
    different = []
    for path in (copy, LESSON):
        flags = (*STEPS, *SMALL, "--mesh", "1x1x2", "--clip", 0.1)
        train(path, *flags, processes=2, env={"PARAMETERS": str(tmp_path)})
        first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
        positions = [each.shape for each in first].index((4, 8))
        different.append((first[positions] - second[positions]).abs().max().item())
    assert different[0] > 1e-6 and different[1] == 0
