"""Why: the ranks add up sums and divide by the number of images, so each image counts the same."""

import torch
import torch.distributed as dist
from torch.nn import functional as F


def train(model, images, labels, steps):
    """Train on this rank's images. All ranks have the same model, without frozen parameters."""
    all_images = torch.tensor(len(labels), device=labels.device)  # NCCL cannot send CPU tensors
    dist.all_reduce(all_images)
    for _ in range(steps):
        model.zero_grad()
        loss = F.cross_entropy(model(images), labels, reduction="sum")
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= all_images
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
