"""What manual_pipeline.py builds by hand: for any nn.Sequential, with few activations."""

import re

import pytest
import torch
import torch.distributed as dist
from conftest import DIGITS, torchrun
from test_manual_data_parallel import in_ranks
from torch import nn
from torch.nn import functional as F


class Permuted(nn.Module):
    """Returns its input with other strides, as a convolution in channels_last does."""

    def forward(self, x):
        """Return (N, C, H, W), in memory as (N, H, W, C)."""
        return x.contiguous(memory_format=torch.channels_last)


def unusual():
    """Return layers with frozen parameters, buffers, other strides, and no bias here and there."""
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(1, 3, 3),
        nn.BatchNorm2d(3).eval(),
        Permuted(),
        nn.Flatten(),
        nn.Linear(48, 7, bias=False),
        nn.Tanh(),
        nn.Linear(7, 9),
        nn.Softplus(),
        nn.Linear(9, 4),
    ]
    layers[0].requires_grad_(False)
    layers[6].bias.requires_grad_(False)
    return nn.Sequential(*layers).double()


def batch(size=11):
    """Return images and labels."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(size, 1, 6, 6, generator=generator, dtype=torch.float64)
    return images, torch.randint(4, (size,), generator=generator)


def by_hand(rank, world_size, port, results):
    """Run a batch by each schedule, and put this rank's gradients into results."""
    import manual_pipeline as lesson

    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    for name, schedule in lesson.SCHEDULES.items():
        for micro_batches in (1, 2, 4, 7):
            layers = unusual()
            stage = lesson.Stage(lesson.cut(layers, world_size)[rank], batch()[0][0], "cpu")
            stage.begin(*batch(), micro_batches)
            schedule(stage, micro_batches)
            gradients = {}
            for number, parameter in enumerate(layers.parameters()):
                if parameter.grad is not None:
                    gradients[number] = parameter.grad.tolist()
            results[rank, name, micro_batches] = gradients, stage.most_kept
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_gradients_of_one_process(world_size):
    """To 1e-12, also with micro-batches of different sizes; the activations kept are counted."""
    layers = unusual()
    images, labels = batch()
    F.cross_entropy(layers(images), labels).backward()
    results = in_ranks(by_hand, world_size)
    for name in ("GPipe", "1F1B"):
        for count in (1, 2, 4, 7):
            found = {}
            for rank in range(world_size):
                gradients, kept = results[rank, name, count]
                assert not found.keys() & gradients.keys()
                found |= gradients
                assert kept == (count if name == "GPipe" else min(count, world_size - rank))
            for number, parameter in enumerate(layers.parameters()):
                assert (number in found) == (parameter.grad is not None)
                if number in found:
                    gradient = torch.tensor(found[number], dtype=torch.float64)
                    torch.testing.assert_close(gradient, parameter.grad, atol=1e-12, rtol=0)


def test_a_shared_parameter_is_refused():
    """Each rank would train its own copy."""
    from manual_pipeline import cut

    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    with pytest.raises(ValueError, match="stages 0 and 1 share a tensor"):
        cut(nn.Sequential(first, last), 2)


def test_what_is_printed():
    """The activations that were kept, and a timeline of both steps."""
    flags = (*DIGITS, "--epochs", 1, "--schedule", "1F1B", "--batch_size", 120)
    done = torchrun("manual_pipeline", *flags, processes=3).wait()
    assert done.returncode == 0, done.stderr
    assert (
        "largest number of micro-batches whose activations each rank kept: [3, 2, 1]\n"
        in done.stdout
    )
    assert re.search(r"^1F1B, 8 micro-batches: .*\(p-1\)/\(m\+p-1\) = 0.20$", done.stdout, re.M)
    assert len(re.findall(r"^rank \d \|", done.stdout, re.M)) == 6
