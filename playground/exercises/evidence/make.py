"""Makes the evidence: runs each program with four ranks, and keeps what they show.

    python playground/exercises/evidence/make.py

README.md of the exercises tells what a folder has. faulthandler, a module of Python, writes the
stacks. The function that reads PyTorch's flight recorder is private, so it may change.
"""

import faulthandler
import functools
import importlib.util
import json
import os
import pickle
import re
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

# PyTorch reads these when it is imported: its recorder keeps 2000 calls (in 2.9, none otherwise),
# and errors have no C++ back traces.
os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))  # find judging/
import torch
import torch._inductor.codecache  # the recorder imports it: here, before the ranks are forked
import torch.distributed as dist
from judging.checks.fault_late_rank import MILLISECONDS, RANK

from watching.ranks import call

RANKS = 4
# A rank is looked at when it has made so many calls, or none for so many seconds.
CALLS = 24
SECONDS = 3


def run(rank, folder, meeting):
    """Run the program of a folder as one rank, and write what it shows."""
    log = open(folder / "log.txt", "a")  # noqa: SIM115, what the rank prints goes there
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = log
    spec = importlib.util.spec_from_file_location("program", folder / "program.py")
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    if folder.name == "late_rank" and rank == RANK:
        program.read = functools.partial(read_late, program.read)
    dist.init_process_group("gloo", meeting, timedelta(seconds=2 * SECONDS), RANKS, rank)
    torch.ones(1, requires_grad=True).backward()  # the first one takes long
    dist.barrier()
    looking = threading.Thread(target=look, args=(folder, rank))
    looking.start()
    try:
        program.train(rank, RANKS)
        print(f"rank {rank}: end", flush=True)
    except RuntimeError as error:
        print(f"rank {rank}: {error}", flush=True)
    looking.join()
    time.sleep(SECONDS)  # so that another rank's timeout is not cut short


def read_late(read, rank, step):
    """Return a batch, but late, as from a slow disk."""
    time.sleep(MILLISECONDS / 1000)
    return read(rank, step)


def look(folder, rank):
    """Write where this rank is and what it has called. A thread does it, beside the program."""
    calls = []
    start = time.monotonic()
    while len(calls) < CALLS and time.monotonic() - start < SECONDS:
        time.sleep(0.1)
        before = len(calls)
        calls = recorded(folder / "program.py")
        if len(calls) > before:
            start = time.monotonic()
    with open(folder / f"stack{rank}.txt", "w") as stack:
        faulthandler.dump_traceback(stack)
    text = ",\n".join(json.dumps(call) for call in calls)
    (folder / f"recorder{rank}.json").write_text(f"[\n{text}\n]\n")


def recorded(program):
    """Return the recorder's calls from lines of the program, with PyTorch's own names."""
    calls = []
    for entry in pickle.loads(torch._C._distributed_c10d._dump_fr_trace())["entries"]:
        frames = []
        for frame in entry["frames"]:
            if frame["filename"] == str(program):
                frames.append({"name": frame["name"], "line": frame["line"]})
        names = ["collective_seq_id", "profiling_name", "input_sizes", "retired", "time_created_ns"]
        call = {name: entry[name] for name in names}
        if frames:
            calls.append({**call, "frames": frames})
    return calls


def clean(folder):
    """Leave out the folders of this machine, and what is not the program's."""
    for path in folder.glob("stack*.txt"):
        frames = []
        for line in path.read_text().rpartition("Thread")[2].splitlines()[1:]:  # the main thread
            line = re.sub(r'"\S*/(torch/|program\.py)', r'"\1', line)
            if '"torch/' in line or '"program.py"' in line:
                frames.append(line)
        path.write_text("\n".join(["most recent call first:", *frames, ""]))
    log = folder / "log.txt"
    text = re.sub(r"\[/\S*/gloo/", "[gloo/", log.read_text())
    lines = [line for line in text.splitlines() if not line.startswith("[Gloo]")]
    log.write_text("\n".join([*lines, ""]))


def main():
    """Run one program after another."""
    for program in sorted(HERE.glob("*/program.py")):
        folder = program.parent
        (folder / "log.txt").unlink(missing_ok=True)
        with tempfile.TemporaryDirectory() as meetings:
            # Each rank joins by itself. Leaving the group could hang.
            call(run, RANKS, folder, f"file://{meetings}/meet", group=False)
        clean(folder)


if __name__ == "__main__":
    main()
