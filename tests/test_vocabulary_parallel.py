"""The lesson on vocabulary parallelism: losses, gradients and messages. test_parity.py trains."""

import copy
from collections import Counter
from functools import partial

import pytest
import torch
from forked import in_group
from torch.nn import functional as F

from common.language import Language
from figures.messages import Messages

close = partial(torch.testing.assert_close, atol=1e-12, rtol=1e-10)
TOKENS = 3 * 5
WIDTH = 8


def sample(rank, tied, group):
    """Compare two backward passes of a language model with split tables and of a whole one."""
    import vocabulary_parallel as lesson

    torch.manual_seed(0)
    whole = Language(WIDTH, layers=1, tied=tied).double()
    parts = copy.deepcopy(whole)
    lesson.split_vocabulary(parts, group)
    rows, labels = torch.randint(256, (2, 3, 5))
    labels[0, 1] = labels[2, 4] = -100
    weights = torch.rand(3, 5, dtype=torch.float64)  # of the tokens' losses
    for _ in range(2):  # gradients accumulate
        logits = whole(rows)
        right = F.cross_entropy(logits, labels, reduction="none")
        (right * weights).sum().backward()
        with Messages() as counted:
            scores = parts(rows)
            embedded = len(counted.noted)
            losses, correct = lesson.SplitCrossEntropy.apply(scores, labels, group)
            of_loss = counted.noted[embedded:]
            (losses * weights).sum().backward()
        close(losses, right)
        assert correct.equal(logits.argmax(dim=1) == labels)
    # In place of 256 scores of each token, 3 numbers. Nothing in backward() of the loss.
    assert [message.nbytes for message in of_loss] == [TOKENS * 8, 2 * TOKENS * 8]
    assert Counter(message.kind for message in counted.noted) == {"all_reduce": 4}
    own = slice(128 * rank, 128 * rank + 128)
    output = parts.stage2[-1].output.weight
    assert (output is parts.stage1[0].weight) == tied
    close(output.grad, whole.stage2[-1].output.weight.grad[own])
    close(parts.stage1[0].weight.grad, whole.stage1[0].weight.grad[own])
    close(parts.stage2[-1].norm.weight.grad, whole.stage2[-1].norm.weight.grad)


@pytest.mark.parametrize("tied", [False, True])
def test_losses_gradients_and_messages(tied):
    """Split or whole, each rank has the losses and gradients of one process."""
    in_group(sample, 2, tied, None)
