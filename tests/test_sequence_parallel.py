"""The sequence parallelism lesson: gradients and messages. test_parity.py has its numbers."""

import copy
from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist

from common.models import Transformer
from watching.messages import Messages
from watching.ranks import call


def sample(rank, sequence, messages):
    """Compare two backward passes of a split transformer with those of a whole one."""
    import sequence_parallel as lesson

    torch.manual_seed(0)
    whole = Transformer(8, layers=1, tokens=4).double()
    parts = copy.deepcopy(whole)
    lesson.split_by_hand(parts, sequence, dist.group.WORLD)
    images = torch.randn(3, 1, 28, 28, dtype=torch.float64)
    for _ in range(2):  # gradients accumulate
        whole(images).square().sum().backward()
        with Messages() as counted:
            parts(images).square().sum().backward()
    assert Counter(message.kind for message in counted.noted) == messages
    block = parts.stage1[2 if sequence else 1]
    expected = whole.stage1[1]
    close = partial(torch.testing.assert_close, atol=1e-12, rtol=1e-10)
    pairs = list(zip(block.norm1.parameters(), expected.norm1.parameters(), strict=True))
    pairs += zip(parts.stage1[0].parameters(), whole.stage1[0].parameters(), strict=True)
    pairs += [(block.bias1, expected.attention.output.bias), (block.bias2, expected.mlp[2].bias)]
    for part, right in pairs:
        close(part.grad, right.grad)
    first, second = expected.mlp[0].weight.grad, expected.mlp[2].weight.grad
    close(block.mlp[0].weight.grad, first.chunk(2)[rank])
    close(block.mlp[2].weight.grad, second.chunk(2, dim=1)[rank])
    close(parts.stage2[-1].linear.weight.grad, whole.stage2[-1].linear.weight.grad)


# Four for the pairs, one after the last block. Norms, biases and the embedding: 4 + 2 + 3.
OF_TOKENS = {"all_gather": 5, "reduce_scatter": 4, "all_reduce": 9}


@pytest.mark.parametrize(("sequence", "messages"), [(False, {"all_reduce": 4}), (True, OF_TOKENS)])
def test_gradients_and_messages(sequence, messages):
    """Split or whole, each rank has the gradient of one process, also if it accumulates."""
    call(sample, 2, sequence, messages)
