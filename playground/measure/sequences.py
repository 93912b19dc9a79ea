"""A step of a model whose ranks have different tokens: its distance from the whole one, its costs.

The costs are what each rank computes, what it keeps for backward(), and what it sends.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from measure.memory import Kept
from measure.messages import Messages


class Scores(TorchDispatchMode):
    """Inside `with Scores() as scores:`, the scores that attention computes are counted.

    Attributes:
        count: over all images and heads. A score is that of a token and one that it looks at.
    """

    def __init__(self):
        super().__init__()
        self.count = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """See Messages in messages.py."""
        return False

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """PyTorch calls this in place of each operation."""
        name = operation._schema.name
        # The lesson hides scores with masked_fill, one block at a time. PyTorch's attention is a
        # single operation, but in float64 on GPUs it is several, and _safe_softmax is one of them.
        if name in ("aten::masked_fill", "aten::_safe_softmax"):
            self.count += args[0].numel()
        if "scaled_dot_product" in name:
            query, key = args[:2]
            self.count += query[..., 0].numel() * key.shape[-2]
        return operation(*args, **(kwargs or {}))


def compare_sequence(
    step: Callable,
    model: nn.Module,
    whole_model: nn.Module,
    batch: tuple[Tensor, Tensor],
    places: list[Tensor],
    by: str,
) -> None:
    """Run a step of both models without changing parameters; rank 0 prints what it costs.

    All ranks must call this together.

    Args:
        step: step(images, labels) computes the gradients of `model`.
        model: its ranks have different tokens, and all parameters.
        whole_model: has the same parameters, on the CPU.
        batch: images and labels, (B, 1, 28, 28) and int64 (B,), the same on all ranks.
        places: for each rank the places of its tokens, in ascending order.
        by: "ring" or "ulysses".
    """
    images, labels = batch
    with Kept(whole_model) as whole_kept:
        F.cross_entropy(whole_model(images), labels).backward()
    device = next(model.parameters()).device
    images = images.to(device)
    labels = labels.to(device)
    model.zero_grad()
    with Messages() as messages, Kept(model) as kept:
        step(images, labels)
    apart = torch.zeros(())
    for mine, whole in zip(model.parameters(), whole_model.parameters(), strict=True):
        distance = (mine.grad.cpu() - whole.grad).abs().max()
        apart = torch.maximum(apart, distance)
    model.zero_grad()
    with torch.no_grad(), Scores() as scores:
        model(images)

    attention = [layer for layer in whole_model.modules() if hasattr(layer, "split_heads")]
    layers = len(attention)
    width = attention[0].query.out_features
    heads = width // attention[0].size
    pairs = scores.count // (len(images) * heads * layers)
    rows = [None] * dist.get_world_size()
    own = [float(apart), len(places[dist.get_rank()]), pairs, kept.nbytes()]
    dist.all_gather_object(rows, own)
    if dist.get_rank() == 0:
        largest = max(row[0] for row in rows)
        print(f"gradients differ from the whole model's by {largest:.0e}")
        print("            tokens  pairs of tokens  kept for backward()")
        for rank, (_, tokens, counted, kept) in enumerate(rows):
            print(f"rank {rank:<7}{tokens:<8}{counted:<17,}{kept:,} bytes")
        tokens = sum(len(mine) for mine in places)
        needed = tokens * (tokens + 1) // 2
        print(f"one process {tokens:<8}{needed:<17,}{whole_kept.nbytes():,} bytes")
        size = len(images) * width * images.element_size() * layers  # bytes for each token
        parameters = list(whole_model.parameters())
        nbytes = sum(parameter.nbytes for parameter in parameters)
        others = (len(places) - 1) / len(places)
        predicted = [predict(by, places, layers, size)]
        predicted.append(("all_reduce", len(parameters), 2 * others * nbytes))
        print("of rank 0   counted  predicted  bytes sent  predicted")
        for kind, number, sent in predicted:
            counted = len(messages.of(kind))
            row = f"{kind:<12}{counted:<9}{number:<11}{messages.sent(kind):<12,.0f}{sent:,.0f}"
            print(row, flush=True)


def predict(by: str, places: list[Tensor], layers: int, size: int) -> tuple[str, int, float]:
    """Return which messages rank 0 should send, how many, and how many bytes.

    Args:
        by: "ring" or "ulysses".
        places: for each rank the places of its tokens.
        layers: how many layers of attention there are.
        size: the bytes of one token's keys in all layers, for all images. Its queries, its values
            and each of their gradients are as large.
    """
    world_size = len(places)
    tokens = sum(len(mine) for mine in places)
    if by == "ulysses":
        # Queries, keys, values and what was read; then the gradients of these four.
        others = (world_size - 1) / world_size
        return "all_to_all", 8 * layers, 4 * others * size * (len(places[0]) + tokens / world_size)
    if world_size == 1:
        return "send", 0, 0
    # Keys and values pass this rank in the forward pass and in backward(), all but those of the
    # next rank, which have arrived. Their gradients go once around the whole ring.
    passing = 2 * (tokens - len(places[1])) + tokens
    return "send", layers * (3 * world_size - 2), 2 * size * passing
