"""Guard rails: a mistake ends a run quickly, in words that say what to type next.

A lesson uses them in a few lines that are marked `# guard rail`, and it runs without these lines:

    check(parser, args)    refuses flags that cannot work, before anything starts
    meet(args)             in roll_call.py: makes sure that all nodes are there
    @explained             above main(), and above what mp.spawn starts: explains an error
"""

import argparse
import atexit
import contextlib
import errno
import functools
import inspect
import logging
import math
import multiprocessing
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tqdm import tqdm

from common.models import HEADS, TOKENS, WIDTH
from common.old_flags import exit_with

TORCHRUN = (
    "torchrun --standalone --nproc-per-node 2 playground/distributed_data_parallel_torchrun.py"
)
LOOK = (
    "another rank has ended, is in a different collective, or has lost its network: look for its"
    " error, on all nodes"
)
PAUSE = 3.0  # seconds for which a rank that lost its connection leaves the word to the others


def check(
    parser: argparse.ArgumentParser, args: argparse.Namespace, replicas: int | None = None
) -> None:
    """Refuse flags that no lesson can work with, and make the folders for what the lesson writes.

    A lesson with --nodes starts its ranks itself. One with --timeout but without --nodes gets its
    rank from the environment; if there is no RANK, it becomes rank 0 of 1. All other lessons are a
    single process.

    Args:
        parser: its error() is called.
        args: what it has parsed.
        replicas: how many equal parts a batch is split into; None: a part for each rank.

    Raises:
        SystemExit: with status 2, after one line on stderr.
    """
    _check_gpus(parser.error, args)
    _check_numbers(parser.error, args)
    if "tokens" in args:
        _check_transformer(parser.error, args)
    _check_files(parser.error, args)
    _check_environment(parser.error, args)
    if getattr(args, "backend", None):
        _check_backend(parser.error, args)
    if "nodes" in args:
        _check_address(parser.error, args)
    if getattr(args, "batch_size", None):
        _check_batch(parser.error, args, replicas)
    cores = os.cpu_count()
    if getattr(args, "gpus", 1) > 8 * cores:
        print(f"{args.gpus} processes on {cores} cores: they take long to start", file=sys.stderr)


def _check_batch(refuse: Callable, args: argparse.Namespace, replicas: int | None) -> None:
    """The batch can be divided into equal parts."""
    if replicas is None and "nodes" in args:
        replicas = args.nodes * args.gpus
    elif replicas is None:
        replicas = int(os.environ.get("WORLD_SIZE", 1))
    if args.batch_size % replicas:
        nearest = max(1, round(args.batch_size / replicas)) * replicas
        refuse(
            f"--batch_size {args.batch_size} cannot be divided by {replicas} processes:"
            f" use --batch_size {nearest}"
        )


def _check_numbers(refuse: Callable, args: argparse.Namespace) -> None:
    """Counts begin at 1, rates at 0, and a seed has 64 bits."""
    for name, value in vars(args).items():
        if type(value) is int and value < 1 and name not in ("nr", "seed", "workers"):
            refuse(f"--{name} {value}: must be 1 or more")
    for name in ("lr", "clip"):
        value = getattr(args, name, 0)
        if not 0 <= value < math.inf:
            refuse(f"--{name} {value}: must be a number, 0 or more, as in --{name} 1e-3")
    if not -(2**63) <= getattr(args, "seed", 0) < 2**63:
        refuse(f"--seed {args.seed}: must be from -2**63 to 2**63 - 1")


def _check_transformer(refuse: Callable, args: argparse.Namespace) -> None:
    """Tokens divide the pixels of an image, and heads the numbers of a token."""
    if args.model != "transformer":
        for name in ("tokens", "heads"):
            if getattr(args, name):
                refuse(f"--{name}: --model {args.model} has none: use --model transformer")
        return
    pixels = 28 * 28
    tokens = args.tokens or TOKENS
    if pixels % tokens:
        nearest = min(_divisors(pixels), key=lambda number: abs(number - tokens))
        refuse(f"--tokens {tokens} does not divide {pixels} pixels: use --tokens {nearest}")
    width = args.width or WIDTH["transformer"]
    heads = args.heads or HEADS
    if width % heads:
        nearest = min(_divisors(width), key=lambda number: abs(number - heads))
        refuse(f"--heads {heads} does not divide --width {width}: use --heads {nearest}")


