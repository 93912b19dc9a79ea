"""Dropout that differs between the ranks, and is the same after a restart.

Lesson: sharded/fully_sharded_checkpoints.py.

Write `seeded_dropout(inputs, p, seed, step)`. It returns a new tensor like `inputs`, in which each
number is replaced by 0 with probability p, and is divided by 1 - p otherwise. Which numbers are
dropped is random, but the same each time that this rank calls it with the same arguments.

`seed` is the seed of the whole run, the same on all ranks. `step` counts the training steps from 0,
and a restart does not reset it.

Rung 1 is float32. As in the lesson, you may seed PyTorch's own random numbers. Your answer passes
it if
- each number is dropped independently of the others, with probability p;
- no two calls on different ranks, or in different steps, drop the same numbers. A different seed
  drops different numbers, too;
- a run that is started again drops the same numbers as a run without a break;
- `backward()` passes a gradient to the numbers that were not dropped, divided by 1 - p.

Rung 2 is any p from 0 to below 1, any shape and any float dtype. Your answer passes it if
- all of rung 1 holds;
- PyTorch's own random numbers stay as they are. All ranks draw the same order of the images from
  them, so dropout must not change them;
- the ranks send nothing.

The first check copies this file to `playground/exercises/answers/`. Write in the copy.

Check it. For help, add `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/seeded_dropout.py
"""

import torch
import torch.distributed as dist
from check import check


def seeded_dropout(inputs, p, seed, step):
    """Drop numbers of `inputs` with the probability p. Differs between ranks and steps."""
    raise NotImplementedError("your turn")


if __name__ == "__main__":
    check(__file__)
