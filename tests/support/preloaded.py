"""Run scripts in processes of Python's fork server, which has imported PyTorch.

Such a run has its own session, pid, environment and output, and it receives signals, like a run
from the command line. The ranks that mp.spawn starts are forked, too.

Two things differ. PyTorch has read its variables (TORCH_*, OMP_NUM_THREADS) before the fork, and
Python does not clean up at the end. Tests of these start Python: `cold=True` in launch.py.
"""

import concurrent.futures
import functools
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import signal
import subprocess
import sys
import traceback
import warnings
from pathlib import Path

import pytest

# What lessons import. multiprocessing imports it in the fork server.
MODULES = [
    "filelock",
    "sklearn.datasets",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.utils.tensorboard",
    "torchvision.datasets",
]
context = multiprocessing.get_context("forkserver")
SUPPORT = Path(__file__).parent


@functools.cache
def _start_server():
    """Start the fork server, which ends with this process. PyTorch reads these variables there."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OMP_NUM_THREADS", "1")
        environment.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")  # as in lessons
        context.set_forkserver_preload(MODULES)
        multiprocessing.forkserver.ensure_running()


class Script:
    """A running script: its path and its flags are `words`. It has those parts of Popen."""

    def __init__(self, words: list, env: dict[str, str], cwd: Path | None = None):
        _start_server()
        self.args = [str(word) for word in words]
        streams = [context.Pipe(duplex=False) for _ in range(2)]
        writers = [writer for _, writer in streams]
        self._process = context.Process(target=_run, args=(self.args, env, cwd, writers))
        self._process.start()
        self.pid = self._process.pid
        for writer in writers:
            writer.close()
        texts = [os.fdopen(os.dup(reader.fileno()), errors="replace") for reader, _ in streams]
        self.stdout, self.stderr = texts

    def poll(self) -> int | None:
        """Return the status, or the negative number of a signal; None while the script runs."""
        return self._process.exitcode

    returncode = property(poll)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the end and return the rest of stdout and stderr. TimeoutExpired as Popen's."""
        pool = concurrent.futures.ThreadPoolExecutor(2)
        texts = [pool.submit(stream.read) for stream in (self.stdout, self.stderr)]
        pool.shutdown(wait=False)
        if concurrent.futures.wait(texts, timeout).not_done:
            raise subprocess.TimeoutExpired(self.args, timeout)
        self._process.join()
        return texts[0].result(), texts[1].result()


def _run(words, env, cwd, writers):
    """Run a script as Python does, with this environment, and end this process."""
    os.setsid()
    for number, writer in enumerate(writers, 1):
        os.dup2(writer.fileno(), number)
        writer.close()
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    os.environ.clear()
    os.environ.update(env)
    if cwd:
        os.chdir(cwd)
    sys.argv = words
    folders = [str(Path(words[0]).parent), *filter(None, env.get("PYTHONPATH", "").split(":"))]
    ours = f"{SUPPORT.parents[1]}{os.sep}"
    sys.path[:] = folders + [p for p in sys.path if "site-packages" in p or ours not in f"{p}/"]
    if "PYTHONWARNINGS" in env:  # Python has read it before the fork
        warnings.simplefilter("error", FutureWarning)
    _fork_ranks()
    if "DOCUMENTS" in env:  # how many the text of --dataset text has: the shortest ones
        from pydoc_data import topics

        shortest = sorted(topics.topics.items(), key=lambda item: len(item[1]))
        topics.topics = dict(shortest[: int(env["DOCUMENTS"])])
    if "NOTES" in env:  # the folder for what first_difference.py compares
        sys.path.append(str(SUPPORT.parents[1] / "playground" / "tools"))
        from watch_ranks.steps import Notes

        sys.path.pop()
        Notes(Path(env["NOTES"]), 1000)
    status = 1
    try:
        runpy.run_path(words[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        else:
            status = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # this process has handled it, or has ended
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _fork_ranks():
    """Replace mp.spawn and mp.start_processes by the same with start_method="fork"."""
    import torch.multiprocessing as mp

    start_processes = mp.start_processes

    def forked(function, args=(), nprocs=1, join=True, daemon=False, start_method="fork"):
        return start_processes(function, args, nprocs, join, daemon, "fork")

    mp.start_processes = mp.spawn = forked
