"""Wrong repairs of fault_cannot_load. See test_exercises.py for the docstrings."""

import time

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


def _train(model, images, labels):
    """Train as the exercise does. Returns the model inside DDP."""
    model = DistributedDataParallel(model)
    for _ in range(2):
        model.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
    return model


def _save(state, path):
    """Write a file on rank 0."""
    if dist.get_rank() == 0:
        torch.save(state, path)
    dist.barrier()


def every_module_removed(model, images, labels, path):
    """WRONG with 1 rank, layers whose names ... has no key `inner.module.weight`, but"""
    state = _train(model, images, labels).state_dict()
    _save({"model": {key.replace("module.", ""): state[key] for key in state}}, path)


def letters_stripped(model, images, labels, path):
    """WRONG with 1 rank, layers whose names ... has no key `outer.weight`, but `ter.weight`"""
    state = _train(model, images, labels).state_dict()
    _save({"model": {key.lstrip("module."): state[key] for key in state}}, path)  # noqa: B005


def the_model_itself(model, images, labels, path):
    """WRONG with 1 rank ... the checkpoint: contains Python objects that are not tensors"""
    _save({"model": _train(model, images, labels).module}, path)


def the_state_alone(model, images, labels, path):
    """WRONG with 1 rank ... the checkpoint: has no entry"""
    _save(_train(model, images, labels).module.state_dict(), path)


def parameters_only(model, images, labels, path):
    """WRONG with 1 rank, a buffer and a frozen parameter ... has no key `steps`"""
    module = _train(model, images, labels).module
    _save({"model": dict(module.named_parameters())}, path)


def a_list(model, images, labels, path):
    """WRONG with 1 rank ... the checkpoint: has a list as its model, and not a dict"""
    _save({"model": list(_train(model, images, labels).parameters())}, path)


def before_training(model, images, labels, path):
    """WRONG with 1 rank ... the loaded model, 0.weight: [ ... This is the model before training."""
    _save({"model": model.state_dict()}, path)
    _train(model, images, labels)


def without_ddp(model, images, labels, path):
    """WRONG with 2 ranks ... the loaded model, 0.weight: [ ... has learned from the images of"""
    for _ in range(2):
        model.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
    _save({"model": model.state_dict()}, path)


def without_a_barrier(model, images, labels, path):
    """WRONG with 2 ranks ... rank 1, the checkpoint: does not exist"""
    state = _train(model, images, labels).module.state_dict()
    if dist.get_rank() == 0:
        time.sleep(0.2)  # a large file takes as long
        torch.save({"model": state}, path)


def sleeps_instead_of_a_barrier(model, images, labels, path):
    """WRONG with 2 ranks, a state that rank 0 needs ... rank 1, the checkpoint: does not exist"""
    model = _train(model, images, labels)
    if dist.get_rank() == 0:
        torch.save({"model": model.module.state_dict()}, path)
    time.sleep(0.5)
