"""Why: model.module is the model inside DDP, so its keys are those of the plain model."""

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


def train(model, images, labels, path):
    """Train on this rank's images, and write the checkpoint."""
    model = DistributedDataParallel(model)
    for _ in range(2):
        model.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
    if dist.get_rank() == 0:
        state = {"model": model.module.state_dict()}
        torch.save(state, path)
    dist.barrier()  # no rank returns before the file is there
