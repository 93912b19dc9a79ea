"""Three axes: the numbers of one process that clips. test_pictures.py has the messages."""

import math

import pytest
from conftest import DIGITS, losses, run, single_gpu, train

LESSON = "three_axes"
STEPS = (*DIGITS, "--batch_size", 120, "--epochs", 1, "--model", "transformer", "--double")
SMALL = ("--tokens", 4, "--width", 8, "--layers", 1)
CLIP = "            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n"
STEP = "            optimizer.step()\n"


@pytest.mark.parametrize(("mesh", "fsdp"), [((2, 1, 2), True), ((2, 2, 2), False)])
def test_clipped_numbers(mesh, fsdp, change):
    """The losses of one process that clips, to 1e-10."""
    [right] = losses(run(change("single_gpu", (STEP, CLIP + STEP)), *STEPS, *SMALL).stdout)
    [unclipped] = single_gpu(*STEPS, *SMALL)
    assert abs(right - unclipped["loss"]) > 1e-4
    flags = [*STEPS, *SMALL, "--clip", 0.1, "--mesh", "x".join(map(str, mesh)), *["--fsdp"] * fsdp]
    done = train(LESSON, *flags, processes=math.prod(mesh))
    assert not done.stderr
    assert losses(done.stdout) == pytest.approx([right], abs=1e-10)
