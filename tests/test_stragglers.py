"""stragglers.md: its functions show which rank is late, and in which part of a step."""

import re

import pytest
from launch import DIGITS, ranks, run
from lessons import ROOT
from test_watch import waits

PAGE = (ROOT / "playground/pages/stragglers.md").read_text()
FUNCTIONS, LOOP = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
# A script of a reader's own, in which rank 1 is slow. The functions of the page come before it, and
# the page's loop after it.
SCRIPT = """
import os
import subprocess
import sys

from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

cause = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
slow = rank == 1
if cause == "neighbour":
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    if slow:
        neighbour = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
        os.nice(5)


def read(indices):
    if cause == "loader" and slow:
        time.sleep(0.2)
    return torch.ones(len(indices), 784), torch.zeros(len(indices), dtype=torch.long)


class Network(nn.Sequential):
    def forward(self, images):
        if cause == "sleep" and slow:
            time.sleep(0.2)
        return super().forward(images)


batch_size = 1024 if cause == "batch" and slow else 512
loader = DataLoader(range(20 * batch_size), batch_size, collate_fn=read)
layers = nn.Linear(784, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 10)
model = DistributedDataParallel(Network(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""
END = """
if cause == "neighbour" and slow:
    neighbour.kill()
    neighbour.wait()
del model
dist.destroy_process_group()
"""
PLACES = ["data", "forward", "backward"]


def arrivals(cause, folder):
    """Run the script. Returns for each place how many ms late each rank is."""
    path = folder / "script.py"
    path.write_text(FUNCTIONS + SCRIPT + LOOP + END)
    done = [job.wait() for job in ranks(path, cause)]
    assert [each.returncode for each in done] == [0, 0], done[0].stderr + done[1].stderr
    assert not done[1].stdout
    rows = [line.split() for line in done[0].stdout.splitlines()]
    assert [row[0] for row in rows] == PLACES
    return {place: list(map(float, late)) for place, *late in rows}


@pytest.mark.parametrize(
    ("cause", "late_in"), [("none", []), ("loader", ["data"]), ("sleep", ["forward"])]
)
def test_a_rank_that_sleeps(cause, late_in, tmp_path, record_property):
    """Rank 1 is late where it sleeps for 200 ms. Nothing else is late by half of that."""
    late = arrivals(cause, tmp_path)
    record_property(cause, late)
    expected = {place: [False, place in late_in] for place in PLACES}
    assert {place: [ms > 100 for ms in late[place]] for place in PLACES} == expected


@pytest.mark.parametrize("cause", ["batch", "neighbour"])
def test_a_rank_that_computes_longer(cause, tmp_path, record_property):
    """Twice the batch and a busy neighbour look alike: rank 1 is late in both passes."""
    late = arrivals(cause, tmp_path)
    record_property(cause, late)
    for place in ("forward", "backward"):
        assert late[place][1] > 2 * late[place][0]


def test_the_waits_of_the_page(change):
    """watch.py shows the line in which the others wait for rank 1, and the line of rank 1."""
    backward = "            loss.backward()\n"
    sleep = re.search(r"`(time\.sleep\(.*?)`", PAGE)[1]
    slow = (backward, f"            {sleep}\n{backward}")
    path = change("distributed_data_parallel_torchrun", slow)
    done = run("watch", path, *DIGITS, "--epochs", 2, processes=2)
    rows, printed = waits(PAGE, done.stdout)
    assert len(rows) == 2 and rows <= printed
