"""Shows at which line each rank of this node is, a line for each: of programs that run already.

Where many nodes hang, call it on each of them, and count equal lines. The odd one comes first:
    srun --jobid 4242 --overlap --nodes 2 --ntasks 2 .venv/bin/python playground/tools/stacks.py \
        | sort -k3 | uniq -c -f2 | sort -n

It asks py-spy (pip install py-spy; it may need root) about each process that has RANK among its
variables, as with torchrun and run/slurm_srun.sbatch; in a step of Slurm, about those of its job. A
line has the rank, the node, the innermost line of your own files, and the function that waits.
"""

import json
import linecache
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import psutil

OF_A_STEP = [name for name in ("SLURM_JOB_ID", "SLURMD_NODENAME") if name in os.environ]
IDENTITY = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
NOT_OWN = r"-packages/|/lib/python3|^<"  # files of packages and of Python


def identity_of(process):
    """Return which rank a process is, RANK first, or None. A child of a rank is the same."""
    try:
        variables = process.environ() if process else {}
    except (psutil.Error, OSError):  # it has ended, or is another user's
        return None
    same = all(variables.get(name) == os.environ.get(name) for name in OF_A_STEP)
    return tuple(map(variables.get, IDENTITY)) if same and variables.get("RANK") else None


def ranks():
    """Return {identity: process}, with the oldest Python of each rank, and no launcher."""
    found = {}
    # A shell between a launcher and a rank has the same variables.
    every = sorted(psutil.process_iter(["exe"]), key=psutil.Process.create_time)
    for process in sorted(every, key=lambda each: "python" not in str(each.info["exe"])):
        identity = identity_of(process)
        if identity and process.pid != os.getpid():
            found.setdefault(identity, process)
    launchers = {process.ppid() for process in found.values()}
    return {identity: each for identity, each in found.items() if each.pid not in launchers}


def place_of(pid):
    """Return where the main thread of a process is, or why that is not known."""
    program = Path(sys.executable).with_name("py-spy")
    command = [program if program.exists() else "py-spy", "dump", "--json", "--pid", str(pid)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return f"unknown: {done.stderr.strip().splitlines()[0]}"
    threads = json.loads(done.stdout)
    frames = next(each["frames"] for each in threads if each["os_thread_id"] == pid)
    own = [each for each in frames if not re.search(NOT_OWN, each["filename"])]
    if not own:
        return f"now in {frames[0]['name']}" if frames else "no function of Python"
    file, line, name = own[0]["filename"], own[0]["line"], own[0]["name"]
    text = linecache.getline(file, line).strip()
    return f"{Path(file).name}:{line} in {name}: {text}, now in {frames[0]['name']}"


def main():
    """Print a line for each rank of this node."""
    if not (Path(sys.executable).with_name("py-spy").exists() or shutil.which("py-spy")):
        sys.exit("error: there is no py-spy: pip install py-spy")
    found = ranks()
    for (rank, *_), process in found.items():
        print(rank, os.environ.get("SLURMD_NODENAME", socket.gethostname()), end=" ")
        print(place_of(process.pid), flush=True)
    if not found:
        why = "no process was started with RANK among its variables (mp.spawn sets none)"
        sys.exit(f"error: {why}: use py-spy dump --subprocesses --pid PID")


if __name__ == "__main__":
    main()
