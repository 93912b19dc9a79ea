"""Four axes: the numbers of one process that ties its table and clips.

test_parity.py compares the parameters, and test_pictures.py which ranks have what.
"""

import re

import pytest
from conftest import losses, run

FLAGS = ("--batch_size", 48, "--epochs", 1, "--model", "language", "--width", 16, "--layers", 3)
SHORT = {"DOCUMENTS": "30"}  # for two steps
TIED = "    model = make_model(args)"
CLIP = "            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n"
STEP = "            optimizer.step()\n"


def test_a_tied_table_and_clipping(change):
    """The losses of one process, to 1e-10. The table is at both ends of two stages, or of three."""
    tied = TIED.replace("model =", "args.tied = True\n    model =")
    copy = change("single_gpu", (TIED, tied), (STEP, CLIP + STEP))
    [right] = losses(run(copy, *FLAGS, "--double", env=SHORT).stdout)
    for mesh, ranks in (("2x1x2x2", 8), ("3x2x1x1", 6)):
        flags = (*FLAGS, "--double", "--mesh", mesh, "--tied", "--clip", 0.1)
        done = run("four_axes", *flags, processes=ranks, env=SHORT)
        assert re.fullmatch(r"text: .*\n", done.stderr)  # and no warning
        assert losses(done.stdout) == pytest.approx([right], abs=1e-10)
