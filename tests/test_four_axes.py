"""four_axes.py: gradients that are clipped as the page shows it have one process's norm.

test_parity.py compares the parameters.
"""

import re

import four_axes
import pytest
from launch import losses, run
from lessons import ROOT, lesson_path

from common.models import Language

FLAGS = ("--batch_size", 48, "--epochs", 1, "--model", "language", "--width", 16, "--layers", 3)
SHORT = {"DOCUMENTS": "30"}  # for two steps
STEP = "            optimizer.step()\n"
PAGE = (ROOT / "playground" / "pages" / "sharding.md").read_text()


def test_clipping(change):
    """The losses of one process, to 1e-10, with two stages, and with three."""
    clip = "            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n"
    copy = change("single_gpu", (STEP, clip + STEP))
    [right] = losses(run(copy, *FLAGS, "--double", env=SHORT).stdout)
    [unclipped] = losses(run("single_gpu", *FLAGS, "--double", env=SHORT).stdout)
    assert abs(right - unclipped) > 1e-5
    [lines] = re.findall(r"^```python\n(def clip_gradients.*?)^```$", PAGE, re.M | re.S)
    epoch = "def run_epoch("
    clip = "            clip_gradients(model, 0.1)\n"
    copy = change("four_axes", (epoch, f"{lines}\n\n{epoch}"), (STEP, clip + STEP))
    for mesh, ranks in (("2x1x2x2", 8), ("3x2x1x1", 6)):
        done = run(copy, *FLAGS, "--double", "--mesh", mesh, processes=ranks, env=SHORT)
        assert re.fullmatch(r"text: .*\n", done.stderr)  # and no warning
        assert losses(done.stdout) == pytest.approx([right], abs=1e-10)


def test_a_shared_table_is_refused():
    """Split, it would become two parameters, each with its own part of the gradient."""
    model = Language(tied=True)
    with pytest.raises(ValueError, match="two parameters"):
        four_axes.wrap([*model.layers], None, None, None, None)


def test_a_step_gathers_once():
    """All its micro-batches use the parameters that were gathered for the first one."""
    flags = (lesson_path("four_axes"), *FLAGS[:-2], "--mesh", "1x2x1x1", "--micro_batches")
    found = []
    for count in (1, 3):
        out = run("watch", *flags, count, processes=2, env=SHORT).stdout
        pattern = r"^all +((?:all_gather|reduce_scatter) +2 \S* *\d+ +[\d,]+)"
        found.append(re.findall(pattern, out, re.M))
    assert found[0] == found[1] != []
