"""Why: the sampler's order depends on the epoch, and set_epoch tells the sampler the epoch."""

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler


def train(model, dataset, epochs):
    """Train. All ranks have the same model, without frozen parameters, and the same data set."""
    sampler = DistributedSampler(dataset, seed=0, drop_last=True)
    loader = DataLoader(dataset, batch_size=2, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            model.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
