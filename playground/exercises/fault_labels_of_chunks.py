"""Find the fault: when sequences are split between ranks, the gradient is a little wrong.

Lesson: language/four_axes.py.

`train(model, rows, places, steps)` trains a language model. All ranks have the same rows of a text,
int64 (N, tokens), and each rank computes its own tokens of every row: places[r] has the places of
rank r's tokens, in ascending order. The label of a token is the one that follows it in the row. So
the last token of a row has none, and the loss is the mean over all others. `model(inputs)` returns
scores, (N, words, tokens of this rank). It computes each token by itself, so no keys and values
have to travel. After training, all ranks should have the model of a single process which has all
tokens. With one rank, they do. With several, they do not. Find the fault, and repair train.

It is repaired if
- all ranks have the model of a single process, whichever places the tokens of each rank have.

The first check copies this file to `playground/exercises/answers/`. Repair the copy.

Check it. For help, add `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/fault_labels_of_chunks.py
"""

import torch
import torch.distributed as dist
from check import check
from torch.nn import functional as F


def train(model, rows, places, steps):
    """Train on this rank's tokens. All ranks have the same model, and the same rows."""
    own = rows[:, places[dist.get_rank()]]
    inputs = own[:, :-1]
    labels = own[:, 1:]
    count = rows[:, 1:].numel()  # the labels of all ranks
    for _ in range(steps):
        model.zero_grad()
        loss = F.cross_entropy(model(inputs), labels, reduction="sum") / count
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)  # each rank has the part of its own tokens
                parameter -= 0.1 * parameter.grad


if __name__ == "__main__":
    check(__file__)
