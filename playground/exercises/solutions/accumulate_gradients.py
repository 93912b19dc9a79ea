"""Why: weighted losses add up to the mean of the batch, and only the last backward() sends."""

from contextlib import nullcontext

import torch
from torch.nn import functional as F


def accumulate_gradients(model, images, labels, count):
    """Compute the gradient of the global batch in micro-batches, with one round of messages."""
    count = min(count, len(labels))  # so no micro-batch is empty
    micro_batches = zip(images.tensor_split(count), labels.tensor_split(count), strict=True)
    for number, (micro_images, micro_labels) in enumerate(micro_batches, start=1):
        # DDP decides in forward() whether backward() averages the gradients.
        context = model.no_sync() if number < count else nullcontext()
        with context:
            loss = F.cross_entropy(model(micro_images), micro_labels)
            fraction = len(micro_labels) / len(labels)
            (loss * fraction).backward()
