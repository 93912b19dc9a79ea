"""Why: os.replace gives the finished file its name in one step, so `path` is always complete."""

import os
import time

import torch
import torch.distributed as dist


def save_and_resume(path, model, optimizer, epochs, train_epoch):
    """Train until `epochs` epochs are done. Resume from the file at `path`, if rank 0 sees one."""
    # In a network folder, ranks may see different files for a moment. So rank 0 decides for all.
    resumes = [os.path.exists(path)]
    dist.broadcast_object_list(resumes, src=0)
    done = 0
    if resumes[0]:
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
            unfinished = f"{path}.{time.time_ns()}"  # a name that no other process uses
            torch.save(state, unfinished)
            os.replace(unfinished, path)
