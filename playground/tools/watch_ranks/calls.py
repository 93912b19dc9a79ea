"""Notes all messages of a rank, their batches, and where it waits for them. nccl.py reads it."""

import json
import threading

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from watch_ranks.anywhere import harmless, replace, running
from watch_ranks.messages import flat, group_of, process_group
from watch_ranks.record import Noting

MOST = 10_000  # messages of a rank that are noted
ROOTED = ("broadcast", "reduce", "gather", "scatter")


class Calls(Noting):
    """Writes each message of this rank to a file when it starts. It takes a Recorder's place.

    Three functions are replaced in this process: with gloo, a wait and a batch are no operations,
    and a group does not say whether gloo was asked for.
    """

    profiler, busy, why = None, False, ""
    file = number = None  # the number is that of the message that starts just now
    count = 0  # how many messages are noted
    batches = batch = 0  # how many have begun, and the number of this one, or 0

    def __init__(self, path):
        super().__init__(None)
        self.path, self.most = path, float("inf")
        self.thread = threading.current_thread()
        self.started = {}  # the numbers of messages, by their requests, until it waits for them
        self.stay = set()  # the names of groups that use gloo with GPUs, too
        self.others = False  # whether another thread has waited for a message, which is not noted

    def note_line(self, frame):
        """Only a Recorder notes when the script is where."""

    @harmless
    def begin(self):
        """Note from here on, because this process joins a group."""
        if self.file:
            return
        self.file = open(self.path, "w")  # noqa: SIM115, it stays open
        self.script, self.thread = running(), threading.current_thread()
        wait, batch, make = dist.Work.wait, c10d.batch_isend_irecv, c10d.new_group

        def noted_wait(work, *args, **named):
            if work in self.started:
                self.write({"wait": self.started.pop(work)})
            elif threading.current_thread() is not self.thread and not self.others:
                self.others = True
                self.write({"others": True})
            return wait(work, *args, **named)

        def noted_batch(p2p_op_list):
            self.batches += 1
            self.batch = self.batches
            try:
                return batch(p2p_op_list)
            finally:
                self.batch = 0

        def noted_group(ranks=None, timeout=None, backend=None, *args, **named):
            group = make(ranks, timeout, backend, *args, **named)
            if str(backend).lower() == "gloo" and isinstance(group, dist.ProcessGroup):
                self.stay.add(group.group_name)
            return group

        dist.Work.wait = noted_wait
        replace(batch, noted_batch)
        replace(make, noted_group)
        self.__enter__()

    def forget(self):
        """Note nothing more, because the script has ended, or this is a forked process."""
        if self.file and threading.current_thread() is self.thread:
            self.__exit__(None, None, None)
        self.file = None

    @harmless
    def stop(self):
        """Note that the script has ended, or that it has sent more than is noted."""
        self.write({"end": True} if self.count < MOST else {"full": True})
        self.forget()

    def write(self, row):
        """Write a line, which is there if this process is killed, too."""
        if self.file:
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()

    def note(self, kind, operation, args):
        """Note a message before it starts."""
        group = process_group(args)
        if self.count == MOST or group.group_name in self.stay:
            return
        super().note(kind, operation, args)
        # The tensor that must have one size on all ranks, or on both.
        second = (
            kind in ("all_gather", "gather", "reduce_scatter") and operation.namespace == "c10d"
        )
        tensors = [[each.numel(), str(each.dtype)[6:]] for each in flat(args[1 if second else 0])]
        if kind == "all_to_all":  # the parts for the ranks may have any size
            tensors = [["any", tensors[0][1]]]
        row = self.noted.pop() | {"tensors": tensors, "rank": self.rank, "script": self.script}
        row["of"] = group_of(group.group_name, group.group_desc)
        if kind in ("send", "recv"):
            row = {"peer": None} | row | {"tag": args[-1], "batch": self.batch}
        if kind in ROOTED:
            row["root"] = next(each for each in args if type(each) is int)
        self.number, self.count = self.count, self.count + 1
        self.write(row)

    @harmless
    def after(self, operation, args, result):
        """Keep the request of a message, so that it is known for which one this rank waits."""
        request = result[-1] if isinstance(result, tuple) else result
        if self.number is not None and isinstance(request, torch.ScriptObject):
            self.started[dist.Work.unbox(request)] = self.number
        self.number = None
