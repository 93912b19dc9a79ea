"""data_parallel.py's own replicas: idle ones, and dropout. test_parity.py has its numbers."""

import copy

import pytest
import torch
from data_parallel import Replicas
from launch import SHORT, run
from torch.nn import functional as F

from common.models import CNN, MLP


def test_fewer_images_than_replicas():
    """Five images, seven replicas: the gradients are those of the plain model, to 1e-12."""
    torch.manual_seed(0)
    plain = MLP(width=8).double()
    replicated = Replicas(copy.deepcopy(plain), ["cpu"] * 7)
    images, labels = torch.randn(5, 1, 28, 28, dtype=torch.float64), torch.arange(5)
    for model in (plain, replicated):
        F.cross_entropy(model(images), labels).backward()
    found, right = ([each.grad for each in one.parameters()] for one in (replicated, plain))
    torch.testing.assert_close(found, right, atol=1e-12, rtol=0)


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


def test_buffers_are_refused():
    """Each replica would keep running averages of its own, and the model those of the start."""
    with pytest.raises(ValueError, match="a model with buffers"):
        Replicas(torch.nn.BatchNorm1d(3), ["cpu"] * 2)


def test_without_a_gpu():
    """nn.DataParallel does nothing on a CPU, and the lesson says so."""
    assert "nn.DataParallel does nothing without a GPU" in run("data_parallel", *SHORT).stderr
