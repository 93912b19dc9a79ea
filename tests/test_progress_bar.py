"""Only rank 0 shows a progress bar, and only on a terminal."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

from conftest import SHORT, lesson_path, run

LESSON = "distributed_data_parallel"
FLAGS = (*SHORT, "-g", 2)


def test_one_bar_on_a_terminal_and_none_in_a_file():
    """The bar starts once, at 0 of the epoch's 12 steps, and a log contains no part of it."""
    terminal, stderr = pty.openpty()
    size = struct.pack("HHHH", 30, 100, 0, 0)  # rows and columns
    fcntl.ioctl(stderr, termios.TIOCSWINSZ, size)
    command = [sys.executable, lesson_path(LESSON), *map(str, FLAGS)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}  # other tests use the cores, too
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=stderr)
    os.close(stderr)
    shown = b""
    try:
        while True:
            shown += os.read(terminal, 4096)
    except OSError:  # so Linux reports that the other end of a terminal is closed
        os.close(terminal)
    assert process.wait(300) == 0
    assert shown.count(b"| 0/12 [") == 1
    assert run(LESSON, *FLAGS).stderr == ""
