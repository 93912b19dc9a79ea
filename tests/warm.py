"""Start lessons without starting Python: a process that has imported PyTorch forks one for each, and that its ranks.

Such a run has its own session, pid, environment and output, and takes signals, like one from the command line. What
differs: PyTorch has read its variables (TORCH_*, OMP_NUM_THREADS) before, ranks of mp.spawn are forked and torchrun's
are not started at all, and at the end Python does not clean up. What is about these goes through the command line:
`cold=True` in conftest.py.
"""

import atexit
import concurrent.futures
import functools
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path


class Warm:
    """A running script, with what the tests use of subprocess.Popen: pid, returncode, stdout, stderr, communicate.

    Args:
        words: the script's path and its flags.
        env: its environment.
        cwd: its working directory; None: that of this process.
    """

    def __init__(self, words: list, env: dict[str, str], cwd: Path | None = None):
        self.args, self.returncode = [str(word) for word in words], None
        request = {"words": self.args, "env": env, "cwd": str(cwd or Path.cwd())}
        pipes = [os.pipe() for _ in range(3)]
        socket.send_fds(_server(), [json.dumps(request).encode()], [write for _, write in pipes])
        for _, write in pipes:
            os.close(write)
        self.stdout, self.stderr, self._report = (os.fdopen(read, errors="replace") for read, _ in pipes)
        self.pid = int(self._report.readline())

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the end and return the rest of stdout and stderr; subprocess.TimeoutExpired if it does not come."""
        pool = concurrent.futures.ThreadPoolExecutor(2)
        texts = [pool.submit(stream.read) for stream in (self.stdout, self.stderr)]
        pool.shutdown(wait=False)
        if concurrent.futures.wait(texts, timeout).not_done:
            raise subprocess.TimeoutExpired(self.args, timeout)
        self.returncode = int(self._report.readline())
        return texts[0].result(), texts[1].result()


@functools.cache
def _server() -> socket.socket:
    """Start the process that forks, once for each worker of the tests. It ends when this end is closed."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}  # as guard_rails sets it for ranks
    process = subprocess.Popen([sys.executable, __file__, str(its.fileno())], env=env, pass_fds=[its.fileno()])
    atexit.register(process.kill)
    its.close()
    return mine


def _serve(requests: socket.socket) -> None:
    """Import what all lessons need, then fork a process for each request, and another that waits for its end."""
    import sklearn.datasets  # noqa: F401
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.pipelining
    import torch.multiprocessing as mp
    import torch.utils.tensorboard  # noqa: F401
    import torchvision.datasets  # noqa: F401

    mp.start_processes = functools.partial(_forked, mp.start_processes)
    mp.spawn = mp.start_processes
    sys.path.pop(0)  # of this script
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait
    while True:
        request, streams, _, _ = socket.recv_fds(requests, 2**20, 3)
        if not request:
            return
        if os.fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            pid = os.fork()
            if pid == 0:
                _be(**json.loads(request), streams=streams)
            os.close(streams[0])
            os.close(streams[1])
            os.write(streams[2], f"{pid}\n".encode())
            os.write(streams[2], f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())
            os._exit(0)
        for stream in streams:
            os.close(stream)


def _be(words: list[str], env: dict[str, str], cwd: str, streams: list[int]) -> None:
    """Be a Python that runs a script, with these streams as stdout, stderr and one to close."""
    os.setsid()
    for stream, number in ((os.open(os.devnull, os.O_RDONLY), 0), (streams[0], 1), (streams[1], 2)):
        os.dup2(stream, number)
        os.close(stream)
    os.close(streams[2])
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = words
    sys.path[:0] = [str(Path(words[0]).parent), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    status = 1
    try:
        runpy.run_path(words[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if status == 1 and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _forked(start_processes, function, args=(), nprocs=1, join=True, daemon=False, start_method="fork"):
    """Stand for mp.spawn and mp.start_processes: its processes are forked."""
    return start_processes(_be_rank, (function, *args), nprocs, join, daemon, "fork")


def _be_rank(rank, function, *args):
    """Be a rank: a started one would import the guard rails, which sees to its signals."""
    if "common.guard_rails" in sys.modules:
        importlib.reload(sys.modules["common.guard_rails"])
    function(rank, *args)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
