"""stragglers.md: what its functions print, and what watch.py shows of a slow rank."""

import re

from launch import DIGITS, ranks, run
from lessons import ROOT
from test_watch import waits

PAGE = (ROOT / "playground/pages/stragglers.md").read_text()
FUNCTIONS, LOOP = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
# A script of a reader's own. The functions of the page come before it, and its loop after it.
SCRIPT = """
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
loader = [(torch.ones(8, 4), torch.zeros(8, dtype=torch.long))] * 9
model = DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""


def test_the_functions_of_the_page(tmp_path):
    """Rank 0 prints a row for each place, with a number of milliseconds for each rank."""
    path = tmp_path / "script.py"
    path.write_text(f"{FUNCTIONS}{SCRIPT}{LOOP}del model\ndist.destroy_process_group()\n")
    done = [job.wait() for job in ranks(path)]
    assert [each.returncode for each in done] == [0, 0], done[0].stderr + done[1].stderr
    rows = [line.split() for line in done[0].stdout.splitlines()]
    assert [row[0] for row in rows] == ["data", "forward", "backward"] and not done[1].stdout
    assert all(min(map(float, late)) == 0 for _, *late in rows)


def test_the_waits_of_the_page(change):
    """watch.py shows the line in which the others wait for rank 1, and the line of rank 1."""
    backward = "            loss.backward()\n"
    sleep = re.search(r"`(time\.sleep\(.*?)`", PAGE)[1]
    slow = (backward, f"            {sleep}\n{backward}")
    path = change("distributed_data_parallel_torchrun", slow)
    done = run("watch", path, *DIGITS, "--epochs", 2, processes=2)
    rows, printed = waits(PAGE, done.stdout)
    assert len(rows) == 2 and rows <= printed