def _divisors(number: int) -> list[int]:
    """Return the numbers that divide a number."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _check_gpus(refuse: Callable, args: argparse.Namespace) -> None:
    """There is a GPU that works for each process of this machine."""
    if args.device != "cuda":
        return
    have = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if have == 0:
        try:
            torch.cuda.init()
        except Exception as error:  # it says why
            reason = str(error).splitlines()[0]
            refuse(f"this machine has no working GPU ({reason}): use --device cpu")
    if "gpus" in args and "RANK" not in os.environ:
        needed = args.gpus
        fewer = f"-g {have}"
    else:  # a launcher says how many processes it has started here, or at least numbers them
        numbered = int(os.environ.get("LOCAL_RANK", 0)) + 1
        needed = max(numbered, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        fewer = f"--nproc-per-node {have}"
    if needed > have:
        refuse(f"{needed} GPUs are needed, this machine has {have}: use {fewer} or --device cpu")


def _check_files(refuse: Callable, args: argparse.Namespace) -> None:
    """What the lesson writes can be written. On several nodes only node 0 writes."""
    if getattr(args, "nr", 0) > 0:
        return
    plot = getattr(args, "plot", None)
    if plot and Path(plot).suffix not in (".png", ".pdf", ".svg"):
        refuse(f"--plot {plot} has a format that cannot be drawn: use {Path(plot).stem}.png")
    for name in ("savefile", "plot", "run_dir", "out"):
        path = getattr(args, name, None)
        if not path:
            continue
        is_folder = name in ("run_dir", "out")
        folder = path if is_folder else os.path.dirname(path) or "."
        with contextlib.suppress(OSError):
            os.makedirs(folder, exist_ok=True)
        writable = os.path.isdir(folder) and os.access(folder, os.W_OK)
        if not writable or (os.path.isdir(path) and not is_folder):
            refuse(f"cannot write --{name} {path}: choose another")


def _check_environment(refuse: Callable, args: argparse.Namespace) -> None:
    """The lesson fits what has started it; if nothing has, it becomes rank 0 of 1."""
    from_environment = "timeout" in args and "nodes" not in args
    also_by_hand = (
        "nodes" in args and "batch_size" not in args
    )  # the lessons that only send messages
    if "RANK" not in os.environ:
        if from_environment:
            os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
            os.environ["MASTER_PORT"] = str(free_port())
        return
    if not from_environment and not also_by_hand:
        refuse(f"RANK is set, but no launcher can start this lesson: unset RANK, or use {TORCHRUN}")
    needed = ["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    if from_environment:
        needed.append("LOCAL_RANK")
    missing = [name for name in needed if name not in os.environ]
    if missing:
        refuse(f"RANK is set, so set {', '.join(missing)} as well, or unset RANK")


def _check_backend(refuse: Callable, args: argparse.Namespace) -> None:
    """This PyTorch has the backend, and the backend can send what is on the device."""
    if not dist.is_backend_available(args.backend):
        refuse(f"this PyTorch is built without {args.backend}: use --backend gloo")
    if args.backend == "nccl" and args.device != "cuda":
        refuse("nccl needs GPUs: use --backend gloo")
    if args.backend == "gloo" and args.device == "cuda" and "batch_size" not in args:
        refuse("gloo cannot send GPU memory from rank to rank: use --backend nccl or --device cpu")


def _check_address(refuse: Callable, args: argparse.Namespace) -> None:
    """Node numbers fit, and there is an address at which the nodes can meet."""
    if not 0 <= args.nr < args.nodes:
        refuse(f"-nr {args.nr}: with -n {args.nodes} the number of a node is 0 to {args.nodes - 1}")
    if ":" in args.ip and not args.ip.startswith("["):
        args.ip = f"[{args.ip}]"  # an IPv6 address, as URLs have it
    url = getattr(args, "init_method", None) or ""
    given = any(word.split("=")[0] in ("-ip", "--ip") for word in sys.argv)
    if args.nodes > 1 and not url and not given and "RANK" not in os.environ:
        refuse(f"-n {args.nodes} needs -ip, the address of node 0")
    if url == "env://":
        if not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            variables = "MASTER_ADDR=<ip of node 0> MASTER_PORT=8888"
            refuse(f"env:// reads the environment: first export {variables}")
    elif url.startswith("file:///"):
        path = Path(url.removeprefix("file://"))
        if path.is_dir() or not path.parent.is_dir():
            refuse(f"--init_method {url}: name a new file, in a folder that exists on all nodes")
    elif url:
        host, _, port = url.removeprefix("tcp://").rpartition(":")
        if not url.startswith("tcp://") or not host or not port.isdecimal():
            known = "env://, tcp://<ip of node 0>:8888 or file:///<a path all nodes see>"
            refuse(f"--init_method {url}: use {known}")


def free_port() -> int:
    """Return the number of a TCP port of this machine that is free.

    It is below the range from which the kernel numbers connections, 32768 or above. So no
    connection of another program gets this port before rank 0 listens.
    """
    while True:
        port = random.randint(10_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def explained(function: Callable) -> Callable:
    """Decorate main(), and what mp.spawn starts: explain an error in one line, or in a line more.

    A lost connection, a full disk, ranks that could not find each other and Ctrl-C end in one line.
    Other errors of PyTorch's own types keep their traceback, and advice follows it. All other
    errors keep their traceback, with nothing added. The line of a sys.exit() is printed once for
    each node. Whatever the first process has started ends with it. Its status is 1, or 130 after
    Ctrl-C.
    """

    @functools.wraps(function)
    def run(*args):
        tqdm.set_lock(threading.RLock())  # Python would warn of tqdm's own, if a process is killed
        if multiprocessing.parent_process():
            return _run_rank(function, *args)
        # mp.spawn warns of each rank that it ends.
        logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
        try:
            returned = function(*args)
            if "RANK" in os.environ and not torch.cuda.is_initialized():  # a rank that uses gloo
                atexit.register(_end_at_once)
            return returned
        except SystemExit as end:
            if isinstance(end.code, str):  # as in sys.exit("error: there is no data")
                exit_with(end.code, 1)
            raise
        except BaseException as error:  # PyTorch's CheckpointException is not an Exception
            text, status = _last_words(error, function)
            print(text, file=sys.stderr, flush=True)
            if dist.is_initialized():
                os._exit(status)  # a thread of the group may abort Python's own way of ending
            sys.exit(status)
        finally:
            for process in multiprocessing.active_children():
                process.kill()

    return run


def _end_at_once() -> None:
    """End this rank before Python cleans up.

    DTensor's caches keep the group of a mesh after destroy_process_group(). So a thread of gloo may
    still free the tensors of the last message. If Python is already cleaning up, this aborts the
    process. (On a busy machine, this happened in 4 of 57 runs of fully_sharded_checkpoints.py.)
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _run_rank(function: Callable, *args) -> None:
    """Run what mp.spawn has started. Its parent gets an error as text, so advice goes in there."""
    # Ctrl-C, and the end of the parent, then end this rank even while it waits inside C++.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if os.getppid() != multiprocessing.parent_process().pid:
        sys.exit(1)  # the parent ended while this rank imported PyTorch
    try:
        function(*args)
    except Exception as error:
        note = _only_line(error, function) or _advice(error)
        if note:
            error.add_note(note)
        raise


