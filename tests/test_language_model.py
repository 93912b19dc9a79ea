"""language_model.py: what it counts as a token's operations, its steps, its text, and its traps."""

import argparse
import re

import language_model
import pytest
import torch
from conftest import epochs, train
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from common.data import ROW
from common.models import make_model
from watching.messages import Messages
from watching.ranks import call

LESSON = "language_model"
SHORT = ("--double", "--width", 16, "--batch_size", 24, "--epochs", 1, "--sample", 20)
FEW = {"DOCUMENTS": "20"}


@pytest.mark.parametrize("tied", [False, True])
def test_the_operations_of_a_token(tied):
    """PyTorch counts as many, if attention is a chain of plain matrix products."""
    flags = {"model": "language", "width": 32, "layers": 3, "heads": None, "double": False}
    model = make_model(argparse.Namespace(**flags, tied=tied))
    rows = torch.randint(256, (2, ROW))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        F.cross_entropy(model(rows), rows).backward()
    counted = counter.get_total_flops() / rows.numel()
    assert language_model.flops_per_token(model) == counted


def test_the_learning_rate():
    """It rises in a twentieth of the steps, and falls to a tenth."""
    factors = [language_model.warm_up_and_decay(step, 100) for step in range(101)]
    assert factors[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1])
    assert all(before > after for before, after in zip(factors[5:], factors[6:], strict=False))
    assert factors[-1] == pytest.approx(0.1)


def test_two_ranks_write_the_text_of_one():
    """Tied, checkpointed, in micro-batches of different sizes, clipped: the same digits."""
    flags = (*SHORT, "--tied", "--checkpoint", "--clip", 0.5)
    one = train(LESSON, *flags, "--rows", 24, processes=1, env=FEW).stdout
    two = train(LESSON, *flags, "--rows", 5, processes=2, env=FEW).stdout
    expected = epochs(one)[0]
    assert epochs(two) == [expected | {"loss": pytest.approx(expected["loss"], abs=1e-10)}]
    text = re.findall(r"^    \|.*$", one, re.M)
    assert text[0].startswith("    | The ")
    assert re.findall(r"^    \|.*$", two, re.M) == text


def test_a_tied_table_in_two_groups(change):
    """fully_shard refuses it, as answers.md says."""
    last = "    fully_shard(model, mesh=mesh, mp_policy=outside)\n"
    copy = change(LESSON, (last, "    fully_shard(model.stage1[0], mesh=mesh)\n" + last))
    done = train(copy, *SHORT, "--tied", processes=1, status=1, env=FEW)
    assert "ValueError" in done.stderr


def accumulate(rank):
    """Exercise 4: gradients that are averaged in each micro-batch, in none, or in the last one."""
    flags = {"model": "language", "width": 16, "layers": None, "heads": None, "double": True}
    flags |= {"device": "cpu", "timeout": 60, "precision": "full", "checkpoint": False}
    args = argparse.Namespace(**flags, compile=False, rows=2, clip=1.0)
    torch.manual_seed(rank)
    rows = torch.randint(256, (4, ROW))  # two micro-batches
    ends = []
    for averaged in ([True, True], [False, False], [False, True]):
        torch.manual_seed(0)
        model = make_model(args)
        before = [parameter.clone() for parameter in model.parameters()]
        language_model.prepare(model, args)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        switches = iter(averaged)
        model.register_forward_pre_hook(
            lambda *_, model=model, switches=switches: model.set_requires_gradient_sync(
                next(switches)
            )
        )
        with Messages() as messages:
            language_model.update(model, optimizer, scheduler, args, rows, rows)
        assert len(messages.of("reduce_scatter")) == 3 * sum(averaged)  # two blocks, and the rest
        ends.append([parameter.full_tensor() for parameter in model.parameters()])
    torch.testing.assert_close(ends[1], before, atol=0, rtol=0)
    torch.testing.assert_close(ends[2], ends[0], atol=1e-12, rtol=0)
    assert not torch.equal(ends[0][0], before[0])


def test_gradients_averaged_in_the_last_micro_batch():
    """The same parameters with fewer messages. Without any, no parameter changes."""
    call(accumulate, 2)
