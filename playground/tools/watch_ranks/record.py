"""Records a few steps of a rank: its messages, when it computes, and at which line it is.

Three of PyTorch's own tools do this. An optimizer's hook tells when a step ends. A
TorchDispatchMode sees each operation before it runs, so it knows the group, the bytes and the line
of each message. It makes small operations slower, so the step in which messages are noted is not
timed. In the next steps, torch.profiler records when operations and messages begin and end.
"""

import json
import sys
import threading
import time
import weakref
from bisect import bisect
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from watch_ranks.anywhere import harmless, is_own, launched, running
from watch_ranks.messages import Messages, flat, kind_of, passed, peer_of, process_group

SKIPPED = 3  # steps before the one whose messages are noted; the first ones are slower
TIMED = 3  # steps that the profiler records
MOST = 10_000  # operations of a script without an optimizer, which is recorded from its beginning
PATIENCE = 60  # seconds for which its thread may rest, while other threads go on to be recorded
OTHER = "the script uses the profiler itself"


class Noting(Messages):
    """While this is active, it notes the messages of this rank, as dicts that JSON can hold.

    A message belongs to the innermost line of the author's files.

    Args:
        enough: called when `most` operations have been seen. No message is noted afterwards.
    """

    def __init__(self, enough):
        super().__init__()
        self.script = ""
        self.enough = enough
        self.operations = self.most = 0
        self.rank = None  # of the process that notes, once it is in a group

    @harmless
    def before(self, operation, args):
        """Count the operations, and note a message."""
        self.operations += 1
        if self.operations == self.most:
            self.enough()
        if self.operations < self.most:
            super().before(operation, args)

    def note(self, kind, operation, args):
        """Note a message before it starts."""
        self.rank = dist.get_rank()
        group = process_group(args)
        message = {"kind": kind, "bytes": bytes_of(passed(kind, operation, args))}
        message["group"] = group.group_name
        message["ranks"] = dist.get_process_group_ranks(group)
        if group.group_desc.startswith("mesh_"):
            message["axis"] = group.group_desc.removeprefix("mesh_")
        peer = peer_of(kind, args, group)
        if peer is not None:
            message["peer"] = peer
        message["line"] = line_of(sys._getframe(), self.script)
        self.noted.append(message)


def bytes_of(value):
    """Return the bytes of the tensors in a tensor or in lists of tensors."""
    return sum(tensor.nbytes for tensor in flat(value))


def line_of(frame, script):
    """Return the innermost line of the author's that a frame was called from: its file and number.

    The file is left out if it is the script. Without such a line, this is "".
    """
    while frame and not is_own(frame.f_code.co_filename, script):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}".removeprefix(script) if frame else ""


