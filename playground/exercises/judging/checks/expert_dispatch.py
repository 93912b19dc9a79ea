"""How expert_dispatch is checked."""

import torch
import torch.distributed as dist

CASES = {
    "an expert on each rank": {"here": 1, "kind": "even"},
    "2 experts on each rank": {"here": 2, "kind": "uneven"},
    "2 experts on each rank, all tokens for expert 1": {"here": 2, "kind": "one expert"},
    "3 experts on each rank, ranks without tokens, float64": {
        "here": 3,
        "kind": "no tokens",
        "dtype": torch.float64,
    },
}
WIDTH = 3
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
HELPERS = ("Exchange",)
HINTS = """
Sort the tokens by expert: then the tokens for a rank stand together. Which numbers must the ranks
exchange before they can make a buffer for the tokens? And how do gradients get from rank to rank?

expert.argsort() sorts, and torch.bincount(expert, minlength=...) counts. An all_to_all_single with
lists of counts has uneven parts. It has no gradient, so put it into a torch.autograd.Function.
outputs[order] = rows puts rows back, and autograd follows.

sort the tokens; count those of each expert; exchange the counts with all_to_all_single
add up the counts of each rank's experts: what this rank sends to each rank, and what it receives
exchange the tokens; let each expert compute its rows, also if there are none
exchange the outputs, with the two lists of counts swapped; put them back in the order of the tokens
backward of an exchange: the same exchange of the gradient, with the lists swapped
"""


def inputs_of(rank, world_size, here, kind, dtype=torch.float32):
    """Return the tokens of a rank, their experts, and the gradient of their outputs."""
    count = {"even": 2 * world_size, "uneven": 3 + 2 * rank, "one expert": 4}.get(kind, 0)
    if kind == "no tokens" and rank % 2 == 0:
        count = 5 + rank
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randn(count, WIDTH, generator=generator).to(dtype)
    expert = torch.randint(world_size * here, (count,), generator=generator)
    if kind == "even":
        expert = torch.arange(count).flip(0) % world_size  # equally many tokens for each rank
    if kind == "one expert":
        expert = torch.ones_like(expert)
    gradient = torch.randn(count, WIDTH, generator=generator).to(dtype)
    return tokens, expert, gradient


def make_expert(number, dtype):
    torch.manual_seed(1000 + number)
    return torch.nn.Linear(WIDTH, WIDTH).to(dtype)


def gradient_of(expert):
    """Return the gradient of an expert's weight and bias as one tensor; None: it has none."""
    if expert.weight.grad is None:
        return None
    return torch.cat([expert.weight.grad, expert.bias.grad[:, None]], dim=1)


def run(expert_dispatch, here, kind, dtype=torch.float32):
    rank = dist.get_rank()
    tokens, expert, gradient = inputs_of(rank, dist.get_world_size(), here, kind, dtype)
    tokens.requires_grad_()
    experts = [make_expert(rank * here + index, dtype) for index in range(here)]
    outputs = expert_dispatch(tokens, expert, experts)
    if isinstance(outputs, torch.Tensor) and outputs.requires_grad:
        outputs.backward(gradient)
    found = {"the outputs": outputs, "the gradient of tokens": tokens.grad}
    if len(tokens) == 0:
        found["the gradient of tokens"] = torch.zeros_like(tokens)  # there may be none
    busy = experts_of_all(dist.get_world_size(), here, kind)
    for index, each in enumerate(experts):
        number = rank * here + index
        gradient = gradient_of(each)
        if gradient is None and number not in busy:  # zeros or none: both are right
            gradient = torch.zeros(WIDTH, WIDTH + 1, dtype=dtype)
        found[f"the gradient of expert {number}"] = gradient
    return found


def experts_of_all(world_size, here, kind):
    """Return the experts of the tokens of all ranks, one number for each token."""
    experts = [inputs_of(rank, world_size, here, kind)[1] for rank in range(world_size)]
    return torch.cat(experts).tolist()


