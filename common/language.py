"""The layers of a language model of the kind of Llama and Qwen.

It differs from the transformer of transformer.py as today's language models differ from the first
ones: RMSNorm in place of LayerNorm, rotary positions (RoPE) in place of a table, groups of heads
that share keys and values (GQA), an MLP with gates (SwiGLU), no biases.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.transformer import Attention, Block

VOCABULARY = 256  # the tokens are bytes
SHARING = 2  # heads that share their keys and values: n_heads / n_kv_heads


def rotate(heads: Tensor, positions: Tensor) -> Tensor:
    """Rotate pairs of numbers by angles that grow with a token's position (RoPE).

    A query and a key that are rotated so have a product that depends on how far apart they are, and
    not on where they are (Su et al., 2021).

    Args:
        heads: queries or keys, (N, heads, tokens, size).
        positions: int64 (tokens,), counted from the beginning of the sequence.
    """
    size = heads.shape[-1]
    # In 16 bits, a large angle would be wrong by a large part of a turn.
    dtype = torch.promote_types(heads.dtype, torch.float32)
    exponents = torch.arange(0, size, 2, device=heads.device, dtype=dtype) / size
    # The positions may be on the CPU, as those of context_parallel.py are.
    angles = positions.to(heads.device)[:, None] * 10_000**-exponents  # (tokens, size / 2)
    cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    x, y = heads.chunk(2, dim=-1)
    return torch.cat([x * cos - y * sin, x * sin + y * cos], dim=-1)


class RotaryAttention(Attention):
    """Causal self-attention with rotary positions, without biases.

    Its `positions` are those of the tokens that it is given, int64 (tokens,). None means 0, 1, 2
    and so on. A lesson that splits sequences changes it.
    """

    positions = None

    def project(self, inputs: Tensor) -> list[Tensor]:
        """Return the queries, keys and values, split into heads."""
        query, key, value = super().project(inputs)
        positions = self.positions
        if positions is None:
            positions = torch.arange(inputs.shape[1], device=inputs.device)
        return [rotate(query, positions), rotate(key, positions), value]


class SwiGLU(nn.Module):
    """An MLP in which one layer's outputs are gates for another's (Shazeer, 2020)."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(tokens)) * self.up(tokens))


class Scores(nn.Module):
    """The end: logits of the next token at each position, (N, 256, tokens)."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.output = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        # FSDP warns of a module that returns a view, so this is a tensor of its own.
        return self.output(self.norm(tokens)).transpose(1, 2).contiguous()


def make_language_block(width: int, heads: int) -> Block:
    """Return a block with random parameters."""
    attention = RotaryAttention(width, heads, groups=heads // SHARING, bias=False)
    mlp = SwiGLU(width, hidden=11 * width // 4)
    return Block(nn.RMSNorm(width, eps=1e-6), attention, nn.RMSNorm(width, eps=1e-6), mlp)
