"""Starts the ranks on which an exercise is tried, watches them, and ends what they have started.

A world is a number of ranks that form a process group. `with started(world) as go:` runs an
exercise in one world:

1. It forks a process for each rank. The process that forks has imported torch and computed nothing,
   so a rank starts in a few milliseconds.
2. The ranks go through the same parts together: they join the group, they import the learner's
   file, and they run one case after another. A rank starts a part when all ranks have finished the
   part before. So the time of a part is counted from when all ranks are there.
3. A rank that fails, that ends, or that does not finish a part in time ends the world. It says by
   faulthandler at which line it is. This works in C++ code, too.

Nothing of the learner is imported here: only in the ranks.
"""

import contextlib
import ctypes
import faulthandler
import functools
import importlib.util
import io
import linecache
import multiprocessing
import os
import re
import resource
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist
from traffic import Forbidden, Message, counting

sys.path.append(str(Path(__file__).resolve().parents[3]))  # find common/
import common  # noqa: F401, it silences a warning that PyTorch 2.13 and 2.14 print in the ranks

SECONDS_TO_JOIN = 10
SECONDS_FOR_A_CASE = 8  # from when all ranks have started it; also for importing the file
GIGABYTE = 2**30
MEMORY = GIGABYTE  # what a rank may take in addition to what `import torch` has taken
FILE_SIZE = GIGABYTE // 10
PRINTED = 2000  # characters that are kept of what a rank prints
MESSAGES = 2000  # messages of a rank that are kept in a case
LATER = 0.05  # seconds after which a rank looks at its result again
fork = multiprocessing.get_context("fork")


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
    """What happened on all ranks in one case.

    Attributes:
        results: what the check's function has returned on each rank; no entry if it did not return.
        later: the results again, a moment after the function has returned, where they have changed.
        messages: a list of Messages for each rank.
        crashes: a Crash for each rank that has failed.
        places: for each rank that did not finish in time, where it is.
    """

    results: dict[int, object] = field(default_factory=dict)
    later: dict[int, object] = field(default_factory=dict)
    messages: dict[int, list[Message]] = field(default_factory=dict)
    crashes: dict[int, Crash] = field(default_factory=dict)
    places: dict[int, str] = field(default_factory=dict)


@dataclass
class Rank:
    """One rank, seen from the process that watches it."""

    number: int
    process: multiprocessing.Process
    connection: multiprocessing.connection.Connection
    output: int  # the end of a pipe, from which this process reads what the rank prints
    stack: Path  # where the rank writes its stack when it gets SIGUSR1
    printed: bytes = b""


@dataclass
class World:
    """A number of ranks, and what they run.

    Attributes:
        size: the number of ranks.
        file: the learner's file.
        name: the name of the learner's function in it.
        run: the check's function, called on each rank as run(the learner's function, **case).
        cases: the arguments of `run`, a dict for each case.
        folder: where case number i runs in the folder case<i>. So what a learner writes is there,
            and another world with the same folder can read it.
        join: whether the ranks form a process group before the learner's function is called.
        only: the kinds of messages that are allowed; None: all. See Counting.
        instead: what to use instead of the others.
        seconds: the time for a case, from when all ranks have started it.
        port: a free port, and `meeting` is where the ranks find each other. Set at the start.
        printed: what each rank has printed. Set at the end.
    """

    size: int
    file: str
    name: str
    run: object
    cases: list[dict]
    folder: Path
    join: bool = True
    only: tuple[str, ...] | None = None
    instead: str = ""
    seconds: float = SECONDS_FOR_A_CASE
    port: int = 0
    meeting: str = ""
    printed: list[str] = field(default_factory=list)


@contextlib.contextmanager
def started(world):
    """Start the ranks of a world. At the end, end them and whatever they have started.

    Yields:
        a function that lets all ranks go through a part and returns a Trial. The parts are "join",
        "import", and the numbers of the cases.
    """
    world.port = free_port()
    world.meeting = f"file://{world.folder}/meet{world.port}"
    for number in range(len(world.cases)):
        (world.folder / f"case{number}").mkdir(exist_ok=True)
    ranks = [start_rank(world, number) for number in range(world.size)]
    try:
        yield functools.partial(go_through, world, ranks)
    finally:
        end_children()
        for rank in ranks:
            read_output(rank)
            os.close(rank.output)
        world.printed = [rank.printed.decode(errors="replace") for rank in ranks]


