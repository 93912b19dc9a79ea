"""The mixed precision lesson: bytes, clipping, and the scaler.

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
from watch_ranks.messages import Messages
from watch_ranks.ranks import call


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


def count_bytes(_):
    """Half of the bytes of all parameters are gathered, and all bytes of the gradients reduced."""
    for dtype in (torch.bfloat16, torch.float16):
        model, _, whole = made(dtype, sharded=True)
        with Messages() as messages:
            model(torch.randn(4, 1, 28, 28)).sum().backward()
        # A ring of two sends half of them. A step gathers twice, and reduces in 32 bits.
        half = 2 * sum(parameter.numel() for parameter in whole.parameters())
        assert [messages.sent(kind) for kind in ("all_gather", "reduce_scatter")] == [half, half]


def test_bytes():
    """Those that sharding.md says. The docstring, which test_readme.py runs, has the dtypes."""
    call(count_bytes, 2)
