"""What manual_data_parallel.py does by hand holds for any module, not only for the lessons' own."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import free_port
from torch import nn

ROWS = 12  # images in a step, over all ranks; a multiple of 2 and of 3
EVERY_WAY = [("broadcast", False), ("send", True)]  # --weights, --bucket


class Unusual(nn.Module):
    """Parameters and buffers of every kind that a reader's model may have."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(5, 7)
        self.frozen.weight.requires_grad_(False)
        self.scale = nn.Parameter(torch.randn(()))
        self.turned = nn.Parameter(torch.randn(7, 7).t())  # not contiguous, but dense
        self.holes = nn.Parameter(torch.randn(7, 14)[:, ::2])  # neither
        self.single = nn.Parameter(torch.randn(7, dtype=torch.float32))  # another dtype
        self.nothing = nn.Parameter(torch.empty(0))
        self.encoder = nn.Linear(7, 7, bias=False)
        self.decoder = nn.Linear(7, 7, bias=False)
        self.decoder.weight = self.encoder.weight
        self.unused = nn.Linear(3, 3)
        self.expert = nn.Linear(7, 7)  # only for rows that begin with a positive number
        self.norm = nn.BatchNorm1d(7)  # in eval mode: it normalises by its buffers
        self.register_buffer("shift", torch.randn(7), persistent=False)
        self.register_buffer("mask", torch.rand(7) > 0.5)

    def forward(self, rows):
        """Turn rows, (N, 5), into outputs, (N, 7)."""
        hidden = self.frozen(rows) * self.scale @ self.turned @ self.holes
        hidden = self.norm(hidden * self.single) + self.shift * self.mask
        hidden = self.decoder(torch.tanh(self.encoder(hidden)))
        chosen = rows[:, 0] > 0
        if chosen.any():
            hidden = hidden + chosen.unsqueeze(1) * self.expert(hidden)
        return hidden


def make(seed):
    """Return such a model in float64, different for each seed, its buffers too."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(seed)
    model = Unusual().eval()
    model.norm.running_mean += torch.rand(7)
    model.norm.num_batches_tracked += seed + 3
    return model


def batches():
    """Return three global batches: the expert is used by one row, by none, and by all rows."""
    rows = torch.randn(3, ROWS, 5, generator=torch.Generator().manual_seed(0))
    rows[..., 0] = -1
    rows[0, 1, 0] = 1
    rows[2, :, 0] = 1
    return rows


def held(model):
    """Return all that a model holds, as lists, and the parameters that have no gradient."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    return {name: tensor.tolist() for name, tensor in tensors}, without


def steps(model, rank=0, world_size=1, average=None):
    """Train three steps with this rank's rows. Returns what the model holds after each of them."""
    # Weight decay and momentum move a parameter whose gradient is zero, but none without one.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    after = []
    for rows in batches():
        optimizer.zero_grad()
        model(rows[rank::world_size]).square().mean().backward()
        if average:
            average()
        optimizer.step()
        after.append(held(model))
    return after


def by_hand(rank, world_size, port, results):
    """Train by the lesson's functions, in each way, and put into results what this rank holds."""
    import manual_data_parallel as lesson

    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    for how, bucket in EVERY_WAY:
        model = make(rank)
        lesson.send_weights(model, how)
        sent = held(model)
        average = partial(lesson.average_gradients, model, bucket)
        trained = steps(model, rank, world_size, average)
        results[rank, how, bucket] = sent, trained
    dist.destroy_process_group()


def assert_equal(one, other):
    """The same numbers, up to rounding, and no gradient for the same parameters."""
    numbers, without = one
    expected, expected_without = other
    assert numbers.keys() == expected.keys()
    assert without == expected_without
    for name, value in numbers.items():
        tolerance = 1e-6 if name == "single" else 1e-12
        difference = torch.tensor(value).double() - torch.tensor(expected[name]).double()
        assert difference.abs().sum() <= tolerance, name


def in_ranks(function, world_size, *args):
    """Call a function in so many processes. Returns the dictionary that they have filled."""
    with mp.Manager() as manager:
        results = manager.dict()
        words = (world_size, free_port(), results, *args)
        mp.start_processes(function, words, world_size, start_method="fork")
        return dict(results)


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_unusual_model_trains_as_in_one_process(world_size):
    """Frozen, tied and unused parameters, several dtypes, any shape and strides, buffers.

    For both ways to send the parameters, and both ways to average the gradients.
    """
    dtype = torch.get_default_dtype()
    try:
        model = make(0)
        first = held(model)
        right = steps(model)
    finally:
        torch.set_default_dtype(dtype)
    assert ["expert.weight" in without for _, without in right] == [False, True, False]
    assert all({"frozen.weight", "unused.weight"} <= without for _, without in right)
    results = in_ranks(by_hand, world_size)
    assert len(results) == 2 * world_size
    for sent, trained in results.values():
        assert sent == first
        for one, other in zip(trained, right, strict=True):
            assert_equal(one, other)


def two_dtypes():
    """Return a model with float16 and float32 parameters, one of which two layers share."""
    model = nn.ModuleList([nn.Linear(3, 2).half(), nn.Linear(3, 2), nn.Linear(3, 2)])
    model[2].weight = model[1].weight
    return model


def counted(rank, world_size, port, results):
    """Send and average such a model. Puts the messages and the means into results."""
    import manual_data_parallel as lesson

    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    messages = []

    def note(call, message, *args, **options):
        messages.append((str(message.dtype), message.numel()))
        return call(message, *args, **options)

    lesson.dist.broadcast = partial(note, dist.broadcast)
    lesson.dist.all_reduce = partial(note, dist.all_reduce)
    model = two_dtypes()
    lesson.send_weights(model, "broadcast")
    results[rank, "send"] = list(messages)
    for bucket in (False, True):
        messages.clear()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 48_000 if rank else 32_000)
        lesson.average_gradients(model, bucket)
        gradients = [parameter.grad.flatten() for parameter in model.parameters()]
        results[rank, bucket] = list(messages), set(torch.cat(gradients).tolist())
    dist.destroy_process_group()


def test_messages_and_float16():
    """A shared parameter is sent once, each dtype has a bucket, and a large mean fits float16."""
    results = in_ranks(counted, 2)
    half, whole, flags = "torch.float16", "torch.float32", ("torch.int32", 5)
    each = [(half, 6), (half, 2), (whole, 6), (whole, 2), (whole, 2)]
    for rank in (0, 1):
        assert results[rank, "send"] == each
        assert results[rank, False] == ([flags, *each], {40_000})
        assert results[rank, True] == ([flags, (half, 8), (whole, 10)], {40_000})
