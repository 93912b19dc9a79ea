"""A small language model, and the places of tokens that are split between the ranks."""

import torch
from torch import nn

VOCABULARY = 7


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
