"""Wrong answers to expert_dispatch. See test_exercises.py for the docstrings."""

import torch
import torch.distributed as dist


def _all_to_all(rows, sent, received):
    """Send rows, so many to each rank. Returns the rows that arrive."""
    arrived = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent)
    return arrived


class _Exchange(torch.autograd.Function):
    """The same with a gradient."""

    @staticmethod
    def forward(ctx, rows, sent, received):
        """Send the rows."""
        ctx.counts = sent, received
        return _all_to_all(rows, sent, received)

    @staticmethod
    def backward(ctx, gradient):
        """Send the gradients back."""
        sent, received = ctx.counts
        return _all_to_all(gradient, received, sent), None, None


class _SameDirection(_Exchange):
    """Its backward pass sends in the direction of the forward pass."""

    @staticmethod
    def backward(ctx, gradient):
        """Forget that the counts change places."""
        return _all_to_all(gradient, *ctx.counts), None, None


def _exchange_counts(expert, here):
    """Return how many tokens of each expert arrive, and the counts for each rank of both sides."""
    world_size = dist.get_world_size()
    counts = torch.bincount(expert, minlength=world_size * here)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts)
    sent = counts.view(world_size, here).sum(1).tolist()
    received = arriving.view(world_size, here).sum(1).tolist()
    return arriving, sent, received


def _compute(arrived, arriving, experts, skip=False):
    """Let this rank's experts compute what has arrived."""
    number = torch.arange(len(experts)).repeat(dist.get_world_size()).repeat_interleave(arriving)
    computed = torch.empty_like(arrived)
    for index, compute in enumerate(experts):
        mine = number == index
        if not skip or mine.any():
            computed[mine] = compute(arrived[mine])
    return computed


def _dispatch(tokens, expert, experts, exchange=_Exchange.apply, exchange_back=None, skip=False):
    """The right answer, of which the others replace a part."""
    order = expert.argsort(stable=True)
    arriving, sent, received = _exchange_counts(expert, len(experts))
    arrived = exchange(tokens[order], sent, received)
    computed = _compute(arrived, arriving, experts, skip)
    outputs = torch.empty_like(tokens)
    outputs[order] = (exchange_back or exchange)(computed, received, sent)
    return outputs


def without_a_gradient(tokens, expert, experts):
    """WRONG with 1 rank ... the gradient of tokens: None ... For autograd, a message is the end"""
    return _dispatch(tokens, expert, experts, _all_to_all)


def no_gradient_on_the_way_there(tokens, expert, experts):
    """WRONG with 1 rank ... the gradient of tokens ... How does the gradient get back"""
    return _dispatch(tokens, expert, experts, _all_to_all, _Exchange.apply)


def same_direction(tokens, expert, experts):
    """CRASH with 2 ranks, 2 experts on each rank ... The counts that a rank sends must be those"""
    return _dispatch(tokens, expert, experts, _SameDirection.apply)


def sorted_outputs(tokens, expert, experts):
    """WRONG with 1 rank ... The outputs are in the order of the experts. Return them in that"""
    return _dispatch(tokens, expert, experts)[expert.argsort(stable=True)]


def sorts_by_rank_only(tokens, expert, experts):
    """WRONG with 1 rank ... was computed by expert ... and not by expert"""
    order = (expert // len(experts)).argsort(stable=True)
    arriving, sent, received = _exchange_counts(expert, len(experts))
    computed = _compute(_Exchange.apply(tokens[order], sent, received), arriving, experts)
    outputs = torch.empty_like(tokens)
    outputs[order] = _Exchange.apply(computed, received, sent)
    return outputs


def equally_many_for_each_rank(tokens, expert, experts):
    """CRASH with 2 ranks, 2 experts on each rank ... rank"""
    n = dist.get_world_size()
    arriving, _, _ = _exchange_counts(expert, len(experts))
    order = expert.argsort(stable=True)
    parts = [len(tokens) // n] * n
    computed = _compute(_Exchange.apply(tokens[order], parts, parts), arriving, experts)
    outputs = torch.empty_like(tokens)
    outputs[order] = _Exchange.apply(computed, parts, parts)
    return outputs


def nothing_to_send(tokens, expert, experts):
    """HANG with 2 ranks, 3 experts ... rank 1 ... Rank 1 has called 0 collectives, and another"""
    if len(tokens) == 0:
        return tokens
    return _dispatch(tokens, expert, experts)


def skips_experts_without_tokens(tokens, expert, experts):
    """HANG with 2 ranks ... expert 1 rank 0 waits at your line ... also those of backward()."""
    return _dispatch(tokens, expert, experts, skip=True)


def all_tokens_everywhere(tokens, expert, experts):
    """COSTLY with 2 ranks ... A token is needed by its expert only"""
    n = dist.get_world_size()
    count = torch.tensor([len(tokens)])
    counts = [torch.empty_like(count) for _ in range(n)]
    dist.all_gather(counts, count)
    received = [each.item() for each in counts]
    sent = [len(tokens)] * n
    arrived = _Exchange.apply(tokens.repeat(n, 1), sent, received)
    numbers = _all_to_all(expert[:, None].repeat(n, 1), sent, received)[:, 0]
    computed = torch.zeros_like(arrived)
    for index, compute in enumerate(experts):
        mine = numbers == dist.get_rank() * len(experts) + index
        computed[mine] = compute(arrived[mine])
    return _Exchange.apply(computed, received, sent).view(n, *tokens.shape).sum(0)
