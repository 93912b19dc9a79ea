"""Why: all_reduce is a collective, so every rank calls it, even if only rank 0 needs the sum."""

import torch
import torch.distributed as dist


def test(model, images, labels):
    """Return the accuracy over the images of all ranks on rank 0, and None on the others."""
    with torch.no_grad():
        predictions = model(images).argmax(dim=1)
    hits = (predictions == labels).sum().item()
    # NCCL cannot send CPU tensors.
    counts = torch.tensor([hits, len(labels)], device=labels.device)
    dist.all_reduce(counts)
    if dist.get_rank() == 0:
        all_hits, all_images = counts.tolist()
        return all_hits / all_images
    return None
