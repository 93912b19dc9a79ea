"""How seeded_dropout is checked."""

import torch
import torch.distributed as dist
from judging.single import of_all_ranks

HALF = {"p": 0.5, "shape": (20, 30), "dtype": torch.float32}
CASES = {
    "p = 0.5, with any seeding": HALF | {"may_seed": True},
    "p = 0.5": HALF,
    "p = 0.1, float64": {"p": 0.1, "shape": (1200,), "dtype": torch.float64},
    "p = 0.75, float16": {"p": 0.75, "shape": (3, 10, 20), "dtype": torch.float16},
}
RUNG_1 = "as in the lesson"
RUNG_2 = "any dtype, and PyTorch's own random numbers stay as they are."
TOLERANCE = {"rtol": 2e-3, "atol": 0}  # float16 has 3 digits
# Seeds such as seed + 100 * rank + step are the same for two ranks in some of these steps.
STEPS = (0, 1, 2, 3, 4, 5, 7, 10, 100, 103, 1003, 10003, 100003, 1000003)
FIRST = 3  # the step at which the second run starts
SEED = 7
LIMITS = {"messages": 0}
HINTS = """
The lesson seeds PyTorch's random numbers once in each epoch: with which number? Here each call
needs a seed that no other rank or step has, and random numbers of its own.

torch.Generator().manual_seed(number) makes a generator, and torch.rand(shape, generator=generator)
draws numbers between 0 and 1 from it. Or: inside `with torch.random.fork_rng():` you may seed,
because the state of PyTorch's own random numbers is restored afterwards.

own_seed = seed + step * the number of ranks + this rank
random = torch.rand(...) from a generator with this seed
return 0 where random < p, and inputs / (1 - p) elsewhere
"""


def inputs_of(shape, dtype):
    """Return numbers other than 0, the same on all ranks."""
    count = torch.Size(shape).numel()
    return (1 + torch.arange(count) % 7).to(dtype).view(shape)


def dropped(seeded_dropout, p, shape, dtype, seed, step):
    """Return where numbers are dropped, as a flat tensor of booleans."""
    returned = seeded_dropout(inputs_of(shape, dtype), p, seed, step)
    return returned.detach().flatten() == 0


def first(seeded_dropout, rank, world_size, p, shape, dtype, may_seed=False):
    """Train from the beginning: note which numbers are dropped."""
    torch.manual_seed(1)
    masks = {step: dropped(seeded_dropout, p, shape, dtype, SEED, step) for step in STEPS}
    torch.save(masks, f"rank{rank}.pt")


def again(seeded_dropout, rank, world_size, p, shape, dtype, may_seed=False):
    """Start again at the step FIRST. Returns what the learner's function does, in words.

    If it may_seed, it may change PyTorch's own random numbers, as the lesson does.
    """
    torch.manual_seed(2)
    torch.rand(3)  # nothing can rely on what was drawn before the break
    state = torch.get_rng_state()
    inputs = inputs_of(shape, dtype).requires_grad_()
    returned = seeded_dropout(inputs, p, SEED, FIRST)
    found = {"its result": kind_of(returned)}
    if found["its result"] != kind_of(inputs):
        return found
    mask = returned.detach().flatten() == 0
    rows = mask.view(-1, shape[-1])
    alike = len(rows) > 1 and torch.equal(rows, rows[:1].expand_as(rows))
    found["the rows"] = "all alike" if alike else "different"
    part = mask.double().mean().item()
    found["dropped"] = f"about {p:.0%}" if abs(part - p) < 0.1 else f"{part:.0%}"
    factors = torch.where(returned == 0, 1 / (1 - p), returned / inputs)
    found["the least and largest factor"] = torch.stack(factors.aminmax())
    twice = dropped(seeded_dropout, p, shape, dtype, SEED, FIRST)
    found["called twice for one step"] = same_or_not(mask, twice)
    before = torch.load(f"rank{rank}.pt")
    found["dropped in both"] = equal_masks(before)
    other = dropped(seeded_dropout, p, shape, dtype, SEED + 54321, FIRST)
    found["with a different seed"] = same_or_not(mask, other)
    masks = [dropped(seeded_dropout, p, shape, dtype, SEED, step) for step in STEPS[FIRST:]]
    as_before = torch.cat([before[step] for step in STEPS[FIRST:]])
    found["after the restart"] = same_or_not(torch.cat(masks), as_before)
    found["PyTorch's random numbers"] = "as before"
    if not may_seed and not torch.equal(torch.get_rng_state(), state):
        found["PyTorch's random numbers"] = "changed"
    found["the gradient"] = gradient_of(returned, inputs)
    return found


