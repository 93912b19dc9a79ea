"""What each rank sends: it is counted, and an exercise may forbid some messages."""

import contextlib
import time
import traceback
from dataclasses import dataclass

import torch.distributed as dist

from watch_ranks.messages import Messages, kept_bytes, passed, peer_of, process_group
from watch_ranks.messages import sent_bytes as sent_in_a_ring

SECONDS_LATE = 0.01  # how much later than the others a late rank starts each message
SHOWN = 3  # numbers of a message that are kept for the trace
TRACED = 14  # lines of a trace, at most


@dataclass
class Message:
    """One call of this rank: a message to or from another rank, or a collective.

    Attributes:
        kind: "send", "recv", "all_reduce", ...: see tools/watch_ranks/messages.py.
        call: the function of torch.distributed that the learner has called, such as "isend".
        line: the line of the learner's file; None if it is not known.
        peer: the other rank; None for a collective, and for a recv from any rank.
        numel: how many numbers are in the tensors that this rank sends (or receives, for a recv).
        nbytes: how many bytes this rank sends; for a collective, in a ring.
        tag: the tag of a send or recv.
        numbers: the first numbers that are sent, as text.
        has_gaps: whether a tensor's numbers have others between them in memory, as a column has.
    """

    kind: str
    call: str
    line: int | None
    peer: int | None
    numel: int
    nbytes: int
    tag: int
    numbers: str
    has_gaps: bool


class Forbidden(BaseException):
    """The learner has called what the exercise is to build.

    It is a BaseException, so that `except Exception` in the learner's code does not catch it.
    """


class Counting(Messages):
    """Reports each message of this rank inside `with`, and refuses those that are forbidden.

    Args:
        file: the learner's file. Its frames tell what is called.
        report: called with each Message before it starts.
        only: the kinds that are allowed; None: all.
        instead: what to use instead, such as "use isend and irecv".
        late: whether this rank starts each message SECONDS_LATE later. A learner who does not wait
            for a message then sees wrong numbers.
    """

    paused = False

    def __init__(self, file, report, only=None, instead="", late=False):
        super().__init__()
        self.file = file
        self.report = report
        self.only = only
        self.instead = instead
        self.late = late

    def note(self, kind, operation, args):
        """Report a message before it starts, or refuse it."""
        if Counting.paused:
            return
        message = describe(kind, operation, args, self.file)
        if self.only is not None and kind not in self.only:
            raise Forbidden(f"dist.{message.call} is not for this exercise: {self.instead}")
        self.report(message)
        last = dist.get_world_size() - 1
        if message.peer == dist.get_rank():  # gloo would say that the connection is lost
            does = "sends to" if kind == "send" else "receives from"
            alone = "" if last else ": there is no other rank"
            raise ValueError(f"rank {message.peer} {does} itself{alone}")
        if message.peer is not None and not 0 <= message.peer <= last:  # gloo would end the process
            raise ValueError(f"there is no rank {message.peer}: the last one is {last}")
        if self.late:
            time.sleep(SECONDS_LATE)


@contextlib.contextmanager
def uncounted():
    """Inside `with uncounted():`, all messages are allowed and none is counted. A check uses it."""
    Counting.paused = True
    try:
        yield
    finally:
        Counting.paused = False


def describe(kind, operation, args, file):
    """Return the Message of one operation with these arguments."""
    tensors = passed(kind, operation, args)
    group = process_group(args)
    peer = peer_of(kind, args, group)
    tag = args[-1] if kind in ("send", "recv") else 0
    call, line = called(file)
    nbytes = sum(tensor.nbytes for tensor in tensors)
    kept = kept_bytes(kind, operation, args, nbytes, group)
    return Message(
        kind,
        call or kind,
        line,
        peer,
        sum(tensor.numel() for tensor in tensors),
        sent_bytes(kind, nbytes, group.size(), kept),
        tag,
        "" if kind == "recv" else first_numbers(tensors),
        any(map(has_gaps, tensors)),
    )


