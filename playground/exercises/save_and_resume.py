"""Training that resumes from a file, with any number of ranks.

Lesson: replicated/resumable.py.

Write `save_and_resume(path, model, optimizer, epochs, train_epoch)`. All ranks call it. It trains
until `epochs` epochs are done, and saves a checkpoint to `path` after each epoch. If rank 0 sees a
file at `path` when it starts, all ranks resume from it.

`train_epoch(epoch)` trains one epoch on all ranks, which therefore have equal parameters. Epochs
are counted from 0.

Rung 1 is what the lesson saves. The order of the images depends only on the number of the epoch.
Your answer passes it if
- a run that is killed and started again computes the same numbers as a run without a break:
  parameters, buffers and the optimizer's state. The number of ranks may differ;
- no epoch that is saved is trained again;
- the file at `path` is complete at all times, even if the run is killed while it saves;
- only rank 0 writes files. All ranks need what is in the file.

In rung 2, `train_epoch(epoch)` draws the order of the images with `torch.randperm()`, which uses
PyTorch's random numbers. Do not seed these between epochs. Their state, `torch.get_rng_state()`, is
the same on all ranks. Your answer passes it if
- all of rung 1 holds, and the order of the images is that of a run without a break;
- it works with a frozen parameter, too;
- rank 0 decides whether the run resumes. In a network folder, other ranks may for a moment lack a
  file that is new, or see one that has been deleted. The check starts the first run like this: only
  the other ranks see a file at `path`, and it is empty.

The first check copies this file to `playground/exercises/answers/`. Write in the copy.

Check it. For help, add `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/save_and_resume.py
"""

import os

import torch
import torch.distributed as dist
from check import check


def save_and_resume(path, model, optimizer, epochs, train_epoch):
    """Train until `epochs` epochs are done. Resume from the file at `path`, if rank 0 sees one."""
    raise NotImplementedError("your turn")


if __name__ == "__main__":
    check(__file__)
