"""Run lessons without starting Python: a process that has imported PyTorch forks one for each run, and that its ranks.

For tests of numbers only. What is about starts, signals and ends goes through the command line: see conftest.py.
"""

import atexit
import functools
import json
import os
import runpy
import subprocess
import sys
import traceback
from pathlib import Path


@functools.cache
def _server() -> subprocess.Popen:
    """Start the process, once for each worker of the tests."""
    server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.kill)
    return server


def warm(words: list, folder: Path, environments: list[dict], python_path: str) -> subprocess.CompletedProcess:
    """Run a lesson in a process for each of some environments.

    Args:
        words: the lesson's path and its flags.
        folder: where the output of each process is kept.
        environments: variables of each process, in the order of the ranks.
        python_path: folders in which it finds modules, as in PYTHONPATH.

    Returns:
        The largest status, and what the first process printed on stdout and all on stderr.
    """
    request = {"words": [str(word) for word in words], "folder": str(folder), "environments": environments}
    server = _server()
    print(json.dumps(request | {"path": python_path.split(os.pathsep)}), file=server.stdin, flush=True)
    status = int(server.stdout.readline())
    errors = [(folder / f"err{number}").read_text() for number in range(len(environments))]
    return subprocess.CompletedProcess(words, status, (folder / "out0").read_text(), "".join(errors))


def _be(request: dict, number: int) -> None:
    """Be one of the processes of a request, in a fork."""
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{request['folder']}/{name}{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(request["environments"][number])
    path, *flags = request["words"]
    sys.argv = [path, *flags]
    sys.path[:0] = [str(Path(path).parent), *filter(None, request["path"])]
    status = 1
    try:
        runpy.run_path(path, run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _serve() -> None:
    """Import what all lessons need, then serve requests until the input ends."""
    import sklearn.datasets  # noqa: F401
    import torch._dynamo
    import torch.distributed.pipelining
    import torch.multiprocessing as mp
    import torch.utils.tensorboard  # noqa: F401
    import torchvision.datasets  # noqa: F401

    torch.set_num_threads(1)
    forked = functools.partial(mp.start_processes, start_method="fork")
    mp.start_processes = forked
    mp.spawn = lambda function, args=(), nprocs=1: forked(function, args, nprocs)
    for line in sys.stdin:
        request, pids = json.loads(line), []
        for number in range(len(request["environments"])):
            pid = os.fork()
            if pid == 0:
                _be(request, number)
            pids.append(pid)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(max(map(abs, statuses)), flush=True)


if __name__ == "__main__":
    _serve()
