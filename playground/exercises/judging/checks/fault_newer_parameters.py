"""How fault_newer_parameters is checked."""

import time
from pathlib import Path

import torch
import torch.distributed as dist
from judging.words import difference

NAME = "train"
FAULT = "WRONG with 2 ranks, 1 step ... the parameters that rank 1 has after its own step"
WORLD_SIZES = (2, 3, 4, 5)
CASES = {"1 step": {"shape": (2,), "steps": 1}, "5 steps": {"shape": (2, 3), "steps": 5}}
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}
PATIENCE = 2  # seconds for which rank 0 waits for rank 1 at most
WHEN = "rank 1 takes its first step"
HINTS = """
When do the numbers of a message leave the tensor: in isend, or later? What has happened to the
tensor until then?

Until wait() has returned for each request, the tensor that isend sends must not change. A clone()
of it can travel while the tensor itself changes.

message = a copy of the parameters
start to send the copy and to receive, in one batch
take a step, and wait for each request, as before
"""


def start(rank, shape):
    return torch.full(shape, 10.0**rank)


def goal(rank, shape):
    """Return the numbers that the training on one rank alone would reach."""
    return torch.full(shape, 3 * 10.0**rank)


def run(train, shape, steps):
    """Call the learner's function on this rank.

    Rank 0 starts when rank 1 has computed a gradient. If rank 1 first waits for a message of rank
    0, rank 0 starts PATIENCE seconds later.
    """
    rank = dist.get_rank()
    parameters = start(rank, shape)
    computed = Path("rank 1 has computed")
    when = "while the messages travel"

    def gradient(now):
        if rank == 1:
            computed.touch()
        return now - goal(rank, shape)

    if rank == 0:
        end = time.monotonic() + PATIENCE
        while not computed.exists() and time.monotonic() < end:
            time.sleep(0.01)
        if not computed.exists():
            when = "after it has received"
    returned = train(parameters, gradient, steps)
    return {"the parameters": parameters, "what is returned": returned, WHEN: when}


def own_step(parameters, rank, shape):
    return parameters - 0.5 * (parameters - goal(rank, shape))


def trained(world_size, shape, steps):
    now = [start(rank, shape) for rank in range(world_size)]
    for _ in range(steps):
        new = []
        for rank in range(world_size):
            new.append((own_step(now[rank], rank, shape) + now[rank - 1]) / 2)
        now = new
    return now


def expected(rank, world_size, shape, steps):
    parameters = trained(world_size, shape, steps)[rank]
    when = "while the messages travel"
    return {"the parameters": parameters, "what is returned": None, WHEN: when}


def limits(rank, world_size, shape, steps):
    return {"messages": steps, "bytes": steps * start(rank, shape).nbytes}


def train(parameters, gradient, steps):
    """Why: isend only starts the message, so it gets a copy, which does not change meanwhile."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    right = (rank + 1) % world_size
    left = (rank - 1) % world_size
    received = torch.empty_like(parameters)
    for _ in range(steps):
        message = parameters.clone()
        # With NCCL, the messages of two ranks share one communicator and run in order, so both
        # ranks could wait for ever if both send first. A batch starts its operations together.
        operations = [
            dist.P2POp(dist.isend, message, right),
            dist.P2POp(dist.irecv, received, left),
        ]
        requests = dist.batch_isend_irecv(operations)
        parameters -= 0.5 * gradient(parameters)
        for request in requests:
            request.wait()
        parameters += received
        parameters /= 2


ORDER = f"{WHEN}: after"
WORDS = {
    "what is returned: ": "Change the parameters in place, and return nothing.",
    ORDER: "The step comes before wait() and recv(), so that no rank waits before it computes.",
}


def explain(trial):
    rank = trial.rank
    shape = trial.case["shape"]
    actual = trial.results[rank]["the parameters"]
    left = (rank - 1) % trial.world_size
    mine = start(rank, shape)
    theirs = start(left, shape)
    if not difference(actual, mine, TOLERANCE):
        return "The tensor of the caller has not changed. Are the new numbers in another tensor?"
    if not difference(actual, own_step((mine + theirs) / 2, rank, shape), TOLERANCE):
        return "This would be right if the mean came first, and the step after it."
    newer = (own_step(mine, rank, shape) + own_step(theirs, left, shape)) / 2
    if not difference(actual, newer, TOLERANCE):
        return f"Rank {rank} has received the parameters that rank {left} has after its own step."
    return None


STEP = "        parameters -= 0.5 * gradient(parameters)\n"
WAIT = "            request.wait()\n"
HALVE = "        parameters /= 2\n"
MISTAKES = {
    "the parameters that rank 1 has after its own step.": ("parameters.clone()", "parameters"),
    "This would be right if the mean came first, and the step after it.": (
        *(STEP, ""),
        *(HALVE, HALVE + STEP),
    ),
    WORDS[ORDER]: (*(STEP, ""), *(WAIT, WAIT + STEP)),
    "The tensor of the caller has not changed. Are the new numbers in another tensor?": (
        *(STEP, STEP.replace("-= 0.5", "= parameters - 0.5")),
    ),
}
