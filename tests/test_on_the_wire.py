"""What two ranks send over the network, as the kernel counts it, and not by a formula.

The ranks run in a network of their own, in which nothing else sends.
"""

import contextlib
import os
import re
import subprocess

import pytest
from conftest import DIGITS, ROOT, ranks
from nodes import need, sh

from common.models import MLP

LESSONS = {
    "DDP": "distributed_data_parallel_torchrun",
    "ZeRO 1": "sharded_optimizer",
    "FSDP": "fully_sharded_data_parallel",
}
IMAGES = 1500  # of the digits, in an epoch


@contextlib.contextmanager
def empty_network():
    """Make a network without any other machine. Yields its name."""
    need("ip")
    name = f"playground-wire-{os.getpid()}"
    sh("ip", "netns", "add", name)
    try:
        sh("ip", "-n", name, "link", "set", "lo", "up")
        yield name
    finally:
        subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL)


def bytes_of_a_run(lesson, steps):
    """Train an epoch of so many steps with two ranks. Returns the bytes that both have sent."""
    with empty_network() as network:
        inside = ("ip", "netns", "exec", network)
        flags = (*DIGITS, "--epochs", 1, "--batch_size", IMAGES // steps)
        env = {"GLOO_SOCKET_IFNAME": "lo"}  # the host's name may have an address outside
        for job in ranks(lesson, *flags, processes=2, env=env, prefix=inside):
            done = job.wait()
            assert done.returncode == 0, done.stderr
        devices = sh(*inside, "cat", "/proc/net/dev")
    [numbers] = re.findall(r"^ *lo: *(.*)$", devices, re.M)
    return int(numbers.split()[8])  # the first of the numbers that were sent


def bytes_of_a_step(lesson):
    """Return the bytes that a rank sends in a step: two runs differ in nothing but their steps."""
    few = bytes_of_a_run(lesson, 10)
    many = bytes_of_a_run(lesson, 50)
    return (many - few) / 40 / 2


def numbers_of_the_page():
    """Return what sharding.md shows for each lesson: given, by a ring, on the wire."""
    text = (ROOT / "playground" / "pages" / "sharding.md").read_text()
    section = text[text.index("## Three words for three numbers") :]
    rows = re.findall(r"^\| (DDP|ZeRO 1|FSDP) \| (.*) \|$", section, re.M)
    shown = {}
    for name, cells in rows:
        shown[name] = [int(cell.replace(",", "")) for cell in cells.split(" | ")]
    return shown


def test_sharding_sends_more_than_ddp_on_cpus(record_property):
    """DDP sends the bytes of all parameters once, ZeRO 1 sends 1.5 times as many, FSDP twice.

    By a ring, it would be once, once, and 1.5 times. sharding.md shows these numbers.
    """
    need("ip")
    measured = {name: bytes_of_a_step(lesson) for name, lesson in LESSONS.items()}
    for name, count in measured.items():
        record_property(f"bytes on the wire in a step of {name}", f"{count:,.0f}")
    assert measured["DDP"] < measured["ZeRO 1"] < measured["FSDP"]
    size = sum(parameter.nbytes for parameter in MLP().parameters())
    shown = numbers_of_the_page()
    assert shown.keys() == measured.keys()
    # Of each: how often a rank hands over all parameters, by a ring, and how often gloo sends them.
    times = {"DDP": (1, 1, 1), "ZeRO 1": (1.5, 1, 1.5), "FSDP": (2, 1.5, 2)}
    for name, (given, by_a_ring, sent) in times.items():
        assert shown[name][:2] == [given * size, by_a_ring * size]
        # Headers and acknowledgements come on top.
        assert sent < measured[name] / size < 1.05 * sent
        assert shown[name][2] == pytest.approx(measured[name], rel=0.02)