def _last_words(error: BaseException, function: Callable) -> tuple[str, int]:
    """Return what to print about the error that ends this program, and its exit status."""
    interrupted = any(isinstance(each, KeyboardInterrupt) for each in _causes(error))
    if interrupted or getattr(error, "signal_name", "") == "SIGINT":
        return "interrupted", 130
    if isinstance(error, mp.ProcessRaisedException):  # its message is the text of a rank's error
        text = str(error).strip()
        note = text.splitlines()[-1]
        return (note if note.startswith("error: ") else text), 1
    if isinstance(error, mp.ProcessExitedException):
        advice = "look for its error message above"
        if error.signal_name == "SIGABRT":
            advice = "a buffer had a different size, the ranks were in different collectives, or,"
            advice += f" with NCCL, {LOOK}"
        elif error.signal_name:
            advice = "if you did not end it, memory may have run out: use fewer processes"
        return f"error: local_rank {error.error_index}: {error.msg}: {advice}", 1
    line = _only_line(error, function)
    if line:
        return line, 1
    note = _advice(error)
    if note:
        error.add_note(note)
    return "".join(traceback.format_exception(error)).strip(), 1


def _only_line(error: BaseException, function: Callable) -> str:
    """Return the line that says all about an error; empty if its traceback should be shown."""
    said = (str(error).splitlines() or [""])[0]
    if _disk_is_full(error):
        advice = "make room, or choose another --savefile or --run_dir"
        return f"error: No space left on device: {advice}"
    if type(error) is RuntimeError and "gloo/" in said and ".cc:" in said:
        # Perhaps another rank of this node has failed. Then this one is ended while it waits.
        time.sleep(PAUSE)
        place = _place(error, function)
        said = said.partition(".cc:")[2].partition("] ")[2]
        advice = LOOK
        if "connectFullMesh" in str(error):
            advice = "allow all TCP between the nodes; for GLOO_SOCKET_IFNAME, file:// and"
            advice += " restarts, see run/README.md"
        return f"error: {place}: {said}: {advice}"
    if isinstance(error, dist.DistStoreError | dist.DistNetworkError) and not dist.is_initialized():
        return f"error: {said}: {_advice(error)}"
    return ""


