r"""Finding hangs: which rank is missing, at which line it is, and which call it has left out.

Run it:
    python playground/replicated/finding_hangs.py    # --help lists the other faults

Three ranks hang on purpose: here rank 1 leaves a loop one step before the others. It prints (of
rank 2 the same as of rank 0; torch 2.9 needs TORCH_FR_BUFFER_SIZE=2000 in front of the command):
    stacks
      rank 0  line 92: dist.all_reduce(numbers), now in all_reduce
      rank 1  line 93: dist.barrier(), now in barrier
    recorder
      rank 0  #3 all_reduce [4], #4 all_reduce [4], #5 all_reduce [4] not done
      rank 1  #3 all_reduce [4], #4 all_reduce [4], #5 barrier not done

If a program of yours hangs, look in this order (`hangs.md` tells what each of these finds):
- The processes. If one of them has ended, look for its own first error.
- The stacks, which Python's `faulthandler` writes. Look for the rank that is at a different line.
- PyTorch's flight recorder. It keeps the last collectives and their sizes, but not send and recv.
- Last, run it again with TORCH_DISTRIBUTED_DEBUG=DETAIL: PyTorch then compares the calls of all
  ranks. Not where DDP sends by gloo, because this can end in SIGSEGV (torch 2.9 to 2.15).
What gloo itself says, `Timed out waiting`, names neither a rank nor a call.

Copy `note_hangs()` into programs that run for days, or on several nodes. A script that you can
start again on one machine needs no change: write watch.py in front of it. If a program hangs
already, `py-spy dump --pid 4242` shows the stack of a process.
    python playground/tools/watch.py --hang 5 playground/replicated/finding_hangs.py --fault early
    TORCH_DISTRIBUTED_DEBUG=DETAIL python playground/replicated/finding_hangs.py --fault shapes

Try breaking it, in a copy (cp playground/replicated/finding_hangs.py playground/broken.py):
  1. In `loader`, give DataLoader num_workers=1, multiprocessing_context="fork". Where is rank 1?
  2. In `early`, let rank 1 return after its loop, so that it skips the barrier, too. Is it a hang?
  3. In `shapes`, give rank 1 a million numbers instead of five. How do the ranks end?
Now write `fault_waits_alone.py` and `fault_equal_stacks.py`, in playground/exercises/.
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


def note_hangs(rank, folder, seconds):
    """Write every so many seconds where this rank is, and which collectives it has called last.

    Start it once, as a thread. In a long run, 300 seconds are enough. The folder must exist.
    """
    while not ENDED.wait(seconds):
        # NEW: each rank has two files of its own, which have its last stacks and its last calls.
        with open(f"{folder}/stacks{rank}.txt", "w") as file:
            faulthandler.dump_traceback(file)  # of all threads of Python
        Path(folder, f"calls{rank}.json").write_bytes(recorded())


def recorded():
    """Return the last calls of this rank, as JSON."""
    # NEW: no public function reads the recorder. These two are private, so they may change. (They
    # are in torch 2.9 to 2.15. NCCL has a recorder of its own, which has not been tried here.)
    if dist.get_backend() == "nccl":
        return torch._C._distributed_c10d._dump_nccl_trace_json()
    return torch._C._distributed_c10d._dump_fr_trace_json()


# Each of these functions is a fault.
def early(rank, args):
    """Rank 1 leaves the loop one step before the others."""
    numbers = torch.ones(4)
    steps = 3 if rank == 1 else 4
    for _ in range(steps):
        dist.all_reduce(numbers)
    dist.barrier()


def root(rank, args):
    """Rank 0 calls a collective inside `if rank == 0`."""
    numbers = torch.ones(4)
    if rank == 0:
        dist.all_reduce(numbers)
    dist.barrier()


def test(rank, args):
    """Rank 0 tests alone. It calls DDP, which first sends the buffers of batch norm."""
    model = DistributedDataParallel(nn.BatchNorm1d(4))
    model(torch.ones(8, 4)).sum().backward()
    if rank == 0:
        model.eval()
        model(torch.ones(8, 4))
    dist.barrier()


def peer(rank, args):
    """In step 2, rank 1 sends to the rank on its left. All others send to the right."""
    numbers = torch.ones(4)
    right = (rank + 1) % RANKS
    left = (rank - 1) % RANKS
    for step in range(4):
        to = left if rank == 1 and step == 2 else right
        request = dist.isend(numbers, to)
        dist.recv(torch.empty(4), left)
        request.wait()


def shapes(rank, args):
    """Rank 1 has five numbers, and the others have four."""
    numbers = torch.ones(5 if rank == 1 else 4)
    for _ in range(3):
        dist.all_reduce(numbers)


def loader(rank, args):
    """The data set of rank 1 does not answer, such as one on a network disk."""

    def read(indices):
        if rank == 1 and 20 in indices:
            time.sleep(3 * args.timeout)
        return torch.ones(4)

    for batch in DataLoader(range(32), batch_size=4, collate_fn=read):
        dist.all_reduce(batch)


def killed(rank, args):
    """The system kills rank 1, as it does when memory has run out."""
    for step in range(4):
        if rank == 1 and step == 2:
            os.kill(os.getpid(), 9)  # SIGKILL
        dist.all_reduce(torch.ones(4))


def shard(rank, args):
    """Rank 1 has three batches, the others four. FSDP, of part 3, sends messages for each batch."""
    model = fully_shard(nn.Linear(4, 4))
    batches = 3 if rank == 1 else 4
    for _ in range(batches):
        model(torch.ones(8, 4)).sum().backward()
    dist.barrier()


FAULTS = {
    "early": early,
    "root": root,
    "test": test,
    "peer": peer,
    "shapes": shapes,
    "loader": loader,
    "killed": killed,
    "shard": shard,
}


def talk(rank, args):
    """As one of the ranks, start the notes, run into the fault, and write the error down."""
    seconds = 0.4 * args.timeout  # so the notes are written twice before gloo gives up
    notes = threading.Thread(target=note_hangs, args=(rank, args.out, seconds), daemon=True)
    try:
        join(rank, args)
        notes.start()
        FAULTS[args.fault](rank, args)
    except Exception as error:
        Path(args.out, f"error{rank}.txt").write_text(str(error), "utf-8")
        raise
    finally:
        ENDED.set()  # the notes are about the hang, so they must not change any more
    dist.destroy_process_group()


def join(rank, args):
    """Join the process group, as in blocking_p2p.py."""
    if args.device != "cpu":
        device = torch.device(args.device, rank)
        torch.accelerator.set_device_index(device)
        torch.set_default_device(device)
    dist.init_process_group(
        dist.get_default_backend_for_device(args.device),
        init_method=f"tcp://127.0.0.1:{args.port}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=args.timeout),
    )
    dist.barrier()


def wait_for_errors(processes, args):
    """Wait until a rank ends or writes an error, and then up to five seconds for each other one."""
    errors = [Path(args.out, f"error{rank}.txt") for rank in range(RANKS)]
    while all(process.is_alive() for process in processes):
        if any(path.exists() for path in errors):
            break
        time.sleep(0.1)
    for process in processes:
        process.join(5)


def show(processes, args):
    """Print what there is of all ranks, so that they can be compared."""
    columns = {"process": [], "stacks": [], "recorder": [], "error": []}
    for rank, process in enumerate(processes):
        error = read(args, f"error{rank}.txt")
        if error or process.is_alive():
            columns["process"].append("was there")
        else:
            columns["process"].append(f"has ended, exit code {process.exitcode}")
        columns["stacks"].append(line_of(read(args, f"stacks{rank}.txt")))
        columns["recorder"].append(calls_of(read(args, f"calls{rank}.json")))
        # Leave out the line of gloo's source, and gloo's advice.
        columns["error"].append(re.sub(r"^\[\S+\] | This is typically.*", "", error))
    for name, column in columns.items():
        print(name)
        for rank, words in enumerate(column):
            print(f"  rank {rank}  {words or 'nothing'}")


def read(args, name):
    """Return what a rank has written to a file, or nothing."""
    path = Path(args.out, name)
    return path.read_text("utf-8") if path.exists() else ""


def line_of(text):
    """Return the line of this file that the main thread has reached, and where it waits."""
    # The main thread comes last. Its innermost function comes first.
    frames = re.findall(r'File "(.*)", line (\d+) in (\w+)', text.rpartition("Thread")[2])
    for path, line, _ in frames:
        if Path(path).name == Path(__file__).name:
            code = linecache.getline(__file__, int(line)).strip()
            return f"line {line}: {code}, now in {frames[0][2]}"
    return ""


def calls_of(text):
    """Return the number, the name and the sizes of the last three collectives."""
    calls = []
    for call in json.loads(text or "{}").get("entries", [])[-3:]:
        words = [f"#{call['collective_seq_id']}", call["profiling_name"].partition(":")[2]]
        words += map(str, call["input_sizes"])
        if not call["retired"]:
            words.append("not done")
        calls.append(" ".join(words))
    return ", ".join(calls)


def main():
    """Start three ranks, wait until they fail, and print what they have written."""
    parser = flags.Parser(__doc__)
    add = parser.add_argument
    add("--fault", choices=FAULTS, default="early", help="what goes wrong; default: early")
    add("--timeout", type=flags.positive, default=10, help="seconds to wait for another rank")
    add("--out", type=flags.new_folder, metavar="DIR", default="traces", help="folder of the notes")
    add("--device", type=flags.device, default="cpu", help="cpu, or three GPUs (not tried)")
    args = parser.parse_args()
    parser.check_no_launcher()
    if args.device != "cpu" and torch.accelerator.device_count() < RANKS:
        parser.error(f"--device {args.device} needs {RANKS} GPUs")
    for rank in range(RANKS):
        for name in (f"stacks{rank}.txt", f"calls{rank}.json", f"error{rank}.txt"):
            Path(args.out, name).unlink(missing_ok=True)  # those of an earlier run
    with socket.create_server(("127.0.0.1", 0)) as server:  # a port that is free now
        args.port = server.getsockname()[1]
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # hide gloo's C++ back traces
    print(f"{args.fault}: {FAULTS[args.fault].__doc__}", flush=True)
    try:
        # NEW: with join=True, mp.spawn would end all ranks when one fails. So would torchrun.
        processes = mp.spawn(talk, (args,), RANKS, join=False).processes
        print("processes", *[process.pid for process in processes], flush=True)
        wait_for_errors(processes, args)
        show(processes, args)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        for process in mp.active_children():
            process.kill()  # no rank outlives this process


if __name__ == "__main__":
    main()
