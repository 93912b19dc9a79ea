"""What manual_pipeline.py builds by hand: for any nn.Sequential, with few activations kept."""

import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from conftest import DIGITS, torchrun
from forked import in_ranks, join
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F


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


def by_hand(rank, world_size, port, results):
    """Run a batch by each schedule, and put this rank's gradients into results.

    Also the most micro-batches whose activations it kept, and the most gradients that it had sent
    and not let go of yet.
    """
    import manual_pipeline as lesson

    join(rank, world_size, port)
    isend = dist.isend
    backward_pass = lesson.Pipeline.backward_pass
    sent, waiting = [], []

    def noted(tensor, dst, group):
        if dst < rank:
            sent.append(StorageWeakRef(tensor.untyped_storage()))
        return isend(tensor, dst, group)

    def counted(pipeline, number):
        backward_pass(pipeline, number)
        waiting.append(len([each for each in sent if not each.expired()]))

    dist.isend = noted
    lesson.Pipeline.backward_pass = counted
    for name, schedule in lesson.SCHEDULES.items():
        for micro_batches in (1, 2, 4, 7):
            layers = some_layers()
            stage, shape = lesson.make_stage(layers, rank, batch()[0][0])
            passes = schedule(rank, world_size, micro_batches)
            pipeline = lesson.Pipeline(stage, shape, passes, timedelta(seconds=60))
            sent.clear()
            waiting.clear()
            logits = pipeline(*batch())
            kept = pipeline.most_kept, max(waiting)
            gradients = {}
            for number, parameter in enumerate(layers.parameters()):
                if parameter.grad is not None:
                    gradients[number] = parameter.grad.tolist()
            with torch.no_grad():
                tested = pipeline.eval()(*batch())
            assert (logits is None) == (tested is None) == (rank < world_size - 1)
            last = None if logits is None else (logits.tolist(), tested.tolist())
            results[rank, name, micro_batches] = gradients, kept, last
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_gradients_of_one_process(world_size):
    """To 1e-12, also with micro-batches of different sizes; what a rank keeps is counted."""
    layers = some_layers()
    images, labels = batch()
    right = layers(images)
    F.cross_entropy(right, labels).backward()
    results = in_ranks(by_hand, world_size)
    for name in ("GPipe", "1F1B"):
        for count in (1, 2, 4, 7):
            found = {}
            for rank in range(world_size):
                gradients, kept, last = results[rank, name, count]
                if rank == world_size - 1:
                    for logits in last:
                        logits = torch.tensor(logits, dtype=torch.float64)
                        torch.testing.assert_close(logits, right, atol=1e-12, rtol=0)
                assert not found.keys() & gradients.keys()
                found |= gradients
                most = count if name == "GPipe" else min(count, world_size - rank)
                assert kept == (most, 1 if rank else 0)
            for number, parameter in enumerate(layers.parameters()):
                assert (number in found) == (parameter.grad is not None)
                if number in found:
                    gradient = torch.tensor(found[number], dtype=torch.float64)
                    torch.testing.assert_close(gradient, parameter.grad, atol=1e-12, rtol=0)


def under_autocast(rank, world_size, port, results):
    """Run a batch by 1F1B, as mixed precision does. Put this rank's gradients into results."""
    import manual_pipeline as lesson

    join(rank, world_size, port)
    layers = some_layers().float()
    images, labels = batch()
    stage, shape = lesson.make_stage(layers, rank, images[0].float())
    passes = lesson.one_forward_one_backward(rank, world_size, 4)
    pipeline = lesson.Pipeline(stage, shape, passes, timedelta(seconds=60))
    with torch.autocast("cpu", torch.bfloat16):
        pipeline(images.float(), labels)
    gradients = {}
    for number, parameter in enumerate(layers.parameters()):
        if parameter.grad is not None:
            gradients[number] = parameter.grad.tolist()
    results[rank] = gradients
    dist.destroy_process_group()


def test_autocast():
    """The stages compute in bfloat16, and the messages fit: about the gradients of one process."""
    layers = some_layers().float()
    images, labels = batch()
    with torch.autocast("cpu", torch.bfloat16):
        output = layers(images.float())
        F.cross_entropy(output, labels).backward()
    assert output.dtype == torch.bfloat16
    found = {}
    for gradients in in_ranks(under_autocast, 3).values():
        found |= gradients
    for number, parameter in enumerate(layers.parameters()):
        gradient = torch.tensor(found[number])
        torch.testing.assert_close(gradient, parameter.grad, atol=2e-3, rtol=2e-2)


def test_a_shared_parameter_is_refused():
    """Each rank would train its own copy."""
    from manual_pipeline import cut

    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    with pytest.raises(ValueError, match="two stages share a parameter"):
        cut(nn.Sequential(first, last), 2)


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        (["F0,F1,B0,B1"], "2 ranks need GPipe, 1F1B, or 2 lists"),
        (["GPipe", "1F1B"], "rank 0 has F0 0 times"),
        (["F0,B0", "F0"], "rank 1 has B0 0 times"),
        (["F0,B0", "F0,B0,F0"], "rank 1 has F0 2 times"),
        (["F0,B0", "F0,B0,F1,B1"], "rank 1 has F1 1 times"),
        (["F0,B0", "B0,F0"], "rank 1 has B0 before F0"),
        (["F0,F1,B0,B1", "F1,F0,B0,B1"], "rank 1 has the order F1 F0, but rank 0 F0 F1"),
    ],
)
def test_lists_that_cannot_work(lists, words, main):
    """One line says what is wrong, before anything starts."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = main("manual_pipeline", *DIGITS, "--schedule", *lists, env=env)
    assert len(done.stderr.strip().splitlines()) == 1 and words in done.stderr


def test_what_is_printed():
    """The passes of each rank, and what it keeps."""
    flags = (*DIGITS, "--epochs", 1, "--schedule", "1F1B", "--batch_size", 120)
    done = torchrun("manual_pipeline", *flags, processes=3).wait()
    assert done.returncode == 0, done.stderr
    assert "rank 2: F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7\n" in done.stdout
    kept = re.findall(r"^rank (\d) keeps ([\d,]+) .* at most (\d) micro-batch", done.stdout, re.M)
    assert kept == [("0", "50,240", "3"), ("1", "4,160", "2"), ("2", "4,810", "1")]
