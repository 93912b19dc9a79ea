"""The sequence parallelism lesson: one process's numbers, its gradients and its messages."""

import copy
import re
from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
from conftest import DIGITS, losses, single_gpu, train
from forked import in_group

from common.models import Transformer
from figures.messages import Messages

LESSON = "sequence_parallel"
TRANSFORMER = ("--model", "transformer", "--double")
STEPS = (*DIGITS, "--batch_size", 120, "--epochs", 1, *TRANSFORMER)
SMALL = ("--tokens", 4, "--width", 8, "--layers", 1)
KEPT = r"^rank \d keeps ([\d,]+) bytes$"


def kept(out):
    """Return the bytes that each rank has printed that it keeps for backward()."""
    return [int(number.replace(",", "")) for number in re.findall(KEPT, out, re.M)]


def test_what_is_kept():
    """With --sequence a rank keeps less, and as much as DTensor does. The losses are right."""
    [right] = single_gpu(*STEPS, *SMALL)
    bytes_kept = []
    for flags in ((), ("--sequence",), ("--sequence", "--by", "dtensor")):
        done = train(LESSON, *STEPS, *SMALL, *flags, processes=2)
        assert not done.stderr
        assert losses(done.stdout) == pytest.approx([right["loss"]], abs=1e-10)
        bytes_kept.append(kept(done.stdout))
    whole, own, by_dtensor = bytes_kept
    assert len(own) == 2 and own[0] == own[1] < whole[0]
    assert by_dtensor == pytest.approx(own, rel=0.01)


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
    in_group(sample, 2, sequence, messages)
