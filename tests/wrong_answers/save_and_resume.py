"""Wrong answers to save_and_resume. See test_exercises.py for the docstrings."""

import os

import torch
import torch.distributed as dist


def _state(model, optimizer, done):
    """Return what belongs into the file."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    return state | {"random": torch.get_rng_state(), "done": done}


def _write(state, path):
    """Let rank 0 write a file."""
    if dist.get_rank() == 0:
        torch.save(state, f"{path}.tmp")
        os.replace(f"{path}.tmp", path)


def _resumes(path):
    """Return whether rank 0 sees a file. All ranks call it."""
    answer = [os.path.exists(path)]
    dist.broadcast_object_list(answer, src=0)
    return answer[0]


def _resume(path, model, optimizer, leave_out=()):
    """Restore what is in the file, but leave out some parts. Returns how many epochs are done."""
    return _load(path, model, optimizer, leave_out) if _resumes(path) else 0


def _load(path, model, optimizer, leave_out=()):
    """Load the file. See _resume."""
    state = torch.load(path)
    if "model" not in leave_out:
        model.load_state_dict(state["model"])
    if "optimizer" not in leave_out:
        optimizer.load_state_dict(state["optimizer"])
    if "random" not in leave_out:
        torch.set_rng_state(state["random"])
    return 0 if "done" in leave_out else state["done"]


def _train(path, model, optimizer, epochs, train_epoch, leave_out=(), write=_write):
    """Train, but leave out some parts when the run resumes."""
    done = _resume(path, model, optimizer, leave_out)
    for epoch in range(done, epochs):
        train_epoch(epoch)
        write(_state(model, optimizer, epoch + 1), path)


def without_the_optimizer(path, model, optimizer, epochs, train_epoch):
    """WRONG with 1, then 2 ranks, Adam, no random numbers rank 0, the restored optimizer, ... None
    ... The optimizer's state has its averages and its learning rate"""
    _train(path, model, optimizer, epochs, train_epoch, ["optimizer"])


def without_the_random_numbers(path, model, optimizer, epochs, train_epoch):
    """WRONG with 1, then 2 ranks, Adam rank 0, the order after the restart ... The random numbers
    differ after the restart.
    """
    _train(path, model, optimizer, epochs, train_epoch, ["random"])


def without_the_epoch(path, model, optimizer, epochs, train_epoch):
    """WRONG with 1, then 2 ranks, Adam, no random numbers rank 0, the epochs after the restart: [0,
    1, 2, 3, 4] expected [3, 4] Training starts from the beginning."""
    _train(path, model, optimizer, epochs, train_epoch, ["done"])


def without_the_model(path, model, optimizer, epochs, train_epoch):
    """WRONG with 1, then 2 ranks, Adam, no random numbers rank 0, the restored parameters ... All
    ranks need the"""
    _train(path, model, optimizer, epochs, train_epoch, ["model"])


def one_epoch_twice(path, model, optimizer, epochs, train_epoch):
    """WRONG with 1, then 2 ranks ... [2, 3, 4] expected [3, 4] The last epoch is trained twice."""
    done = _resume(path, model, optimizer)
    for epoch in range(done, epochs):
        train_epoch(epoch)
        _write(_state(model, optimizer, epoch), path)


def parameters_only(path, model, optimizer, epochs, train_epoch):
    """WRONG with 1, then 2 ranks, Adam, no random numbers rank 0, the restored buffers, seen: [0]
    expected [36] Buffers belong to the model, too"""
    done = _resume(path, model, optimizer, ["model"])
    if done:
        saved = torch.load(path)["model"]
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(saved[name])
    for epoch in range(done, epochs):
        train_epoch(epoch)
        _write(_state(model, optimizer, epoch + 1), path)


