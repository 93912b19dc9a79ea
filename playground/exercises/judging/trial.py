"""One part of an answer's run on all ranks: what happens in a rank, and what is heard of it.

Nothing of the learner is imported in the process that judges: only in the ranks.
"""

import importlib.util
import io
import os
import re
import resource
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

import common  # noqa: F401, it silences a warning that PyTorch 2.13 and 2.14 print in the ranks
from instruments.ranks import news
from judging.traffic import Counting, Forbidden, Message, steps

GIGABYTE = 2**30
MEMORY = GIGABYTE  # what a rank may take in addition to what `import torch` has taken
FILE_SIZE = GIGABYTE // 10
PRINTED = 2000  # characters that are kept of what a rank prints
MESSAGES = 2000  # messages of a rank that are kept in a case
SECONDS_TO_JOIN = 60


@dataclass
class Crash:
    """An error in the learner's code, or the end of a rank.

    Attributes:
        error: the type and the text of the error.
        frames: the learner's own frames, as text.
        kind: "error", "forbidden", "your turn", "connection" (another rank has ended, so this one
            lost its connection) or "ended" (the process is gone).
    """

    error: str
    frames: list[str]
    kind: str = "error"


@dataclass
class Trial:
    """What happened in one part on all ranks, and what should have.

    Attributes:
        world_size: the number of ranks.
        messages: a list of Messages for each rank.
        results: what run() has returned on each rank; no entry if it did not return. A tuple has
            become a list.
        later: the results again, a moment after the function has returned, where they have changed.
        crashes: a Crash for each rank that has failed.
        places: for each rank that did not finish, where it is.
        verdict: "" (right), "WRONG", "COSTLY", "CRASH", "HANG" or "your turn".
        case: the arguments of the case, a dict.
        expected: what expected() has returned, for each rank.
        start: what each rank's result would be if the function did nothing; empty if it is unknown.
        rank: the first rank at fault.
    """

    world_size: int
    messages: list[list[Message]]
    results: dict[int, object] = field(default_factory=dict)
    later: dict[int, object] = field(default_factory=dict)
    crashes: dict[int, Crash] = field(default_factory=dict)
    places: dict[int, str] = field(default_factory=dict)
    verdict: str = ""
    case: dict = field(default_factory=dict)
    expected: dict[int, object] = field(default_factory=dict)
    start: dict[int, object] = field(default_factory=dict)
    rank: int = 0

    def of_rank(self):
        """Return what the rank at fault has, and what it should have."""
        return self.results[self.rank], self.expected[self.rank]

    @cached_property
    def steps(self):
        """The messages that were sent, and those that were not: see steps() in traffic.py."""
        return steps(self.messages)

    def why_it_hangs(self):
        """Return words for a hang: which message is missing. None if it is not known."""
        calls = [mine[-1].call if mine else None for mine in self.messages]
        if all(call == "send" for call in calls):
            return "Every rank waits in send until its message is received. Which rank receives?"
        sent, missing = self.steps
        for rank, recv in missing:
            if recv.peer is not None:
                return f"Rank {rank} waits for a message that rank {recv.peer} has not sent."
        for each in sent:
            if not each.received:
                return f"Rank {each.receiver} has not received a message from rank {each.sender}."
        if sent:
            return "Each message has a sender and a receiver. Is wait() called for each request?"
        first = [each.call for each in self.messages[0]]
        for mine in self.messages:
            if [each.call for each in mine] != first:
                return "All ranks must call the same collectives in the same order."
        return None

    def lost_message(self):
        """Return words if a message was not received, or a recv has got none; otherwise None."""
        sent, missing = self.steps
        for each in sent:
            if not each.received:
                return f"rank {each.receiver} has not received a message from rank {each.sender}"
        for rank, recv in missing:
            origin = f", from rank {recv.peer}" if recv.peer is not None else ""
            return f"rank {rank} expects one more message{origin}"
        return None

    def sent_with_gaps(self):
        """Return words on a tensor of which gloo has sent other numbers; None if there is none."""
        for rank, mine in enumerate(self.messages):
            for each in mine:
                if each.with_gaps and each.kind in ("broadcast", "reduce", "all_reduce", "scatter"):
                    lies = (
                        "has a tensor that is not contiguous, and gloo sends its memory as it lies"
                    )
                    return f"Rank {rank}'s {each.call} {lies}. Send .contiguous()."
        return None

    def used(self, rank):
        """Return what a rank has sent."""
        calls = [each for each in self.messages[rank] if each.kind != "recv"]
        sent, _ = self.steps
        return {
            "rounds": max((each.step for each in sent), default=0),
            "bytes": sum(each.nbytes for each in calls),
            "messages": len(calls),
        }


def go_through(attempt, ranks, part):
    """Let all ranks go through one part. Returns a Trial.

    A rank starts a part when all ranks have finished the part before. If a rank fails, ends, or
    does not finish, the run is over.

    Args:
        attempt: the Attempt.
        ranks: what started() yields.
        part: "join", "import", or the number of a case.
    """
    trial = Trial(len(ranks), [[] for _ in ranks])
    for rank in ranks:
        rank.connection.send(part)
    seconds = SECONDS_TO_JOIN if part == "join" else attempt.seconds
    left = set(range(len(ranks)))
    for rank, kind, value in news(ranks, seconds):
        number = rank.number
        if kind == "message":
            trial.messages[number].append(value)
        elif kind in ("result", "later"):
            # Only plain data is read, no objects of the learner.
            plain_value = torch.load(io.BytesIO(value), weights_only=True)
            {"result": trial.results, "later": trial.later}[kind][number] = plain_value
        else:
            left.discard(number)
        if kind == "crash":
            trial.crashes[number] = value
        if kind == "ended":
            trial.crashes[number] = crash_of(attempt, rank, value)
    if left and not trial.crashes:
        for number in sorted(left):
            does = ranks[number].ask()
            line = ranks[number].line_of(attempt.file)
            place = f"at your {line}" if line else "outside your function"
            trial.places[number] = f"{does} {place}"
    return trial


