"""The collectives: what every rank holds afterwards. test_answers.py has calls that differ."""

import re

from launch import run

BEFORE = [[10.0, 11.0, 12.0], [20.0, 21.0, 22.0], [30.0, 31.0, 32.0]]  # on three ranks
OWN = [10.0, 21.0, 32.0]
SUMS = [60.0, 63.0, 66.0]
AFTER = {
    "broadcast": [BEFORE[0]] * 3,
    "scatter": [[10.0], [11.0], [12.0]],
    "gather": [OWN, [], []],
    "all_gather": [OWN] * 3,
    "reduce": [SUMS, [], []],
    "reduce_scatter": [[60.0], [63.0], [66.0]],
    "all_to_all": [[10.0, 20.0, 30.0], [11.0, 21.0, 31.0], [12.0, 22.0, 32.0]],
    "all_reduce": [SUMS] * 3,
}


def rows(before, *after):
    """Return the lines of the ranks: what each of them holds before, and then after."""
    lines = []
    for rank, lists in enumerate(zip(before, *after, strict=True)):
        lines.append(f"rank {rank}: {' -> '.join(map(str, lists))}")
    return lines


def test_what_is_printed():
    """The numbers are those of lists. With async_op the sum is the same."""
    out = run("collectives", "-g", 3).stdout
    for name, after in AFTER.items():
        table = "\n".join(rows(BEFORE, after))
        assert re.search(rf"^{name}: .*\n{re.escape(table)}$", out, re.M), out
    for line in rows(BEFORE, AFTER["reduce_scatter"], [SUMS] * 3):
        assert f"\n{line}, = all_reduce: True\n" in out
    for line in rows(BEFORE, [SUMS] * 3):
        assert f"\n{line} by async_op\n" in out
    assert re.findall(r"^rank (\d): [\d.]+ s at a barrier", out, re.M) == ["0", "1", "2"]
