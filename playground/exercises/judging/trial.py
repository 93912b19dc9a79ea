"""What happens in a rank: it runs the learner's function, and sends what comes of it.

Nothing of the learner is imported in the process that judges: only here.
"""

import importlib
import importlib.util
import io
import os
import re
import resource
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import psutil
import torch
import torch.distributed as dist

import common  # noqa: F401, it silences a warning that PyTorch 2.13 and 2.14 print in the ranks
from judging.solution import solution_of
from judging.traffic import Counting, Forbidden
from watch_ranks.facts import TOLERANCE

MEMORY = 2**30  # what a rank may take in addition to what `import torch` has taken
FILE_SIZE = MEMORY // 10
LATER = 0.05  # after how many seconds a rank looks at its result again
MESSAGES = 2000  # messages of a rank that are kept in a case
DEFAULTS = {
    "NAME": "",  # of the function, if the module has another name
    "HELPERS": (),  # the names of what --answer shows before the solution
    "WORLD_SIZES": (1, 2, 3, 4, 5),
    "RUNG_1": "",  # what the first of two rungs is, as in "RIGHT for 7 numbers"; "": there is one
    "RUNG_2": "",  # what the second one adds, as in "Next: any length."
    "CASES_OF_RUNG_1": 1,  # how many of the CASES the first one has: there, costs do not count
    "ONLY": None,  # the kinds of messages that are allowed; None: all
    "INSTEAD": "",  # what is allowed, in words
    "TOLERANCE": TOLERANCE,
    "WORDS": {},  # by a pattern, which is searched in the lines of a verdict
    "STARTS": False,  # whether run(), with a function that does nothing, returns what was at first
    "start": lambda rank, world_size, **case: None,  # or this returns it
    "limits": lambda rank, world_size, **case: {},
    "explain": lambda verdict: None,  # words on a Verdict with wrong results
}


def check_of(name):
    """Return what the check of an exercise has."""
    module = importlib.import_module(f"judging.checks.{name}")
    return SimpleNamespace(**DEFAULTS | {"NAME": name} | vars(module), name=name, module=module)


def be_a_rank(number, connection, folder, name, file, function, size, port):
    """Run one case after another on one rank. Runs in a process of its own."""
    prepare_process(folder / f"printed{number}", number, size, port)
    # A process that the learner forks must not report as if it were this rank.
    os.register_at_fork(after_in_child=connection.close)
    check = check_of(name)
    answer = None
    while True:
        case = connection.recv()
        try:
            if case:
                place = folder / f"case{list(check.CASES).index(case)}"
                place.mkdir(exist_ok=True)
                os.chdir(place)  # a case may write files
                result = run_case(check, answer, file, case, number, size, connection)
            else:
                timeout = timedelta(seconds=600)
                dist.init_process_group("gloo", f"file://{folder}/meet", timeout, size, number)
                os.truncate(folder / f"printed{number}", 0)  # gloo of PyTorch 2.9 prints a line
                result = None
                answer = answer_of(check, file, function)
        except BaseException as error:
            connection.send(("crash", crash_of(error, file)))
        else:
            sys.stdout.flush()
            connection.send(("finished", result))


def prepare_process(output, number, size, port):
    """Limit what this process may take, and keep what it prints."""
    torch.set_num_threads(1)
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: FILE_SIZE}
    if sys.platform == "linux":
        limits[resource.RLIMIT_DATA] = psutil.Process().memory_info().data + MEMORY
    for what, most in limits.items():
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))
    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream, to in enumerate((os.open(os.devnull, os.O_RDONLY), written, written)):
        os.dup2(to, stream)
    sys.stdout = open(1, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115
    # What torchrun sets. A learner's program that joins by itself reads it.
    place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in place.items()})
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TMPDIR": str(output.parent)}


def answer_of(check, file, function):
    """Return the learner's function; of the check's own file, the solution or a mistake."""
    if file == check.module.__file__:
        return solution_of(check.module, check.MISTAKES[function] if function is not None else ())
    spec = importlib.util.spec_from_file_location("your_file", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["your_file"] = module
    sys.path.append(str(Path(file).parent))  # as Python does with a file that it runs
    spec.loader.exec_module(module)
    wanted = function or check.NAME
    if not hasattr(module, wanted):
        raise AttributeError(f"there is no {wanted} in {Path(file).name}")
    return getattr(module, wanted)


def run_case(check, function, file, case, number, size, connection):
    """Run one case. Returns what comes of it, and what this has become a moment later."""
    count = 0

    def report(message):
        nonlocal count
        count += 1
        if count <= MESSAGES:
            connection.send(("message", message))

    # In every second case the odd ranks are late, in the others the even ones.
    late = number % 2 == list(check.CASES).index(case) % 2
    with Counting(file, report, check.ONLY, check.INSTEAD, late):
        result = check.run(function, number, size, **check.CASES[case])
        saved = save(result)
        time.sleep(LATER)
        return saved, save(result)


def save(result):
    """Return a result, as plain data, in bytes."""
    file = io.BytesIO()
    torch.save(plain(result), file)
    return file.getvalue()


def plain(value):
    """Return a result, of tensors, numbers, text, lists and dicts, with all else as text."""
    if isinstance(value, dict):
        return {plain(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return f"an object of the class {type(value).__name__}"


def crash_of(error, file):
    """Return of an error: its kind, its text, and the frames of the learner's file."""
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    text = "\n".join(line[:200] for line in lines[:6])
    kind = "error" if dist.is_initialized() else "no group"
    if isinstance(error, Forbidden):
        kind, text = "forbidden", str(error)
    elif isinstance(error, NotImplementedError) and str(error) == "your turn":
        kind = "your turn"
    elif isinstance(error, (RuntimeError, dist.DistError)) and "gloo/" in text:
        kind = "connection"  # another rank has ended, or left the group
    elif isinstance(error, MemoryError) or "can't allocate memory" in text:
        text = text.split(":")[0] + f": a rank may use at most {MEMORY // 2**30} GB"
    frames = []
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == file:
            frames.append(f"your line {frame.lineno}, in {frame.name}: {frame.line}")
    return kind, text, frames if len(frames) <= 4 else [*frames[:2], "...", *frames[-2:]]


def crash_of_process(rank, status, file, printed):
    """Return the same of a rank whose process has ended with a status; `printed` is its file."""
    line = rank.line_of(file)
    text = printed.read_text(errors="replace")
    sizes = re.search(r"op.preamble.length <= op.nbytes. (\d+) vs (\d+)", text)  # gloo's words
    if sizes:
        printed.write_text("")
        words = f"its buffer has {sizes[2]} bytes, but the message that arrived has {sizes[1]}"
    elif status < 0:
        words = f"its process was ended by {signal.Signals(-status).name}"
    else:
        words = f"its process has ended with status {status}, in the middle of your function"
    return "ended", words, [f"your {line}"] if line else []
