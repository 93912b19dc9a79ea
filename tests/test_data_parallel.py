"""data_parallel.py's own replicas compute what the plain model computes."""

import copy

import pytest
import torch
from conftest import SHORT, run
from data_parallel import Replicas
from torch.nn import functional as F

from common.models import CNN, MLP


def gradients(model, images, labels):
    """Return the outputs of a model, and the gradient of each parameter by its name."""
    outputs = model(images)
    F.cross_entropy(outputs, labels).backward()
    named = model.named_parameters()
    return outputs.detach(), {name.removeprefix("module."): value.grad for name, value in named}


@pytest.mark.parametrize(("kind", "replicas", "size"), [(MLP, 1, 12), (CNN, 3, 12), (MLP, 7, 5)])
def test_replicas_compute_what_the_model_computes(kind, replicas, size):
    """Outputs and gradients are equal to 1e-12, after a step, too, and with idle replicas."""
    torch.manual_seed(0)
    plain = kind(width=8).double()
    replicated = Replicas(copy.deepcopy(plain), ["cpu"] * replicas)
    assert list(replicated.state_dict()) == [f"module.{name}" for name in plain.state_dict()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, replicated)]
    for _ in range(2):
        images = torch.randn(size, 1, 28, 28, dtype=torch.float64)
        labels = torch.randint(10, (size,))
        expected = gradients(plain, images, labels)
        found = gradients(replicated, images, labels)
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_replicas_follow_the_mode_of_the_model():
    """In eval mode under no_grad, there is no dropout, and the threads keep no graph."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(CNN(width=8), torch.nn.Dropout(0.5)).double()
    replicated = Replicas(plain, ["cpu"] * 3)
    images = torch.randn(12, 1, 28, 28, dtype=torch.float64)
    replicated.eval()
    with torch.no_grad():
        outputs = replicated(images)
        assert not outputs.requires_grad
        torch.testing.assert_close(outputs, plain(images), atol=1e-12, rtol=0)
    replicated.train()
    assert not torch.equal(replicated(images), replicated(images))
    assert replicated(images).requires_grad


def test_without_a_gpu():
    """nn.DataParallel does nothing on a CPU, and the lesson says so."""
    assert "nn.DataParallel does nothing without a GPU" in run("data_parallel", *SHORT).stderr
