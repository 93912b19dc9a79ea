"""The sequence parallelism lesson: one process's numbers, its messages, and its exercises."""

import copy
import re
from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
from conftest import DIGITS, losses, one_line, single_gpu, train
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


def one_process(*flags):
    """Return the losses of single_gpu.py."""
    return [line["loss"] for line in single_gpu(*STEPS, *flags)]


def test_other_heads():
    """Other sizes than those of test_parity.py: the losses of single_gpu.py to 1e-10."""
    network = ("--heads", 3, "--width", 12, "--tokens", 4)
    out = train(LESSON, *STEPS, *network, processes=3).stdout
    assert losses(out) == pytest.approx(one_process(*network), abs=1e-10)


def test_what_is_kept():
    """With --sequence a rank keeps less, and as much as DTensor does. The losses are right."""
    bytes_kept = []
    for flags in ((), ("--sequence",), ("--sequence", "--by", "dtensor")):
        done = train(LESSON, *STEPS, *SMALL, *flags, processes=2)
        assert not done.stderr
        assert losses(done.stdout) == pytest.approx(one_process(*SMALL), abs=1e-10)
        bytes_kept.append(kept(done.stdout))
    whole, own, by_dtensor = bytes_kept
    assert len(own) == 2 and own[0] == own[1] < whole[0]
    assert by_dtensor == pytest.approx(own, rel=0.01)


def sample(rank, sequence, messages, gather_again=False):
    """Compare two backward passes of a split transformer with those of a whole one."""
    import sequence_parallel as lesson

    def all_tokens(layer, tokens):
        """Gather tokens as a pair does, which adds up their gradients."""
        return lesson.BeginPair.apply(tokens, True, layer.group)

    if gather_again:
        lesson.AllTokens.forward = all_tokens
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
    factor = 2 if gather_again else 1
    block = parts.stage1[2 if sequence else 1]
    expected = whole.stage1[1]
    close = partial(torch.testing.assert_close, atol=1e-12, rtol=1e-10)
    pairs = list(zip(block.norm1.parameters(), expected.norm1.parameters(), strict=True))
    pairs += zip(parts.stage1[0].parameters(), whole.stage1[0].parameters(), strict=True)
    pairs += [(block.bias1, expected.attention.output.bias), (block.bias2, expected.mlp[2].bias)]
    for part, right in pairs:
        close(part.grad, factor * right.grad)
    first, second = expected.mlp[0].weight.grad, expected.mlp[2].weight.grad
    close(block.mlp[0].weight.grad, factor * first.chunk(2)[rank])
    close(block.mlp[2].weight.grad, factor * second.chunk(2, dim=1)[rank])
    close(parts.stage2[-1].linear.weight.grad, whole.stage2[-1].linear.weight.grad)


# Four for the pairs, one after the last block. Norms, biases and the embedding: 4 + 2 + 3.
OF_TOKENS = {"all_gather": 5, "reduce_scatter": 4, "all_reduce": 9}


@pytest.mark.parametrize(("sequence", "messages"), [(False, {"all_reduce": 4}), (True, OF_TOKENS)])
def test_gradients_and_messages(sequence, messages):
    """Split or whole, each rank has the gradient of one process, also if it accumulates."""
    in_group(sample, 2, sequence, messages)


def test_which_gradients_are_too_large():
    """Exercise 2: those before the last layer, n times. A reduce_scatter more adds them up."""
    in_group(sample, 2, True, OF_TOKENS | {"reduce_scatter": 5}, True)


