"""Guard rails: whatever goes wrong ends quickly, in one line that says what to type next, and leaves no process behind.

A lesson has two or three lines of them, and runs without them as well: check(parser, args) refuses flags that can't
work, meet(args) names nodes that are missing, are there twice or were started with other flags, and explained(), around
main(), says in one line what ended a run and ends what it has started. Their import lets Ctrl-C end ranks inside C++.
"""

import argparse
import contextlib
import json
import logging
import math
import multiprocessing
import os
import pickle
import re
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # noqa: F401 - first imported after a rank has joined, it would hold the group
import torch.multiprocessing as mp
from tqdm import tqdm

MAY_DIFFER = {"nr", "ip", "init_method", "timeout", "data_dir", "gpu_ids"}  # between nodes
GREETING, INTERRUPTED = b"playground: ", "interrupted"  # what node 0's answer begins with; after Ctrl-C
LOST = "another rank has ended, is in another collective, or its network is down: look for its error, on all nodes"
ADVICE = {  # what PyTorch says in an error of its own, and what to do about it
    "EADDRINUSE": "choose another --port, the same on every node",
    "clients joined": "start every node, with the same -n, -g, -ip and --port",
    "client socket|trying to connect|Ping failed": "start node 0, check -ip, --port and the firewall",
    "connectFullMesh": "let all TCP between the nodes pass; GLOO_SOCKET_IFNAME, file:// and restarts: run/README.md",
    "Duplicate GPU|using the same GPU": "use a smaller -g or --device cpu; NCCL_MULTI_RANK_GPU_ENABLE=1 allows it",
    "plan key": "name the layers as model.named_modules() does",
    "allocate": "use a smaller --batch_size or --width, or share the model out: README.md, which parallelism when",
    "": LOST,
}

for name in ("multiprocessing.spawn", "distributed.pipelining", "distributed.tensor._redistribute"):
    logging.getLogger(f"torch.{name}").setLevel(logging.CRITICAL)  # of processes ended, whole schedules, slow layouts
logging.getLogger().addFilter(lambda record: "metadata is not found" not in str(record.msg))  # it is also an error
warnings.filterwarnings("error", "Parallelize plan key")  # else a layer that it misspells stays whole on all ranks
if any(word.endswith("cuda") for word in sys.argv):
    warnings.filterwarnings("ignore", "CUDA initialization")  # check says it in one line
