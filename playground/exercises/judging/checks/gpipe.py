"""How gpipe is checked."""

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

CASES = {
    "2, 2 and 2 rows": {"rows": (2, 2, 2)},
    "3, 3 and 1 rows": {"rows": (3, 3, 1)},
    "the first 3 layers are frozen": {"rows": (2, 2, 2, 1), "frozen": True},
    "integers as inputs, float64": {"rows": (2, 2, 1), "words": True},
    "earlier gradients": {"rows": (3, 2), "before": True},
}
RUNG_1 = "for micro-batches of the same size"
RUNG_2 = "any sizes and any stage, with all forward passes first."
ONLY = ("send", "recv")
INSTEAD = "use send and recv"
CLASSES = 3
HINTS = """
Forward: receive from the previous rank, compute the stage, send to the next rank, for each
micro-batch. Keep what you have received and computed. Backward: receive the gradient of what you
have sent, call backward() with it, and send the gradient of what you have received.

dist.recv(buffer, rank - 1) fills a buffer of len(micro_batch) rows. buffer.requires_grad_() lets
backward() fill buffer.grad. output.backward(gradient) starts with a gradient. F.cross_entropy(...,
reduction="sum") is a sum that you divide by the rows of the batch.

for each micro-batch: if there is a previous rank, receive into a buffer; compute the stage; if
    there is a next rank, send the output, otherwise compute its part of the loss
for each micro-batch: if there is a next rank, receive the gradient of the output; if the output
    requires a gradient, output.backward(gradient); if there is a previous rank, send the gradient
    of the buffer
"""