def crash_of(attempt, rank, status):
    """Return the Crash of a rank whose process has ended with this status."""
    line = rank.line_of(attempt.file)
    sizes = r"op.preamble.length <= op.nbytes. (\d+) vs (\d+)"  # as gloo prints it
    found = re.search(sizes, attempt.text_of(rank.number))
    if found:
        attempt.output_of(rank.number).write_text("")  # the same in other words
        words = f"its buffer has {found[2]} bytes, but the message that arrived has {found[1]}"
    elif status < 0:
        words = f"its process was ended by {signal.Signals(-status).name}"
    else:
        words = f"its process has ended with status {status}, in the middle of your function"
    return Crash(words, [f"your {line}"] if line else [], "ended")


def be_a_rank(number, connection, attempt, run, size, port):
    """Go through the parts on one rank. Runs in a process of its own."""
    prepare_process(attempt, size, number, port)
    # A process that the learner forks must not report as if it were this rank.
    os.register_at_fork(after_in_child=connection.close)
    while True:
        part = connection.recv()
        try:
            if part == "join":
                if attempt.exercise.JOIN:
                    meeting = f"file://{attempt.folder}/meet{port}"
                    timeout = timedelta(seconds=600)
                    dist.init_process_group("gloo", meeting, timeout, size, number)
                # What gloo prints when it connects is not the learner's.
                os.truncate(attempt.output_of(number), 0)
            elif part == "import":
                function = attempt.function()
            else:
                run_case(attempt, run, function, part, number, size, connection)
        except BaseException as error:
            frames = own_frames(error, attempt.file)
            connection.send(("crash", Crash(describe(error), frames, kind_of(error))))
        else:
            sys.stdout.flush()
            connection.send(("finished", None))


def prepare_process(attempt, size, number, port):
    """Limit what this process may take, and keep what it prints."""
    torch.set_num_threads(1)
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_FSIZE, FILE_SIZE)
    if sys.platform == "linux":
        limit(resource.RLIMIT_DATA, psutil.Process().memory_info().data + MEMORY)
    output = os.open(attempt.output_of(number), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for stream, to in enumerate((nothing, output, output)):
        os.dup2(to, stream)
    sys.stdout = open(1, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115
    os.environ["TMPDIR"] = str(attempt.folder)
    # What torchrun sets. A learner's program that joins by itself reads it.
    numbers = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in numbers.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"


def limit(what, most):
    """Set a limit of this process, unless the user has set a lower one."""
    hard = resource.getrlimit(what)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))


def load_function(file, name):
    """Import the learner's file in this rank and return the function."""
    spec = importlib.util.spec_from_file_location("your_file", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["your_file"] = module
    # Python itself finds the modules beside a file that it runs.
    sys.path.append(str(Path(file).parent))
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise AttributeError(f"there is no {name} in {Path(file).name}")
    return getattr(module, name)


def run_case(attempt, run, function, part, number, size, connection):
    """Run one case in its folder and send what comes of it."""
    os.chdir(attempt.place_of(part))
    count = 0

    def report(message):
        nonlocal count
        count += 1
        if count <= MESSAGES:
            connection.send(("message", message))

    exercise = attempt.exercise
    case = list(exercise.CASES.values())[part]
    # In every second case the odd ranks are late, in the others the even ones.
    late = number % 2 == part % 2
    with Counting(attempt.file, report, exercise.ONLY, exercise.INSTEAD, late):
        result = run(function, number, size, **case)
        saved = save(result)
        connection.send(("result", saved))
        time.sleep(attempt.later)
        later = save(result)
        if later != saved:
            connection.send(("later", later))


def save(result):
    """Return a result as bytes. It may have tensors, numbers, text, lists, tuples, dicts, None."""
    file = io.BytesIO()
    torch.save(plain(result), file)
    return file.getvalue()


def plain(value):
    """Return a value with everything replaced by text that is not plain data."""
    if isinstance(value, dict):
        return {plain(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return f"an object of the class {type(value).__name__}"


def describe(error):
    """Return an error as text, without its stack."""
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    text = "\n".join(line[:200] for line in lines[:6])
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        text = text.split(":")[0] + f": a rank may use at most {MEMORY // GIGABYTE} GB"
    return text


def kind_of(error):
    """Return the kind of Crash that an error is."""
    if isinstance(error, Forbidden):
        return "forbidden"
    if isinstance(error, NotImplementedError) and str(error) == "your turn":
        return "your turn"
    if isinstance(error, (RuntimeError, dist.DistError)) and "gloo/" in str(error):
        return "connection"
    return "error"


def own_frames(error, file):
    """Return the frames of the learner's file in an error's traceback, as text."""
    frames = []
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == file:
            frames.append(f"your line {frame.lineno}, in {frame.name}: {frame.line}")
    if len(frames) > 4:
        frames = [*frames[:2], "...", *frames[-2:]]
    return frames
