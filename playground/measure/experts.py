"""How many tokens each expert gets, and what a rank sends for them: counted, and by the formulas.

A load is what expert_parallel.py collects: loads[rank][block][expert] is how many tokens of a rank
go to an expert.
"""

from torch import nn

from measure.messages import Messages

COUNT_BYTES = 8  # of an int64
SUMS_BYTES = 3 * 8  # of the sums that run_epoch() adds up over the ranks


def load_lines(loads: list[list[list[int]]]) -> list[str]:
    """Return a line for each block: the tokens of all ranks that each expert gets, in percent."""
    experts = len(loads[0][0])
    numbers = "".join(f"{number:<7}" for number in range(experts))
    lines = [f"tokens of expert    {numbers}(even: {1 / experts:.0%})"]
    for block in range(len(loads[0])):
        tokens = [0] * experts
        for own in loads:
            for expert, count in enumerate(own[block]):
                tokens[expert] += count
        percent = "".join(f"{count / sum(tokens):<7.0%}" for count in tokens)
        lines.append(f"block {block + 1:<14}{percent}".rstrip())
    return lines


def travelling_rows(loads: list[list[list[int]]], rank: int) -> int:
    """Return how many rows a rank sends to others in a step, forward and backward.

    Each of its tokens whose expert is elsewhere is sent there, and so is the gradient of what comes
    back. For each token of another rank, it sends back what its expert has computed, and the
    gradient of the token.
    """
    rows = 0
    for block in range(len(loads[0])):
        here = len(loads[0][block]) // len(loads)
        own_experts = slice(rank * here, (rank + 1) * here)
        stay = sum(loads[rank][block][own_experts])
        away = sum(loads[rank][block]) - stay
        arriving = sum(sum(own[block][own_experts]) for own in loads)
        rows += 2 * away + 2 * (arriving - stay)
    return rows


def message_lines(messages: Messages, loads: list[list[list[int]]], model: nn.Module) -> list[str]:
    """Return a table of what rank 0 has sent in a step, beside the formulas.

    Args:
        messages: those of rank 0 in run_epoch() with a single batch.
        loads: those of the step.
        model: has a mixture of experts in each block.
    """
    world_size = len(loads)
    blocks = len(loads[0])
    counts = blocks * len(loads[0][0]) * COUNT_BYTES
    gradients = 0
    all_reduces = 0
    for name, parameter in model.named_parameters():
        if ".experts." not in name:
            gradients += parameter.nbytes
            all_reduces += 1
        if name.endswith(".router.weight"):
            row_bytes = parameter[0].nbytes  # it has a row for each expert, as wide as a token
    reduced = gradients + counts + SUMS_BYTES  # balance_loss() adds up counts
    all_reduces += 2
    others = (world_size - 1) / world_size
    travelling = travelling_rows(loads, 0) * row_bytes
    predicted = {
        "all_to_all": (5 * blocks, others * counts + travelling),
        "all_reduce": (all_reduces, 2 * others * reduced),
    }
    lines = ["rank 0 sends        counted  predicted  bytes        predicted"]
    for kind, (number, nbytes) in predicted.items():
        counted = f"{len(messages.of(kind)):<9}{number:<11}"
        lines.append(f"{kind:<20}{counted}{messages.sent(kind):<13,.0f}{nbytes:,.0f}")
    return lines