def expected(rank, world_size, here, kind, dtype=torch.float32):
    experts = [make_expert(number, dtype) for number in range(world_size * here)]
    found = {}
    for other in range(world_size):
        tokens, expert, gradient = inputs_of(other, world_size, here, kind, dtype)
        tokens.requires_grad_()
        outputs = torch.zeros_like(tokens)
        for number, each in enumerate(experts):
            outputs = torch.where((expert == number)[:, None], each(tokens), outputs)
        outputs.backward(gradient)
        if other == rank:
            found["the outputs"] = outputs.detach()
            found["the gradient of tokens"] = tokens.grad
    for index in range(here):
        number = rank * here + index
        found[f"the gradient of expert {number}"] = gradient_of(experts[number])
    return found


def limits(rank, world_size, here, kind, dtype=torch.float32):
    """Return how much a rank may send: rows with their gradients, and counts for all experts.

    An answer may also send the number of the expert with each token.
    """
    _, expert, _ = inputs_of(rank, world_size, here, kind)
    away = (expert // here != rank).sum().item()  # tokens of this rank whose expert is elsewhere
    mine = [number for number in experts_of_all(world_size, here, kind) if number // here == rank]
    guests = len(mine) - (len(expert) - away)  # tokens of other ranks whose expert is here
    rows = 2 * (away + guests) * WIDTH * dtype.itemsize
    all_counts = world_size * here
    counts = (world_size - 1) * all_counts * 8 + away * 8  # int64, to each rank
    return {"bytes": rows + counts, "messages": 6 * max(1, world_size - 1)}


class Exchange(torch.autograd.Function):
    """An all_to_all with uneven parts, and with a gradient."""

    @staticmethod
    def forward(ctx, rows, sent, received):
        """Send rows, so many to each rank. Returns the rows that arrive."""
        ctx.sent = sent
        ctx.received = received
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent)
        return arrived

    @staticmethod
    def backward(ctx, gradient):
        """Send the gradients back."""
        back = gradient.new_empty(sum(ctx.sent), gradient.shape[1])
        dist.all_to_all_single(back, gradient.contiguous(), ctx.sent, ctx.received)
        return back, None, None


def expert_dispatch(tokens, expert, experts):
    """Why: counts tell each rank the size of its buffer, and a gradient travels the way back."""
    world_size = dist.get_world_size()
    here = len(experts)
    order = expert.argsort()
    counts = torch.bincount(expert, minlength=world_size * here)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts)
    sent = counts.view(world_size, here).sum(1).tolist()
    received = arriving.view(world_size, here).sum(1).tolist()
    arrived = Exchange.apply(tokens[order], sent, received)
    number = torch.arange(here, device=tokens.device)
    number = number.repeat(world_size).repeat_interleave(arriving)
    computed = torch.empty_like(arrived)
    for index, compute in enumerate(experts):
        computed[number == index] = compute(arrived[number == index])
    outputs = torch.empty_like(tokens)
    outputs[order] = Exchange.apply(computed, received, sent)
    return outputs


SPLIT = "CRASH.*(?i:split sizes)"
WORDS = {
    SPLIT: "The counts that a rank sends must be those with which the other rank receives.",
    "the gradient of .*: None": "For autograd, a message is the end of the graph. Send "
    "gradients in backward().",
    "COSTLY": "A token is needed by its expert only, and its output by its own rank only.",
    "HANG, 3 experts": "A rank without tokens must call all collectives, also those of backward().",
}
SORT = "expert.argsort()"
WORLD = "dist.get_world_size()"
BACK = "Exchange.apply(computed, received, sent)"
MISTAKES = {
    WORDS[SPLIT]: (BACK, "Exchange.apply(computed, sent, received)"),
    WORDS["COSTLY"]: (
        *(WORLD, f"{WORLD}\n    dist.all_gather_object([None] * world_size, tokens)"),
    ),
    WORDS["HANG, 3 experts"]: (
        *(WORLD, f"{WORLD}\n    if len(tokens) == 0:\n        return tokens"),
    ),
    "For autograd, a message is the end of the graph.": (BACK, f"{BACK}.detach()"),
    "It has the right numbers, in another order.": (
        *(SORT, "expert.argsort(stable=True)"),
        *("outputs[order] =", "outputs[:] ="),
    ),
    "3 experts on each rank, ranks": (SORT, "(expert // here).argsort(stable=True)"),
}
