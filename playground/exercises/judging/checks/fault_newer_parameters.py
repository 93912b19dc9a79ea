"""How fault_newer_parameters is checked."""

import time
from pathlib import Path

import torch

from instruments.facts import difference

NAME = "train"
FAULT = "WRONG with 2 ranks, 1 step ... the parameters that rank 1 has after its own step"
WORLD_SIZES = (2, 3, 4, 5)
CASES = {"1 step": {"shape": (2,), "steps": 1}, "5 steps": {"shape": (2, 3), "steps": 5}}
HINTS = """
When do the numbers of a message leave the tensor: in isend, or later? What has happened to the
tensor until then?

Until wait() has returned for each request, the tensor that isend sends must not change. A clone()
of it can travel while the tensor itself changes.

message = a copy of the parameters
start to send the copy and to receive, in one batch
take a step, and wait for each request, as before
"""


def first(rank, shape):
    return torch.full(shape, 10.0**rank)


def goal(rank, shape):
    """Return the numbers that the training on one rank alone would reach."""
    return torch.full(shape, 3 * 10.0**rank)


def run(train, rank, world_size, shape, steps):
    """Call the learner's function on this rank: on rank 0 when rank 1 has computed a gradient."""
    parameters = first(rank, shape)
    computed = Path("rank 1 has computed")

    def gradient(now):
        if rank == 1:
            computed.touch()
        return now - goal(rank, shape)

    while rank == 0 and not computed.exists():
        time.sleep(0.01)
    returned = train(parameters, gradient, steps)
    return {"the parameters": parameters, "what is returned": returned}


def own_step(parameters, rank, shape):
    return parameters - 0.5 * (parameters - goal(rank, shape))


def trained(world_size, shape, steps):
    now = [first(rank, shape) for rank in range(world_size)]
    for _ in range(steps):
        new = []
        for rank in range(world_size):
            new.append((own_step(now[rank], rank, shape) + now[rank - 1]) / 2)
        now = new
    return now


def start(rank, world_size, shape, steps):
    return {"the parameters": first(rank, shape), "what is returned": None}


def expected(rank, world_size, shape, steps):
    return {"the parameters": trained(world_size, shape, steps)[rank], "what is returned": None}


def limits(rank, world_size, shape, steps):
    return {"messages": steps, "bytes": steps * first(rank, shape).nbytes}


REPAIR = ("isend, parameters,", "isend, parameters.clone(),")
WHY = "isend only starts the message, so it gets a copy, which does not change meanwhile."
WAITS = r"HANG.*rank 0 waits [^\n]*(outside|computed|sleep)"
WORDS = {
    "what is returned: ": "Change the parameters in place, and return nothing.",
    WAITS: "Rank 0 starts when rank 1 has computed its first gradient. So rank 1 must not wait for "
    "a message of rank 0 before.",
}


def explain(trial):
    rank = trial.rank
    shape = trial.case["shape"]
    left = (rank - 1) % trial.world_size
    theirs = own_step(first(left, shape), left, shape)
    newer = (own_step(first(rank, shape), rank, shape) + theirs) / 2
    if difference(trial.results[rank]["the parameters"], newer):
        return None
    return f"Rank {rank} has received the parameters that rank {left} has after its own step."


STEP = "        parameters -= 0.5 * gradient(parameters)\n"
WAIT = "            request.wait()\n"
MISTAKES = {
    WORDS[WAITS]: (STEP, "", WAIT, WAIT + STEP),
    "It is unchanged.": (STEP, STEP.replace("-= 0.5", "= parameters - 0.5")),
}
