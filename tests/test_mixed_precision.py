"""The mixed precision lesson: dtypes, bytes, clipping, the scaler, and its exercises."""

import argparse
import functools
import re

import pytest
import torch
from conftest import DIGITS, losses, one_line, run, single_gpu, train
from forked import in_group

from common.models import Transformer

LESSON = "mixed_precision"
# A small transformer, so that a run takes a second.
SMALL = (*DIGITS, "--batch_size", 120, "--model", "transformer", "--tokens", 8, "--width", 16)
ONE_EPOCH = (*SMALL, "--epochs", 1)
ENV = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
ENV |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
CLIP = "            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)\n"
STEP = "            optimizer.step()\n"


def dtypes(out):
    """Return the dtype of each thing that the lesson prints one for."""
    found = {}
    for dtype, names in re.findall(r"^(bfloat16|float\d\d): ([A-Za-z][^\d\n]*)$", out, re.M):
        found |= dict.fromkeys(names.split(", "), dtype)
    return found


def norms(out):
    """Return the norm of all gradients, and that of what rank 0 has."""
    row = re.search(r"^norm of the last gradients: (\S+), of what rank 0 has: (\S+)$", out, re.M)
    return [float(number) for number in row.groups()]


@functools.cache
def printed(*flags):
    """Return what two ranks print with these flags, which run only once."""
    return train(LESSON, *ONE_EPOCH, *flags, processes=2).stdout


@pytest.mark.parametrize(("processes", "flags"), [(2, ()), (3, ("--sharded",))])
def test_clipping(processes, flags, change):
    """By the norm over all ranks: the losses of one process that clips, to 1e-10.

    With --double nothing is converted.
    """
    flags = ("--double", "--clip", 0.5, *flags)
    clipped = run(change("single_gpu", (STEP, CLIP + STEP)), *ONE_EPOCH, "--double").stdout
    done = train(LESSON, *ONE_EPOCH, *flags, processes=processes)
    assert not done.stderr
    out = done.stdout
    assert losses(out) == pytest.approx(losses(clipped), abs=1e-10)
    assert abs(losses(out)[0] - single_gpu(*ONE_EPOCH, "--double")[0]["loss"]) > 1e-4
    assert set(dtypes(out).values()) == {"float64"}
    whole, own = norms(out)
    assert whole == pytest.approx(0.5, abs=1e-3)
    if "--sharded" in flags:
        assert 0.05 < own < 0.49
    else:
        assert own == pytest.approx(whole, abs=1e-3)


MATRIX_PRODUCTS = {"Linear", "Attention", "GELU", "LastToken"}
SUMS = {"Tokens", "LayerNorm", "Block"}  # what adds up small numbers
OF_THE_OPTIMIZER = {"parameters", "gradients", "Adam's averages"}


@pytest.mark.parametrize(
    ("flags", "in_bfloat16", "in_float32"),
    [
        ((), MATRIX_PRODUCTS | {"Transformer"}, SUMS | {"Autocast"}),
        (("--sharded",), MATRIX_PRODUCTS | SUMS, {"Transformer"}),  # all inside the model
    ],
)
def test_dtypes(flags, in_bfloat16, in_float32):
    """With DDP and autocast, and with FSDP and a policy. The loss differs in the third digit."""
    out = printed(*flags)
    expected = dict.fromkeys(in_bfloat16, "bfloat16")
    assert dtypes(out) == expected | dict.fromkeys(in_float32 | OF_THE_OPTIMIZER, "float32")
    assert abs(losses(out)[0] - single_gpu(*ONE_EPOCH)[0]["loss"]) < 0.03


def test_float16():
    """The loss is nearer to that of float32 than with bfloat16."""
    out = printed("--precision", "float16", "--sharded")
    assert abs(losses(out)[0] - single_gpu(*ONE_EPOCH)[0]["loss"]) < 0.003


