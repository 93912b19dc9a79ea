"""How token_mean is checked."""

import torch.distributed as dist
from judging.single import gradients_of, seeded
from judging.texts import Bigram, mean_loss, micro_batches_of
from judging.traffic import uncounted
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

CASES = {
    "3 micro-batches": {"count": 3},
    "2 micro-batches, one of rank 0 only padding": {"count": 2, "padding": True},
}
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


def run(token_mean, rank, world_size, **case):
    model = seeded(Bigram)
    with uncounted():
        ddp = DistributedDataParallel(model)
        for _ in range(2):  # DDP sends more in its first steps, because it changes its buckets
            mean_loss(ddp, micro_batches_of(0, 1)).backward()
    ddp.zero_grad()
    token_mean(ddp, micro_batches_of(rank, **case))
    return gradients_of(model)


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
    "It is about 1.2 times what is expected": (
        *(SUM, "", f"total / count{FACTOR}", "total / len(micro_batches)"),
    ),
    "It differs by about 17% from what is expected.": (REDUCE, "", FACTOR, ""),
    "It is what is expected, divided by 2": (FACTOR, ""),
    "The mean over the ranks is": ("model(rows)", "model.module(rows)"),
    NO_TOKENS: ("        total", f"{SKIP}        total"),
    COSTLY: (
        *(COUNT, "    counts = [(labels != -100).sum() for _, labels in micro_batches]\n"),
        *(REDUCE, "    for count in counts:\n        dist.all_reduce(count)\n"),
        *("total / count", "total / sum(counts)"),
    ),
}