def at_the_end_only(path, model, optimizer, epochs, train_epoch):
    """WRONG with 1, then 2 ranks, Adam, no random numbers rank 0, the file: missing after 3 epochs
    ... Save after each epoch."""
    done = _resume(path, model, optimizer)
    for epoch in range(done, epochs):
        train_epoch(epoch)
    _write(_state(model, optimizer, epochs), path)


def in_place(path, model, optimizer, epochs, train_epoch):
    """WRONG with 1, then 2 ranks, Adam, no random numbers rank 0, the file: overwritten in place
    ... If the run is killed at this moment, no complete file is left."""

    def write(state, path):
        if dist.get_rank() == 0:
            torch.save(state, path)

    _train(path, model, optimizer, epochs, train_epoch, write=write)


def deleted_first(path, model, optimizer, epochs, train_epoch):
    """WRONG with 1, then 2 ranks, Adam, no random numbers rank 0, the file: deleted before the next
    one has its"""

    def write(state, path):
        if dist.get_rank() == 0:
            torch.save(state, f"{path}.tmp")
            if os.path.exists(path):
                os.remove(path)
            os.rename(f"{path}.tmp", path)

    _train(path, model, optimizer, epochs, train_epoch, write=write)


def all_ranks_write(path, model, optimizer, epochs, train_epoch):
    """CRASH with 1, then 2 ranks, Adam ... Here, only rank 0 can write files."""

    def write(state, path):
        torch.save(state, f"{path}.tmp{dist.get_rank()}")
        os.replace(f"{path}.tmp{dist.get_rank()}", path)

    _train(path, model, optimizer, epochs, train_epoch, write=write)


def only_rank_0_loads(path, model, optimizer, epochs, train_epoch):
    """CRASH with 1, then 2 ranks, Adam ... rank 0 trains epoch 3, but rank 1 trains epoch 0 ... All
    ranks must load the file.
    """
    done = 0
    if dist.get_rank() == 0 and os.path.exists(path):
        done = _load(path, model, optimizer)
    for epoch in range(done, epochs):
        train_epoch(epoch)
        _write(_state(model, optimizer, epoch + 1), path)


def each_rank_asks(path, model, optimizer, epochs, train_epoch):
    """CRASH with 2 ranks, Adam rank 1: EOFError ... Rank 0 must decide for all."""
    done = _load(path, model, optimizer) if os.path.exists(path) else 0
    for epoch in range(done, epochs):
        train_epoch(epoch)
        _write(_state(model, optimizer, epoch + 1), path)


def always_loads(path, model, optimizer, epochs, train_epoch):
    """CRASH with 1 rank, Adam, no random numbers rank 0: FileNotFoundError: ... In the first run
    there is no file"""
    torch.load(path)
    _train(path, model, optimizer, epochs, train_epoch)


def a_seed_for_each_epoch(path, model, optimizer, epochs, train_epoch):
    """WRONG with 1, then 2 ranks, Adam rank 0, the order before the restart ... Do not seed"""

    def train_from_a_seed(epoch):
        torch.manual_seed(epoch)
        train_epoch(epoch)

    _train(path, model, optimizer, epochs, train_from_a_seed)


def every_second_epoch(path, model, optimizer, epochs, train_epoch):
    """WRONG with 1, then 2 ranks, Adam, no random numbers rank 0, the file: not saved after epoch 1
    ... A run that is killed loses this epoch."""

    def write(state, path):
        if state["done"] % 2:
            _write(state, path)

    _train(path, model, optimizer, epochs, train_epoch, write=write)


def rounds_the_rate(path, model, optimizer, epochs, train_epoch):
    """WRONG with 1, then 2 ranks, Adam, no random numbers rank 0, bit for bit: not optimizer, lr
    ... The numbers of the file must be restored as they are."""
    done = _resume(path, model, optimizer)
    for group in optimizer.param_groups:
        group["lr"] = round(group["lr"], 9)
    for epoch in range(done, epochs):
        train_epoch(epoch)
        _write(_state(model, optimizer, epoch + 1), path)