class Apply(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function


def layers_of(words, frozen, before):
    """Return a model as a list of 5 layers. Each rank makes the same one.

    Args:
        words: whether it takes integers and computes in float64.
        frozen: whether the first three layers are not trained.
        before: whether the parameters have gradients already.
    """
    torch.manual_seed(0)
    if words:
        swap = Apply(lambda inputs: inputs.transpose(1, 2))  # so the output is not contiguous
        layers = [
            nn.Sequential(nn.Embedding(9, 4), swap),
            nn.Sequential(nn.Linear(2, 3), swap, Apply(torch.Tensor.double)),
            nn.Sequential(nn.Linear(4, 5).double(), swap),
            nn.Sequential(nn.Flatten(), nn.Linear(15, 4).double(), nn.Tanh()),
            nn.Linear(4, CLASSES).double(),
        ]
    else:
        widths = pairwise((4, 6, 5, 5, 7, CLASSES))
        layers = [nn.Sequential(nn.Linear(*pair), nn.Tanh()) for pair in widths]
    for layer in layers[:3]:
        layer.requires_grad_(not frozen)
    for parameter in nn.Sequential(*layers).parameters():
        parameter.grad = torch.ones_like(parameter) if before else None
    return layers


def data_of(rows, words):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(sum(rows), 4, generator=generator)
    if words:
        inputs = torch.randint(9, (sum(rows), 2), generator=generator)
    labels = torch.randint(CLASSES, (sum(rows),), generator=generator)
    return list(inputs.split(rows)), list(labels.split(rows))


def numbers_of(rank, world_size):
    return torch.arange(5).tensor_split(world_size)[rank].tolist()


def activations(layers, inputs):
    """Return what goes into each layer of the model, and what comes out of the last one."""
    found = [inputs]
    with torch.no_grad():
        for layer in layers:
            found.append(layer(found[-1]))
    return found


def run(gpipe, rank, world_size, rows, words=False, frozen=False, before=False):
    layers = layers_of(words, frozen, before)
    mine = numbers_of(rank, world_size)
    inputs, labels = data_of(rows, words)
    example = activations(layers, inputs[0])[mine[0]]
    stage = nn.Sequential(*[layers[number] for number in mine])
    passes = []
    stage[0].register_forward_hook(lambda *_: passes.append(1))
    gpipe(stage, inputs, labels, example.shape[1:], example.dtype)
    return results_of(layers, mine, len(passes))


def results_of(layers, numbers, passes):
    """Return the gradients of some layers by name, and how many forward passes were computed."""
    found = {}
    for number in numbers:
        for name, parameter in layers[number].named_parameters():
            found[f"the gradient of layer {number}'s {name}"] = parameter.grad
    return found | {"its forward passes": passes}


def expected(rank, world_size, rows, words=False, frozen=False, before=False):
    layers = layers_of(words, frozen, before)
    inputs, labels = data_of(rows, words)
    F.cross_entropy(nn.Sequential(*layers)(torch.cat(inputs)), torch.cat(labels)).backward()
    return results_of(layers, numbers_of(rank, world_size), len(rows))


def limits(rank, world_size, rows, words=False, frozen=False, before=False):
    numbers = numbers_of(rank, world_size)
    inputs, _ = data_of(rows, words)
    found = activations(layers_of(words, frozen, before), torch.cat(inputs))
    # A rank sends its outputs to the next rank, and the gradients of its inputs to the previous.
    sends = []
    if rank < world_size - 1:
        sends.append(found[numbers[-1] + 1].nbytes)
    if rank > 0:
        sends.append(found[numbers[0]].nbytes)
    rounds = 2 * (world_size + len(rows) - 2)
    return {"messages": len(sends) * len(rows), "bytes": sum(sends), "rounds": rounds}


def gpipe(stage, inputs, labels, shape, dtype):
    """Why: backward() starts with the gradient from the next rank, so the chain rule holds."""
    rank, n = dist.get_rank(), dist.get_world_size()
    rows = sum(len(each) for each in labels)
    received = list(inputs)
    outputs = []
    for number, micro_batch in enumerate(inputs):
        if rank > 0:
            buffer = torch.empty(len(micro_batch), *shape, dtype=dtype, device=micro_batch.device)
            dist.recv(buffer, rank - 1)
            received[number] = buffer.requires_grad_()
        output = stage(received[number])
        if rank < n - 1:
            dist.send(output.detach().contiguous(), rank + 1)
        else:  # this micro-batch's part of the mean over all rows
            output = F.cross_entropy(output, labels[number], reduction="sum") / rows
        outputs.append(output)
    for number, output in enumerate(outputs):
        gradient = output.new_ones(output.shape)  # that of the loss itself is 1
        if rank < n - 1:
            dist.recv(gradient, rank + 1)
        if output.requires_grad:  # false in a first stage whose parameters are all frozen
            output.backward(gradient)
        if rank > 0:
            dist.send(received[number].grad, rank - 1)


SCALAR = "CRASH.*only for scalar outputs"
NO_GRAPH = "CRASH.*does not require grad"
NO_GRADIENT = "CRASH.*(NoneType|Expected Tensor, got)"
BUFFER = "its buffer has"
ROUNDS = "rounds of messages;"
WORDS = {
    SCALAR: "Only the last rank has a loss. On the others, backward(gradient) starts with the "
    "gradient that the next rank has sent.",
    NO_GRAPH: "If this stage and all before it are frozen, the output requires no gradient, and "
    "backward() has nothing to do.",
    NO_GRADIENT: "backward() fills .grad of what was received only after requires_grad_().",
    BUFFER: "The buffer needs the shape, the dtype and the number of rows of the message.",
    "CRASH.*require gradients": "The inputs of rank 0 may be integers. They need no gradient.",
    "bytes;": "Only the stage's output goes forward, and only the gradient of its input back.",
    ROUNDS: "Compute all forward passes first, so that no rank waits for a gradient in between.",
    "passes: ": "One forward pass for each micro-batch is enough: keep its output for backward().",
}
LOSS = ', reduction="sum") / rows'
BACKWARD = "output.backward(gradient)"
MISTAKES = {
    WORDS[SCALAR]: (BACKWARD, "output.backward()"),
    WORDS[NO_GRAPH]: ("if output.requires_grad:", "if True:"),
    WORDS[NO_GRADIENT]: ("buffer.requires_grad_()", "buffer"),
    WORDS[BUFFER]: ("dtype=dtype, ", ""),
    WORDS[ROUNDS]: (
        *("        outputs.append(output)\n    for number, output in enumerate(outputs):\n", ""),
    ),
    "3, 3 and 1 rows": (LOSS, ") / len(inputs)"),
    "earlier gradients": ("outputs = []", "outputs = stage.zero_grad() or []"),
}