def start_rank(world, number):
    """Fork the process of one rank. Returns the Rank."""
    ours, theirs = fork.Pipe()
    output, write = os.pipe()
    os.set_blocking(output, False)
    stack = world.folder / f"stack{world.port}-{number}"
    process = fork.Process(target=be_a_rank, args=(world, number, theirs, write, stack))
    process.start()
    theirs.close()
    os.close(write)
    return Rank(number, process, ours, output, stack)


def go_through(world, ranks, part):
    """Let all ranks go through one part. Returns a Trial."""
    seconds = SECONDS_TO_JOIN if part == "join" else world.seconds
    file = world.file
    trial = Trial(messages={rank.number: [] for rank in ranks})
    for rank in ranks:
        with contextlib.suppress(OSError):  # it has ended; this is noticed below
            rank.connection.send(part)
    waiting = {rank.number for rank in ranks}
    end = time.monotonic() + seconds
    while waiting and time.monotonic() < end:
        listen(ranks, waiting, trial, end - time.monotonic(), file)
        if trial.crashes:
            # The other ranks may fail for the same reason. This moment tells which rank was first.
            end = min(end, time.monotonic() + 0.3)
    if waiting and not trial.crashes:
        trial.places = places([rank for rank in ranks if rank.number in waiting], file)
    return trial


def listen(ranks, waiting, trial, seconds, file):
    """Wait for the next news of the ranks, and note them in the Trial."""
    sources = []
    for rank in ranks:
        sources.append(rank.output)
        if rank.number in waiting:
            sources += [rank.connection, rank.process.sentinel]
    ready = wait(sources, min(seconds, 0.1))
    for rank in ranks:
        if rank.output in ready:
            read_output(rank)
        if rank.number not in waiting:
            continue
        with contextlib.suppress(EOFError, OSError):  # it has ended
            while rank.connection.poll():
                kind, news = rank.connection.recv()
                note(kind, news, rank.number, waiting, trial)
        if rank.number in waiting and rank.process.sentinel in ready:
            rank.process.join()
            read_output(rank)
            place = place_in(rank.stack, file)
            frames = [f"your {place}"] if place else []
            trial.crashes[rank.number] = Crash(ending(rank), frames, "ended")
            waiting.discard(rank.number)


def note(kind, news, rank, waiting, trial):
    """Note one message of a rank to the process that watches it."""
    if kind == "message":
        trial.messages[rank].append(news)
    elif kind == "crash":
        trial.crashes[rank] = news
        waiting.discard(rank)
    elif kind == "result":
        trial.results[rank] = load(news)
    elif kind == "later":
        trial.later[rank] = load(news)
    elif kind == "finished":
        waiting.discard(rank)


def read_output(rank):
    """Read what a rank has printed, and keep its beginning. The rank must not wait to print."""
    with contextlib.suppress(BlockingIOError):
        for _ in range(100):
            text = os.read(rank.output, 65536)
            if not text:
                break
            rank.printed += text[: PRINTED - len(rank.printed)]


def ending(rank):
    """Return how the process of a rank has ended, in words."""
    status = rank.process.exitcode
    printed = rank.printed.decode(errors="replace")
    sizes = re.search(r"op.preamble.length <= op.nbytes. (\d+) vs (\d+)", printed)
    if sizes:
        rank.printed = b""  # gloo has printed the same in its own words
        return f"its buffer has {sizes[2]} bytes, but the message that arrived has {sizes[1]}"
    if status is not None and status < 0:
        return f"its process was ended by {signal.Signals(-status).name}"
    return f"its process has ended with status {status}, in the middle of your function"


def places(ranks, file):
    """Ask ranks where they are. Returns for each number its line of the learner's file, as text."""
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid, signal.SIGUSR1)
    running = dict.fromkeys([rank.number for rank in ranks], 0)
    for _ in range(5):
        time.sleep(0.1)
        for rank in ranks:
            running[rank.number] += is_running(rank.process.pid)
    found = {}
    for rank in ranks:
        does = "computes" if running[rank.number] >= 3 else "waits"
        place = place_in(rank.stack, file)
        found[rank.number] = f"{does} at your {place}" if place else f"{does} outside your function"
    return found


def place_in(stack, file):
    """Return the innermost line of a file in a stack that faulthandler has written; "": none."""
    text = stack.read_text() if stack.exists() else ""
    for path, line in re.findall(r'File "(.*)", line (\d+) in ', text):
        if path == file:
            return f"line {line}: {linecache.getline(file, int(line)).strip()}"
    return ""


