"""Why: one forward pass for each rank after this one is enough until the first gradient is back."""


def order_1f1b(rank, world_size, micro_batches):
    """Return the passes of a rank in the order of 1F1B, such as ["F0", "B0", "F1", "B1"]."""
    ranks_after = world_size - 1 - rank
    warm_up = min(ranks_after, micro_batches)
    order = [f"F{number}" for number in range(warm_up)]
    for number in range(warm_up, micro_batches):
        order.append(f"F{number}")
        order.append(f"B{number - warm_up}")
    for number in range(micro_batches - warm_up, micro_batches):
        order.append(f"B{number}")
    return order
