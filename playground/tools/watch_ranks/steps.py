"""Notes sums of a rank's tensors before each step of an optimizer. No rank sends anything."""

import hashlib
import json
import os
import re
import weakref
from functools import partial
from itertools import chain
from multiprocessing.util import Finalize
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils._pytree import tree_leaves

from watch_ranks.anywhere import harmless
from watch_ranks.messages import call_in_words, recorded_calls

WRAPPERS = re.compile(r"(_fsdp_wrapped_|_checkpoint_wrapped_)?module\.|_orig_mod\.")
COUNT, STRANGE, SQUARES, SUM, PLACES = range(5)  # what sums_of() returns
NOTHING = [0.0] * 5


def sums_of(tensor):
    """Return five sums over this rank's part of a tensor. The last one depends on the order."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local = local.detach().to_dense()
    if local.untyped_storage().nbytes() < local.nbytes:
        return NOTHING  # its memory is freed, as that of a layer that is gathered when needed
    return sums_of_rows(local.flatten()[None])[0]


def sums_of_rows(rows):
    """Return the five sums of each row of a tensor with two axes."""
    numbers = rows.cpu().double()
    finite = numbers.isfinite()
    numbers = numbers.where(finite, 0)
    # These look random, and are the same everywhere.
    weights = (torch.arange(numbers.shape[1]).double() * 0.6180339887498949 % 1 - 0.5) * 12**0.5
    counts = torch.full((len(rows),), numbers.shape[1]).double()
    sums = [(~finite).sum(1).double(), numbers.square().sum(1), numbers.sum(1), numbers @ weights]
    return torch.stack([counts, *sums], dim=1).tolist()


def batches(values):
    """Return the tensors in what a model gets or returns that may have a row for each example."""
    tensors = [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]
    return [each for each in tensors if each.ndim and not isinstance(each, DTensor)]


def inputs_of(values):
    """Return a tensor with a row for each example that a model gets, or None if that is unknown."""
    for value in values:
        found = batches(value)
        if found:  # the tensors of a list may be images, or batches
            return None if isinstance(value, (list, tuple)) else found[0]
    return None


@harmless
def append(examples, tensor):
    """Append the sums of its row to the notes of each example."""
    if tensor is None:
        return  # the loss does not use this output
    rows = tensor.detach().to_dense()[:, None].flatten(1)
    for example, sums in zip(examples, sums_of_rows(rows), strict=True):
        example.append(sums)


def random_state():
    """Return a text that is the same for the same states of the random number generators."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return hashlib.md5(torch.cat(states).numpy().tobytes(), usedforsecurity=False).hexdigest()[:12]


def acts(module):
    """Return whether a module is no dropout of 0, and does what it does in training."""
    drops = isinstance(module, nn.modules.dropout._DropoutNd)
    return module.training and not (drops and module.p == 0)


def joins(rank, size, folder, most):
    """Note the steps of this process, which is about to join a group."""
    if not Notes.made:
        Notes(Path(folder), most)


def has_joined():
    """See that this process has joined a group. Its rank is read when it makes a step."""


