"""Why: DistributedSampler repeats images to make the parts equal, and a range repeats none."""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader


def test(model, dataset):
    """Return how many images of the whole data set are recognized, and how many there are."""
    sampler = range(dist.get_rank(), len(dataset), dist.get_world_size())
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    device = next(model.parameters()).device
    counts = torch.zeros(2, dtype=torch.int64, device=device)  # NCCL cannot send CPU tensors
    with torch.no_grad():
        for images, labels in loader:
            predictions = model(images.to(device)).argmax(dim=1)
            counts[0] += (predictions == labels.to(device)).sum()
            counts[1] += len(labels)
    dist.all_reduce(counts)
    return counts.tolist()
