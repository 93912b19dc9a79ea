"""sharded_muon.py: its ways compute one thing, the one of torch.optim.Muon, and what each sends.

The functions without "test" in their names run on ranks, or help them.
"""

import re
from collections import Counter
from unittest import mock

import pytest
import sharded_muon
import torch
import torch.distributed as dist
from conftest import DIGITS, lesson_path, losses, run
from torch.distributed.tensor import Shard, distribute_tensor

from watching.ranks import call

LESSON = "sharded_muon"
MATRICES = 2 * 64 * 64 * 4  # bytes of those of the default model
WAYS = [sharded_muon.by_dtensor, sharded_muon.by_gathering, sharded_muon.by_owners]
# Of three ranks, the last one has fewer rows of the first matrix, and none of the second one.
SHAPES = [(7, 5), (4, 9), (6, 6), (3, 8)]
STEPS = 3
TWO_EPOCHS = (*DIGITS, "--batch_size", 120, "--epochs", 2, "--double")
TRANSFORMER = ("--model", "transformer", "--tokens", 8, "--width", 16)
RUNS = ("gather 1", "owner 3", "dtensor 2")  # ways and numbers of ranks that must agree


def drawn(seed):
    """Return random matrices, float64."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def torchs_own():
    """Return the matrices after a few steps of torch.optim.Muon in one process."""
    matrices = [torch.nn.Parameter(matrix) for matrix in drawn(0)]
    muon = torch.optim.Muon(matrices, lr=0.1, weight_decay=0, nesterov=False)
    for step in range(STEPS):
        for matrix, gradient in zip(matrices, drawn(step + 1), strict=True):
            matrix.grad = gradient
        muon.step()
    return [matrix.detach() for matrix in matrices]


def moved(rank, expected):
    """Make the same steps in each way, and count who computes what."""
    mesh = dist.init_device_mesh("cpu", (3,))
    orthogonalize = sharded_muon.orthogonalize
    for way in WAYS:
        computed = mock.Mock(side_effect=orthogonalize)
        matrices = [distribute_tensor(matrix, mesh, [Shard(0)]) for matrix in drawn(0)]
        matrices = [torch.nn.Parameter(matrix) for matrix in matrices]
        muon = sharded_muon.Muon(matrices, 0.1, way)
        with mock.patch.object(sharded_muon, "orthogonalize", computed):
            for step in range(STEPS):
                for matrix, gradient in zip(matrices, drawn(step + 1), strict=True):
                    matrix.grad = distribute_tensor(gradient, mesh, [Shard(0)])
                muon.step()
        own = 2 if rank == 0 else 1  # the ranks take turns with four matrices
        assert computed.call_count == STEPS * (own if way is sharded_muon.by_owners else 4)
        whole = [matrix.full_tensor() for matrix in matrices]
        torch.testing.assert_close(whole, expected, atol=1e-12, rtol=0)
    dist.barrier()


def test_the_steps_of_torchs_own_optimizer():
    """They are the same to 1e-12, if torch.optim.Muon is kept from computing in bfloat16."""
    rounded = torchs_own()
    with (
        mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone),
        mock.patch.object(torch, "bfloat16", torch.float64),
    ):
        exact = torchs_own()
    differences = [(a - b).abs().max() for a, b in zip(rounded, exact, strict=True)]
    assert 1e-5 < max(differences) < 1e-2
    call(moved, 3, exact)


def test_the_same_twelve_digits():
    """From all ways and numbers of ranks. PyTorch's own optimizer rounds to bfloat16."""
    found = {}
    for each in (*RUNS, "torch 1"):
        way, processes = each.split()
        done = run(LESSON, *TWO_EPOCHS, *TRANSFORMER, "--by", way, processes=int(processes))
        found[each] = losses(done.stdout)
    expected = found[RUNS[0]]
    assert len(expected) == 2
    for each in RUNS:
        assert found[each] == pytest.approx(expected, abs=2e-12), each
    apart = [abs(a - b) for a, b in zip(found["torch 1"], expected, strict=True)]
    assert 1e-6 < max(apart) < 5e-3


def test_the_table_of_calls():
    """The docstring has the calls that watch.py counts in a step of the optimizer.

    By a ring of two ranks, a rank sends what it gives to its all_gathers.
    """
    row = r"^    (\w+)  +(\d.*?)  +([\d.]* ?)\(n-1\)/n"
    rows = re.findall(row, sharded_muon.__doc__, re.M)
    assert [way for way, *_ in rows] == ["torch", "dtensor", "gather", "owner"]
    for way, calls, factor in rows:
        words = (lesson_path(LESSON), *DIGITS, "--epochs", 1, "--by", way)
        done = run("watch", *words, processes=2)
        found, given = Counter(), Counter()
        pattern = r"^all +(\w+) +2 +(\d+) +([\d,]+) +\d+: (?!logits|loss)"
        for kind, count, size in re.findall(pattern, done.stdout, re.M):
            found[kind] += int(count)
            given[kind] += int(size.replace(",", ""))
        assert calls.split(", ") == [f"{count} {call}" for call, count in sorted(found.items())]
        if way != "owner":
            assert given["all_gather"] == float(factor or 1) / 2 * MATRICES
