"""Find the fault: one rank never returns.

Lesson: collectives.py.

`test(model, images, labels)` tests a model on all ranks together. Each rank has images of its own.
Some ranks may have more images than others, and a rank may have none. Rank 0 should return the test
accuracy over the images of all ranks. The other ranks should return None. But the program does not
end. Find the fault, and repair test.

It is repaired if
- every rank returns, with any number of ranks;
- rank 0 returns the accuracy over the images of all ranks;
- the other ranks return None.

The first check copies this file to `playground/exercises/answers/`. Repair the copy.

Check it. For help, add `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/fault_never_returns.py
"""

import torch
import torch.distributed as dist
from check import check


def test(model, images, labels):
    """Return the accuracy over the images of all ranks on rank 0, and None on the others."""
    with torch.no_grad():
        predictions = model(images).argmax(dim=1)
    hits = (predictions == labels).sum().item()
    # NCCL cannot send CPU tensors.
    counts = torch.tensor([hits, len(labels)], device=labels.device)
    if dist.get_rank() == 0:
        dist.all_reduce(counts)
        all_hits, all_images = counts.tolist()
        return all_hits / all_images
    return None


if __name__ == "__main__":
    check(__file__)
