"""Why: backward() starts with the gradient from the next rank, so the chain rule holds."""

import torch
import torch.distributed as dist
from torch.nn import functional as F


def gpipe(stage, inputs, labels, shape, dtype):
    """Compute the gradients of this rank's stage in the order of GPipe."""
    rank, n = dist.get_rank(), dist.get_world_size()
    rows = sum(len(each) for each in labels)
    received = list(inputs)
    outputs = []
    for number, micro_batch in enumerate(inputs):
        if rank > 0:
            buffer = torch.empty(len(micro_batch), *shape, dtype=dtype, device=micro_batch.device)
            dist.recv(buffer, rank - 1)
            received[number] = buffer.requires_grad_()
        output = stage(received[number])
        if rank < n - 1:
            dist.send(output.detach().contiguous(), rank + 1)
        else:  # this micro-batch's part of the mean over all rows
            output = F.cross_entropy(output, labels[number], reduction="sum") / rows
        outputs.append(output)
    for number, output in enumerate(outputs):
        gradient = output.new_ones(output.shape)  # that of the loss itself is 1
        if rank < n - 1:
            dist.recv(gradient, rank + 1)
        if output.requires_grad:  # false in a first stage whose parameters are all frozen
            output.backward(gradient)
        if rank > 0:
            dist.send(received[number].grad, rank - 1)
