"""How fault_waits_alone is checked."""

import json

from judging.evidence import lines_of, refuse, what_is_found

NAME = "found"
JOIN = False
WORLD_SIZES = (1,)
CASES = {"the evidence of four ranks": {}}
FOLDER = "waits_alone"
HINTS = """
Rank 0 waits in gather, which needs a number of each rank. Which rank has not sent its own?

"collective_seq_id" in recorder0.json and the other three numbers the calls of each rank. Compare
the calls with the same number, from the last ones back. In the first number that differs, three
ranks have made the same call.

rank: the one whose call differs
cause: what has it done in place of this call, and does it make the call later?
line: the one on which it depends whether a rank makes the call
"""
WAITS = "Rank 0 waits for a rank that has not sent its number. Whose calls differ from rank 0's?"
ANOTHER = "This rank's calls are those of two others, as far as they have come. Whose calls differ?"
AT_LINE = (
    "The rank is right. It waits at this line, as others do. Which line makes its calls differ?"
)
LINE = "The rank is right, the line is not. Which line decides whether a rank makes a call?"
CAUSE = "The rank and the line are right. Which call of the others does this rank not make at all?"


def run(found, rank, world_size):
    rank, line, cause = what_is_found(found, FOLDER)
    refuse(
        (rank == 0, WAITS),
        (rank != 2, ANOTHER),
        (line in lines_of(FOLDER, "dist.all_reduce("), AT_LINE),
        (line not in lines_of(FOLDER, "if missing > 0:", "dist.gather("), LINE),
        (cause != "left out", CAUSE),
    )


def found(folder):
    """Why: all images of rank 2 have a label in step 7, so it leaves out the gather."""
    recorders = []
    for rank in range(4):
        recorders.append(json.loads((folder / f"recorder{rank}.json").read_text()))
    for calls in zip(*recorders, strict=False):  # those with the same number
        lines = [call["frames"][0]["line"] for call in calls]
        for rank, line in enumerate(lines):
            if lines.count(line) == 1:
                # The others are at the gather, which is inside `if missing > 0:`.
                return {"rank": rank, "line": 32, "cause": "left out"}


MISTAKES = {
    WAITS: ('"rank": rank', '"rank": 0'),
    ANOTHER: ('"rank": rank', '"rank": 3'),
    AT_LINE: ('"line": 32', '"line": 28'),
    LINE: ('"line": 32', '"line": 22'),
    CAUSE: ('"left out"', '"order"'),
    "but not one of batches, left out, order,": ('"left out"', '"a barrier"'),
}
