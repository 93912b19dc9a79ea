"""How fault_averaged_experts is checked."""

import torch
import torch.distributed as dist
from judging.words import difference
from torch.nn import functional as F

NAME = "train"
FAULT = "WRONG with 2 ranks, an expert on each rank ... changes by the mean over the experts of"
CASES = {
    "an expert on each rank": {"here": 1, "busy": True, "steps": 1},
    "2 experts on each rank": {"here": 2, "busy": True, "steps": 3},
    "an expert without tokens": {"here": 1, "busy": False, "steps": 3},
}
WIDTH = 3
LR = 0.1
HINTS = """
Average the gradients of a layer over the ranks: which parameters meet in one all_reduce? Look at
model.shared, and then at model.experts.

An expert is on one rank only, and backward() has already added up its gradient over the tokens of
all ranks. But each rank's loss is a mean over its own tokens, and not over those of all ranks.

for name, parameter in model.named_parameters():
    add up its gradient over the ranks, unless it belongs to an expert
    divide it by the number of ranks in any case
"""


class Exchange(torch.autograd.Function):
    """Sends rows, so many to each rank. Its backward pass sends their gradients back."""

    @staticmethod
    def forward(ctx, rows, sent, received):
        ctx.counts = sent, received
        return all_to_all(rows, sent, received)

    @staticmethod
    def backward(ctx, gradient):
        sent, received = ctx.counts
        return all_to_all(gradient, received, sent), None, None


def all_to_all(rows, sent, received):
    """Send rows, so many to each rank. Returns the rows that arrive."""
    arrived = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent)
    return arrived


class Mixture(torch.nn.Module):
    """A layer of which each rank has a replica, and experts, of which it has some or all.

    Args:
        numbers: of the experts that this model has.
    """

    def __init__(self, numbers):
        super().__init__()
        torch.manual_seed(1)
        self.shared = torch.nn.Linear(WIDTH, WIDTH)
        experts = []
        for number in numbers:
            torch.manual_seed(100 + number)
            experts.append(torch.nn.Linear(WIDTH, WIDTH))
        self.experts = torch.nn.ModuleList(experts)

    def compute(self, rows, counts):
        """Let each expert compute some of the rows, which are sorted by expert."""
        parts = rows.split(counts)
        pairs = zip(self.experts, parts, strict=True)
        return torch.cat([expert(part) for expert, part in pairs])


class Distributed(Mixture):
    """The same with the experts of this rank. Tokens travel.

    The first tokens of each rank go to expert 0, the next ones to expert 1, and so on. All ranks
    send as many tokens to an expert, so no counts have to travel.
    """

    def __init__(self, here, busy):
        rank = dist.get_rank()
        super().__init__(range(rank * here, (rank + 1) * here))
        self.counts = counts_of(dist.get_world_size(), here, busy)

    def forward(self, tokens):
        rank = dist.get_rank()
        world_size = dist.get_world_size()
        here = len(self.experts)
        own = self.counts[rank * here : (rank + 1) * here]  # from each rank
        sent = [sum(self.counts[each * here : each * here + here]) for each in range(world_size)]
        received = [sum(own)] * world_size
        arrived = Exchange.apply(torch.tanh(self.shared(tokens)), sent, received)
        computed = []
        for part in arrived.split(received):
            computed.append(self.compute(part, own))
        return Exchange.apply(torch.cat(computed), received, sent)


class Whole(Mixture):
    """The same in a single process."""

    def __init__(self, world_size, here, busy):
        super().__init__(range(world_size * here))
        self.counts = counts_of(world_size, here, busy)

    def forward(self, tokens):
        return self.compute(torch.tanh(self.shared(tokens)), self.counts)


def counts_of(world_size, here, busy):
    """Return how many tokens of a rank go to each expert: 1, 2, 3, and again 1, 2, 3."""
    counts = [1 + number % 3 for number in range(world_size * here)]
    if not busy and world_size > 1:
        counts[-1] = 0
    return counts


def part(rank, world_size, here, busy):
    """Return the tokens of a rank, and what they should become."""
    generator = torch.Generator().manual_seed(rank)
    count = sum(counts_of(world_size, here, busy))
    tokens = torch.randn(count, WIDTH, generator=generator)
    return tokens, torch.randn(count, WIDTH, generator=generator)


def run(train, here, busy, steps):
    """Call the learner's function on this rank."""
    model = Distributed(here, busy)
    train(model, *part(dist.get_rank(), dist.get_world_size(), here, busy), steps)
    return own_names(model, dist.get_rank(), here)


