"""Three axes: the numbers of one process that clips, and messages. test_parity.py has more."""

import math
import re

import pytest
from conftest import DIGITS, ROOT, losses, run, single_gpu, train

LESSON = "three_axes"
STEPS = (*DIGITS, "--batch_size", 120, "--epochs", 1, "--model", "transformer", "--double")
SMALL = ("--tokens", 4, "--width", 8, "--layers", 1)
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
    """Return how many messages, and bytes, sharding.md predicts for SMALL along each axis.

    The norm costs one message more, along tp, and with fsdp along dp_cp, too.
    """
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
            ("dp_cp", "all_reduce"): (1, 2 * (n - 1) * 8 / n),
        }
    rows["cp", "send"] = (3 * c - 2, 2 * (3 * c - 2) * s / t)
    rows["tp", "all_reduce"] = (4 + 1, 2 * (t - 1) * (4 * s + 8) / t)
    sizes = {"dp": d, "cp": c, "tp": t, "dp_cp": n}
    return {key: row for key, row in rows.items() if sizes[key[0]] > 1}


CLIP = "            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n"
STEP = "            optimizer.step()\n"


@pytest.mark.parametrize(("mesh", "fsdp"), [((2, 1, 2), True), ((2, 2, 2), False)])
def test_clipped_numbers_and_messages(mesh, fsdp, change):
    """The losses of one process that clips to 1e-10, and the messages of sharding.md's formulas."""
    [right] = losses(run(change("single_gpu", (STEP, CLIP + STEP)), *STEPS, *SMALL).stdout)
    [unclipped] = single_gpu(*STEPS, *SMALL)
    assert abs(right - unclipped["loss"]) > 1e-4
    flags = [*STEPS, *SMALL, "--clip", 0.1, "--mesh", "x".join(map(str, mesh)), *["--fsdp"] * fsdp]
    done = train(change(LESSON, (END, COUNT)), *flags, processes=math.prod(mesh))
    assert not done.stderr
    assert losses(done.stdout) == pytest.approx([right], abs=1e-10)
    table = messages(done.stdout)
    expected = by_formula(*mesh, fsdp)
    assert table.keys() == expected.keys()
    for key, (number, sent) in expected.items():
        # fully_shard adds zeros to parameters whose rows the ranks cannot divide: at most a fifth.
        most = 1.2 * sent if key[0] == "dp_cp" else sent
        assert table[key][0] == number and sent <= table[key][1] <= most
