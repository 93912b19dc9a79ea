"""How token_mean is checked."""

import torch
import torch._dynamo  # DDP imports it: here, before the ranks are forked
import torch.distributed as dist
from judging.single import seeded
from judging.texts import Bigram, mean_loss, micro_batches_of
from judging.traffic import uncounted
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

CASES = {
    "3 micro-batches": {"count": 3},
    "2 micro-batches, one of rank 0 only padding": {"count": 2, "padding": True},
}
IMITATED = True
HINTS = """
In the mean over all tokens, each token counts the same. So by which number must the loss of a token
be divided, on whichever rank and in whichever micro-batch it is? And what does DDP divide by?

F.cross_entropy(scores, labels, reduction="sum") adds up the losses of a micro-batch, and leaves out
the label -100. dist.all_reduce can add up the number of tokens before the first backward(). NCCL
cannot send CPU tensors, so make this number a tensor on the device of the labels.

count = the tokens of all micro-batches of this rank, added up over the ranks
for each micro-batch:
    loss = the sum of its losses / count * the number of ranks, by which DDP divides
    loss.backward()
"""


def run(token_mean, **case):
    model = seeded(Bigram)
    with uncounted():
        ddp = DistributedDataParallel(model)
        for _ in range(2):  # DDP sends more in its first steps, because it changes its buckets
            mean_loss(ddp, micro_batches_of(0, 1)).backward()
    ddp.zero_grad()
    token_mean(ddp, micro_batches_of(dist.get_rank(), **case))
    return gradients_of(model)


def gradients_of(model):
    return {f"the gradient of {name}": each.grad for name, each in model.named_parameters()}


def expected(rank, world_size, **case):
    model = seeded(Bigram)
    micro_batches = []
    for each in range(world_size):
        micro_batches += micro_batches_of(each, **case)
    mean_loss(model, micro_batches).backward()
    return gradients_of(model)


def limits(rank, world_size, count, padding=False):
    return {"messages": count + 1}  # DDP sends one in each backward()


def token_mean(model, micro_batches):
    """Why: each loss is divided by the tokens of all ranks. The factor undoes DDP's division."""
    count = sum((labels != -100).sum() for _, labels in micro_batches)
    dist.all_reduce(count)
    for rows, labels in micro_batches:
        total = F.cross_entropy(model(rows), labels, reduction="sum")
        loss = total / count * dist.get_world_size()
        loss.backward()


COUNT = "    count = sum((labels != -100).sum() for _, labels in micro_batches)\n"
REDUCE = "    dist.all_reduce(count)\n"
FACTOR = " * dist.get_world_size()"
SKIP = "        if (labels == -100).all():\n            continue\n"
SUM = ', reduction="sum"'
WORDS = {
    "HANG, 2 micro": "DDP sends in each backward(), so a rank must also call it for a "
    "micro-batch of padding.",
    "messages;": "DDP sends the gradients. In addition, one message is enough, with the number "
    "of tokens of all micro-batches.",
}
NO_TOKENS, COSTLY = WORDS.values()
MISTAKES = {
    "This is a mean of means: a token counts more in a micro-batch with few tokens than in one "
    "with many.": (SUM, "", f"total / count{FACTOR}", "total / len(micro_batches)"),
    "Each rank has divided by the number of its own tokens, so a token counts more on a rank with "
    "few tokens.": (REDUCE, "", FACTOR, ""),
    "This is the sum of the ranks' means.": (REDUCE, ""),
    "Each micro-batch is divided by its tokens on all ranks, and not by those of all micro-batches."
    "": (
        *(COUNT + REDUCE, ""),
        *("        total", f"        count = (labels != -100).sum()\n    {REDUCE}        total"),
        *(FACTOR, f"{FACTOR} / len(micro_batches)"),
    ),
    "DDP divides the sum of the gradients by the number of ranks, but your number already has the "
    "tokens of all ranks.": (FACTOR, ""),
    "These are this rank's own terms. DDP averages over the ranks in a backward() outside of "
    "no_sync(), if forward() was a call of model(...).": ("model(rows)", "model.module(rows)"),
    "Padding is counted, too.": ("(labels != -100).sum()", "torch.tensor(labels.numel())"),
    NO_TOKENS: ("        total", f"{SKIP}        total"),
    COSTLY: (
        *(COUNT, "    counts = [(labels != -100).sum() for _, labels in micro_batches]\n"),
        *(REDUCE, "    for count in counts:\n        dist.all_reduce(count)\n"),
        *("total / count", "total / sum(counts)"),
    ),
}