def count_bytes(rank):
    """With a policy, FSDP gathers half of the bytes, and reduces as many as without."""
    import mixed_precision

    from figures.messages import Messages

    args = argparse.Namespace(device="cpu", timeout=60, double=False)
    images = torch.randn(4, 1, 28, 28)
    counted = {"all_gather": [], "reduce_scatter": []}
    for dtype in (None, torch.bfloat16):
        model = Transformer(16, 2, 8)
        mixed_precision.shard(model, dtype, args)
        with Messages() as messages:
            model(images).sum().backward()
        for kind, numbers in counted.items():
            numbers.append(messages.sent(kind))
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    # A ring of two ranks sends half. A step gathers twice.
    assert counted == {"all_gather": [size, size / 2], "reduce_scatter": [size / 2, size / 2]}


def test_bytes():
    """Those of the formula."""
    in_group(count_bytes, 2)


def test_small_numbers():
    """A small gradient is 0 in float16, and right if the loss is multiplied.

    The docstring shows the range of float16, and what bfloat16 makes of a small step.
    """
    from mixed_precision import small_gradient

    assert small_gradient(torch.bfloat16, factor=1) == pytest.approx(1e-9, rel=1e-2)
    assert small_gradient(torch.float16, factor=1) == 0
    assert small_gradient(torch.float16, factor=65536) == pytest.approx(1e-9, rel=1e-3)
    float16 = torch.finfo(torch.float16)
    assert float16.max == 65504
    assert 5.9e-8 < float16.smallest_normal * float16.eps < 6e-8
    assert torch.tensor(1, dtype=torch.bfloat16) + 0.001 == 1


INFINITE = """    if dist.get_rank() == 1:
        next(iter(model.parameters())).grad.to_local()[0] = math.inf
"""
UNSCALE = "    scaler.unscale_(optimizer)"
UPDATE = "    scaler.update()\n"


def test_an_infinite_gradient_on_one_rank(change):
    """All ranks skip the step, because unscale_() exchanges what the ranks have found."""
    shown = '    print(f"factor {scaler.get_scale()}", flush=True)\n'
    copy = change(LESSON, (UNSCALE, INFINITE + UNSCALE), (UPDATE, UPDATE + shown))
    flags = (*ONE_EPOCH, "--precision", "float16", "--sharded")
    out = train(copy, *flags, processes=2).stdout
    factors = [float(factor) for factor in re.findall(r"^factor (\S+)$", out, re.M)]
    assert factors == [65536 / 2**step for step in range(1, 13)]
    assert losses(out)[0] > 2.25  # no step is made


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--double", "--precision", "bfloat16"), ("--double", "leave out --precision")),
        (("--clip", -1), ("--clip", "0 or more")),
    ],
)
def test_wrong_flags(flags, words, main):
    """Status 2, one line."""
    one_line(main(LESSON, *SMALL, *flags, env=ENV), *words)


def test_all_in_bfloat16(change):
    """Exercise 1: parameters, gradients and Adam's averages are bfloat16, too."""
    made = "    model = make_model(args).to(device)"
    copy = change(LESSON, (made, "    model = make_model(args).bfloat16().to(device)"))
    found = dtypes(train(copy, *ONE_EPOCH, processes=2).stdout)
    assert found.pop("Autocast") == "float32"
    assert set(found.values()) == {"bfloat16"}


def test_a_loss_in_bfloat16(change):
    """Exercise 2: two to three digits of the loss are left."""
    copy = change(LESSON, ("return logits.float()", "return logits"))
    found = losses(train(copy, *ONE_EPOCH, processes=2).stdout)[0]
    assert 1e-4 < abs(found - losses(printed())[0]) < 2e-2


def test_clipping_before_the_division(change):
    """Exercise 3: what is clipped are the gradients times 65,536. step() then divides them."""
    copy = change(LESSON, (UNSCALE, "    #"))
    flags = ("--precision", "float16", "--clip", 1)
    out = train(copy, *ONE_EPOCH, *flags, processes=2).stdout
    assert losses(out)[0] > losses(printed(*flags))[0] + 0.01
