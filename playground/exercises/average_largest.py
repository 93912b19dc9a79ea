"""Send only the largest 1% of a gradient, and keep the rest for the next step (error feedback).

Lesson: replicated/sending_less.py.

Write `average_largest(gradient, unsent)`. All ranks call it in each step:
- `gradient` is this rank's gradient, a float32 tensor of any shape, the same shape on all ranks.
- `unsent` is a tensor of this shape: what this rank has not sent in the steps before, at first 0.
  The next call gets the same tensor, so the function changes it in place.

Each call does this, in this order:
- It adds both tensors.
- Of the n numbers of this sum, it sends the ceil(n / 100) with the largest absolute values to all
  ranks, together with their positions.
- It leaves in `unsent` what this rank has not sent: the sum, with 0 where it has sent a number.
  Without this error feedback, numbers that are small in each step would never be sent.
- It returns the mean of what the ranks have sent, in the shape of `gradient`. At each position,
  this is the sum of the ranks' numbers, divided by the number of ranks. It is 0 if no rank has sent
  a number from there.

For example, two ranks have 200 numbers, so each sends two. `unsent` is 0. Rank 0 sends 8.0 from
position 7 and -9.0 from position 120, and rank 1 sends 6.0 and 5.0 from positions 7 and 8. Both
return 7.0, 2.5 and -4.5 at positions 7, 8 and 120, and 0 at the others.

Your answer passes if
- the returned tensor and `unsent` are right in each of three steps, on any number of ranks;
- in each step, each rank sends two messages, with the bytes of an all_gather of its numbers (4
  bytes each) and of their positions (8 bytes each).

The first check copies this file to `playground/exercises/answers/`. Write in the copy.

Check it. For help, add `--trace`, `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/average_largest.py
"""

import torch
import torch.distributed as dist
from check import check


def average_largest(gradient, unsent):
    """Return the mean over the ranks of what they send, and keep what is not sent in `unsent`."""
    raise NotImplementedError("your turn")


if __name__ == "__main__":
    check(__file__)
