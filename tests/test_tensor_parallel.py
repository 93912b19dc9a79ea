"""The tensor parallelism lesson: any module. test_pictures.py has the messages of a pair."""

import copy

import torch
import torch.distributed as dist
from torch import nn

from watching.ranks import call


class Several(nn.Module):
    """Layers of many kinds around, inside and between two pairs."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)  # it has buffers
        self.first = nn.Linear(6, 12)
        self.second = nn.Linear(12, 8)
        self.third = nn.Linear(8, 24)
        self.fourth = nn.Linear(24, 5)
        self.last = nn.Linear(5, 3)  # it has no partner
        self.unused = nn.Linear(2, 2)  # it gets no gradient
        self.also_last = nn.Linear(5, 3)
        self.also_last.weight = self.last.weight  # one parameter for two layers
        self.first.weight.requires_grad_(False)
        self.fourth.bias.requires_grad_(False)

    def forward(self, inputs):
        """Return (B, 3) for (B, 6)."""
        inputs = self.norm(inputs)
        hidden = self.second(self.first(inputs).sigmoid())
        hidden.tanh_()  # in place, and its backward pass uses its output
        outputs = self.fourth(self.third(hidden).exp()).sigmoid()
        return self.last(outputs) + self.also_last(outputs.t().contiguous().t())


PAIRS = [("first", "second"), ("third", "fourth")]
DIMS = {"first.weight": 0, "first.bias": 0, "second.weight": 1}  # along which a pair is split
DIMS |= {"third.weight": 0, "third.bias": 0, "fourth.weight": 1}


def three_steps(model):
    """Train a model for three steps, the same ones in each process."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        optimizer.zero_grad()
        images = torch.randn(7, 6, generator=generator, dtype=torch.float64)
        model(images).square().sum().backward()
        optimizer.step()


def train_by_hand(rank):
    """Train a whole model and one that is split, and compare the parameters and buffers."""
    import tensor_parallel as lesson

    torch.manual_seed(0)
    whole = Several().double()
    model = copy.deepcopy(whole)
    lesson.split(model, PAIRS)
    three_steps(whole)
    three_steps(model)
    state = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    assert state.keys() == whole.state_dict().keys()
    for key, right in whole.state_dict().items():
        if key in DIMS:
            right = right.chunk(dist.get_world_size(), DIMS[key])[rank]
        torch.testing.assert_close(state[key], right, atol=1e-12, rtol=0)
    without = {key for key, value in model.named_parameters() if value.grad is None}
    assert without == {"first.weight", "fourth.bias", "unused.weight", "unused.bias"}


def test_any_module():
    """Frozen, tied and unused parameters, and buffers, to 1e-12.

    The functions inside and behind a pair use their outputs in their backward passes.
    """
    call(train_by_hand, 3)


def ends_of_a_pair(rank):
    """AddTerms must not overwrite a sigmoid's output, from which its gradient is computed."""
    import tensor_parallel as lesson

    term = torch.tensor([0.3, -1.0], requires_grad=True)
    total = lesson.AddTerms.apply(term.sigmoid())
    torch.testing.assert_close(total.detach(), 2 * term.sigmoid().detach())
    total.sum().backward()
    output = term.detach().sigmoid()
    torch.testing.assert_close(term.grad, output * (1 - output))
    inputs = torch.ones(2, 3, requires_grad=True)
    lesson.AddGradients.apply(inputs).t().sum().backward()  # this gradient is not contiguous
    assert inputs.grad.tolist() == [[2.0] * 3] * 2


def test_the_functions_at_the_ends_of_a_pair():
    """They leave their inputs as they are."""
    call(ends_of_a_pair, 2)
