"""The layers of a transformer: causal attention, and an MLP, for each token of a sequence."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Tokens(nn.Module):
    """The embedding: turn images, (N, 1, 28, 28), into tokens, (N, tokens, width).

    `tokens` is the sequence length: an image is cut into so many equal pieces, each of which gets
    its position. `width` is the hidden size (d_model).
    """

    def __init__(self, width: int, tokens: int):
        super().__init__()
        self.tokens = tokens
        self.embed = nn.Linear(28 * 28 // tokens, width)
        self.position = nn.Parameter(torch.randn(tokens, width) * 0.02)

    def forward(self, images: Tensor) -> Tensor:
        pieces = images.flatten(1).unflatten(1, (self.tokens, -1))
        return self.embed(pieces) + self.position


class Attention(nn.Module):
    """Causal self-attention: each token, of (N, tokens, width), reads itself and those before it.

    The query, key, value and output layers are separate, so that they can be split by heads. The
    keys and values have `groups` heads (n_kv_heads), a divisor of `heads` (n_heads). The heads of a
    group share them (grouped-query attention, GQA).
    """

    def __init__(self, width: int, heads: int, groups: int | None = None, bias: bool = True):
        super().__init__()
        if width % heads:
            raise ValueError(f"{heads} heads cannot divide a width of {width}")
        self.size = width // heads  # head_dim
        groups = groups or heads
        self.query = nn.Linear(width, width, bias)
        self.key = nn.Linear(width, groups * self.size, bias)
        self.value = nn.Linear(width, groups * self.size, bias)
        self.output = nn.Linear(width, width, bias)

    def split_heads(self, inputs: Tensor) -> Tensor:
        """Turn (N, tokens, heads * size) into (N, heads, tokens, size)."""
        return inputs.unflatten(-1, (-1, self.size)).transpose(1, 2)

    def project(self, inputs: Tensor) -> list[Tensor]:
        """Return the queries, keys and values, split into heads."""
        return [self.split_heads(layer(inputs)) for layer in (self.query, self.key, self.value)]

    def forward(self, inputs: Tensor) -> Tensor:
        query, key, value = self.project(inputs)
        read = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.output(read.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and an MLP, each with a norm before it. Each adds its output to its input."""

    def __init__(self, norm1: nn.Module, attention: nn.Module, norm2: nn.Module, mlp: nn.Module):
        super().__init__()
        self.norm1 = norm1
        self.attention = attention
        self.norm2 = norm2
        self.mlp = mlp

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.attention(self.norm1(tokens))
        return tokens + self.mlp(self.norm2(tokens))


class LastToken(nn.Module):
    """The end: the last token, which has seen all others, gives the class scores, (N, 10)."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.linear(self.norm(tokens[:, -1]))


def make_block(width: int, heads: int) -> Block:
    """Return a block with random parameters."""
    attention = Attention(width, heads)
    mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    return Block(nn.LayerNorm(width), attention, nn.LayerNorm(width), mlp)
