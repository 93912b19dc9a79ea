"""Only rank 0 shows a progress bar, and only on a terminal."""

from launch import SHORT, run

LESSON = "distributed_data_parallel"
FLAGS = (*SHORT, "-g", 2)
ON_A_TERMINAL = "    sys.stderr.isatty = lambda: True\n"
MAIN = "    main()\n"


def test_one_bar_on_a_terminal_and_none_in_a_file(change):
    """The bar starts once, at 0 of the epoch's 12 steps, and a log contains no part of it."""
    copy = change(LESSON, (MAIN, ON_A_TERMINAL + MAIN))
    assert run(copy, *FLAGS).stderr.count("| 0/12 [") == 1
    assert run(LESSON, *FLAGS).stderr == ""