def ends_of_pairs(rank):
    """Four tokens of one number each, as in the comments of the lesson. Seven cannot be split."""
    import sequence_parallel as lesson

    first = torch.tensor([1.0, 2, 3, 4])
    terms = (first * 10**rank).view(1, 4, 1)
    terms.requires_grad_()
    group = dist.group.WORLD
    both = lesson.EndPair.apply(terms, False, group)
    assert both.flatten().tolist() == [11, 22, 33, 44]
    own = lesson.EndPair.apply(terms, True, group)
    assert own.flatten().tolist() == [[11, 22], [33, 44]][rank]
    again = lesson.BeginPair.apply(own, True, group)
    assert again.flatten().tolist() == [11, 22, 33, 44]
    # The gradient of the own tokens is added up over two ranks.
    again.backward(first.view(1, 4, 1))
    assert terms.grad.flatten().tolist() == [2, 4, 6, 8]
    bias = torch.zeros(1, requires_grad=True)
    tokens = lesson.OwnTokens(group)(torch.zeros(1, 4, 1)) + bias
    lesson.AllTokens(group)(tokens).backward(first.view(1, 4, 1))
    assert bias.grad.item() == [3, 7][rank]
    assert lesson.add_up(bias.grad, group).item() == 10
    copied = torch.ones(1, 4, 1, requires_grad=True)
    lesson.BeginPair.apply(copied, False, group).backward(terms.detach())
    assert copied.grad.flatten().tolist() == [11, 22, 33, 44]
    with pytest.raises(ValueError, match="2 ranks cannot split a dimension of 7"):
        lesson.OwnTokens(group)(torch.ones(2, 7, 4))


def test_the_examples_of_the_comments():
    """PyTorch computes their numbers."""
    in_group(ends_of_pairs, 2)


@pytest.mark.parametrize(
    ("ranks", "flags", "words"),
    [
        (3, (), ("3 ranks cannot split --heads 4: use 3",)),
        (8, ("--heads", 8, "--sequence"), ("8 ranks cannot split --tokens 28", "--sequence out")),
        (2, ("--model", "mlp"), ("tensor_parallel.py", "use --model transformer")),
    ],
)
def test_flags_that_cannot_work(ranks, flags, words, main):
    """Status 2 and one line that says what to type."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": f"{ranks}"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    one_line(main(LESSON, *DIGITS, *flags, env=env), *words)


HOOK = "        parameter.register_hook(partial(add_up, group=group))\n"
JOINED = """        chunks[dist.get_rank(self.group)] = tokens
        return torch.cat(chunks, dim=1)
"""
ADDED = "        return BeginPair.apply(tokens, True, self.group)\n"
NEIGHBOURS = "    shard = cut(parameter.detach(), dim, group)[dist.get_rank(group)].clone()\n"
EVERY_NTH = """    size = parameter.shape[dim]
    every = torch.arange(dist.get_rank(), size, dist.get_world_size())
    shard = parameter.detach().index_select(dim, every)
"""
NORMS = "            if sequence:\n                # NEW: tells DTensor"


@pytest.mark.parametrize(
    ("flags", "old", "new", "apart"),
    [
        (("--sequence",), HOOK, "        pass\n", 1e-4),  # 1
        (("--sequence",), JOINED, ADDED, 1e-9),  # 2
        ((), NEIGHBOURS, EVERY_NTH, 1e-4),  # 3
        (("--sequence", "--by", "dtensor"), NORMS, NORMS.replace("sequence", "False"), 1e-6),  # 4
    ],
)
def test_wrong_without_an_error(flags, old, new, apart, change):
    """The four exercises: the loss differs, by little in the second and in the fourth."""
    copy = change(LESSON, (old, new))
    [found] = losses(train(copy, *STEPS, *SMALL, *flags, processes=2).stdout)
    [right] = one_process(*SMALL)
    assert apart < abs(found - right) < 0.1


def test_the_mlp_may_be_split_in_any_way(change):
    """Exercise 3: its columns do not belong together. With the MLP alone the loss stays right."""
    of_mlp = EVERY_NTH.replace("    shard", "    if parameter.shape[dim] > 8:\n        shard")
    copy = change(LESSON, (NEIGHBOURS, NEIGHBOURS + of_mlp))
    found = losses(train(copy, *STEPS, *SMALL, processes=2).stdout)
    assert found == pytest.approx(one_process(*SMALL), abs=1e-10)
