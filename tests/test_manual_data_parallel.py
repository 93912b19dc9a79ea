"""What manual_data_parallel.py does by hand trains as one process does, in so many messages."""

import copy
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn import functional as F

from common.models import MLP
from watching.ranks import call

IMAGES = 12  # in a step, over all ranks; a multiple of 2 and of 3


def make(seed, frozen=0):
    """Return an MLP in float64, different for each seed. Its first parameters are frozen."""
    torch.manual_seed(seed)
    model = MLP(width=5).double()
    for parameter in list(model.parameters())[:frozen]:
        parameter.requires_grad_(False)
    return model


def steps(model, rank=0, world_size=1, average=lambda: None):
    """Train three steps with this rank's images. Returns the parameters after each of them."""
    generator = torch.Generator().manual_seed(0)
    # Weight decay and momentum move a parameter whose gradient is zero, but none without one.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    after = []
    for _ in range(3):
        images = torch.randn(IMAGES, 1, 28, 28, generator=generator, dtype=torch.float64)
        labels = torch.randint(10, (IMAGES,), generator=generator)
        optimizer.zero_grad()
        outputs = model(images[rank::world_size])
        F.cross_entropy(outputs, labels[rank::world_size]).backward()
        average()
        optimizer.step()
        after.append(copy.deepcopy(model.state_dict()))
    return after


def by_hand(rank, world_size):
    """Train in both ways, count the messages of a step, and compare with one process."""
    import manual_data_parallel as lesson

    for average, frozen, messages in (
        (lesson.average_gradients, 0, 8),
        (lesson.average_gradients, 2, 6),
        (lesson.average_in_one_bucket, 2, 1),
    ):
        expected = make(0, frozen)
        model = make(rank, frozen)
        lesson.send_weights(model)
        torch.testing.assert_close(model.state_dict(), expected.state_dict(), atol=0, rtol=0)

        def count_and_average(model=model, average=average, messages=messages):
            with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as calls:
                average(model)
            assert calls.call_count == messages

        trained = steps(model, rank, world_size, count_and_average)
        torch.testing.assert_close(trained, steps(expected), atol=1e-12, rtol=0)


def test_ranks_train_as_one_process():
    """With a frozen layer, too: 8 or 6 messages in a step, or 1 with a bucket."""
    call(by_hand, 3, 3)
