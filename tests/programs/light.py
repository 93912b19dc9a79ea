"""A lesson for launchers without PyTorch, for tests that are about the launcher.

Each rank prints where it runs, its flags, and variables of its environment. Then it connects to
rank 0 at MASTER_ADDR, as PyTorch's ranks do, one port above MASTER_PORT, where torchrun itself may
listen. With --wait it then waits until another rank ends, and fails, as in a collective. With
--sleep it only ends if it is told to.
"""

import os
import select
import socket
import sys
import time

names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
place = "rank {} of {}, on its node {} of {}, node {}".format(*map(os.environ.get, names))
host = os.uname().nodename
variables = ("NCCL_DEBUG", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "TORCH_NAME")
variables += ("CUDA_VISIBLE_DEVICES",)
there = {name: os.environ[name] for name in variables if name in os.environ}
# One call writes both lines, because other ranks write to the same output.
sys.stdout.write(f"{place}, {host}, flags {sys.argv[1:]}\n{host}: {there}\n")
sys.stdout.flush()

rank = int(os.environ["RANK"])
others = []
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1)
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
if "--wait" in sys.argv or "--sleep" in sys.argv:
    sys.stdout.write(f"rank {rank} waits\n")
    sys.stdout.flush()
    select.select(others if "--wait" in sys.argv else [], [], [])
    sys.exit(f"error: rank {rank}: another rank has ended")
