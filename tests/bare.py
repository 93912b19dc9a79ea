"""What single_gpu.py computes, with nothing around it: no DataLoader, no flags, no messages. For benchmark.py.

python tests/bare.py data
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torchvision.datasets import MNIST


def tensors(part: MNIST) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images, float32 (N, 1, 28, 28), normalised, and their labels, int64 (N,)."""
    return part.data.unsqueeze(1).float().div_(255).sub_(0.1307).div_(0.3081), part.targets


images, labels = tensors(MNIST(sys.argv[1], train=True))
test_images, test_labels = tensors(MNIST(sys.argv[1], train=False))
torch.manual_seed(0)
sizes = [(784, 64), (64, 64), (64, 64)]
layers = [layer for size in sizes for layer in (nn.Linear(*size), nn.ReLU())]
model = nn.Sequential(nn.Flatten(), *layers, nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-6, fused=True)
for epoch in range(3):
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
    loss_sum = hits = 0
    for batch in order[: 468 * 128].split(128):
        logits = model(images[batch])
        loss = F.cross_entropy(logits, labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss_sum += loss.detach()
        hits += (logits.argmax(dim=1) == labels[batch]).sum()
    with torch.no_grad():
        test_hits = (model(test_images).argmax(dim=1) == test_labels).sum()
    print(f"{loss_sum.item() / 468:.4f} {hits.item() / (468 * 128):.2%} {test_hits.item() / len(test_labels):.2%}")
