"""Why: a rank has time for one forward pass for each rank from it on, if memory allows.

With a smaller limit, it starts the backward passes earlier. So the next rank gets its micro-batches
later, and waits.
"""


def order_1f1b(rank, world_size, micro_batches, most):
    """Return the passes of a rank in the order of 1F1B, such as ["F0", "B0", "F1", "B1"]."""
    kept = min(world_size - rank, most, micro_batches)
    order = [f"F{number}" for number in range(kept)]
    for number in range(micro_batches):
        order.append(f"B{number}")
        if kept + number < micro_batches:
            order.append(f"F{kept + number}")
    return order