def is_running(pid):
    """Return whether a process computes, or would if a core were free. False where unknown."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state == "R"


def be_a_rank(world, number, connection, output, stack):
    """Go through the parts on one rank. Runs in a process of its own."""
    prepare_process(world, number, stack)
    # A process that the learner forks must not report as if it were this rank.
    os.register_at_fork(after_in_child=connection.close)
    function = None
    while True:
        part = connection.recv()
        try:
            if part == "join":
                if world.join:
                    join(world, number)
                # From here on, what is printed is the learner's.
                os.dup2(output, 1)
                os.dup2(output, 2)
            elif part == "import":
                function = load_function(world)
            else:
                run_case(world, number, function, part, connection)
        except BaseException as error:
            crash = Crash(describe(error), own_frames(error, world.file), kind_of(error))
            connection.send(("crash", crash))
        sys.stdout.flush()
        connection.send(("finished", None))


def prepare_process(world, number, stack):
    """Limit what this process may take, and connect its output and its stack."""
    os.setsid()  # Ctrl-C in the terminal reaches only the check, which ends the ranks
    die_with_parent()
    file = open(stack, "w")  # noqa: SIM115, it stays open for SIGUSR1
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)
    faulthandler.enable(file)  # C++ code may end the process by a signal
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE, FILE_SIZE))
    if sys.platform == "linux":
        status = Path("/proc/self/status").read_text()
        taken = int(re.search(r"VmData:\s+(\d+) kB", status)[1]) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (taken + MEMORY, taken + MEMORY))
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # gloo prints when it connects, and this is not the learner's
        os.dup2(nothing, stream)
    sys.stdout = open(1, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115
    os.environ["TMPDIR"] = str(world.folder)
    # What torchrun sets. A learner's program that joins by itself reads it.
    os.environ["RANK"] = str(number)
    os.environ["LOCAL_RANK"] = str(number)
    os.environ["WORLD_SIZE"] = str(world.size)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(world.port)


def join(world, number):
    """Form the process group. The ranks of a world find each other by a file."""
    dist.init_process_group(
        "gloo",
        init_method=world.meeting,
        rank=number,
        world_size=world.size,
        timeout=timedelta(seconds=60),
    )


def load_function(world):
    """Import the learner's file in this rank and return the function."""
    spec = importlib.util.spec_from_file_location("your_file", world.file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["your_file"] = module
    # Python itself finds the modules beside a file that it runs.
    sys.path.append(str(Path(world.file).parent))
    spec.loader.exec_module(module)
    if not hasattr(module, world.name):
        raise AttributeError(f"there is no {world.name} in {Path(world.file).name}")
    return getattr(module, world.name)


def run_case(world, number, function, part, connection):
    """Run one case in its folder and send what comes of it."""
    os.chdir(world.folder / f"case{part}")
    count = 0

    def report(message):
        nonlocal count
        count += 1
        if count <= MESSAGES:
            connection.send(("message", message))

    # In every second case the odd ranks are late, in the others the even ones.
    late = number % 2 == part % 2
    with counting(world.file, report, world.only, world.instead, late):
        result = world.run(function, **world.cases[part])
        saved = save(result)
        connection.send(("result", saved))
        time.sleep(LATER)
        later = save(result)
        if later != saved:
            connection.send(("later", later))


def save(result):
    """Return a result as bytes. It may have tensors, numbers, text, lists, tuples, dicts, None."""
    file = io.BytesIO()
    torch.save(plain(result), file)
    return file.getvalue()


def load(saved):
    """Return the result that was saved. Only plain data is read, no objects of the learner."""
    return torch.load(io.BytesIO(saved), weights_only=True)


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


def free_port():
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def die_with_parent():
    """Let the kernel end this process when its parent ends, also by SIGKILL. Linux has this."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def adopt_orphans():
    """Let the processes that the ranks have started become children of this one at a rank's end."""
    if sys.platform == "linux":
        pr_set_child_subreaper = 36
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1)


def end_children():
    """End all children of this process, and the children that it then gets from them."""
    while pids := children():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def children():
    """Return the pids of the children of this process that are alive."""
    pids = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            state, parent = file.read_text().rsplit(")", 1)[1].split()[:2]
            if int(parent) == os.getpid() and state != "Z":
                pids.append(int(file.parent.name))
    if not Path("/proc").exists():  # macOS
        pids = [process.pid for process in multiprocessing.active_children()]
    return pids
