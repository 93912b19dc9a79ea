r"""Finding hangs: which rank is missing, at which line it is, and which call it has left out.

Run it:
    python playground/replicated/finding_hangs.py    # --help lists the other faults

Three ranks hang on purpose: here rank 1 leaves a loop one step early. The last lines that it prints
show where each rank waits, and which collectives it has called:
    stacks
      rank 0  line 75: dist.all_reduce(numbers)
      rank 1  line 76: dist.barrier()
      rank 2  line 75: dist.all_reduce(numbers)
    recorder
      rank 0  #3 all_reduce [4], #4 all_reduce [4], #5 all_reduce [4] not done
      rank 1  #3 all_reduce [4], #4 all_reduce [4], #5 barrier not done
      rank 2  #3 all_reduce [4], #4 all_reduce [4], #5 all_reduce [4] not done

The error of gloo, `Timed out waiting`, names neither the rank at fault nor a call. If a program of
yours hangs, look in this order (`playground/pages/hangs.md` has what each of these finds):
- The processes. If one has ended, look for its own first error.
- The stacks: which functions each process is in, and at which lines. Look for the rank that is at a
  different line.
- PyTorch's flight recorder, which keeps the last collectives of each rank and the sizes of their
  tensors. Look for the rank whose last call differs.
- Last, run the program again with TORCH_DISTRIBUTED_DEBUG=DETAIL. PyTorch then compares the calls
  of all ranks before each collective. (Try it with `--fault shapes`. DDP on CPUs may crash.)

A script that you can start again on one machine needs no change. Write `watch.py` in front of it,
which prints the lines and the calls of all ranks after five seconds without progress:
    python playground/tools/watch.py --hang 5 playground/replicated/finding_hangs.py --fault early
A program that runs for days, or on several nodes, must write them down itself: copy `note_hangs()`
and `ENDED`, and start the thread as `talk()` does. For a program that hangs already,
`pip install py-spy`. Then `py-spy dump --pid 4242` prints its stack.

Try breaking it, in a copy beside it:
  1. In `loader`, give DataLoader `num_workers=1, multiprocessing_context="fork"`. Where is rank 1?
  2. In `early`, let rank 1 return after its loop, so that it skips the barrier, too. Is it a hang?
  3. In `shapes`, give rank 1 a million numbers instead of five. How do the ranks end?
Builds on: collectives.py
The next lesson, `sending_less.py`, makes the messages of a step smaller.
"""

import faulthandler
import json
import linecache
import os
import re
import socket
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # find common/ from any folder
from common import flags

RANKS = 3
ENDED = threading.Event()  # set when this rank does not hang any more


# Each of these functions is a fault, and its docstring names what shows it.
def early(rank, args):
    """Rank 1 leaves the loop one step early. Its stack and its last call differ."""
    numbers = torch.ones(4)
    steps = 3 if rank == 1 else 4
    for _ in range(steps):
        dist.all_reduce(numbers)
    dist.barrier()


def root(rank, args):
    """Rank 0 calls a collective inside `if rank == 0`. Its stack and its last call differ."""
    numbers = torch.ones(4)
    if rank == 0:
        dist.all_reduce(numbers)
    dist.barrier()


def test(rank, args):
    """Rank 0 tests alone, and DDP sends the buffers of batch norm. Its stack and call differ."""
    model = DistributedDataParallel(nn.BatchNorm1d(4))
    model(torch.ones(8, 4)).sum().backward()
    if rank == 0:
        model.eval()
        model(torch.ones(8, 4))
    dist.barrier()


def peer(rank, args):
    """In one step, rank 1 sends to the left, the others to the right. Only stacks show it."""
    numbers = torch.ones(4)
    right = (rank + 1) % RANKS
    left = (rank - 1) % RANKS
    for step in range(4):
        to = left if rank == 1 and step == 2 else right
        request = dist.isend(numbers, to)
        dist.recv(torch.empty(4), left)
        request.wait()


def shapes(rank, args):
    """Rank 1 has five numbers, the others four. All stacks are equal, but not the sizes."""
    numbers = torch.ones(5 if rank == 1 else 4)
    for _ in range(3):
        dist.all_reduce(numbers)


def loader(rank, args):
    """The disk of rank 1 does not answer. Its stack differs, and it is one call behind."""

    def read(indices):
        if rank == 1 and 20 in indices:
            time.sleep(3 * args.timeout)
        return torch.ones(4)

    for batch in DataLoader(range(32), batch_size=4, collate_fn=read):
        dist.all_reduce(batch)


def killed(rank, args):
    """The system kills rank 1, as when memory has run out. Its process is gone."""
    for step in range(4):
        if rank == 1 and step == 2:
            os.kill(os.getpid(), 9)  # SIGKILL
        dist.all_reduce(torch.ones(4))


def shard(rank, args):
    """Rank 1 has one batch less. FSDP (see sharded/) sends for each. Its stack and call differ."""
    model = fully_shard(nn.Linear(4, 4))
    batches = 3 if rank == 1 else 4
    for _ in range(batches):
        model(torch.ones(8, 4)).sum().backward()
    dist.barrier()


FAULTS = {f.__name__: f for f in (early, root, test, peer, shapes, loader, killed, shard)}