class Notes:
    """Writes a line to this rank's file in a folder before a step of an optimizer, `most` times."""

    made = False  # in this process, or in that from which it was forked

    def __init__(self, folder, most):
        Notes.made = True
        self.folder = folder
        self.most = most
        self.file = None
        self.eps = 0.0  # of the coarsest dtype: the distance from 1 to the next number
        self.models = weakref.WeakSet()  # the outermost modules that have been called
        self.inside = weakref.WeakSet()  # the modules in them
        self.examples = []  # that a model has got since the last step
        self.buffers = {}  # with which modules have begun since then
        self.has_begun = False  # whether a model has been called since then
        self.random = None  # the random state when the first one was called
        self.called = -1  # the number of the last collective before the last step
        self.tensors = {}  # of the step that is made now, by name
        self.since = set()  # the names of those that have got a gradient since the last step
        self.kept = []  # of these, those whose old gradient was still there
        self.handles = []  # of the hooks that note this
        self.optimizers = weakref.WeakSet()  # that have made a step
        self.end = None  # notes what the last step has left
        self.depth = 0  # of steps, because an optimizer may call another one
        modules.register_module_forward_pre_hook(self.before_forward)
        modules.register_module_forward_hook(self.after_forward, with_kwargs=True)
        optimizers.register_optimizer_step_pre_hook(self.before_step)
        optimizers.register_optimizer_step_post_hook(self.after_step)
        Finalize(None, self.note_end, exitpriority=1)

    def before_forward(self, module, args):
        """PyTorch calls this before each module."""
        if not torch.compiler.is_compiling():
            self.begin_module(module)

    def after_forward(self, module, args, kwargs, output):
        """PyTorch calls this after each module."""
        if not torch.compiler.is_compiling():
            self.end_module(module, args, kwargs, output)

    @harmless
    def begin_module(self, module):
        """Find the outermost modules, and note the buffers with which each one begins."""
        if module not in self.inside and next(module.parameters(), None) is not None:
            self.models.add(module)
            self.inside.update(set(module.modules()) - {module})
            self.models -= self.inside  # they were called by themselves before
        if self.notes_of(module):
            self.random = self.random or random_state()
            if self.file and module in self.models:  # an unfinished line: a step has begun
                self.file.write(" ")
                self.file.flush()
                self.has_begun = True
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():  # DDP has sent it by now
                    self.buffers.setdefault((id(module), name), sums_of(buffer))

    def notes_of(self, module):
        """Return whether what a module gets and returns now is of interest."""
        return self.most and module.training and torch.is_grad_enabled()

    @harmless
    def end_module(self, module, args, kwargs, output):
        """Note the input and the output of each example, and later the loss's gradient there."""
        if module not in self.models or not self.notes_of(module):
            return
        inputs = inputs_of([*args, *kwargs.values()])
        if inputs is None or inputs.requires_grad:
            return  # these are activations, and no examples
        examples = [[] for _ in inputs]
        self.examples += examples
        append(examples, inputs)
        for tensor in batches(output):
            if tensor.requires_grad and len(tensor) == len(examples):
                self.eps = max(self.eps, torch.finfo(tensor.dtype).eps)
                append(examples, tensor)
                tensor.register_hook(partial(append, examples))
                return

    @harmless
    def before_gradient(self, name, parameter, gradient):
        """Note whether a parameter's gradient of the step before is there when a new one comes."""
        old = parameter().grad
        if name not in self.since and old is not None and old.any():
            self.kept.append(name)
        self.since.add(name)

    @harmless
    def before_step(self, optimizer, args, kwargs):
        """Write a line."""
        self.depth += 1
        if self.depth > 1:
            return
        if self.most == 0:
            self.note_end()
            return
        self.most -= 1
        joined = dist.is_available() and dist.is_initialized()
        rank, size = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
        row = {"ranks": size, "examples": self.examples, "buffer": {}}
        after = random_state()
        row["random"] = None if after == self.random else after  # None: nothing was drawn
        self.random = None
        row["closure"] = any(map(callable, (*args[1:], *kwargs.values())))
        row |= self.tensors_of(optimizer)
        self.optimizers.add(optimizer)
        row["kept"] = self.kept if len(self.optimizers) == 1 else []
        self.kept = []
        row["calls"] = self.new_calls()
        for name, module in chain(*(model.named_modules() for model in self.models)):
            for buffer in module._buffers:
                if (id(module), buffer) in self.buffers:
                    name_of_it = WRAPPERS.sub("", f"{name}.{buffer}")
                    row["buffer"][name_of_it] = self.buffers[id(module), buffer]
        if self.file is None:
            self.file = open(self.folder / f"rank{rank}.jsonl", "w")  # noqa: SIM115, it stays open
            self.process = os.getpid()  # one that is forked from it has the same file
        self.file.write(json.dumps(row, default=str) + "\n")
        self.file.flush()  # the process may be killed
        self.examples, self.buffers = [], {}
        self.has_begun = False

    def new_calls(self):
        """Return how many collectives were called since the last step, and the last one."""
        *_, last = [None, *recorded_calls()]
        before, self.called = self.called, last["record_id"] if last else -1
        return [self.called - before, call_in_words(last).removesuffix(" not done") if last else ""]

    def after_step(self, optimizer, args, kwargs):
        """Note the end of a step, and see that what the last one leaves is noted, too.

        That is at the end of the process, or when the optimizer is not used any more.
        """
        self.depth -= 1
        if self.tensors and self.depth == 0:
            if self.end:
                self.end.detach()
            self.end = weakref.finalize(optimizer, self.write_end, self.tensors)
            self.see_old_gradients()
            self.tensors = {}

    @harmless
    def see_old_gradients(self):
        """Let each tensor of this step call before_gradient() when it gets its next gradient."""
        for handle in self.handles:
            handle.remove()
        self.since = set()
        self.handles = []
        for name, tensor in self.tensors.items():
            if tensor.requires_grad and tensor.is_leaf:
                hook = partial(self.before_gradient, name, weakref.ref(tensor))
                self.handles.append(tensor.register_hook(hook))

    def note_end(self):
        """Write a last line, if that is not done yet."""
        if self.end:
            self.end()

    @harmless
    def write_end(self, tensors):
        """Write what the last step has left, unless another step has begun."""
        if not self.has_begun and os.getpid() == self.process:
            left = {name: sums_of(tensor) for name, tensor in tensors.items()}
            self.file.write(json.dumps({"end": left}) + "\n")
            self.file.flush()

    def tensors_of(self, optimizer):
        """Return the sums of all tensors, the optimizer's settings, and the kinds of modules."""
        self.tensors = {}
        row = {"value of": {}, "gradient of": {}, "settings": {}, "kinds": [], "shards": []}
        row["ddp"] = False  # whether all ranks are replicas
        row |= {"trained": [], "idle": []}  # names; those that are trained without a gradient
        names = {}
        for model in self.models:
            row["kinds"] += {type(each).__name__ for each in model.modules() if acts(each)}
            if isinstance(model, nn.parallel.DistributedDataParallel):
                of_all = model.process_group.size() == dist.get_world_size()
                row["ddp"] = of_all and not model.parameters_to_ignore
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
                    name = f"'{name}"  # layers that are called one by one may have the same names
                row["value of"][name] = sums_of(parameter)
                self.tensors[name] = parameter
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                # Of a Partial one, the ranks have the terms of a sum.
                terms = any(each.is_partial() for each in getattr(gradient, "placements", ()))
                row["gradient of"][name] = None if terms else sums_of(gradient)
                if parameter.requires_grad:
                    row["trained"].append(name)
                    if not terms and not any(row["gradient of"][name][STRANGE:]):
                        row["idle"].append(name)
                self.eps = max(self.eps, torch.finfo(parameter.dtype).eps)
                if not all(each.is_replicate() for each in getattr(parameter, "placements", ())):
                    row["shards"].append(name)
        for parameter, name in names.items():
            sums = sums_of(parameter)
            if sums[COUNT]:  # it is not freed
                row["value of"].setdefault(name, sums)
                self.tensors.setdefault(name, parameter)
        return row | {"eps": self.eps}
