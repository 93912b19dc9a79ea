"""Training that continues when ranks are killed.

Lesson: replicated/survivors.py.

Write `keep_training(model, optimizer, steps, gradients, regroup)`. All ranks call it, and are in a
group. It trains until `steps` steps are done, each with `optimizer.step()`:
- `gradients(step)` replaces each parameter's `.grad` with this rank's part of the gradient of a
  step, counted from 0. The sum of the parts over all ranks is the gradient of the global batch,
  however many ranks there are.
- If a rank is killed, messages that need it raise RuntimeError on the other ranks. Then `regroup()`
  leaves the group, and forms one with the processes that are there. Their ranks may be different.
- A new process may be among them. It calls `keep_training`, too, with a model and an optimizer that
  have done no step. So in a new group, the rank that has done the most steps gives its state to
  all.

Your answer passes if
- all ranks end with the same numbers as a run without kills: the parameters, and the optimizer's
  state;
- no step is computed again except the one during which a rank was killed;
- that also holds if a second rank is killed while the state is sent.

The check kills processes of its own, by SIGKILL.

The first check copies this file to `playground/exercises/answers/`. Write in the copy.

Check it. For help, add `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/keep_training.py
"""

import torch
import torch.distributed as dist
from check import check


def keep_training(model, optimizer, steps, gradients, regroup):
    """Train until `steps` steps are done, with the ranks that are there."""
    raise NotImplementedError("your turn")


if __name__ == "__main__":
    check(__file__)
