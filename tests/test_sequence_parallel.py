"""Tensor and sequence parallelism of a transformer: the messages. test_parity.py has numbers."""

from collections import Counter

import head_parallel
import pytest
import sequence_parallel
import torch
import torch.distributed as dist

from common.models import Transformer
from common.transformer import make_block
from watch_ranks.messages import Messages
from watch_ranks.ranks import call


def count(_, lesson, expected):
    """Count the messages of a step of a transformer with one block."""
    model = Transformer(8, layers=1, tokens=4)
    lesson.split_by_hand(model, dist.group.WORLD)
    with Messages() as messages:
        model(torch.randn(3, 1, 28, 28)).sum().backward()
    assert Counter(message.kind for message in messages.noted) == expected


# Four for the pairs, one after the last block, one for the embedding. Norms and biases: 4 + 2.
OF_TOKENS = {"all_gather": 6, "reduce_scatter": 4, "all_reduce": 6}


@pytest.mark.parametrize(
    ("lesson", "expected"), [(head_parallel, {"all_reduce": 4}), (sequence_parallel, OF_TOKENS)]
)
def test_messages(lesson, expected):
    """If tokens are split, the halves of each all_reduce, and sums for what all tokens share."""
    call(count, 2, lesson, expected)


def test_a_norm_of_heads_is_refused():
    """Its gradient would lack the heads of other ranks."""
    block = make_block(16, heads=4)
    block.attention.norm = torch.nn.RMSNorm(4)
    with pytest.raises(ValueError, match="only linear layers"):
        head_parallel.SplitBlock(block, (), (), group=None)
