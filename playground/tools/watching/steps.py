"""Notes sums of a rank's tensors before each step of an optimizer. No rank sends anything."""

import json
import re
import weakref
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils._pytree import tree_leaves

WRAPPERS = re.compile(r"(_fsdp_wrapped_|_checkpoint_wrapped_)?module\.|_orig_mod\.")
COUNT, STRANGE, SQUARES, SUM, PLACES = range(5)  # what sums_of() returns
NOTHING = [0.0] * 5


def weights(count):
    """Return numbers that look random, and are the same everywhere."""
    return (torch.arange(count).double() * 0.6180339887498949 % 1 - 0.5) * 12**0.5


def sums_of(tensor):
    """Return five sums over this rank's part of a tensor. The last one depends on the order."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local = local.detach().to_dense()
    if local.untyped_storage().nbytes() < local.nbytes:
        return NOTHING  # its memory is freed, as that of a layer that is gathered when needed
    numbers = local.cpu().double().flatten()
    finite = numbers.isfinite()
    numbers = numbers.where(finite, 0)
    sums = [(~finite).sum(), numbers @ numbers, numbers.sum(), numbers @ weights(len(numbers))]
    return [len(numbers), *map(float, sums)]


def batches(values):
    """Return the tensors in what a model gets or returns that may have a row for each example."""
    tensors = [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]
    return [each for each in tensors if each.ndim and not isinstance(each, DTensor)]


def append(examples, tensor):
    """Append to the notes of each example: how many numbers, a sum as PLACES, and the norm."""
    for example, row in zip(examples, tensor.detach().cpu(), strict=True):
        numbers = row.double().flatten()
        places = numbers @ weights(len(numbers))
        example.append([len(numbers), places.item(), numbers.norm().item()])


class Notes:
    """Writes a line to the file of this rank before each step of an optimizer.

    Args:
        folder: of the files, one for each rank.
        most: how many steps are noted.
    """

    def __init__(self, folder, most):
        self.folder = folder
        self.most = most
        self.file = None
        self.eps = 0.0  # of the coarsest dtype: the distance from 1 to the next number
        self.models = weakref.WeakSet()  # the outermost modules that have been called
        self.inside = weakref.WeakSet()  # the modules in them
        self.calls = []  # of a model since the last step: its examples
        self.depth = 0  # of steps, because an optimizer may call another one
        modules.register_module_forward_pre_hook(self.before_forward)
        modules.register_module_forward_hook(self.after_forward, with_kwargs=True)
        optimizers.register_optimizer_step_pre_hook(self.before_step)
        optimizers.register_optimizer_step_post_hook(self.after_step)

    def before_forward(self, module, args):
        """Find the outermost modules."""
        if module not in self.inside and next(module.parameters(), None) is not None:
            self.models.add(module)
            self.inside.update(set(module.modules()) - {module})

    def after_forward(self, module, args, kwargs, output):
        """Note the input and the output of each example, and later the loss's gradient there."""
        if module not in self.models or not module.training or not torch.is_grad_enabled():
            return
        examples = []
        self.calls.append(examples)
        inputs = batches([args, kwargs])
        if not inputs or inputs[0].requires_grad:
            return  # these are activations, and no examples
        examples += [[] for _ in inputs[0]]
        append(examples, inputs[0])
        for tensor in batches(output):
            if tensor.requires_grad and len(tensor) == len(examples):
                self.eps = max(self.eps, torch.finfo(tensor.dtype).eps)
                append(examples, tensor)
                tensor.register_hook(partial(append, examples))
                return

    def before_step(self, optimizer, args, kwargs):
        """Write a line."""
        self.depth += 1
        if self.most == 0 or self.depth > 1:
            return
        self.most -= 1
        joined = dist.is_available() and dist.is_initialized()
        if self.file is None:
            path = self.folder / f"rank{dist.get_rank() if joined else 0}.jsonl"
            self.file = open(path, "w")  # noqa: SIM115, it stays open
        row = {"ranks": dist.get_world_size() if joined else 1, "calls": self.calls}
        self.file.write(json.dumps(row | self.tensors_of(optimizer)) + "\n")
        self.file.flush()  # the process may be killed
        self.calls = []

    def after_step(self, optimizer, args, kwargs):
        """Note the end of a step."""
        self.depth -= 1

    def tensors_of(self, optimizer):
        """Return the sums of all tensors, the optimizer's settings, and what differs by design."""
        row = {"value of": {}, "gradient of": {}, "settings": {}}
        names = {}
        designed = set()
        for model in self.models:
            for name, parameter in model.named_parameters():
                name = WRAPPERS.sub("", name)
                names[parameter] = max(names.get(parameter, ""), name, key=len)
            kinds = {type(module).__name__ for module in model.modules()}
            designed |= {kind for kind in kinds if kind.startswith(("Dropout", "BatchNorm"))}
        for index, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                numbers = value if isinstance(value, tuple) else [value]
                if all(type(number) in (int, float) for number in numbers):
                    row["settings"][f"{key} of group {index}"] = value
            for place, parameter in enumerate(group["params"]):
                name = names.setdefault(parameter, f"number {place} of group {index}")
                row["value of"][name] = sums_of(parameter)
                row["gradient of"][name] = self.gradient_of(parameter)
                self.eps = max(self.eps, torch.finfo(parameter.dtype).eps)
        for parameter, name in names.items():
            if name not in row["value of"] and sums_of(parameter)[COUNT]:
                row["value of"][name] = sums_of(parameter)
        return row | {"eps": self.eps, "designed": sorted(designed)}

    def gradient_of(self, parameter):
        """Return the sums of a gradient. None: the ranks have the terms of a sum."""
        if parameter.grad is None:
            return [sums_of(parameter)[COUNT], *NOTHING[1:]]
        if any(each.is_partial() for each in getattr(parameter.grad, "placements", ())):
            return None
        return sums_of(parameter.grad)


class NotedSteps:
    """What mp.spawn gets in place of a function: it calls the function, and notes its steps."""

    def __init__(self, function, *options):
        self.function = function
        self.options = options  # those of Notes

    def __call__(self, *args):
        """Run the function as a rank."""
        Notes(*self.options)
        self.function(*args)
