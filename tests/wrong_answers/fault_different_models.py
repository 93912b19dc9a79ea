"""Wrong repairs of fault_different_models. See test_exercises.py for the docstrings."""

import torch
import torch.distributed as dist
from torch.nn import functional as F


def _step(model, images, noise, average=True):
    """Take one step, as the exercise does."""
    model.zero_grad()
    F.mse_loss(model(images + noise), images).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if average:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            parameter -= 0.1 * parameter.grad


def _train(model, images):
    """Take three steps, as the exercise does."""
    for _ in range(3):
        _step(model, images, 0.1 * torch.randn(images.shape))
    return model


def the_same_seed(make_model, images, seed):
    """WRONG with 2 ranks ... the noise: ranks 0 and 1 add the same noise in step 1"""
    torch.manual_seed(seed)
    return _train(make_model(), images)


def no_seed_but_broadcast(make_model, images, seed):
    """WRONG with 1 rank ... the seed: two runs with the same seed give different models"""
    model = make_model()
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)
    return _train(model, images)


def parameters_only(make_model, images, seed):
    """WRONG with 2 ranks ... rank 1's buffer `scale` differs ... A model has buffers, too."""
    torch.manual_seed(seed + dist.get_rank())
    model = make_model()
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), src=0)
    return _train(model, images)


def averaged_at_the_end(make_model, images, seed):
    """WRONG with 2 ranks ... the models: in step 1, rank 1's parameter `weight` differs"""
    torch.manual_seed(seed + dist.get_rank())
    model = _train(make_model(), images)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.all_reduce(tensor)
            tensor /= dist.get_world_size()
    return model


def seeded_in_each_step(make_model, images, seed):
    """WRONG with 1 rank ... the noise: rank 0 adds the same noise in steps 1 and 2"""
    torch.manual_seed(seed)
    model = make_model()
    for _ in range(3):
        torch.manual_seed(seed + dist.get_rank())
        _step(model, images, 0.1 * torch.randn(images.shape))
    return model


def a_constant_seed(make_model, images, seed):
    """WRONG with 1 rank ... the seed: runs with different seeds give the same model"""
    torch.manual_seed(0)
    model = make_model()
    torch.manual_seed(dist.get_rank())
    return _train(model, images)


def without_noise(make_model, images, seed):
    """WRONG with 1 rank ... the noise: rank 0 adds no noise in step 1"""
    torch.manual_seed(seed)
    model = make_model()
    for _ in range(3):
        _step(model, images, torch.zeros_like(images))
    return model


def without_averages(make_model, images, seed):
    """WRONG with 2 ranks ... the models: in step 2, ... The models were equal in step 1."""
    torch.manual_seed(seed)
    model = make_model()
    torch.manual_seed(seed + dist.get_rank())
    for _ in range(3):
        _step(model, images, 0.1 * torch.randn(images.shape), average=False)
    return model


def sent_by_rank_0_only(make_model, images, seed):
    """HANG with 2 ranks ... rank 0 ... rank 1"""
    torch.manual_seed(seed + dist.get_rank())
    model = make_model()
    if dist.get_rank() == 0:
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
    return _train(model, images)
