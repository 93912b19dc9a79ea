"""Why: counts tell each rank how large its buffer must be, and a gradient travels the way back."""

import torch
import torch.distributed as dist


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
    """Return what the experts compute of the tokens, (T, width), in the order of the tokens."""
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
