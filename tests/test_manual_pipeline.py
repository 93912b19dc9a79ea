"""What manual_pipeline.py builds by hand: for any nn.Sequential, with few activations kept."""

from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from watching.ranks import call


def some_layers():
    """Return layers whose activations have three axes, with no bias here and there."""
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(1, 3, 3),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(48, 7, bias=False),
        nn.Tanh(),
        nn.Linear(7, 9),
        nn.Softplus(),
        nn.Linear(9, 4),
    ]
    return nn.Sequential(*layers).double()


def batch(size=11):
    """Return images and labels."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(size, 1, 6, 6, generator=generator, dtype=torch.float64)
    return images, torch.randint(4, (size,), generator=generator)


def by_hand(rank, dtype):
    """Compute a batch by each schedule, and compare what this rank has with one process.

    With bfloat16, the stages compute as mixed precision does, and are close to one process only.
    """
    import manual_pipeline as lesson

    mixed = dtype == torch.bfloat16
    precision = torch.float32 if mixed else dtype
    close = partial(torch.testing.assert_close, atol=1e-12, rtol=0)
    if mixed:
        close = partial(torch.testing.assert_close, atol=1e-2, rtol=2e-2, check_dtype=False)
    world_size = dist.get_world_size()
    images, labels = batch()
    images = images.to(precision)
    whole = some_layers().to(precision)
    with torch.autocast("cpu", dtype, enabled=mixed):
        right = whole(images)
        assert right.dtype == dtype
        F.cross_entropy(right, labels).backward()
        for name, schedule in lesson.SCHEDULES.items():
            for micro_batches in (1, 4, 7):
                layers = some_layers().to(precision)
                stage, shape = lesson.make_stage(layers, rank, images[0])
                passes = schedule(rank, world_size, micro_batches)
                pipeline = lesson.Pipeline(stage, shape, passes, timedelta(seconds=60))
                found = [pipeline(images, labels)]
                most = min(micro_batches, world_size - rank)
                assert pipeline.most_kept == (micro_batches if name == "GPipe" else most)
                with torch.no_grad():
                    found.append(pipeline.eval()(images, labels))
                for logits in found:
                    assert (logits is None) == (rank < world_size - 1)
                    assert logits is None or close(logits, right) is None
                own = []
                pairs = zip(layers.parameters(), whole.parameters(), strict=True)
                for number, (parameter, expected) in enumerate(pairs):
                    if parameter.grad is not None:
                        close(parameter.grad, expected.grad)
                        own.append(number)
                by_rank = [None] * world_size
                dist.all_gather_object(by_rank, own)
                assert sum(by_rank, []) == list(range(number + 1))


@pytest.mark.parametrize(
    ("world_size", "dtype"), [(1, torch.float64), (3, torch.float64), (3, torch.bfloat16)]
)
def test_the_gradients_of_one_process(world_size, dtype):
    """To 1e-12, also with micro-batches of different sizes; what a rank keeps is counted."""
    call(by_hand, world_size, dtype)
