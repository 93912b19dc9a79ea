"""Why: os.replace gives the finished file its name in one step, so `path` is always complete."""

import os

import torch
import torch.distributed as dist


def save_and_resume(path, model, optimizer, epochs, train_epoch):
    """Train until `epochs` epochs are done. Resume from the file at `path`, if there is one."""
    done = 0
    if os.path.exists(path):
        state = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        done = state["done"]
    for epoch in range(done, epochs):
        train_epoch(epoch)
        if dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"random": torch.get_rng_state(), "done": epoch + 1}
            torch.save(state, f"{path}.tmp")
            os.replace(f"{path}.tmp", path)