class Recorder:
    """Records this rank. What it has recorded is written once, to a file.

    If there is no optimizer, it records from begin() until stop(), or MOST operations.

    Args:
        path: of the file.
    """

    def __init__(self, path):
        self.path = Path(path)
        self.messages = Noting(self.end_profiler)
        self.done = False
        self.why = ""  # it records nothing
        self.busy = False  # whether it starts, or writes what it has recorded
        self.noting = False
        self.thread = threading.main_thread()  # the one that is recorded
        self.number = 0  # that of the system for it, which a fork changes
        self.profiler = None
        self.trace = ""  # the path of what the profiler has recorded
        self.first = None  # a reference to the optimizer that makes the first step
        self.optimizers = weakref.WeakSet()  # all that have made one
        self.borders = []  # when the first one made its steps, in microseconds
        self.lines = []  # when the main thread came to a line, and the line
        self.beginning = None  # trace, messages and lines until the first step
        self.held = {}
        self.hook = register_optimizer_step_post_hook(self.after_optimizer)
        for name in ("_prepare_profiler", "_enable_profiler"):  # each profiler calls one of them
            function = getattr(torch.autograd.profiler, name)
            setattr(torch.autograd.profiler, name, self.before_other(function))

    def before_other(self, function):
        """Return a function that starts a profiler, and ends this recorder first."""

        def first(*args, **named):
            if not self.busy and not self.done:
                self.end_other()
            return function(*args, **named)

        return first

    @harmless
    def end_other(self):
        """End all, and keep nothing: PyTorch has only one profiler, and the script wants it."""
        self.done, self.why = True, OTHER
        if self.profiler:
            self.profiler.stop()
        self.profiler = None
        self.end_noting()

    def forget(self):
        """Record nothing, because this process was forked from the one that is recorded."""
        self.done = True
        self.end_noting()
        if self.profiler:
            torch._C._autograd._enable_record_function(False)
            self.profiler = None

    def begin(self):
        """Record from here on, because this process joins a group."""
        if not self.done and not self.borders and not self.trace and not self.profiler:
            self.start_noting(MOST)
            self.start_profiler()

    @harmless
    def after_optimizer(self, optimizer, args, kwargs):
        """PyTorch calls this when an optimizer has made a step. Here the next step begins."""
        self.optimizers.add(optimizer)
        self.first = self.first or weakref.ref(optimizer)
        if self.done or optimizer is not self.first():
            return
        self.borders.append(time.time_ns() / 1000)
        number = len(self.borders)
        if number == 1:
            self.pause()
            self.beginning = self.trace, self.messages.noted, self.lines
            self.messages.noted, self.lines = [], []
        if number == SKIPPED:
            self.start_noting()
        if number == SKIPPED + 1:
            self.pause()
            self.held = held_by(self.optimizers)
            self.start_profiler()
        # The first step with the profiler is not used, because not all ranks begin it together.
        if number == SKIPPED + 2 + TIMED:
            self.stop()

    @harmless
    def note_line(self, frame):
        """Note at which line of the script the main thread is. Another thread calls this."""
        if self.profiler:
            if self.messages.operations != self.moved[0]:
                self.moved = self.messages.operations, time.time()
            if not self.borders and time.time() - self.moved[1] > PATIENCE:
                self.end_profiler()
                return
            line = line_of(frame, self.messages.script)
            if not self.lines or self.lines[-1][1] != line:
                self.lines.append([time.time_ns() / 1000, line])

    def start_noting(self, most=float("inf")):
        """Start to note messages."""
        self.messages.script = running() or self.messages.script  # which may have ended before
        self.messages.operations, self.messages.most = 0, most
        self.messages.__enter__()
        self.noting = True
        self.thread, self.number = threading.current_thread(), threading.get_native_id()
        self.moved = 0, time.time()  # how many operations there were, and when that was seen first

    def start_profiler(self):
        """Start to record when operations begin and end, unless the script does so itself."""
        if torch.autograd._profiler_enabled():
            self.end_other()
            return
        # Of all threads, so that any of them can end it, as the one that trains may be another one.
        settings = torch.profiler._ExperimentalConfig(profile_all_threads=True)
        self.busy = True
        self.profiler = torch.profiler.profile(experimental_config=settings)
        self.profiler.start()
        self.busy = False

    def pause(self):
        """End both, and keep what the profiler has recorded in a file."""
        self.end_noting()
        self.end_profiler()

    def end_noting(self):
        """End to note messages. PyTorch keeps modes in the thread that has begun them."""
        if self.noting and threading.current_thread() is self.thread:
            self.messages.__exit__(None, None, None)
        elif self.noting:
            self.messages.most = 0  # it stays there, and notes nothing
            old, self.messages = self.messages, Noting(self.end_profiler)
            self.messages.noted, self.messages.script = old.noted, old.script
        self.noting = False

    def end_profiler(self):
        """End the profiler, and keep what it has recorded in a file."""
        if self.profiler:
            self.busy = True
            self.profiler.stop()
            self.trace = f"{self.path}.trace{len(self.borders)}"
            self.profiler.export_chrome_trace(self.trace)
            self.profiler = None
            self.busy = self.done

    @harmless
    def stop(self):
        """Write the record, if this process has joined a group, or trained."""
        if self.done:
            return
        self.done = self.busy = True
        self.hook.remove()
        self.pause()
        trace, noted, lines = self.trace, self.messages.noted, self.lines
        part = "all of it"
        if self.messages.operations >= self.messages.most > 0:
            part = f"its first {MOST:,} operations"
        borders = self.borders[SKIPPED + 1 :]
        if self.borders and len(borders) < 2:
            trace, noted, lines = self.beginning
            part = "until its first step, because it has fewer than 8"
            borders = []
        if trace:
            self.write(part, borders, trace, noted, lines)
        self.busy = False

    def write(self, part, borders, trace, noted, lines):
        """Write the record."""
        rank = self.messages.rank
        if rank is None:  # it has sent no message
            rank = dist.get_rank() if dist.is_initialized() else (launched() or [0])[0]
        record = {"script": self.messages.script, "rank": rank, "part": part, "held": self.held}
        record |= {"borders": borders, "noted": noted, "lines": lines}
        record |= read_trace(trace, self.number)
        unfinished = Path(f"{self.path}.part")
        unfinished.write_text(json.dumps(record))
        unfinished.replace(self.path)  # so that half of it is never read


