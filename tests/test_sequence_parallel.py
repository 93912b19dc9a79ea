"""The sequence parallelism lesson: its messages. test_parity.py has its numbers."""

from collections import Counter

import pytest
import sequence_parallel
import torch
import torch.distributed as dist

from common.models import Transformer
from watching.messages import Messages
from watching.ranks import call


def count(_, sequence, expected):
    """Count the messages of a step of a transformer with one block."""
    model = Transformer(8, layers=1, tokens=4)
    sequence_parallel.split_by_hand(model, sequence, dist.group.WORLD)
    with Messages() as messages:
        model(torch.randn(3, 1, 28, 28)).sum().backward()
    assert Counter(message.kind for message in messages.noted) == expected


# Four for the pairs, one after the last block. Norms, biases and the embedding: 4 + 2 + 3.
OF_TOKENS = {"all_gather": 5, "reduce_scatter": 4, "all_reduce": 9}


@pytest.mark.parametrize(("sequence", "expected"), [(False, {"all_reduce": 4}), (True, OF_TOKENS)])
def test_messages(sequence, expected):
    """With --sequence, the halves of each all_reduce, and sums for what all tokens share."""
    call(count, 2, sequence, expected)
