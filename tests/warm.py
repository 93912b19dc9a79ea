"""Start lessons without starting Python: a process that has imported PyTorch forks one for each, and what that starts.

Such a run has its own session, pid, environment and output, and takes signals, like one from the command line. The
ranks of mp.spawn are forked, too, and what starts a Python as a program: torchrun's ranks, compare.py's lessons. What
differs: PyTorch has read its variables (TORCH_*, OMP_NUM_THREADS) before, and at the end Python does not clean up. What
is about these goes through the command line: `cold=True` in conftest.py.
"""

import atexit
import concurrent.futures
import ctypes
import functools
import gc
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

libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_void_p
MARK = libc.getenv(b"PLAYGROUND_TEST")  # where the kernel reads it for /proc/<pid>/environ, which never changes


class Warm:
    """A running script, with what the tests use of subprocess.Popen: pid, returncode, stdout, stderr, communicate.

    Args:
        words: the script's path, or -m and a module, and its flags.
        env: its environment.
        cwd: its working directory; None: that of this process.
    """

    def __init__(self, words: list, env: dict[str, str], cwd: Path | None = None):
        self.args, self.returncode = [str(word) for word in words], None
        request = [self.args, env, str(cwd or Path.cwd())]
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
    env["PLAYGROUND_TEST"] = "-" * 32  # room for the marks of its children
    process = subprocess.Popen([sys.executable, __file__, str(its.fileno())], env=env, pass_fds=[its.fileno()])
    atexit.register(process.kill)
    its.close()
    return mine


def _serve(requests: socket.socket) -> None:
    """Import what all lessons need, then fork a process for each request, and another that waits for its end."""
    subprocess.Popen = _Popen  # before torchrun's modules take it
    import sklearn.datasets  # noqa: F401
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.launcher.api
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
            words, env, cwd = json.loads(request)
            options = {"stdin": subprocess.DEVNULL, "stdout": streams[0], "stderr": streams[1]}
            process = _Popen([sys.executable, *words], env=env, cwd=cwd, start_new_session=True, **options)
            os.close(streams[0])
            os.close(streams[1])
            os.write(streams[2], f"{process.pid}\n".encode())
            os.write(streams[2], f"{process.wait()}\n".encode())
            os._exit(0)
        for stream in streams:
            os.close(stream)


class _Popen(subprocess.Popen):
    """Stand for subprocess.Popen: a Python that would run a script or a module is this one, in a new process."""

    def __init__(self, args, **options):
        if args[0] == sys.executable and args[1] != "-c":
            env = dict(options.get("env") or os.environ)
            options["preexec_fn"] = functools.partial(_be, [str(word) for word in args[1:]], env)  # does not return
        super().__init__(args, **options)


def _be(words: list[str], env: dict[str, str]) -> None:
    """Be a Python that was started with these words and this environment; Popen has set all else."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    gc.freeze()  # keep what has these files: their numbers are taken anew
    gc.enable()
    ctypes.memmove(MARK, env["PLAYGROUND_TEST"].encode(), 32)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(env)
    at_once = words[0] == "-u"  # as torchrun has it
    sys.stdout = os.fdopen(1, "w", 1 if at_once else -1, closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    sys.argv = words[at_once:]
    sys.path[:0] = [str(Path(sys.argv[0]).parent), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    status = 1
    try:
        if sys.argv[0] == "-m":
            del sys.argv[0]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
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
