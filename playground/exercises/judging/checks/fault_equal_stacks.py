"""How fault_equal_stacks is checked."""

import json

from judging.evidence import lines_of, refuse, what_is_found

NAME = "found"
JOIN = False
WORLD_SIZES = (1,)
CASES = {"the evidence of four ranks": {}}
FOLDER = "equal_stacks"
HINTS = """
All ranks wait at one line, and the stacks do not tell in which step they are. What does the
recorder tell of the calls that the stacks do not?

In recorder0.json and the other three, "collective_seq_id" numbers the calls of each rank, and
"input_sizes" has the shapes of their tensors. Compare the calls with the same number.

rank: the one with a call that differs from that of the others with the same number
line: the one that makes the tensor of this call. What does it do with a batch without the class 4?
"""
ANOTHER = "The stacks are equal, and this rank's calls are those of two others. Whose calls differ?"
AT_LINE = "The rank is right. All ranks wait at this line. Which line makes this rank differ?"
LINE = "The rank is right, the line is not. Which line makes the tensor that differs?"
AHEAD = "The rank and the line are right. It is one call ahead, but why? All ranks have 10 batches."
CAUSE = "The rank and the line are right. What differs in the last call that has ended on it?"


def run(found, rank, world_size):
    rank, line, cause = what_is_found(found, FOLDER)
    refuse(
        (rank != 1, ANOTHER),
        (line in lines_of(FOLDER, "dist.all_reduce("), AT_LINE),
        (line not in lines_of(FOLDER, "torch.bincount("), LINE),
        (cause == "batches", AHEAD),
        (cause != "shapes", CAUSE),
    )


def found(folder):
    """Why: rank 1 has no image of the last class in batch 7, so bincount counts four classes."""
    recorders = []
    for rank in range(4):
        recorders.append(json.loads((folder / f"recorder{rank}.json").read_text()))
    for calls in zip(*recorders, strict=False):  # those with the same number
        shapes = [call["input_sizes"] for call in calls]
        for rank, shape in enumerate(shapes):
            if shapes.count(shape) == 1:
                # torch.bincount(labels, minlength=CLASSES) would be right.
                return {"rank": rank, "line": 19, "cause": "shapes"}


MISTAKES = {
    ANOTHER: ('"rank": rank', '"rank": 0'),
    AT_LINE: ('"line": 19', '"line": 20'),
    LINE: ('"line": 19', '"line": 18'),
    AHEAD: ('"shapes"', '"batches"'),
    CAUSE: ('"shapes"', '"order"'),
}
