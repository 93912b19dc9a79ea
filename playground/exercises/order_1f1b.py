"""The order of 1F1B with little memory: which passes a rank of a pipeline computes.

Lesson: split/manual_pipeline.py.

Write `order_1f1b(rank, world_size, micro_batches, most)`. It returns the passes that this rank
computes in one step, in order, as a list of strings. "F2" is the forward pass of micro-batch 2, and
"B2" is its backward pass. Micro-batches are counted from 0. For example, the last of 2 ranks
computes ["F0", "B0", "F1", "B1", "F2", "B2"] for 3 micro-batches. It needs only its arguments.
There is no process group here, so `dist.get_rank()` fails.

Rung 1 is 1F1B, as in the lesson. `most` is so large that you can ignore it. Your answer passes it
if
- each micro-batch has one forward and one backward pass, both in the order of the numbers;
- rank r keeps the activations of at most `world_size` - r micro-batches. They are kept from a
  forward pass to its backward pass;
- among all such orders, it computes each forward pass as early as possible;
- it is right with fewer micro-batches than ranks, too.

In rung 2, that is too much memory for the first ranks, because each rank has memory for `most`
micro-batches only. The other ranks compute as before. Your answer passes it if
- all of rung 1 holds, and a rank keeps the activations of no more than `most` micro-batches.

To see what the limit costs, give your lists to `manual_pipeline.py` as `--schedule`.

The first check copies this file to `playground/exercises/answers/`. Write in the copy.

Check it. For help, add `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/order_1f1b.py
"""

from check import check


def order_1f1b(rank, world_size, micro_batches, most):
    """Return the passes of a rank in the order of 1F1B, such as ["F0", "B0", "F1", "B1"]."""
    raise NotImplementedError("your turn")


if __name__ == "__main__":
    check(__file__)
