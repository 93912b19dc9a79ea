"""The lesson on vocabulary parallelism: losses, gradients and messages. test_parity.py trains."""

import copy
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F

from common.models import Language
from watch_ranks.messages import Messages
from watch_ranks.ranks import call

close = partial(torch.testing.assert_close, atol=1e-12, rtol=1e-10)
TOKENS = (3, 5)
BYTES = 8 * 3 * 5  # of a number for each token
RANKS = 2


def gradient(parameter):
    """Return the whole gradient of a parameter that is split by rows."""
    chunks = [torch.empty_like(parameter.grad) for _ in range(RANKS)]
    dist.all_gather(chunks, parameter.grad)
    return torch.cat(chunks)


def by_hand(rank, tied):
    """Compare losses and gradients with those of one process, and count messages."""
    import vocabulary_parallel as lesson

    torch.manual_seed(0)
    whole = Language(8, layers=1, tied=tied).double()
    parts = copy.deepcopy(whole)
    lesson.split_vocabulary(parts, group=None)
    rows, labels = torch.randint(256, (2, *TOKENS))
    labels[0, 1] = labels[2, 4] = -100
    weights = torch.rand(TOKENS, dtype=torch.float64)  # of the tokens' losses
    for _ in range(2):  # gradients accumulate
        logits = whole(rows)
        right = F.cross_entropy(logits, labels, reduction="none")
        (right * weights).sum().backward()
        scores = parts(rows)
        with Messages() as of_loss:
            losses, correct = lesson.SplitCrossEntropy.apply(scores, labels, None)
        with Messages() as of_gradients:
            (losses * weights).sum().backward()
        close(losses, right)
        assert correct.equal(logits.argmax(dim=1) == labels)
    for of in (lambda model: model.stage1[0], lambda model: model.stage2[-1].output):
        close(gradient(of(parts).weight), of(whole).weight.grad)
    assert (parts.stage2[-1].output.weight is parts.stage1[0].weight) == tied
    # Three numbers of each token. In backward(), only the gradients of the last layer's inputs.
    assert [message.nbytes for message in of_loss.of("all_reduce")] == [BYTES, 2 * BYTES]
    assert [message.nbytes for message in of_gradients.noted] == [8 * BYTES]
    # Scores that are too large for exp(), and a rank of which all scores are -inf.
    large = 1e4 * logits.detach()
    large[:, 128:] = -torch.inf
    shard = large.chunk(RANKS, dim=1)[rank]
    losses, _ = lesson.SplitCrossEntropy.apply(shard, labels % 128, None)
    close(losses, F.cross_entropy(large, labels % 128, reduction="none"))


@pytest.mark.parametrize("tied", [False, True])
def test_by_hand(tied):
    """Split or whole, tied or not, each rank has the losses and gradients of one process."""
    call(by_hand, RANKS, tied)


def memory(name):
    """Return a number of bytes that Linux knows about this process, in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) / 1024


def step_of_many_words(rank, by):
    """Compute the gradients of 256 tokens with 128,000 words. Returns the MiB that it takes."""
    import vocabulary_parallel as lesson

    model = Language(64, layers=1)
    model.stage1[0] = torch.nn.Embedding(128_000, 64)
    model.stage2[-1].output = torch.nn.Linear(64, 128_000, bias=False)
    if by == "hand":
        lesson.split_vocabulary(model, None)
    if by == "dtensor":
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        lesson.split_vocabulary_by_dtensor(model, mesh)
    rows, labels = torch.randint(128_000, (2, 2, 128))
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is this, from now on
    with loss_parallel():
        scores = model(rows)
        if by == "hand":
            loss = lesson.SplitCrossEntropy.apply(scores, labels, None)[0].mean()
        else:
            loss = F.cross_entropy(scores, labels)
        del scores
        loss.backward()
    taken = memory("VmHWM") - before
    dist.barrier()
    return taken


def test_the_memory_of_128000_words(record_property):
    """The scores of all words are 125 MiB. One process has three such tensors at a time."""
    taken = {}
    for by, ranks in (("one process", 1), ("hand", RANKS), ("dtensor", RANKS)):
        taken[by] = round(max(call(step_of_many_words, ranks, by)))
    record_property("MiB for a step with 128,000 words", taken)
    assert taken["one process"] > 3 * 125
    assert 125 < taken["hand"] < 1.3 * 125  # two halves
    assert taken["hand"] < taken["dtensor"] < taken["one process"]
