"""How fault_late_rank is checked."""

import json
import statistics

from judging.evidence import lines_of, refuse, what_is_found

NAME = "found"
JOIN = False
WORLD_SIZES = (1,)
CASES = {"the evidence of four ranks": {}}
FOLDER = "late_rank"
# This rank slept so long in each step, when the evidence was made.
RANK = 3
MILLISECONDS = 250
HINTS = """
All ranks leave an all_reduce together, so each step takes equally long on all of them. But they do
not start an all_reduce together: the late rank starts it last, and the others wait.

"time_created_ns" in recorder0.json and the other three is the time at which a rank has started a
call, in nanoseconds. (The ranks ran on one machine, so they had one clock.) json.loads reads a
file. The line of a call is call["frames"][0]["line"].

for the calls with the same number:
    how much later than the first rank has each rank started this call?
for each line of the program that has a call, and each rank: the median of these times
rank: the one that is late at a line; milliseconds: this median
line: what does it do between the call before and this one?
"""
ANOTHER = "This rank waits for a late one. Which rank starts a call later than all others?"
AT_LINE = "The rank is right. It comes late to this line. Which line has it been at before?"
LINE = "The rank is right, the line is not. Before which call is it late, and what is before it?"
COMPUTES = "The rank and the line are right. But at this line, no rank computes with its model yet."
CAUSE = "The rank and the line are right. What does the rank do at this line?"
UNIT = "Are these milliseconds? The recorder's times are in nanoseconds."
LATENESS = (
    "All is right but the milliseconds. How much later than the first rank does it start the call "
    "right after this line? Other calls do not count."
)


def run(found, rank, world_size):
    rank, line, cause, milliseconds = what_is_found(found, FOLDER, "milliseconds")
    units = milliseconds * 1000, milliseconds / 1e6
    refuse(
        (rank != RANK, ANOTHER),
        (line in lines_of(FOLDER, "dist.all_reduce(count)"), AT_LINE),
        (line not in lines_of(FOLDER, "read(rank, step)", "generator", "return images"), LINE),
        (cause == "computing", COMPUTES),
        (cause != "data", CAUSE),
        (any(map(is_late, units)), UNIT),
        (not is_late(milliseconds), LATENESS),
    )


def is_late(milliseconds):
    return abs(milliseconds - MILLISECONDS) <= 0.2 * MILLISECONDS


def found(folder):
    """Why: rank 3 is late only at the call after read(), and the others wait for it there."""
    recorders = []
    for rank in range(4):
        recorders.append(json.loads((folder / f"recorder{rank}.json").read_text()))
    late = [[], [], [], []]  # for each rank: how much later than the first, in milliseconds
    for calls in zip(*recorders, strict=False):  # those with the same number
        times = [call["time_created_ns"] for call in calls]
        if calls[0]["frames"][0]["line"] == 29:
            for rank in range(4):
                late[rank].append((times[rank] - min(times)) / 1e6)
    medians = [statistics.median(each) for each in late]
    rank = medians.index(max(medians))
    return {"rank": rank, "line": 27, "cause": "data", "milliseconds": medians[rank]}


MISTAKES = {
    ANOTHER: ('"rank": rank', '"rank": 0'),
    AT_LINE: ('"line": 27', '"line": 29'),
    LINE: ('"line": 27', '"line": 33'),
    COMPUTES: ('"data"', '"computing"'),
    UNIT: ("medians[rank]}", "medians[rank] / 1000}"),
    LATENESS: ("statistics.median(each)", "sum(each)"),
}