def kind_of(value):
    if not isinstance(value, torch.Tensor):
        return "not a tensor"
    return f"shape {tuple(value.shape)}, {value.dtype}"


def same_or_not(mask, other):
    return "the same numbers" if torch.equal(mask, other) else "different numbers"


def equal_masks(masks):
    """Return which two ranks and steps drop the same numbers, in words. All ranks call it."""
    seen = {}
    for rank, each in enumerate(of_all_ranks(masks)):
        for step, mask in each.items():
            name = f"rank {rank} in step {step}"
            key = bytes(mask.tolist())
            if key in seen:
                return f"{seen[key]}, and {name}"
            seen[key] = name
    return "no two calls"


def gradient_of(returned, inputs):
    if not returned.requires_grad:
        return "none"
    returned.backward(torch.ones_like(returned))
    same = torch.allclose(inputs.grad * inputs, returned, rtol=2e-3)  # no input is 0
    return "right" if same else "wrong"


def expected(rank, world_size, p, shape, dtype, may_seed=False):
    return {
        "its result": kind_of(inputs_of(shape, dtype)),
        "the rows": "different",
        "dropped": f"about {p:.0%}",
        "the least and largest factor": torch.full((2,), 1 / (1 - p), dtype=dtype),
        "called twice for one step": "the same numbers",
        "dropped in both": "no two calls",
        "with a different seed": "different numbers",
        "after the restart": "the same numbers",
        "PyTorch's random numbers": "as before",
        "the gradient": "right",
    }


def runs(world_size):
    return [(first, world_size), (again, world_size)]


def seeded_dropout(inputs, p, seed, step):
    """Why: each rank and step has its own seed, and a generator of its own draws."""
    own_seed = seed + step * dist.get_world_size() + dist.get_rank()
    generator = torch.Generator(inputs.device).manual_seed(own_seed)
    random = torch.rand(inputs.shape, generator=generator, device=inputs.device)
    return torch.where(random < p, 0, inputs / (1 - p))


WORDS = {
    "the rows:": "Draw a random number for each number of `inputs`.",
    "factor: ": "The numbers that stay are divided by 1 - p, so the mean stays the same.",
    "called twice": "Seed in each call, with a number that depends only on `seed`, the rank and "
    "the step.",
    r"both: (rank \d) in .*, and \1": "The seed must depend on `step`, too.",
    r"both: .*(step \d+), and rank \d in \1\b": "The seed must depend on the rank, too.",
    "both: rank": "Two ranks have the same seed in different steps. Multiply the step by the "
    "number of ranks before you add the rank.",
    "a different seed": "`seed` has no effect.",
    "random numbers: changed": "Then the ranks would draw different orders of the images. Draw "
    "from a generator of your own.",
}
OWN = "seed + step * dist.get_world_size() + dist.get_rank()"
MISTAKES = {
    "The seed must depend on the rank, too.": (OWN, "seed + step"),
    "The seed must depend on `step`, too.": (OWN, "seed + dist.get_rank()"),
    "Multiply the step by the number of ranks": (OWN, "seed + step + dist.get_rank()"),
    "`seed` has no effect.": (OWN, OWN.removeprefix("seed + ")),
    "Draw from a generator of your own.": (".Generator(inputs.device).manual_seed", ".manual_seed"),
    "The numbers that stay are divided by 1 - p": ("inputs / (1 - p)", "inputs"),
}