def has_gaps(tensor):
    """Return whether a tensor's numbers have others between them in memory."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return sum((size - 1) * stride for size, stride in steps) >= tensor.numel() > 0


def sent_bytes(kind, nbytes, size, kept=0):
    """Return how many bytes a rank sends. See tools/watch_ranks/messages.py."""
    return int(sent_in_a_ring(kind, nbytes, size, kept))


def first_numbers(tensors):
    """Return the first numbers of tensors as text."""
    numbers = []
    for tensor in tensors:
        numbers += tensor.detach().flatten()[:SHOWN].tolist()
    shown = " ".join(f"{number:.4g}" for number in numbers[:SHOWN])
    more = " ..." if sum(tensor.numel() for tensor in tensors) > SHOWN else ""
    return f"[{shown}{more}]"


def called(file):
    """Return which function of torch.distributed a file has called, and at which line, or None."""
    call = None
    for frame, line in traceback.walk_stack(None):
        if frame.f_code.co_filename == file:
            return call, line
        # A wrapper of torch.distributed's logger is between the learner's line and the function.
        if frame.f_globals.get("__name__", "").startswith("torch.distributed"):
            name = frame.f_code.co_name
            if name not in ("wrapper", "inner"):
                call = name
    return call, None


@dataclass
class Step:
    """One message that was sent, with the step in which it travels, counted from 1."""

    step: int
    sender: int
    receiver: int
    message: Message
    received: bool


def steps(messages):
    """Return each message between two ranks with the step in which it travels.

    In one step a rank sends at most one message and receives at most one. A rank sends a message at
    the earliest in the step after all those that it has received before. A rank that starts a recv
    before its own send continues with the send if the message cannot be there yet.

    Args:
        messages: a list for each rank, of its Messages in the order in which they were started.

    Returns:
        a list of Steps in the order of steps, and a list of (rank, Message): each recv without a
        message.
    """
    todo = []
    for mine in messages:
        todo.append([each for each in mine if each.kind in ("send", "recv")])
    clocks = [0] * len(todo)
    sent = []
    progress = True
    while progress:
        progress = False
        for rank, calls in enumerate(todo):
            while calls and take(rank, calls[0], clocks, sent):
                calls.pop(0)
                progress = True
        if not progress:
            progress = skip(todo, clocks, sent)
    missing = []
    for rank, calls in enumerate(todo):
        missing += [(rank, call) for call in calls if call.kind == "recv"]
    return sorted(sent, key=lambda each: (each.step, each.sender)), missing


def take(rank, message, clocks, sent):
    """Let a rank send, or receive what was sent before. Returns whether this was possible."""
    if message.kind == "send":
        clocks[rank] += 1
        sent.append(Step(clocks[rank], rank, message.peer, message, received=False))
        return True
    for each in sent:
        fits = each.receiver == rank and message.peer in (None, each.sender)
        if fits and not each.received and each.message.tag == message.tag:
            each.received = True
            clocks[rank] = max(clocks[rank], each.step)
            return True
    return False


def skip(todo, clocks, sent):
    """All ranks are at a recv whose message is not sent yet: let each send its next message.

    Only a recv that does not block is skipped. Returns whether any rank has sent.
    """
    found = False
    for rank, calls in enumerate(todo):
        for index, call in enumerate(calls):
            if call.kind == "send":
                take(rank, call, clocks, sent)
                del calls[index]
                found = True
                break
            if call.call == "recv":
                break
    return found


def used(messages, rank):
    """Return how much a rank has sent, and in how many rounds all messages travel."""
    calls = [each for each in messages[rank] if each.kind != "recv"]
    rounds = max((each.step for each in steps(messages)[0]), default=0)
    return {"rounds": rounds, "bytes": sum(each.nbytes for each in calls), "messages": len(calls)}


def lost_message(messages):
    """Return words if a message was not received, or a recv has got none; otherwise None."""
    sent, missing = steps(messages)
    for each in sent:
        if not each.received:
            return f"rank {each.receiver} has not received a message from rank {each.sender}"
    for rank, recv in missing:
        origin = f", from rank {recv.peer}" if recv.peer is not None else ""
        return f"rank {rank} expects one more message{origin}"
    return None


def why_it_hangs(messages):
    """Return words for a hang: which message is missing. None if it is not known."""
    if all(mine and mine[-1].call == "send" for mine in messages):
        return "Every rank waits in send until its message is received. Which rank receives?"
    sent, missing = steps(messages)
    for rank, recv in missing:
        if recv.peer is not None:
            return f"Rank {rank} waits for a message that rank {recv.peer} has not sent."
    for each in sent:
        if not each.received:
            return f"Rank {each.receiver} has not received a message from rank {each.sender}."
    if sent:
        return "Each message has a sender and a receiver. Is wait() called for each request?"
    calls = [[each.call for each in mine] for mine in messages]
    if any(mine != calls[0] for mine in calls):
        return "All ranks must call the same collectives in the same order."
    return None


def with_gaps(messages):
    """Return words on a tensor of which gloo has sent other numbers; None if there is none."""
    for rank, mine in enumerate(messages):
        for each in mine:
            if each.has_gaps and each.kind in ("broadcast", "reduce", "all_reduce", "scatter"):
                lies = "has a tensor that is not contiguous, and gloo sends its memory as it lies"
                return f"Rank {rank}'s {each.call} {lies}. Send .contiguous()."
    return None


def trace(messages):
    """Return at most TRACED lines that tell who sent what to whom, step by step."""
    sent, missing = steps(messages)
    lines = {}
    for each in sent:
        text = f"{each.sender} -> {each.receiver}: {each.message.numbers}"
        if not each.received:
            text += " (not received)"
        lines.setdefault(each.step, []).append(text)
    found = [f"step {step}:  " + "   ".join(texts) for step, texts in lines.items()]
    for rank, recv in missing:
        origin = "any rank" if recv.peer is None else f"rank {recv.peer}"
        found.append(f"rank {rank} waits for a message from {origin}")
    for rank, mine in enumerate(messages):
        others = [each.call for each in mine if each.kind not in ("send", "recv")]
        if others:
            found.append(f"rank {rank} calls {', '.join(others)}")
    if len(found) > TRACED:
        left = len(found) - TRACED
        found = [*found[:TRACED], f"... and {left} more lines"]
    return found or ["no rank has sent anything"]
