"""Find the fault: the ranks count more test images than there are.

Lesson: distributed_data_parallel.py.

`test(model, dataset)` tests a model on all ranks together. Each rank tests a part of the data set,
and the ranks add up their counts. Each image should be counted once. But some are counted twice.
Find the fault, and repair test.

It is repaired if
- the counts are right on all ranks, with any number of images, even with fewer images than ranks;
- each image is read on one rank only;
- the parts are equal, or some ranks have one more image than others.

The first check copies this file to `playground/exercises/answers/`. Repair the copy.

Check it. For help, add `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/fault_too_many_images.py
"""

import torch
import torch.distributed as dist
from check import check
from torch.utils.data import DataLoader, DistributedSampler


def test(model, dataset):
    """Return how many images of the whole data set are recognized, and how many there are."""
    sampler = DistributedSampler(dataset, shuffle=False)
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


if __name__ == "__main__":
    check(__file__)
