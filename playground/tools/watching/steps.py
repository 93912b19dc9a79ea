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


def sums_of(tensor):
    """Return five sums over this rank's part of a tensor. The last one depends on the order."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local = local.detach().to_dense()
    if local.untyped_storage().nbytes() < local.nbytes:
        return NOTHING  # its memory is freed, as that of a layer that is gathered when needed
    numbers = local.cpu().double().flatten()
    finite = numbers.isfinite()
    numbers = numbers.where(finite, 0)
    # These look random, and are the same everywhere.
    weights = (torch.arange(len(numbers)).double() * 0.6180339887498949 % 1 - 0.5) * 12**0.5
    sums = [(~finite).sum(), numbers @ numbers, numbers.sum(), numbers @ weights]
    return [len(numbers), *map(float, sums)]


def batches(values):
    """Return the tensors in what a model gets or returns that may have a row for each example."""
    tensors = [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]
    return [each for each in tensors if each.ndim and not isinstance(each, DTensor)]


def append(examples, tensor):
    """Append the sums of its row to the notes of each example."""
    for example, row in zip(examples, tensor.detach().cpu(), strict=True):
        example.append(sums_of(row))


class Notes:
    """Writes a line to this rank's file in a folder before a step of an optimizer, `most` times."""

    def __init__(self, folder, most):
        self.folder = folder
        self.most = most
        self.file = None
        self.eps = 0.0  # of the coarsest dtype: the distance from 1 to the next number
        self.models = weakref.WeakSet()  # the outermost modules that have been called
        self.inside = weakref.WeakSet()  # the modules in them
        self.examples = []  # that a model has got since the last step
        self.depth = 0  # of steps, because an optimizer may call another one
        modules.register_module_forward_pre_hook(self.before_forward)
        modules.register_module_forward_hook(self.after_forward, with_kwargs=True)
        optimizers.register_optimizer_step_pre_hook(self.before_step)
        optimizers.register_optimizer_step_post_hook(self.after_step)

    def before_forward(self, module, args):
        """Find the outermost modules."""
        if torch.compiler.is_compiling():
            return
        if module not in self.inside and next(module.parameters(), None) is not None:
            self.models.add(module)
            self.inside.update(set(module.modules()) - {module})

    def after_forward(self, module, args, kwargs, output):
        """Note the input and the output of each example, and later the loss's gradient there."""
        if torch.compiler.is_compiling():
            return
        learns = module.training and torch.is_grad_enabled()
        if module not in self.models or not learns or self.most == 0:
            return
        inputs = batches([args, kwargs])
        if not inputs or inputs[0].requires_grad:
            return  # these are activations, and no examples
        examples = [[] for _ in inputs[0]]
        self.examples += examples
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
        rank, size = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
        row = {"ranks": size, "examples": self.examples, **self.tensors_of(optimizer)}
        if self.file is None:
            self.file = open(self.folder / f"rank{rank}.jsonl", "w")  # noqa: SIM115, it stays open
        self.file.write(json.dumps(row, default=str) + "\n")
        self.file.flush()  # the process may be killed
        self.examples = []

    def after_step(self, optimizer, args, kwargs):
        """Note the end of a step."""
        self.depth -= 1

    def tensors_of(self, optimizer):
        """Return the sums of all tensors, the optimizer's settings, and the kinds of modules."""
        row = {"value of": {}, "gradient of": {}, "settings": {}, "kinds": []}
        names = {}
        for model in self.models:
            row["kinds"] += {type(module).__name__ for module in model.modules()}
            for name, parameter in model.named_parameters():
                name = WRAPPERS.sub("", name)
                names[parameter] = max(names.get(parameter, ""), name, key=len)
        for index, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if type(value) in (int, float, tuple):
                    row["settings"].setdefault(key, []).append(value)
            for place, parameter in enumerate(group["params"]):
                name = names.setdefault(parameter, f"number {place} of group {index}")
                while name in row["value of"]:
                    name += "'"  # layers that are called one by one may have the same names
                row["value of"][name] = sums_of(parameter)
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                # Of a Partial one, the ranks have the terms of a sum.
                terms = any(each.is_partial() for each in getattr(gradient, "placements", ()))
                row["gradient of"][name] = None if terms else sums_of(gradient)
                self.eps = max(self.eps, torch.finfo(parameter.dtype).eps)
        for parameter, name in names.items():
            sums = sums_of(parameter)
            if sums[COUNT]:  # it is not freed
                row["value of"].setdefault(name, sums)
        return row | {"eps": self.eps}


def noted(function, folder, most, *args):
    """Run a function as a rank, and note its steps. mp.spawn gets this in place of the function."""
    Notes(folder, most)
    function(*args)