def own_names(model, rank, here):
    """Return the parameters of a rank, by name. Experts have their numbers over all ranks."""
    found = {}
    for name, parameter in model.named_parameters():
        if name.startswith("experts."):
            _, number, last = name.split(".")
            name = f"expert {rank * here + int(number)}, {last}"
        found[name] = parameter.detach()
    return found


def gradients(model, ranks, world_size, case):
    """Return the gradients of the mean loss over the tokens of some ranks, by parameter."""
    model.zero_grad()
    shape = {"here": case["here"], "busy": case["busy"]}
    for rank in ranks:
        tokens, goals = part(rank, world_size, **shape)
        (F.mse_loss(model(tokens), goals) / len(ranks)).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def expected(rank, world_size, here, busy, steps):
    """Return what run() should return."""
    case = {"here": here, "busy": busy}
    model = Whole(world_size, here, busy)
    for _ in range(steps):
        found = gradients(model, range(world_size), world_size, case)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= LR * found[name]
    model.experts = model.experts[rank * here : (rank + 1) * here]
    return own_names(model, rank, here)


def train(model, tokens, goals, steps):
    """Why: an expert has the sum of the gradients already. It only has to become a mean."""
    for _ in range(steps):
        model.zero_grad()
        F.mse_loss(model(tokens), goals).backward()
        for name, parameter in model.named_parameters():
            if not name.startswith("experts."):
                dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad


def explain(trial):
    """Put typical mistakes into words, in the first case, which has an expert on each rank."""
    if trial.verdict == "HANG":
        return None
    if trial.case["steps"] > 1:
        return None
    size = trial.world_size
    rank = trial.rank
    case = trial.case
    start = Mixture(range(rank, rank + 1))  # the parameters with which this rank has started
    before = own_names(start, rank, 1)
    whole = Whole(size, case["here"], case["busy"])
    right = gradients(whole, range(size), size, case)
    of_ranks = [gradients(whole, [each], size, case) for each in range(size)]
    actual, _ = trial.of_rank()
    for name, parameter in before.items():
        change = (parameter - actual[name]) / LR
        found = words_on(name, change, right, of_ranks, rank)
        if found:
            return f"{name} {found}"
    return None


def words_on(name, change, right, of_ranks, rank):
    """Return in words which gradients have changed a parameter; None if they are right or unknown.

    Args:
        name: the parameter.
        change: by what it has changed, as if it were a gradient.
        right: the gradients of a single process.
        of_ranks: for each rank, the gradients of the mean loss over its tokens.
        rank: the rank on which it has changed.
    """
    size = len(of_ranks)
    if not name.startswith("expert "):
        if close(change, right[name]):
            return None
        if close(change, of_ranks[rank][name]):
            return "changes by this rank's own gradient only, but it is a replica."
        if close(change, right[name] * size):
            return f"changes by {size} times the mean gradient: added up, but not divided."
        return None
    last = name.rpartition(" ")[2]
    wanted = right[f"experts.{rank}.{last}"]
    if close(change, wanted):
        return None
    if close(change, wanted * size):
        return (
            f"changes by {size} times its gradient. Each rank's loss is a mean over its own tokens,"
            f" of which there are {size} times as many on all ranks."
        )
    if close(change, wanted / size):
        return f"changes by its gradient, divided by {size} once more."
    others = sum(right[f"experts.{other}.{last}"] for other in range(size))
    if close(change, others):
        return "changes by the mean over the experts of all ranks. They are different experts."
    if close(change, others * size):
        return "changes by the sum over the experts of all ranks. They are different experts."
    return None


def close(tensor, other):
    """Return whether two gradients are equal, up to rounding."""
    return difference(tensor, other, {"rtol": 1e-3, "atol": 1e-4}) is None


IS_SHARED = 'if not name.startswith("experts."):'
DIVIDE = "parameter.grad /= dist.get_world_size()"
MISTAKES = {
    "changes by the mean over the experts of": (IS_SHARED, "if True:"),
    "expert 0, weight changes by 2 times its gradient. Each rank's loss": (
        *(DIVIDE, f"{DIVIDE} if 'experts.' not in name else 1"),
    ),
    "shared.weight changes by 2 times the mean gradient: added up": (
        *(DIVIDE, f"{DIVIDE} if 'experts.' in name else 1"),
    ),
    "shared.weight changes by this rank's own gradient only": (
        *("dist.all_reduce(parameter.grad)", "continue"),
    ),
    "expert 0, weight changes by its gradient, divided by 2 once more.": (
        *(DIVIDE, f"{DIVIDE} ** (1 + ('experts.' in name))"),
    ),
}
