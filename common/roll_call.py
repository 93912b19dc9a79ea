"""A roll call before the ranks start: all nodes are there, with the same lesson and flags."""

import argparse
import contextlib
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import torch.distributed as dist

from common.guard_rails import free_port

MAY_DIFFER = {"nr", "ip", "init_method", "timeout", "data_dir", "gpu_ids"}  # between nodes
GREETING = (
    b"playground: "  # the answer of node 0 begins with it, so no other program is taken for node 0
)


def meet(args: argparse.Namespace) -> None:
    """Make sure that all nodes are there, once each, and were started with the same flags.

    It is called before the ranks of a node start. A single node picks a free port. Several nodes
    call node 0 at its address and port, which is free again afterwards, for rank 0. If it is called
    in a process group, the ranks compare their flags.

    Raises:
        SystemExit: with status 1 and one line on stderr, if anything is wrong.
    """
    flags = {name: value for name, value in vars(args).items() if name not in MAY_DIFFER}
    flags["lesson"] = Path(sys.argv[0]).name
    if dist.is_initialized():
        _compare_ranks(flags)
        return
    if args.device == "cpu":
        os.environ.setdefault(
            "TORCH_CPP_LOG_LEVEL", "FATAL"
        )  # gloo's back traces would hide the ranks' own lines
    if "RANK" in os.environ:
        return  # what has set it keeps the port, and looks after the other ranks
    if args.nodes == 1:
        args.port = free_port()
        return
    url = urlsplit(getattr(args, "init_method", None) or f"tcp://{args.ip}:{args.port}")
    if url.scheme == "file":
        return
    host = url.hostname or os.environ["MASTER_ADDR"]
    port = url.port or int(os.environ["MASTER_PORT"])
    if args.nr == 0:
        answering = threading.Thread(target=_answer, args=(_listen(port), args, flags), daemon=True)
        answering.start()
    wrong = _call(host, port, json.dumps([args.nr, flags]), args.timeout)
    if args.nr == 0 and "could not reach" not in wrong:
        answering.join()  # until all nodes have the answer
    if wrong:
        sys.exit(f"error: {wrong}")


def _compare_ranks(flags: dict) -> None:
    """Compare the flags of all ranks of the process group with those of rank 0."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, flags)
    for rank, theirs in enumerate(everyone):
        wrong = _difference(everyone[0], theirs, "rank", rank)
        if wrong:
            dist.destroy_process_group()
            sys.exit(
                f"error: {wrong}" if os.environ["LOCAL_RANK"] == "0" else 1
            )  # one line for each node


def _difference(zero: dict, theirs: dict, kind: str, number: int) -> str:
    """Return in which flag a node or rank differs from number 0; empty if in none."""
    for name in zero | theirs:
        if name == "savefile" and kind == "node":
            continue  # only node 0 uses it
        if zero.get(name) != theirs.get(name):
            flag = name if name == "lesson" else f"--{name}"
            values = f"{zero.get(name)} on {kind} 0, {theirs.get(name)} on {kind} {number}"
            return f"{flag} differs: {values}: start every node with the same lesson and flags"
    return ""


def _listen(port: int) -> socket.socket:
    """Listen on a port of all networks of this machine."""
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        why = f"cannot listen on port {port} ({error.strerror})"
        sys.exit(f"error: {why}: choose another --port on every node")


def _answer(server: socket.socket, args: argparse.Namespace, flags: dict) -> None:
    """On node 0: wait for a call from every node, this one too, and tell them what is wrong."""
    end = time.monotonic() + args.timeout
    callers = []
    present = set()
    wrong = ""
    while len(present) < args.nodes and time.monotonic() < end and not (wrong and 0 in present):
        try:
            server.settimeout(max(0.01, end - time.monotonic()))
            caller, _ = server.accept()
            callers.append(caller)
            caller.settimeout(5)
            number, theirs = json.loads(caller.makefile().readline(10_000))
        except (ValueError, TypeError, OSError):
            continue  # another program called, or the time is up
        if number in present:
            wrong = wrong or f"two nodes have -nr {number}: give each node its own -nr"
        present.add(number)
        wrong = wrong or _difference(flags, theirs, "node", number)
    missing = sorted(set(range(args.nodes)) - present)
    if missing and not wrong:
        wrong = (
            f"nodes {missing} are missing after {args.timeout} s: start every node, with the same"
        )
        wrong += " -n, -g, -ip and --port"
    server.close()  # before any node continues: the next to listen there is rank 0
    for caller in callers:
        with contextlib.suppress(OSError), caller:
            caller.sendall(GREETING + wrong.encode())


def _call(host: str, port: int, hello: str, timeout: int) -> str:
    """Call node 0. Returns what it says is wrong, or why no answer came; empty if all is well."""
    end = time.monotonic() + timeout
    why = "nothing is listening there"
    while time.monotonic() < end:
        try:
            with socket.create_connection(
                (host, port), timeout=max(0.01, end - time.monotonic())
            ) as node0:
                node0.settimeout(
                    timeout + 1
                )  # node 0 may have started just now, and wait for others
                node0.sendall(f"{hello}\n".encode())
                answer = node0.recv(4096)
                while answer.startswith(GREETING):
                    part = node0.recv(4096)
                    if not part:
                        return answer.removeprefix(GREETING).decode()
                    answer += part
            raise ConnectionResetError
        except ConnectionResetError:
            stranger = f"the program at {host}, port {port}, is not node 0, or node 0 has ended"
            return f"{stranger}: choose another --port"
        except ConnectionRefusedError:
            time.sleep(0.2)  # node 0 does not listen yet
        except OSError as error:
            why = error.strerror or "no answer"
            break
    missed = f"could not reach node 0 at {host} in {timeout} s ({why})"
    return f"{missed}: start it, check -ip, --port and the firewall"
