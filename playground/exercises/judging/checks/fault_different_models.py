"""How fault_different_models is checked."""

import torch
from judging.single import of_all_ranks

NAME = "train"
FAULT = "WRONG with 2 ranks, images of its own on each rank ... rank 1's parameter `weight` differs"
CASES = {"images of its own on each rank": {"length": 4}, "1 image on each rank": {"length": 1}}
RIGHT = {
    "the models": "equal in all steps, and trained",
    "the noise": "different in all steps and on all ranks",
    "the seed": "decides which model is made",
}
HINTS = """
Which random numbers does the program draw, and which of them must be equal on all ranks?

torch.manual_seed(number) sets the numbers that are drawn after it, and can be called again.
dist.broadcast(tensor, src=0) would also give all ranks the numbers of rank 0.

the same seed on all ranks
make the model
a different seed on each rank
train
"""


class Recorded(torch.nn.Module):
    """A model that notes what it gets, and what its parameters and buffers are at that moment."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 3))
        self.bias = torch.nn.Parameter(torch.zeros(3))
        self.register_buffer("scale", torch.rand(3), persistent=False)
        self.inputs = []
        self.states = []

    def note(self):
        tensors = [*self.named_parameters(), *self.named_buffers()]
        self.states.append({name: tensor.detach().clone() for name, tensor in tensors})

    def forward(self, images):
        self.inputs.append(images.detach().clone())
        self.note()
        return torch.tanh(images @ self.weight + self.bias) * self.scale


def run(train, rank, world_size, length):
    generator = torch.Generator().manual_seed(rank)
    images = torch.randn(length, 3, generator=generator)
    runs = []
    for number, seed in enumerate((5, 5, 6)):
        # The ranks have drawn random numbers before.
        torch.manual_seed(100 * number + rank)
        model = train(Recorded, images, seed)
        model.note()
        noise = [inputs - images for inputs in model.inputs]
        runs.append((noise, model.states))
    all_runs = of_all_ranks(runs)
    noise = [runs[0][0] for runs in all_runs]
    states = [runs[0][1] for runs in all_runs]
    last = [states[-1]["weight"] for _, states in runs]
    return {
        "the models": words_on_models(states),
        "the noise": words_on_noise(noise),
        "the seed": words_on_seed(last),
    }


def expected(rank, world_size, length):
    return RIGHT


def words_on_models(states):
    """Return in words whether the models are equal. `states` has a list for each rank."""
    steps = len(states[0]) - 1
    if any(len(each) != steps + 1 for each in states):
        return "some ranks take more steps than others"
    for step in range(steps + 1):
        when = f"in step {step + 1}" if step < steps else "at the end"
        for rank, each in enumerate(states):
            for name, tensor in each[step].items():
                if not torch.allclose(tensor, states[0][step][name], atol=1e-6):
                    what = "buffer" if name == "scale" else "parameter"
                    return f"{when}, rank {rank}'s {what} `{name}` differs from rank 0's"
    for step in range(steps):
        if torch.equal(states[0][step]["weight"], states[0][step + 1]["weight"]):
            return f"step {step + 1} does not change the model"
    return RIGHT["the models"]


def words_on_noise(noise):
    """Return in words whether all noise is different. `noise` has a list for each rank."""
    seen = []
    for rank, tensors in enumerate(noise):
        for step, tensor in enumerate(tensors, start=1):
            place = f"rank {rank} in step {step}"
            if not tensor.any():
                return f"{place} adds none"
            for other_place, other in seen:
                # The noise is the difference of rounded numbers.
                if torch.allclose(tensor, other, atol=1e-5):
                    return f"{other_place} and {place} add the same"
            seen.append((place, tensor))
    return RIGHT["the noise"]


def words_on_seed(last):
    """Return in words how the model depends on the seed, from the models of three runs."""
    first, again, other = last
    if not torch.equal(first, again):
        return "two runs with the same seed give different models"
    if torch.equal(first, other):
        return "runs with different seeds give the same model"
    return RIGHT["the seed"]


REPAIR = (
    "    model = make_model()\n",
    "",
    "    # Each",
    "    torch.manual_seed(seed)\n    model = make_model()\n    # Each",
)
WHY = "all ranks draw the same model, and only then does each rank get a seed of its own."
MODEL = "    torch.manual_seed(seed)\n    model = make_model()\n"
WORDS = {"models: .* buffer": "The parameters are equal. A model has buffers, too."}
OTHERS = MODEL.replace("seed)", "seed + dist.get_rank())")
SEND = "    for each in model.parameters():\n        dist.broadcast(each.data, 0)\n"
MISTAKES = {
    "The parameters are equal. A model has buffers, too.": (MODEL, OTHERS + SEND),
    "rank 0 in step 1 and rank 1 in step 1 add the same": (
        *("    torch.manual_seed(seed + dist.get_rank())\n", ""),
    ),
    "two runs with the same seed give different": ("manual_seed(seed)", "seed()"),
}