def held_by(optimizers):
    """Return the bytes that this rank holds of what optimizers handle. DTensors are shards."""
    held = {"parameters": 0, "gradients": 0, "the optimizer's state": 0}
    for optimizer in optimizers:
        for parameter in chain(*(group["params"] for group in optimizer.param_groups)):
            state = optimizer.state.get(parameter, {}).values()
            for name, tensors in zip(held, ([parameter], [parameter.grad], state), strict=True):
                for tensor in tensors:
                    own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                    held[name] += bytes_of(own)
    return held


def read_trace(path, thread):
    """Return when this rank computed, its calls, and when the message of each was complete.

    Only those of one thread, and how many calls other threads have made. Below a GPU's operations,
    PyTorch has threads of its own, which make the calls in backward().

    Times are lists [begin, end] in microseconds, on the clock of this node. They are those of the
    CPU, also if "gpu" says that a GPU computed.
    """
    trace = json.loads(Path(path).read_text())
    base = trace.get("baseTimeNanoseconds", 0) / 1000
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    events.sort(key=lambda event: event["ts"])
    on_gpu = any(event.get("cat") == "kernel" for event in events)
    computing, calls, carried = [], [], []
    returned = others = 0
    for event in events:
        name = event["name"]
        begin = base + event["ts"]
        span = [begin, begin + event["dur"]]
        if name.startswith("gloo:"):
            carried.append([*span, name])
        elif name.startswith("aten::") and event["tid"] == thread:
            computing.append(span)
        elif name.startswith("c10d::") and event["tid"] != thread and not on_gpu:
            others += kind_of(name[6:]) is not None
        elif name.startswith("c10d::") and kind_of(name[6:]) and begin > returned:
            # While messages are noted, an operation is in the trace twice, one in the other.
            calls.append({"kind": kind_of(name[6:]), "span": span})
            returned = span[1]
    # An operation on DTensors has messages inside, in which the rank may only wait.
    begins = [call["span"][0] for call in calls]
    inner = [span for span in computing if bisect(begins, span[0]) == bisect(begins, span[1])]
    find_ends(calls, carried)
    return {"computing": inner, "calls": calls, "others": others, "gpu": on_gpu}


def find_ends(calls, carried):
    """Find out when the message of each call was complete.

    gloo's threads carry out the messages of a group in the order of the calls.
    """
    for call in calls:
        kinds = [call["kind"], None]
        if call["kind"] == "reduce_scatter":
            kinds.append("all_reduce")  # which gloo uses for it
        for number, (begin, end, name) in enumerate(carried):
            if begin >= call["span"][0] and kind_of(name) in kinds:
                call["span"] = [call["span"][0], end]
                del carried[number]
                break
