"""Run lessons without starting Python: a process that has imported PyTorch forks a new process.

Such a run has its own session, pid, environment and output, and it receives signals, like a run
from the command line. The ranks of mp.spawn are forked, too. So is each Python that a program
starts: torchrun's ranks and compare.py's lessons.

Two things differ. PyTorch has read its variables (TORCH_*, OMP_NUM_THREADS) before the fork, and
Python does not clean up at the end. Tests of these start Python: `cold=True` in conftest.py.
"""

import atexit
import concurrent.futures
import ctypes
import functools
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
import warnings
from pathlib import Path

libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_void_p
# The address of this variable's value. The kernel reads /proc/<pid>/environ there.
MARK = libc.getenv(b"PLAYGROUND_TEST")


class Warm:
    """A running script. It has the parts of subprocess.Popen that the tests use.

    They are args, pid, returncode, stdout, stderr and communicate.

    Args:
        words: the script's path, or -m and a module, and its flags.
        env: its environment.
        cwd: its working directory; None means that of this process.
    """

    def __init__(self, words: list, env: dict[str, str], cwd: Path | None = None):
        self.args = [str(word) for word in words]
        self.returncode = None
        request = [self.args, env, str(cwd or Path.cwd())]
        pipes = [os.pipe() for _ in range(3)]
        socket.send_fds(_server(), [json.dumps(request).encode()], [write for _, write in pipes])
        for _, write in pipes:
            os.close(write)
        files = [os.fdopen(read, errors="replace") for read, _ in pipes]
        self.stdout = files[0]
        self.stderr = files[1]
        self._report = files[2]
        self.pid = int(self._report.readline())

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the end and return the rest of stdout and stderr.

        Raises:
            subprocess.TimeoutExpired: if it does not end in that time.
        """
        pool = concurrent.futures.ThreadPoolExecutor(2)
        texts = [pool.submit(stream.read) for stream in (self.stdout, self.stderr)]
        pool.shutdown(wait=False)
        if concurrent.futures.wait(texts, timeout).not_done:
            raise subprocess.TimeoutExpired(self.args, timeout)
        self.returncode = int(self._report.readline())
        return texts[0].result(), texts[1].result()


def import_what_lessons_need() -> None:
    """Import it before this process forks, and not in each forked process."""
    import filelock  # noqa: F401
    import parameters  # noqa: F401
    import sklearn.datasets  # noqa: F401
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.launcher.api
    import torch.distributed.pipelining
    import torch.utils.tensorboard  # noqa: F401
    import torchvision.datasets  # noqa: F401


@functools.cache
def _server() -> socket.socket:
    """Start the process that forks, once for each worker of the tests.

    It ends when the socket that is returned is closed.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    env["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # as the lessons set it for their ranks
    env["PLAYGROUND_TEST"] = "-" * 32  # room for the marks of the processes that it forks
    process = subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno())], env=env, pass_fds=[theirs.fileno()]
    )
    atexit.register(process.kill)
    theirs.close()
    return ours


def _serve(requests: socket.socket) -> None:
    """Fork two processes for each request.

    The first waits for the end of the second, which runs the script.
    """
    subprocess.Popen = _Popen  # before torchrun's modules import it
    import_what_lessons_need()
    import torch.multiprocessing as mp

    mp.start_processes = functools.partial(_forked, mp.start_processes)
    mp.spawn = mp.start_processes
    sys.path.pop(0)  # the folder of this script
    # The waiting processes are not waited for, so the kernel removes them when they end.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        request, streams, _, _ = socket.recv_fds(requests, 2**20, 3)
        if not request:
            return
        if os.fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            words, env, cwd = json.loads(request)
            process = _Popen(
                [sys.executable, *words],
                env=env,
                cwd=cwd,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=streams[0],
                stderr=streams[1],
            )
            os.close(streams[0])
            os.close(streams[1])
            os.write(streams[2], f"{process.pid}\n".encode())
            os.write(streams[2], f"{process.wait()}\n".encode())
            os._exit(0)
        for stream in streams:
            os.close(stream)


class _Popen(subprocess.Popen):
    """A subprocess.Popen that forks this process where it would start Python with a script."""

    def __init__(self, args, **options):
        if args[0] == sys.executable and args[1] != "-c":
            env = dict(options.get("env") or os.environ)
            words = [str(word) for word in args[1:]]
            options["preexec_fn"] = functools.partial(_be, words, env)  # does not return
        super().__init__(args, **options)


def _be(words: list[str], env: dict[str, str]) -> None:
    """Run a script or module with this environment. Popen has set everything else."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    # Objects that hold the closed files must not be freed, because that would close new files that
    # have the same numbers.
    gc.freeze()
    gc.enable()
    ctypes.memmove(MARK, env["PLAYGROUND_TEST"].encode(), 32)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(env)
    buffering = -1
    if words[0] == "-u":  # from torchrun: write each line at once
        words = words[1:]
        buffering = 1
    sys.stdout = os.fdopen(1, "w", buffering, closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    sys.argv = words
    sys.path[:0] = [
        str(Path(sys.argv[0]).parent),
        *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)),
    ]
    if "PYTHONWARNINGS" in env:  # Python has read it before the fork
        warnings.simplefilter("error", FutureWarning)
    write_parameters = None
    if "PARAMETERS" in env:
        from parameters import remember

        write_parameters = remember(Path(env["PARAMETERS"]))
    status = 1
    try:
        if sys.argv[0] == "-m":
            del sys.argv[0]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
        if write_parameters is not None:
            write_parameters()
        status = 0
    except SystemExit as end:
        if end.code is None:
            status = 0
        elif isinstance(end.code, int):
            status = end.code
        else:
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # this process has handled it, or has ended
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _forked(
    start_processes, function, args=(), nprocs=1, join=True, daemon=False, start_method="fork"
):
    """Replace mp.spawn and mp.start_processes by the same with start_method="fork"."""
    return start_processes(function, args, nprocs, join, daemon, "fork")


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
