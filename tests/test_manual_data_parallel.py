"""What manual_data_parallel.py does by hand trains as one process does, in so many messages."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from forked import in_ranks, join
from torch.nn import functional as F

from common.models import MLP

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
        after.append([parameter.tolist() for parameter in model.parameters()])
    return after


def assert_equal(after, expected):
    """The same parameters after each step, up to rounding."""
    for parameters, others in zip(after, expected, strict=True):
        for parameter, other in zip(parameters, others, strict=True):
            numbers = torch.tensor(parameter, dtype=torch.float64)
            right = torch.tensor(other, dtype=torch.float64)
            torch.testing.assert_close(numbers, right, atol=1e-12, rtol=0)


def by_hand(rank, world_size, port, results):
    """Train in both ways, and put into results the messages of a step, and the parameters."""
    import manual_data_parallel as lesson

    join(rank, world_size, port)
    for average in (lesson.average_gradients, lesson.average_in_one_bucket):
        for frozen in (0, 2):
            model = make(rank, frozen)
            lesson.send_weights(model)
            sent = [parameter.tolist() for parameter in model.parameters()]

            def count_and_average(model=model, average=average, frozen=frozen):
                with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as calls:
                    average(model)
                results[rank, average.__name__, frozen, "messages"] = calls.call_count

            trained = steps(model, rank, world_size, count_and_average)
            results[rank, average.__name__, frozen] = sent, trained
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_train_as_one_process(world_size):
    """With a frozen layer, too: 8 or 6 messages in a step, or 1 with a bucket."""
    results = in_ranks(by_hand, world_size)
    for frozen in (0, 2):
        model = make(0, frozen)
        first = [parameter.tolist() for parameter in model.parameters()]
        right = steps(model)
        for rank in range(world_size):
            for name, messages in (("average_gradients", 8 - frozen), ("average_in_one_bucket", 1)):
                sent, trained = results[rank, name, frozen]
                assert sent == first
                assert_equal(trained, right)
                assert results[rank, name, frozen, "messages"] == messages
