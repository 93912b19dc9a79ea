"""What two ranks send over the network, as the kernel counts it, and not by a formula.

The ranks run on a node of their own, on which nothing else sends.
"""

import re

import pytest
from launch import DIGITS, ranks
from lessons import ROOT
from nodes import sh

from common.models import MLP

LESSONS = {
    "DDP": "distributed_data_parallel_torchrun",
    "ZeRO 2": "sharded_optimizer",
    "FSDP": "fully_sharded_data_parallel",
}
IMAGES = 1500  # of the digits, in an epoch
PAGE = (ROOT / "playground" / "pages" / "sharding.md").read_text()


def sent(nodes):
    """Return how many bytes node 0 has sent to itself."""
    devices = sh(*nodes.enter(0), "cat", "/proc/net/dev")
    [numbers] = re.findall(r"^ *lo: *(.*)$", devices, re.M)
    return int(numbers.split()[8])


def bytes_of_a_step(lesson, nodes):
    """Return the bytes that a rank sends in a step: two runs differ in nothing but their steps."""
    of_runs = []
    for steps in (10, 250):
        before = sent(nodes)
        flags = (*DIGITS, "--epochs", 1, "--batch_size", IMAGES // steps)
        # Otherwise the host's name may have an address outside.
        for job in ranks(lesson, *flags, env={"GLOO_SOCKET_IFNAME": "lo"}, node=(nodes, 0)):
            done = job.wait()
            assert done.returncode == 0, done.stderr
        of_runs.append(sent(nodes) - before)
    return (of_runs[1] - of_runs[0]) / 240 / 2


def numbers_of_the_page():
    """Return what sharding.md shows for each lesson: given, by a ring, on the wire."""
    section = PAGE[PAGE.index("## Three words for three numbers") :]
    rows = re.findall(r"^\| (DDP|ZeRO 2|FSDP) \| (.*) \|$", section, re.M)
    shown = {}
    for name, cells in rows:
        shown[name] = [int(cell.replace(",", "")) for cell in cells.split(" | ")]
    return shown


def test_sharding_sends_more_than_ddp_on_cpus(nodes):
    """DDP sends the bytes of all parameters once, ZeRO 2 sends 1.5 times as many, FSDP twice.

    By a ring, it would be once, once, and 1.5 times. sharding.md shows these numbers.
    """
    size = sum(parameter.nbytes for parameter in MLP().parameters())
    shown = numbers_of_the_page()
    assert shown.keys() == LESSONS.keys()
    # Of each: how often a rank hands over all parameters, by a ring, and how often gloo sends them.
    times = {"DDP": (1, 1, 1), "ZeRO 2": (1.5, 1, 1.5), "FSDP": (2, 1.5, 2)}
    for name, (given, by_a_ring, by_gloo) in times.items():
        measured = bytes_of_a_step(LESSONS[name], nodes)
        assert shown[name][:2] == [given * size, by_a_ring * size]
        # Headers and acknowledgements come on top.
        assert by_gloo < measured / size < 1.05 * by_gloo
        assert shown[name][2] == pytest.approx(measured, rel=0.02)