def _disk_is_full(error: BaseException) -> bool:
    """Return whether an error, or one that led to it, is that of a full disk."""
    failures = getattr(error, "failures", {})  # CheckpointException has one for each rank
    for failure in [error, *(failure for failure, _ in failures.values())]:
        for each in _causes(failure):
            if isinstance(each, OSError) and each.errno == errno.ENOSPC:
                return True
            if "unexpected pos" in str(each):  # what torch.save makes of a write that was cut short
                return True
    return False


def _causes(error: BaseException) -> list[BaseException]:
    """Return an error, the error that led to it, the one that led to that, and so on."""
    found = []
    while error:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _place(error: BaseException, function: Callable) -> str:
    """Return where this rank was in the lesson: `rank 1 waited at x.py, line 80: dist.recv(y)`."""
    file = inspect.unwrap(function).__code__.co_filename  # @record may stand between
    frames = traceback.extract_tb(error.__traceback__)
    last = [frame for frame in frames if frame.filename == file][-1]
    rank = f"rank {dist.get_rank()}" if dist.is_initialized() else "this rank"
    return f"{rank} waited at {Path(file).name}, line {last.lineno}: {last.line}"


def _advice(error: BaseException) -> str:
    """Return what to do about an error of PyTorch's own types; empty for any other error."""
    said = str(error)
    if isinstance(error, dist.DistStoreError | dist.DistNetworkError):
        by_hand = "RANK" in os.environ  # a launcher, or the user, has set the rank and the address
        if "EADDRINUSE" in said:
            port = "MASTER_PORT" if by_hand else "--port"
            return f"choose another {port}, the same on every node"
        address = "MASTER_ADDR and MASTER_PORT" if by_hand else "-n, -g, -ip and --port"
        return f"start every node, with the same {address}; check the address and the firewall"
    if isinstance(error, dist.DistBackendError):
        if "Duplicate GPU" in said or "using the same GPU" in said:
            return "use a smaller -g or --device cpu; NCCL_MULTI_RANK_GPU_ENABLE=1 allows sharing"
        return LOOK
    no_memory = type(error) is RuntimeError and "DefaultCPUAllocator" in said
    if no_memory or isinstance(error, torch.OutOfMemoryError):
        shard = "or shard the model: see README.md, 'Which parallelism when'"
        return f"use a smaller --batch_size or --width, {shard}"
    return ""
