"""A lesson for launchers without PyTorch, for tests that are about the launcher.

Each rank says where it is and which flags it got, and meets the others at MASTER_ADDR and MASTER_PORT, as PyTorch's
ranks do. With --wait it stays, as in a collective: until another rank ends, and then it fails.
"""

import os
import select
import socket
import sys
import time

names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
place = "rank {} of {}, on its node {} of {}, node {}".format(*map(os.environ.get, names))
sys.stdout.write(f"{place}, {os.uname().nodename}, flags {sys.argv[1:]}\n")  # at once, as others write there, too
sys.stdout.flush()

rank, others = int(os.environ["RANK"]), []
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    server = socket.create_server(("", address[1]))
    others = [server.accept()[0] for _ in range(1, int(os.environ["WORLD_SIZE"]))]
while rank and not others:
    try:
        others = [socket.create_connection(address)]
    except ConnectionRefusedError:  # rank 0 does not listen yet
        time.sleep(0.1)
for other in others:
    other.sendall(b".")
for other in others:
    other.recv(1)
if "--wait" in sys.argv:
    sys.stdout.write(f"rank {rank} waits\n")
    sys.stdout.flush()
    select.select(others, [], [])
    sys.exit(f"error: rank {rank}: another rank has ended")
