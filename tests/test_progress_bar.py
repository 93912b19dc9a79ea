"""The progress bar: one, from rank 0, on a terminal only."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest
from conftest import ROOT, run

FLAGS = ("--dataset", "digits", "--device", "cpu", "--epochs", "1", "--batch_size", "120")


@pytest.mark.parametrize(("lesson", "processes"), [("single_gpu", ()), ("distributed_data_parallel", ("-g", "2"))])
def test_one_bar_on_a_terminal_and_none_in_a_file(lesson, processes):
    """The bar begins once, at 0 of the epoch's 12 steps, and none of it ends up in a log."""
    terminal, stderr = pty.openpty()
    fcntl.ioctl(stderr, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))  # rows and columns
    command = [sys.executable, ROOT / "playground" / f"{lesson}.py", *FLAGS, *processes]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr)
    os.close(stderr)
    shown = b""
    try:
        while piece := os.read(terminal, 4096):
            shown += piece
    except OSError:  # Linux reports the end of a terminal so
        pass
    os.close(terminal)
    assert process.wait(300) == 0
    assert shown.count(b"| 0/12 [") == 1
    assert run(lesson, *FLAGS, *processes).stderr == ""
