"""The mixed precision lesson: dtypes, bytes, clipping, and the scaler.

The functions without "test" in their names run on two ranks, or help them.
"""

import argparse
import contextlib
import copy
import io
import math

import mixed_precision as lesson
import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from common.models import Transformer
from watching.messages import Messages
from watching.ranks import call

CPU = torch.device("cpu")
MATRIX_PRODUCTS = {"Linear", "Attention", "GELU", "LastToken"}
SUMS = {"Tokens", "LayerNorm", "Block"}  # what adds up small numbers
OF_THE_OPTIMIZER = {"parameters", "gradients", "optimizer state"}


def made(dtype, sharded, double=False):
    """Return a model that is parallel as in the lesson, the one inside, and a whole one."""
    torch.manual_seed(0)
    whole = Transformer(16, 2, 8)
    if double:
        whole.double()
    model = copy.deepcopy(whole)
    if sharded:
        lesson.shard(model, dtype, argparse.Namespace(device="cpu", timeout=60, double=double))
        return model, model, whole
    if dtype is not None:
        model = lesson.Autocast(model, dtype)
    return DistributedDataParallel(model), model, whole


def printed(function, *args):
    """Return what a function prints on this rank."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        function(*args)
    return out.getvalue()


class SpoiledScaler(torch.amp.GradScaler):
    """A scaler that meets an infinite gradient in the shard of rank 1."""

    def unscale_(self, optimizer):
        """Divide the gradients again."""
        if dist.get_rank() == 1:
            optimizer.param_groups[0]["params"][0].grad.to_local()[0] = math.inf
        super().unscale_(optimizer)


def step_of(rank, sharded):
    """Make a step in float64, one that must be skipped, and compare with one process."""
    parallel, model, whole = made(None, sharded, double=True)
    images, labels = torch.randn(8, 1, 28, 28, dtype=torch.float64), torch.arange(8)
    F.cross_entropy(whole(images), labels).backward()
    assert torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5) > 1
    right = [each.detach() - each.grad for each in whole.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1)

    def make_step(scaler):
        loss = F.cross_entropy(parallel(images.chunk(2)[rank]), labels.chunk(2)[rank])
        lesson.make_step(model, optimizer, scaler, 0.5, loss)
        for each, number in zip(model.parameters(), right, strict=True):
            found = each.full_tensor() if sharded else each.detach()
            torch.testing.assert_close(found, number, atol=1e-12, rtol=0)
        return scaler.get_scale()

    assert make_step(torch.amp.GradScaler("cpu")) == 65536
    shown = printed(lesson.show_norms, model)
    if rank == 0:
        gradients = [each.grad.chunk(2)[0] if sharded else each.grad for each in whole.parameters()]
        own = torch.nn.utils.get_total_norm(gradients)
        assert shown == f"norm of the last gradients: 0.5000, of what rank 0 has: {own:.4f}\n"
    if sharded:
        assert make_step(SpoiledScaler("cpu")) == 32768


@pytest.mark.parametrize("sharded", [False, True])
def test_clipping(sharded):
    """The step of one process that clips. If one shard has an infinite gradient, no rank steps."""
    call(step_of, 2, sharded)


def dtypes_of(shown):
    """Return the dtype of each thing that the lesson prints one for."""
    found = {}
    for row in shown.splitlines():
        dtype, _, names = row.partition(": ")
        found |= dict.fromkeys(names.split(", "), dtype)
    return found


def dtypes_and_bytes(rank):
    """Compare what is printed and sent, and how far 16 bits are from float32."""
    images = torch.randn(4, 1, 28, 28)
    far = []
    sent = []
    for name, sharded in (("bfloat16", False), ("bfloat16", True), ("float16", True)):
        parallel, model, whole = made(lesson.DTYPES[name], sharded)
        optimizer = torch.optim.Adam(model.parameters())
        with Messages() as messages:
            logits = parallel(images)
            logits.sum().backward()
        optimizer.step()
        assert logits.dtype == torch.float32
        far.append((logits - whole(images)).abs().max().item())
        sent.append([messages.sent(kind) for kind in ("all_gather", "reduce_scatter")])
        narrow = MATRIX_PRODUCTS | (SUMS if sharded else {"Transformer"})
        wide = OF_THE_OPTIMIZER | ({"Transformer"} if sharded else SUMS | {"Autocast"})
        expected = dict.fromkeys(narrow, name) | dict.fromkeys(wide, "float32")
        shown = printed(lesson.show_dtypes, model, optimizer, [(images, None)], CPU)
        assert dtypes_of(shown) == (expected if rank == 0 else {})
    assert min(far[:2]) > 1e-3 and max(far) < 0.1  # bfloat16 differs enough, and none too much
    assert 1e-5 < far[2] < far[1] / 2
    # A ring of two sends half of the parameters. A step gathers twice, and reduces in 32 bits.
    half = 2 * sum(parameter.numel() for parameter in whole.parameters())
    assert sent[1:] == [[half, half]] * 2


def test_dtypes_and_bytes():
    """With autocast, and with a policy, which gathers half of the bytes and reduces all of them."""
    call(dtypes_and_bytes, 2)
