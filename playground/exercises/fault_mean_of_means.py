"""Find the fault: the gradient depends on how a batch is split into micro-batches.

Lesson: language/token_mean.py.

`train(model, micro_batches, steps)` trains a language model. Each rank has micro-batches of its
own, pairs (rows, labels), both int64 (N, tokens), and uses all of them in each step. Padding has
the label -100. `model(rows)` returns scores, (N, words, tokens). The loss is the mean over the
tokens of all micro-batches of all ranks, so the model should be the same as if a single process
computed them all at once. But it is not. Find the fault, and repair train.

It is repaired if
- all ranks have the model of a single process, however many tokens each micro-batch has;
- the ranks may have different numbers of micro-batches.

The first check copies this file to `playground/exercises/answers/`. Repair the copy.

Check it. For help, add `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/fault_mean_of_means.py
"""

import torch
import torch.distributed as dist
from check import check
from torch.nn import functional as F


def train(model, micro_batches, steps):
    """Train on this rank's micro-batches, at least one. All ranks have the same model."""
    for _ in range(steps):
        model.zero_grad()
        for rows, labels in micro_batches:
            count = (labels != -100).sum()
            dist.all_reduce(count)  # the tokens of all ranks
            total = F.cross_entropy(model(rows), labels, reduction="sum")
            loss = total / count / len(micro_batches)
            loss.backward()  # adds to the gradients
        with torch.no_grad():
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)  # each rank has the part of its own tokens
                parameter -= 0.1 * parameter.grad


if __name__ == "__main__":
    check(__file__)
