"""What turns a failure into one line that says what to do: who is missing, who has other flags, who died first.

with deadline(args, "reach node 0"):
    store = dist.TCPStore(...)
everyone = sign_in(store, rank, local_rank, device, args)

except (Exception, KeyboardInterrupt) as error:
    return explain(error, args, ranks)
"""

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import pickle
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)  # it logs whole schedules at a failure
CUT_SHORT = {97: "reach node 0", 98: "connect to all other ranks"}  # exit status of a rank, what it could not do
LOST = "another rank has ended, is in another collective, or its network is down: look for its own error"
ADVICE = {  # what a failure says, and what to do about it
    "are missing after|clients joined": "start every node, with the same -n, -g, -ip and --port",
    "is there twice": "give each node its own -nr (restarts by torchrun need the torchrun lesson)",
    "is left over": "delete it, or choose another one",
    "differs": "start every node with the same lesson and flags",
    "could not reach|client socket|Ping failed": "start node 0, check -ip, --port and the firewall",
    "could not connect": "let the nodes' firewalls pass all TCP between them, and look for the error of another rank",
    "connectFullMesh": "if this host's name leads to 127.0.0.1, set GLOO_SOCKET_IFNAME to its network, as in eth0; for "
    "torchrun's restarts on several nodes set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
    "EADDRINUSE": "choose another --port, the same on every node",
    r"Errno (2|13|17|20|21|28|30)\b": "make room, or choose another --savefile or --run_dir",
    "SIGABRT": "the ranks were in different collectives, or a buffer had another size, or one was late or, with NCCL, "
    "has ended: look for its own error",
    "signal SIG": "if it was not you, memory may have run out: use fewer processes",
    "gloo|NCCL|onnection|imed out|timeout": LOST,
}
BUG = r"(Assertion|Attribute|Import|Index|Key|ModuleNotFound|Name|Type|UnboundLocal)Error\b"  # its traceback helps
MAY_DIFFER = {  # between nodes, or between ranks
    "nr", "ip", "port", "init_method", "meeting_file", "timeout", "gpu_ids", "data_dir", "savefile", "run_dir",
    "profile", "plot",
}  # fmt: skip