def note_hangs(rank, folder, seconds):
    """Write every so many seconds where this rank is, and which collectives it has called last.

    Start it as a thread, after init_process_group(), and set ENDED before the group is destroyed.
    Choose less than the group's timeout. In a long run, 300 seconds are enough.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    while not ENDED.wait(seconds):
        # NEW: each rank has two files of its own, which have its last stacks and its last calls.
        with open(f"{folder}/stacks{rank}.txt", "w") as file:
            faulthandler.dump_traceback(file)  # of all threads of Python
        # NEW: these two functions are private, so they may change. (They are in torch 2.9 to 2.15.
        # From 2.10 on, torch.distributed.debug.start_debug_server shows the notes in a browser.)
        if "nccl" in dist.get_backend():
            calls = torch._C._distributed_c10d._dump_nccl_trace_json()
        else:
            calls = torch._C._distributed_c10d._dump_fr_trace_json()
        Path(folder, f"calls{rank}.json").write_bytes(calls)


def talk(rank, args):
    """As one of the ranks, start the notes, and run into the fault."""
    join(rank, args)
    seconds = 0.4 * args.timeout  # so the notes are written twice before gloo gives up
    threading.Thread(target=note_hangs, args=(rank, args.out, seconds), daemon=True).start()
    try:
        FAULTS[args.fault](rank, args)
    except Exception as error:
        print(f"rank {rank}: {error}", flush=True)
        raise
    finally:
        ENDED.set()  # the notes are about the hang, so they must not change any more
    dist.destroy_process_group()


def join(rank, args):
    """Join the process group, as in blocking_p2p.py."""
    gpu = None
    if args.device != "cpu":
        # Ranks may share a GPU, if each has a name of its own, as on a node of its own.
        os.environ["NCCL_HOSTID"] = f"rank{rank}"
        gpu = torch.device(args.device, rank % torch.accelerator.device_count())
        torch.accelerator.set_device_index(gpu)
        torch.set_default_device(gpu)
    dist.init_process_group(
        dist.get_default_backend_for_device(args.device),
        init_method=f"tcp://127.0.0.1:{args.port}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=args.timeout),
        device_id=gpu,
    )
    dist.barrier()


def main():
    """Start three ranks, wait until they fail, and print what they have written."""
    parser = flags.Parser(__doc__)
    add = parser.add_argument
    add("--fault", choices=FAULTS, default="early", help="what goes wrong; default: early")
    add("--timeout", type=flags.positive, default=10, help="seconds to wait for another rank")
    add("--out", type=flags.new_folder, metavar="DIR", default="traces", help="folder of the notes")
    add("--device", type=flags.device, default="cpu", help="cpu, or GPUs, which ranks may share")
    args = parser.parse_args()
    parser.check_no_launcher()
    for rank in range(RANKS):  # remove the notes of an earlier run
        Path(args.out, f"stacks{rank}.txt").unlink(missing_ok=True)
        Path(args.out, f"calls{rank}.json").unlink(missing_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as server:  # a port that is free now
        args.port = server.getsockname()[1]
    if args.device == "cpu":
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # hide gloo's C++ back traces
    # After a timeout, NCCL's ranks wait four times this long before they end. The default is 15 s.
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "500")
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # otherwise torch 2.9 records nothing
    print(f"{args.fault}: {FAULTS[args.fault].__doc__}", flush=True)
    try:
        ranks = mp.spawn(talk, (args,), RANKS, join=False)
        print("processes", *ranks.pids(), flush=True)
        # NEW: when a rank has failed, give the others ten seconds to fail, too, before they are
        # ended. By default, mp.spawn ends them at once. So does torchrun.
        while not ranks.join(grace_period=10):
            pass
    except (mp.ProcessRaisedException, mp.ProcessExitedException):
        show(ranks.processes, args.out)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        for process in mp.active_children():
            process.kill()  # no rank outlives this process


# You can stop here: what follows only prints the last notes of the ranks.


def show(processes, folder):
    """Print what there is of all ranks, so that they can be compared."""
    columns = {"process": [], "stacks": [], "recorder": []}
    for rank, process in enumerate(processes):
        hung = process.exitcode in (1, -15)  # it raised an error, or had to be ended
        ended = f"has ended, exit code {process.exitcode}"
        columns["process"].append("was there" if hung else ended)
        columns["stacks"].append(line_of(Path(folder, f"stacks{rank}.txt")))
        columns["recorder"].append(calls_of(Path(folder, f"calls{rank}.json")))
    for name, column in columns.items():
        print(name)
        for rank, words in enumerate(column):
            print(f"  rank {rank}  {words}")


def line_of(path):
    """Return the line of this lesson that a rank had reached."""
    text = path.read_text("utf-8") if path.exists() else ""
    stack = text.rpartition("Thread")[2]  # the main thread comes last
    found = re.search(rf'{Path(__file__).name}", line (\d+)', stack)  # the innermost one is first
    if found is None:
        return "nothing"
    return f"line {found[1]}: {linecache.getline(__file__, int(found[1])).strip()}"


def calls_of(path):
    """Return the number, the name and the sizes of the last three collectives."""
    calls = []
    found = json.loads(path.read_bytes()) if path.exists() else {}
    for call in found.get("entries", [])[-3:]:
        words = [f"#{call['collective_seq_id']}", call["profiling_name"].partition(":")[2]]
        words += map(str, call["input_sizes"])
        if not call["retired"]:
            words.append("not done")
        calls.append(" ".join(words))
    return ", ".join(calls) or "nothing"


if __name__ == "__main__":
    main()
