"""How expert_dispatch is checked."""

import torch
import torch.distributed as dist

UNEVEN = (3, 5, 7, 9, 11)
SOME = (5, 0, 7, 0, 9)
CASES = {  # how many experts each rank has, and how many tokens
    "an expert on each rank": {"here": 1, "counts": UNEVEN},
    "2 experts on each rank": {"here": 2, "counts": UNEVEN},
    "2 experts on each rank, all tokens for expert 1": {"here": 2, "counts": UNEVEN, "only": 1},
    "3 experts on each rank, ranks without tokens": {"here": 3, "counts": SOME},
}
WIDTH = 3
DTYPE = torch.float64
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


def inputs_of(rank, world_size, here, counts, only=None):
    """Return the tokens of a rank, their experts, and the gradient of their outputs."""
    generator = torch.Generator().manual_seed(rank)
    tokens, gradient = torch.randn(2, counts[rank], WIDTH, generator=generator, dtype=DTYPE)
    expert = torch.randint(world_size * here, (counts[rank],), generator=generator)
    if only is not None:
        expert[:] = only
    return tokens, expert, gradient


def make_expert(number):
    torch.manual_seed(1000 + number)
    return torch.nn.Linear(WIDTH, WIDTH, dtype=DTYPE)


def gradient_of(expert):
    """Return the gradient of an expert's weight and bias as one tensor; None: it has none."""
    if expert.weight.grad is None:
        return None
    return torch.cat([expert.weight.grad, expert.bias.grad[:, None]], dim=1)


def run(expert_dispatch, rank, world_size, here, **case):
    tokens, expert, gradient = inputs_of(rank, world_size, here, **case)
    tokens.requires_grad_()
    experts = [make_expert(rank * here + index) for index in range(here)]
    outputs = expert_dispatch(tokens, expert, experts)
    if isinstance(outputs, torch.Tensor) and outputs.requires_grad:
        outputs.backward(gradient)
    found = {"the outputs": outputs, "the gradient of tokens": tokens.grad}
    if len(tokens) == 0:
        found["the gradient of tokens"] = torch.zeros_like(tokens)  # there may be none
    busy = experts_of_all(world_size, here, **case)
    for index, each in enumerate(experts):
        number = rank * here + index
        gradient = gradient_of(each)
        if gradient is None and number not in busy:  # zeros or none: both are right
            gradient = torch.zeros(WIDTH, WIDTH + 1, dtype=DTYPE)
        found[f"the gradient of expert {number}"] = gradient
    return found


def experts_of_all(world_size, here, **case):
    """Return the experts of the tokens of all ranks, one number for each token."""
    experts = [inputs_of(rank, world_size, here, **case)[1] for rank in range(world_size)]
    return torch.cat(experts).tolist()


def expected(rank, world_size, here, **case):
    experts = [make_expert(number) for number in range(world_size * here)]
    found = {}
    for other in range(world_size):
        tokens, expert, gradient = inputs_of(other, world_size, here, **case)
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


def limits(rank, world_size, here, **case):
    """Return how much a rank may send: rows with their gradients, and counts for all experts.

    An answer may also send the number of the expert with each token.
    """
    _, expert, _ = inputs_of(rank, world_size, here, **case)
    away = (expert // here != rank).sum().item()  # tokens of this rank whose expert is elsewhere
    mine = [number for number in experts_of_all(world_size, here, **case) if number // here == rank]
    guests = len(mine) - (len(expert) - away)  # tokens of other ranks whose expert is here
    rows = 2 * (away + guests) * WIDTH * DTYPE.itemsize
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
WORLD = "dist.get_world_size()"
BACK = "Exchange.apply(computed, received, sent)"
MISTAKES = {
    WORDS[SPLIT]: (BACK, "Exchange.apply(computed, sent, received)"),
    WORDS["COSTLY"]: (WORLD, f"{WORLD}; dist.all_gather_object([None] * world_size, tokens)"),
    WORDS["HANG, 3 experts"]: (
        *(WORLD, f"{WORLD}\n    if len(tokens) == 0:\n        return tokens"),
    ),
    "For autograd, a message is the end of the graph.": (BACK, f"{BACK}.detach()"),
    "It has the right numbers, in another order.": ("outputs[order] =", "outputs[:] ="),
}