@contextlib.contextmanager
def deadline(args: argparse.Namespace, what: str) -> Iterator[None]:
    """End this process if the block takes longer than --timeout and a second.

    For calls into C++ that may wait longer than the timeout they were given, or for ever, such as for an answer of a
    foreign server on the port: no exception and no signal handler of Python gets through to them.

    Args:
        args: from `common.flags.parse`.
        what: one of the values of CUT_SHORT.
    """

    def end():
        if multiprocessing.parent_process() is None:  # else the parent will say it
            say(f"rank {args.nr}: could not {what} in {args.timeout} s")
            os._exit(1)
        os._exit(next(status for status, text in CUT_SHORT.items() if text == what))

    timer = threading.Timer(args.timeout + 1, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def sign_in(
    store: dist.Store, rank: int, local_rank: int, device: torch.device, args: argparse.Namespace
) -> list[tuple[int, int, int, str, int, str]]:
    """Wait for all ranks, make sure that they have the same flags, and let rank 0 print who is who.

    All get node 0's --savefile: only rank 0 writes it, but the others may have to send their part of the model.

    Args:
        store: the rendezvous, which all ranks can read and write.
        rank, local_rank, device: of this process.
        args: from `common.flags.parse`.

    Returns:
        One row for each rank, in their order: node, rank, local_rank, device, pid, host.

    Raises:
        ConnectionError: ranks are missing after --timeout, are there twice, or have other flags; or the meeting file
            is one of an earlier run.
    """
    node = int(os.environ.get("GROUP_RANK", args.nr))  # a launcher's; else each rank would count as a node
    me = (node, rank, local_rank, str(device), os.getpid(), os.uname().nodename)
    flags_here = vars(args) | {"lesson": Path(sys.argv[0]).name}
    mine = json.dumps([flags_here, me])
    if store.compare_set(f"rank {rank}", "", mine).decode() != mine:  # the first to write it stays
        if args.meeting_file:
            raise ConnectionError(f"{args.meeting_file} is left over from an earlier run, rank {rank} is in it")
        raise ConnectionError(f"rank {rank} is there twice")
    everyone = []
    try:
        store.set_timeout(timedelta(seconds=args.timeout))
        for other in range(args.world_size):
            flags_there, row = json.loads(store.get(f"rank {other}"))
            _compare(flags_here, rank, flags_there, other)
            if other == 0:
                args.savefile = flags_there.get("savefile")
            everyone.append(tuple(row))
    except RuntimeError:  # what a store says when it has waited long enough
        missing = [other for other in range(args.world_size) if not store.check([f"rank {other}"])]
        raise ConnectionError(f"ranks {missing} are missing after {args.timeout} s") from None
    if rank == 0:
        _print_table(everyone)
    return everyone


def introduce(everyone: list[tuple[dict, tuple[int, int, int, str, int, str]]], rank: int) -> None:
    """Do what `sign_in` does, in a process group that has been formed already.

    Args:
        everyone: of each rank its flags and its row, as all_gather_object brings them.
        rank: of this process.

    Raises:
        ConnectionError: the ranks have different flags.
    """
    for other, (flags_there, _) in enumerate(everyone):
        _compare(everyone[rank][0], rank, flags_there, other)
    if rank == 0:
        _print_table([row for _, row in everyone])


def go_on_with(path: str | Path, then: dict, args: argparse.Namespace) -> None:
    """Make sure that a checkpoint is of the same training.

    Args:
        path: of the checkpoint.
        then: the flags that it was trained with.
        args: the flags now, from `common.flags.parse`.

    Raises:
        SystemExit: with one line, if a flag has changed on which the numbers depend.
    """
    for name in ("model", "width", "layers", "dataset", "batch_size", "lr", "seed"):
        if then[name] != vars(args)[name]:
            sys.exit(f"error: {path} was trained with --{name} {then[name]}: use that, or choose another --run_dir")


def _compare(here: dict, rank: int, there: dict, other: int) -> None:
    """Raise ConnectionError if the flags of two ranks differ where they must not."""
    for name in ["lesson", *sorted(here.keys() - MAY_DIFFER)]:  # another lesson may have other flags
        if here.get(name) != there.get(name):
            what = name if name == "lesson" else f"--{name}"
            raise ConnectionError(f"{what} differs: {here[name]} on rank {rank}, {there[name]} on rank {other}")


def _print_table(rows: list[tuple[int, int, int, str, int, str]]) -> None:
    """Print node, rank, local_rank, device, pid and host of each rank."""
    for row in [("node", "rank", "local_rank", "device", "pid", "host"), *rows]:
        print("{:<6}{:<6}{:<12}{:<8}{:<8}{}".format(*row), flush=True)


def say(told: str) -> None:
    """Print a failure with its advice, as one line on stderr."""
    advice = next((text for sign, text in ADVICE.items() if re.search(sign, told)), None)
    print(f"error: {told}" + (f": {advice}" if advice else ""), file=sys.stderr, flush=True)


def explain(error: BaseException, args: argparse.Namespace, ranks: mp.ProcessContext | None = None) -> int:
    """Print what ended this node's ranks and what to do about it, as one line.

    Where a rank has only lost its connections, the line is about the rank that failed first, on whatever node it was.

    Args:
        error: what was raised, by a rank or by its parent.
        args: from `common.flags.parse`.
        ranks: what mp.spawn returned, if this process has started ranks.

    Returns:
        The exit status: 1, or 130 after Ctrl-C.

    Raises:
        BaseException: the error itself, if it is not one of the known failures: a bug, whose traceback says where.
    """
    several = getattr(args, "nodes", 1) > 1
    error = _first_cause(error, ranks)
    what = _last_line(error)
    cause = "".join(traceback.format_exception(error))  # of a rank's error, the text that it sent
    if full := re.search(r"^OSError: (\[Errno 28\].*)$", cause, re.M):
        what = full[1]  # torch.save raises another error after it
    if status := re.search("exit code (97|98)", what):
        what = f"could not {CUT_SHORT[int(status[1])]} in {args.timeout} s"
    interrupted = re.search("^KeyboardInterrupt", cause, re.M)  # torch.save raises another error after it
    if interrupted:
        what = "interrupted by Ctrl-C"
    where = ""
    if hasattr(args, "nr"):
        where = f"rank {args.nr * args.gpus + getattr(error, 'error_index', 0)}"
        where += f" on {os.uname().nodename}: " if several else ": "
    told = (where + what).split("ConnectionError: ")[-1]  # a message of our own needs no rank, or says it
    sign = _sign(error, what)
    torchrun = "TORCHELASTIC_RUN_ID" in os.environ  # it says itself who failed first
    if several and not torchrun and not re.search("could not reach|client socket|Ping failed|EADDRINUSE", what):
        told = _first_failure(told, ADVICE.get(sign) != LOST, args)
    if interrupted:
        print("interrupted", file=sys.stderr)
        return 130
    if sign is None:
        raise error
    say(told)
    return 1


def _last_line(error: BaseException) -> str:
    """Return what an exception says, without the traceback of another process that may stand before it."""
    return (str(error).strip() or repr(error)).splitlines()[-1]


def _sign(error: BaseException, what: str) -> str | None:
    """Return the first key of ADVICE that is found in what an error says; None for a bug, whatever its words are."""
    bug = re.match(BUG, "".join(traceback.format_exception_only(error)).strip().splitlines()[-1])
    return None if bug else next((sign for sign in ADVICE if re.search(sign, what)), None)


def _first_cause(error: BaseException, ranks: mp.ProcessContext | None) -> BaseException:
    """Return the error of a rank that failed by itself, if the given one may only have followed from it."""
    failed = (mp.ProcessRaisedException, mp.ProcessExitedException)
    other, ended = error, ranks is None or not isinstance(error, failed)
    consequences = (LOST, ADVICE["SIGABRT"])
    while "SIGTERM" in _last_line(other) or ADVICE.get(_sign(other, _last_line(other))) in consequences:
        if ended:
            return error
        try:
            ended = ranks.join()  # at each call it raises the error of one more rank; join() has ended them all
        except failed as next_one:
            other = next_one
            other.__suppress_context__ = True  # its traceback needs no word about the one that followed from it
        except (EOFError, pickle.UnpicklingError):
            continue  # join() has ended that rank while it was writing its error
    return other


def _first_failure(told: str, certain: bool, args: argparse.Namespace) -> str:
    """Write a failure into the nodes' store; or, if its cause may be on another node, read what that one wrote."""
    wait = timedelta(seconds=5)
    with contextlib.suppress(RuntimeError):  # node 0 may be what is lost
        if args.meeting_file:
            store = dist.FileStore(args.meeting_file)
        else:
            store = dist.TCPStore(args.ip, args.port, timeout=wait, wait_for_workers=False)
        store.set_timeout(wait)
        told = (store.compare_set("failure", "", told) if certain else store.get("failure")).decode()
        know = store.add("nodes that know", 1)
        if certain and args.nr == 0:  # the store ends with this process: let the other nodes read it
            complete = store.check([f"rank {rank}" for rank in range(args.world_size)])
            end = time.monotonic() + (15 if complete else 3)  # a busy node takes a while; one that never came, for ever
            while know < args.nodes and time.monotonic() < end:
                time.sleep(0.1)
                know = store.add("nodes that know", 0)
    return told
