"""Run a lesson on a node, in this process.

Nodes.enter starts other programs for that. This script starts none, so preloaded.py can fork it.

    tests/programs/on_node.py <name of the network> <name of the host> <lesson> <flags>
"""

import ctypes
import os
import platform
import runpy
import socket
import sys
from pathlib import Path

# The kernel's flags for the namespaces of mounts, host names and networks.
FILES = 0x20000
HOST = 0x4000000
NETWORK = 0x40000000
# The kernel's flags for a mount of one file, and for mounts that only this process sees.
BIND = 0x1000
PRIVATE = 0x44000


def call(function, *arguments):
    """Call a function of the C library, and raise an OSError if it fails."""
    if getattr(libc, function)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")


libc = ctypes.CDLL(None, use_errno=True)
network, host, *sys.argv = sys.argv[1:]
with open(f"/run/netns/{network}") as file:
    call("setns", file.fileno(), NETWORK)
call("unshare", FILES | HOST)
call("mount", b"none", b"/", None, PRIVATE, None)
call("mount", f"/etc/netns/{network}/hosts".encode(), b"/etc/hosts", None, BIND, None)
socket.sethostname(host)
platform._uname_cache = None  # otherwise platform.node() returns the name before the fork
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