tqdm.set_lock(threading.RLock())  # Python warns of its default, a semaphore, when a process is killed
if multiprocessing.current_process().name != "MainProcess":  # this is a rank that mp.spawn has started
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends it even while it waits inside C++
    mp._prctl_pr_set_pdeathsig(signal.SIGINT)  # as mp.spawn does, but earlier: the end of the starter ends it
    if os.environ.get("PLAYGROUND_STARTER", "") not in ("", str(os.getppid())):
        sys.exit(1)  # it has ended already


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse flags that no lesson can work with, with status 2 and one line; make the folders for what it writes.

    A lesson with --nodes starts its processes itself, or, without --batch_size, is started by hand, too; one with
    --timeout, but neither --nodes nor --gpus, is started by torchrun, or is rank 0 of 1; the others are one process.
    """
    refuse, env, cuda = parser.error, os.environ, args.device == "cuda"
    have = torch.cuda.device_count() if torch.cuda.is_available() else 0
    here = max(int(env.get("LOCAL_WORLD_SIZE", 1)), int(env.get("LOCAL_RANK", 0)) + 1)  # a launcher's processes
    if cuda and not have:
        try:
            torch.cuda.init()
        except Exception as error:  # it says why
            refuse(f"this machine has 0 GPUs that work ({str(error).splitlines()[0]}): use --device cpu")
    for name, value in vars(args).items():
        if type(value) is int and value < 1 and name not in ("nr", "seed", "workers"):
            refuse(f"--{name} {value}: must be 1 or more")
    started = "RANK" in env or "gpus" not in args  # by a launcher or by hand, not by the lesson
    wanted, fewer = (here, f"--nproc-per-node {have}") if started else (args.gpus, f"-g {have}")
    if cuda and wanted > have:
        refuse(f"{wanted} GPUs are needed, this machine has {have}: use {fewer} or --device cpu")
    for name in ("lr", "clip"):
        if not 0 <= (value := getattr(args, name, 0)) < math.inf:
            refuse(f"--{name} {value}: must be a number, 0 or more, as in --{name} 1e-3")
    if not -(2**63) <= getattr(args, "seed", 0) < 2**63:
        refuse(f"--seed {args.seed}: must be from -2**63 to 2**63 - 1")
    if getattr(args, "plot", None) and Path(args.plot).suffix not in (".png", ".pdf", ".svg"):
        refuse(f"--plot {args.plot} is of a format that can't be drawn: use {Path(args.plot).stem}.png")
    for name in ("savefile", "plot", "run_dir", "out") if getattr(args, "nr", 0) == 0 else ():
        if path := getattr(args, name, None):
            folder = path if name in ("run_dir", "out") else os.path.dirname(path) or "."
            with contextlib.suppress(OSError):
                os.makedirs(folder, exist_ok=True)
            if not os.path.isdir(folder) or not os.access(folder, os.W_OK) or (os.path.isdir(path) and folder != path):
                refuse(f"can't write --{name} {path}: choose another")

    by_torchrun, by_hand = "timeout" in args and "gpus" not in args, "nodes" in args and "batch_size" not in args
    if "RANK" not in env and by_torchrun:  # be rank 0 of 1
        port = str(socket.create_server(("127.0.0.1", 0)).getsockname()[1])
        env.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    elif "RANK" in env and not by_torchrun and not by_hand:
        torchrun = "torchrun --standalone --nproc-per-node 2 playground/distributed_data_parallel_torchrun.py"
        refuse(f"RANK is set, but this lesson is not for a launcher: unset RANK, or use {torchrun}")
    needed = ["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", *["LOCAL_RANK"] * by_torchrun]
    if "RANK" in env and (missing := [name for name in needed if name not in env]):
        refuse(f"RANK is set, so set {', '.join(missing)} as well, or unset RANK")
    if backend := getattr(args, "backend", None):
        if not dist.is_backend_available(backend):
            refuse(f"this torch is built without {backend}: use --backend gloo")
        if backend == "nccl" and not cuda:
            refuse("nccl needs GPUs: use --backend gloo")
        if backend == "gloo" and cuda and (by_hand or getattr(args, "weights", "") == "send"):
            refuse("gloo can't send GPU memory from rank to rank: use --backend nccl or --device cpu")
    if "nodes" not in args:
        return
    if not 0 <= args.nr < args.nodes:
        refuse(f"-nr {args.nr}: with -n {args.nodes} the number of a node is 0 to {args.nodes - 1}")
    if ":" in args.ip and not args.ip.startswith("["):  # IPv6, as URLs have it
        args.ip = f"[{args.ip}]"
    given = parser.parse_args(namespace=argparse.Namespace(ip=None)).ip  # None in place of the default
    url = getattr(args, "init_method", None) or ("tcp://given:1" if given or args.nodes == 1 else "")
    path = Path(url.removeprefix("file://"))
    if not url:
        refuse(f"-n {args.nodes} needs -ip, the address of node 0")
    if url == "env://" and not {"MASTER_ADDR", "MASTER_PORT"} <= env.keys():
        refuse("env:// reads the environment: first export MASTER_ADDR=<ip of node 0> MASTER_PORT=8888")
    if url.startswith("file:///") and (path.is_dir() or not path.parent.is_dir()):
        refuse(f"--init_method {url}: name a file that can be made, in a folder that is there on all nodes")
    if not re.fullmatch(r"env://|file:///.*|tcp://.+:\d+", url):
        refuse(f"--init_method {url}: use env://, tcp://<ip of node 0>:8888 or file:///<a path all nodes see>")


def meet(args: argparse.Namespace) -> None:
    """Make sure that all nodes are there and were started alike; else end with status 1 and one line.

    Before a process starts the ranks of a node: on one node it picks a free port, unless --port was given; several
    call each other at node 0's port, which is free again afterwards. In a process group the ranks compare their flags.
    """
    flags = {"lesson": Path(sys.argv[0]).name} | {k: v for k, v in vars(args).items() if k not in MAY_DIFFER}
    if dist.is_initialized():
        seconds = timedelta(seconds=args.timeout)  # for the groups of a mesh, too: their own default is half an hour
        dist.distributed_c10d.default_pg_timeout = dist.distributed_c10d.default_pg_nccl_timeout = seconds
        dist.all_gather_object(everyone := [None] * dist.get_world_size(), flags)
        told = [_difference(everyone[0], theirs, f"rank {rank}") for rank, theirs in enumerate(everyone)]
        if any(told):
            dist.destroy_process_group()
            sys.exit(f"error: {max(told, key=len)}" if os.environ["LOCAL_RANK"] == "0" else 1)  # once on each node
        return
    by_hand, given = "RANK" in os.environ, getattr(args, "init_method", None)
    if args.nodes == 1 and not by_hand and not given and not any(word.startswith("--po") for word in sys.argv):
        args.port = socket.create_server(("127.0.0.1", 0)).getsockname()[1]
    url = urlsplit(given or f"tcp://{args.ip}:{args.port}")
    if args.nodes == 1 or by_hand or url.scheme == "file":
        return
    host, port = url.hostname or os.environ["MASTER_ADDR"], url.port or int(os.environ["MASTER_PORT"])
    if args.nr == 0:
        kind = {"family": socket.AF_INET6, "dualstack_ipv6": True} if socket.has_dualstack_ipv6() else {}
        try:
            server = socket.create_server(("", port), **kind)
        except OSError as error:
            sys.exit(f"error: can't listen on port {port} ({error.strerror}): choose another --port on every node")
        answering = threading.Thread(target=_answer, args=(server, args, flags), daemon=True)
        answering.start()
    told = _call(host, port, json.dumps([args.nr, flags]), args.timeout)
    if args.nr == 0 and "could not reach" not in told:
        answering.join()  # until all have heard it
    if told:
        sys.exit(f"error: {told}")


def _difference(zero: dict, theirs: dict, who: str) -> str:
    """Say in which flag somebody differs from node or rank 0; empty, if in none."""
    for name in zero | theirs:
        if zero.get(name) != theirs.get(name) and not (name == "savefile" and "nodes" in zero):  # only node 0 uses it
            values = f"{zero.get(name)} on {who.split()[0]} 0, {theirs.get(name)} on {who}"
            flag = name if name == "lesson" else f"--{name}"
            return f"{flag} differs: {values}: start every node with the same lesson and flags"
    return ""


def _answer(server: socket.socket, args: argparse.Namespace, flags: dict) -> None:
    """On node 0: wait for a call from every node, itself too, and tell all what is wrong, or nothing."""
    callers, nodes, told, end = [], {}, "", time.monotonic() + args.timeout
    while len(nodes) < args.nodes and not (told and (0 in nodes or time.monotonic() >= end)):
        try:
            server.settimeout(max(0.01, end - time.monotonic()))
            callers.append(server.accept()[0])
            callers[-1].settimeout(5)
            number, theirs = json.loads(callers[-1].makefile().readline(10_000))
            if number in nodes:
                told = told or f"node {number} is there twice: give each node its own -nr"
            nodes[number], told = theirs, told or _difference(flags, theirs, f"node {number}")
        except (ValueError, TypeError, OSError):  # a stranger, or nobody
            if time.monotonic() >= end:
                told = f"nodes {[number for number in range(args.nodes) if number not in nodes]} are missing after"
                told += f" {args.timeout} s: start every node, with the same -n, -g, -ip and --port"
    server.close()  # before anybody goes on: the next who listens there is rank 0
    for caller in callers:
        with contextlib.suppress(OSError), caller:
            caller.sendall(GREETING + told.encode())


def _call(host: str, port: int, hello: str, timeout: int) -> str:
    """Call node 0. Returns what it says is wrong, or why it can't be heard."""
    end, why = time.monotonic() + timeout, "nothing listens there"
    while time.monotonic() < end:
        try:
            with socket.create_connection((host, port), timeout=max(0.01, end - time.monotonic())) as node0:
                node0.settimeout(timeout + 1)  # it may have come just now, and wait for others
                node0.sendall(f"{hello}\n".encode())
                answer = node0.recv(4096)
                while answer.startswith(GREETING) and (piece := node0.recv(4096)):
                    answer += piece
            if answer.startswith(GREETING):
                return answer.removeprefix(GREETING).decode()
            raise ConnectionResetError
        except ConnectionResetError:
            return f"what answers at {host}, port {port}, is not node 0, or it has ended: choose another --port"
        except ConnectionRefusedError:
            time.sleep(0.2)  # node 0 does not listen yet
        except OSError as error:
            why, end = error.strerror or "no answer", 0
    return f"could not reach node 0 at {host} in {timeout} s ({why}): start it, check -ip, --port and the firewall"


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Say in one line what PyTorch says in many, and end what was started; own errors keep their traceback."""
    os.environ["PLAYGROUND_STARTER"] = str(os.getpid())  # the ranks look for it
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # of the ranks: C++ back traces would bury the one line
    try:
        yield
    except SystemExit:
        raise
    except BaseException as error:  # PyTorch's CheckpointException is no Exception
        told = _told(_cause(error))
        print(f"{told}\n", end="", file=sys.stderr, flush=True)  # in one piece
        end = os._exit if dist.is_initialized() else sys.exit  # a thread of the group may abort Python's own way out
        end(130 if told == INTERRUPTED else 1)
    finally:
        for process in multiprocessing.active_children():
            process.kill()


def _cause(error: BaseException) -> BaseException:
    """Return the error of the rank that failed by itself: one that only lost its connection may be seen first."""
    places = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    ranks, errors = next((place for place in places if isinstance(place, mp.ProcessContext)), None), [error]
    while ranks and not isinstance(error, KeyboardInterrupt):
        try:
            ranks = None if ranks.join() else ranks  # each call raises the error of one more rank
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as other:
            errors.append(other)
        except (EOFError, pickle.UnpicklingError):
            continue  # that rank was ended while it wrote its error
    followed = [getattr(e, "signal_name", None) in ("SIGTERM", "SIGABRT") or LOST in _told(e) for e in errors]
    return errors[followed.index(False) if False in followed else 0]


def _told(error: BaseException) -> str:
    """Return an error of PyTorch's, known by its type and place, as one line with advice; another's traceback."""
    who = f"error: local_rank {error.error_index}: " if hasattr(error, "error_index") else "error: "
    text = str(error) if isinstance(error, mp.ProcessRaisedException) else "".join(traceback.format_exception(error))
    if getattr(error, "signal_name", "") == "SIGINT" or re.search("^KeyboardInterrupt", text, re.M):
        return INTERRUPTED
    if isinstance(error, mp.ProcessExitedException):
        advice = "if it was not you, memory may have run out: use fewer processes"
        if error.signal_name == "SIGABRT":
            advice = f"the ranks were in different collectives, a buffer had another size, or, with NCCL, {LOST}"
        return f"{who}{error.msg}: {advice if error.signal_name else 'look for its own words above'}"
    if full := re.search(r"^OSError: \[Errno 28\] (.*)$|^RuntimeError: \[enforce .* (unexpected pos) ", text, re.M):
        return f"{who}{full[1] or 'a file is cut short'}: make room, or choose another --savefile or --run_dir"
    frames = list(re.finditer(r'^  File "(.*)", line \d+, in .*\n(?:    .*\n)*', text, re.M))
    kind, _, said = text[frames[-1].end() if frames else 0 :].strip().partition(": ")
    own = re.search("(Dist(Network|Store|Backend)|OutOfMemory)Error$", kind) or said.startswith("Parallelize plan key")
    if kind == "RuntimeError":
        in_torch = bool(frames) and Path(frames[-1][1]).is_relative_to(Path(torch.__file__).parent)
        own = re.search(r"gloo/\S+\.cc:\d+\]|DefaultCPUAllocator" + "|Application timeout|NCCL" * in_torch, said)
    if not own:
        return text.strip()
    line = re.sub(r"^\[[^]]+\] ?(err == 0\. )?| in module \w+\($", "", said.strip().partition("\n")[0])  # no places
    return f"{who}{line}: {next(advice for sign, advice in ADVICE.items() if re.search(sign, said))}"
