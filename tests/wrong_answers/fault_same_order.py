"""Wrong repairs of fault_same_order. See test_exercises.py for the docstrings."""

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler


def _step(model, images, labels):
    """Take one step, as the exercise does."""
    model.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad


def set_to_a_constant(model, dataset, epochs):
    """WRONG with 1 rank, 13 images ... all epochs have the order that set_epoch(1) gives"""
    sampler = DistributedSampler(dataset, seed=0, drop_last=True)
    loader = DataLoader(dataset, batch_size=2, sampler=sampler)
    for _ in range(epochs):
        sampler.set_epoch(1)
        for images, labels in loader:
            _step(model, images, labels)


def set_to_the_number_of_epochs(model, dataset, epochs):
    """WRONG with 1 rank, 13 images ... all epochs have the order that set_epoch(3) gives"""
    sampler = DistributedSampler(dataset, seed=0, drop_last=True)
    sampler.set_epoch(epochs)
    loader = DataLoader(dataset, batch_size=2, sampler=sampler)
    for _ in range(epochs):
        for images, labels in loader:
            _step(model, images, labels)


def set_after_the_epoch(model, dataset, epochs):
    """WRONG with 1 rank, 13 images ... epoch 2 has the order of epoch 1, but ... too late?"""
    sampler = DistributedSampler(dataset, seed=0, drop_last=True)
    loader = DataLoader(dataset, batch_size=2, sampler=sampler)
    for epoch in range(epochs):
        for images, labels in loader:
            _step(model, images, labels)
        sampler.set_epoch(epoch)


def numbers_come_again(model, dataset, epochs):
    """WRONG with 1 rank, 16 images ... epoch 4 has the order of epoch 1, but ... needs a number"""
    sampler = DistributedSampler(dataset, seed=0, drop_last=True)
    loader = DataLoader(dataset, batch_size=2, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch % 3)
        for images, labels in loader:
            _step(model, images, labels)


def a_random_number_on_each_rank(model, dataset, epochs):
    """WRONG with 2 ranks, 13 images ... in epoch 1, ... images are read more than once"""
    sampler = DistributedSampler(dataset, seed=0, drop_last=True)
    loader = DataLoader(dataset, batch_size=2, sampler=sampler)
    for _ in range(epochs):
        sampler.set_epoch(torch.randint(1000, ()).item())
        for images, labels in loader:
            _step(model, images, labels)


def not_shuffled(model, dataset, epochs):
    """WRONG with 1 rank, 13 images ... all epochs have the order of the data set"""
    sampler = DistributedSampler(dataset, shuffle=False, drop_last=True)
    loader = DataLoader(dataset, batch_size=2, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            _step(model, images, labels)


def shuffled_by_the_loader(model, dataset, epochs):
    """WRONG with 2 ranks, 13 images ... rank 0 has read 39 images, not 18 ... Every rank reads"""
    loader = DataLoader(dataset, batch_size=2, shuffle=True)
    for _ in range(epochs):
        for images, labels in loader:
            _step(model, images, labels)


def a_seed_for_each_rank(model, dataset, epochs):
    """WRONG with 2 ranks, 13 images ... in epoch 1, ... are read more than once ... Do all ranks"""
    sampler = DistributedSampler(dataset, seed=dist.get_rank(), drop_last=True)
    loader = DataLoader(dataset, batch_size=2, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            _step(model, images, labels)


def set_on_rank_0(model, dataset, epochs):
    """WRONG with 2 ranks, 13 images ... in epoch 2, ... are read more than once ... Do all ranks"""
    sampler = DistributedSampler(dataset, seed=0, drop_last=True)
    loader = DataLoader(dataset, batch_size=2, sampler=sampler)
    for epoch in range(epochs):
        if dist.get_rank() == 0:
            sampler.set_epoch(epoch)
        for images, labels in loader:
            _step(model, images, labels)


def each_rank_shuffles_its_own(model, dataset, epochs):
    """WRONG with 2 ranks, 13 images ... each rank has the same images in all epochs ... But"""
    part = len(dataset) // dist.get_world_size()
    mine = range(dist.get_rank() * part, (dist.get_rank() + 1) * part)
    for _ in range(epochs):
        order = [mine[index] for index in torch.randperm(part).tolist()]
        for images, labels in DataLoader(dataset, batch_size=2, sampler=order):
            _step(model, images, labels)


def no_average(model, dataset, epochs):
    """WRONG with 2 ranks, 13 images ... the trained model: differs from that of a single process"""
    sampler = DistributedSampler(dataset, seed=0, drop_last=True)
    loader = DataLoader(dataset, batch_size=2, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            model.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
