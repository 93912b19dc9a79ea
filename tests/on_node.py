"""Be a lesson on a node: what Nodes.enter does with a new program, here without one, so that it can be forked.

tests/on_node.py <name of the network> <name of the host> <lesson> <flags>
"""

import ctypes
import os
import runpy
import socket
import sys
from pathlib import Path

FILES, HOST, NETWORK = 0x20000, 0x4000000, 0x40000000  # the kernel's numbers for the namespaces
BIND, PRIVATE = 0x1000, 0x44000  # and for mounts: this one; all of them are this process's own


def call(function, *arguments):
    """Call a function of the C library; raises what it says is wrong."""
    if getattr(libc, function)(*arguments):
        raise OSError(ctypes.get_errno(), f"{function}: {os.strerror(ctypes.get_errno())}")


libc = ctypes.CDLL(None, use_errno=True)
network, host, *sys.argv = sys.argv[1:]
with open(f"/run/netns/{network}") as file:
    call("setns", file.fileno(), NETWORK)
call("unshare", FILES | HOST)
call("mount", b"none", b"/", None, PRIVATE, None)
call("mount", f"/etc/netns/{network}/hosts".encode(), b"/etc/hosts", None, BIND, None)
socket.sethostname(host)
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
