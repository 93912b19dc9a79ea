"""Four axes: the numbers of one process that ties its table and clips.

test_parity.py compares the parameters, and test_pictures.py which ranks have what.
"""

import math
import re

import pytest
from conftest import losses, run, train

STEPS = ("--batch_size", 120, "--epochs", 1, "--model", "language", "--width", 16, "--double")
SHORT = {"DOCUMENTS": "12"}
TIED = "    model = make_model(args)"
CLIP = "            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n"
STEP = "            optimizer.step()\n"


@pytest.mark.parametrize(
    ("mesh", "layers"), [((2, 2, 1, 2), 2), ((2, 1, 2, 2), 2), ((4, 1, 1, 1), 3)]
)
def test_a_tied_table_and_clipping(mesh, layers, change):
    """The losses of one process, to 1e-10. The table is at both ends of two stages, or of four."""
    flags = (*STEPS, "--layers", layers)
    tied = TIED.replace("model =", "args.tied = True\n    model =")
    copy = change("single_gpu", (TIED, tied), (STEP, CLIP + STEP))
    [right] = losses(run(copy, *flags, env=SHORT).stdout)
    flags += ("--mesh", "x".join(map(str, mesh)), "--tied", "--clip", 0.1)
    done = train("four_axes", *flags, processes=math.prod(mesh), env=SHORT)
    assert re.fullmatch(r"text: .*\n", done.stderr)  # and no warning
    assert losses(done.stdout) == pytest.approx([right], abs=1e-10)
