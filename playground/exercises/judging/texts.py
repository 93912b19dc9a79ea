"""Texts of different lengths, and a small model of them, for the checks of a language model."""

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 7
TOKENS = 8  # of a row, padding included


class Bigram(nn.Module):
    """Scores the next token from each token alone."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 5)
        self.output = nn.Linear(5, VOCABULARY)

    def forward(self, rows):
        """Turn tokens, int64 (N, tokens), into scores, (N, 7, tokens)."""
        return self.output(self.embedding(rows)).transpose(1, 2)


def places_of(order, tokens, world_size):
    """Return for each rank the places of its tokens, in ascending order."""
    everything = torch.arange(tokens)
    if order == "plain":
        return list(everything.tensor_split(world_size))
    if order == "dealt":
        return [everything[rank::world_size] for rank in range(world_size)]
    chunks = everything.tensor_split(2 * world_size)
    pairs = zip(chunks[:world_size], chunks[: world_size - 1 : -1], strict=True)
    return [torch.cat(pair) for pair in pairs]


def micro_batches_of(rank, count, padding=False):
    """Return micro-batches of a rank, a list of pairs (rows, labels), each int64 (2, 8).

    Padding has the label -100. With `padding`, rank 0's first micro-batch has nothing else.
    """
    generator = torch.Generator().manual_seed(rank)
    micro_batches = []
    for number in range(count):
        rows, labels = torch.randint(VOCABULARY, (2, 2, TOKENS), generator=generator)
        for row in range(2):
            length = 1 + (3 * rank + 2 * number + row) % TOKENS
            labels[row, length:] = -100
        micro_batches.append((rows, labels))
    if padding and rank == 0:
        micro_batches[0][1].fill_(-100)
    return micro_batches


def mean_loss(model, micro_batches):
    """Return the mean loss of all tokens of all micro-batches, as of a single process."""
    rows = torch.cat([rows for rows, _ in micro_batches])
    labels = torch.cat([labels for _, labels in micro_batches])
    return F.cross_entropy(model(rows), labels)
