"""bandwidth.py: what it prints of times that are given. No test measures time."""

import contextlib
import os

import bandwidth
from launch import free_port

from watch_ranks.ranks import call


def given(timed):
    """Make a call, and return a millisecond for each rank, or four if rank 2 sends."""
    timed()
    sends = getattr(timed, "func", None) is bandwidth.send and timed.args[1] == 2
    return [0.004 if sends else 0.001] * 4


def print_given(rank, port, folder):
    """Run bandwidth.py as one of four ranks, with one size and times that are given."""
    os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"LOCAL_RANK": f"{rank}", "LOCAL_WORLD_SIZE": "4", "MASTER_PORT": f"{port}"}
    bandwidth.SIZES = [2**22]
    bandwidth.measure = given
    with open(folder / f"printed{rank}", "w") as file, contextlib.redirect_stdout(file):
        bandwidth.main()


def test_what_it_prints(tmp_path):
    """The factors are those of nccl-tests, and a rank that sends slowly is a row of the pairs."""
    call(print_given, 4, free_port(), tmp_path, group=False)
    lines = [line.split() for line in (tmp_path / "printed0").read_text().splitlines()]
    for name, on_the_bus in {
        "all_reduce": 2 * 3 / 4 * 4.194,
        "all_gather": 3 / 4 * 4.194,
        "reduce_scatter": 3 / 4 * 4.194,
        "all_to_all": 3 / 4 * 4.194,
        "broadcast": 4.194,
    }.items():
        assert [name, "4,096", "1.000", "4.194", f"{on_the_bus:.4g}"] in lines
    assert ["from", "1", "4.194", "-", "4.194", "4.194"] in lines
    assert ["from", "2", "1.049", "1.049", "-", "1.049"] in lines
    assert (tmp_path / "printed3").read_text() == ""
