"""placements.py: what it prints with 2, 3 and 4 ranks; and how gradcheck finds a missing message.

The lesson itself compares its results and gradients with those of a single process.
"""

import re
from argparse import Namespace
from contextlib import redirect_stdout
from io import StringIO
from unittest import mock

import placements
import pytest
import torch
import torch.distributed as dist
from torch.autograd.gradcheck import GradcheckError

from watching.ranks import call


def printed(rank):
    """Return what talk() prints. Only rank 0 prints."""
    args = Namespace(device="cpu", timeout=60)
    joined = mock.patch.object(placements, "join", lambda args: (rank, args.device))
    kept = mock.patch.object(dist, "destroy_process_group")  # call() destroys it
    with joined, kept, redirect_stdout(StringIO()) as out:
        placements.talk(args)
    return out.getvalue()


def test_what_it_prints():
    """The docstring has lines of a run with 2 ranks. More ranks print the same words."""
    quoted = re.findall(r"^ {4}(?!torchrun)(.+)", placements.__doc__, re.M)
    tables = set()
    for ranks in (2, 3, 4):
        lines = call(printed, ranks)[0].splitlines()
        if ranks == 2:
            assert [line for line in lines if line in quoted] == quoted
        first = lines.index("R to S0")
        last = next(i for i, line in enumerate(lines) if line.startswith("gradient of w"))
        tables.add("\n".join(lines[first:last]))
        gradients = [re.findall(r"\d+\.0", line) for line in lines[last + 1 :]]
        terms = [f"{rank + 1}.0" for rank in range(ranks)]
        total = [f"{sum(range(ranks + 1))}.0"] * ranks
        assert gradients == [terms, total, terms, total]
    assert len(tables) == 1


def check_pairs(rank):
    """Try gradcheck, as pages/sharding.md has it, on functions with and without a message."""
    from sequence_parallel import AllTokens, BeginPair, EndPair, OwnTokens
    from tensor_parallel import AddGradients, AddTerms

    torch.manual_seed(0)
    x = torch.randn(1, 4, 3, dtype=torch.double, requires_grad=True)
    mine = torch.randn(2, *x.shape, dtype=torch.double)[rank]
    own = OwnTokens(None)
    every = AllTokens(None)

    def split_by_tokens(x):
        tokens = BeginPair.apply(own(AddGradients.apply(x)), True, None)
        return every(EndPair.apply(mine * tokens, True, None))

    right = [
        lambda x: AddTerms.apply(mine * AddGradients.apply(x)),
        lambda x: every(own(AddGradients.apply(x))),
        split_by_tokens,
    ]
    for function in right:
        assert torch.autograd.gradcheck(function, x)
    without_a_message = [lambda x: AddTerms.apply(mine * x), lambda x: every(own(x))]
    for function in [*without_a_message, AddTerms.apply, AddGradients.apply]:
        with pytest.raises(GradcheckError):
            torch.autograd.gradcheck(function, x)
        dist.barrier()


def test_gradcheck():
    """It accepts pairs, and refuses functions that lack a message, or that are half of a pair."""
    call(check_pairs, 2)
