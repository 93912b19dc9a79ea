"""A block that keeps only its input for `backward()`, and computes the rest again there.

Lesson: transformer/activation_checkpointing.py.

Write the autograd function CheckpointBlock. It does what PyTorch's `checkpoint()` does for a block,
which is any module with one input and one output. It gets the parameters of the block, too, because
autograd computes gradients only of tensors that are arguments of `apply()`:

    output = CheckpointBlock.apply(block, inputs, *block.parameters())

Autograd records nothing inside `forward()`, so nothing that the block has computed is left after
it, except the output. `backward()` runs the block again, lets autograd record it, and returns the
gradients. With several ranks, each rank has inputs of its own, and sends nothing.

Rung 1 is a block without random numbers. Your answer passes it if
- the output is right, and so are the gradients of the inputs and of the parameters;
- from `forward()` to `backward()`, this rank keeps the inputs, but nothing that the block has
  computed from them (except its output, which the caller has).

Rung 2 is any block. Your answer passes it if
- all of rung 1 holds;
- a block with dropout drops the same numbers again. `torch.get_rng_state()` returns the state of
  the random numbers, and `torch.set_rng_state(state)` restores it. After `backward()`, the random
  numbers continue as if it had drawn none. (A GPU has random numbers of its own:
  `torch.cuda.get_rng_state`.)
- it is right if the inputs, or some of the parameters, need no gradient. `backward()` returns None
  for them, and `ctx.needs_input_grad` shows which they are;
- it is right if the block does not use some of its parameters.

The first check copies this file to `playground/exercises/answers/`. Write in the copy.

Check it. For help, add `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/checkpoint_block.py
"""

import torch
from check import check


class CheckpointBlock(torch.autograd.Function):
    """A block that keeps only its input, and is computed once more in backward()."""

    @staticmethod
    def forward(ctx, block, inputs, *parameters):
        """Return block(inputs). `parameters` are those of the block, in order."""
        raise NotImplementedError("your turn")

    @staticmethod
    def backward(ctx, gradient):
        """Return None for the block, and the gradients of the inputs and of each parameter."""
        raise NotImplementedError("your turn")


if __name__ == "__main__":
    check(__file__)
