"""DistributedDataParallel with detectron2's helpers: launch starts the processes, comm talks to them.

Facebook AI Research's detectron2 has two small modules that many projects borrow. `launch` does what the end of
distributed_data_parallel.py does: it starts the processes of this node, gives them their ranks and forms the process
group. `comm` has the ranks and the collectives under short names, and most of them work with a single process, too.

    python playground/distributed_data_parallel2.py -g 2
    python playground/distributed_data_parallel2.py -n 2 -g 2 -r 0 -ip <ip of node 0>    # and on node 1 with -r 1
    python playground/distributed_data_parallel2.py --random_seed    # another seed in each run, one for all ranks

-r is the index of the node, which launch calls machine_rank. The numbers are those of single_gpu.py, for any number of
processes that divides --batch_size, up to rounding (pid, host and times will differ):

    node  rank  local_rank  device  pid     host
    0     0     0           cpu     4242    laptop
    0     1     1           cpu     4243    laptop
    epoch 1/3  loss 0.3960  train 88.26%  test 93.96%  1.54 s  38,900 images/s

Break it, in a copy:
  1. Call comm.reduce_dict with average=True: loss and accuracy stay right. Why? And what is wrong now?
  2. Call comm.gather(...) only `if comm.is_main_process()`: the ranks are in different collectives. With --timeout 10
     they give up after 10 s, or at once when one has ended.
"""

import os
import signal
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # C++ back traces would bury the line that helps
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common.data import fetch, load, whole_batch
from common.flags import flags, parse
from common.guard_rails import deadline, explain, introduce
from common.models import MODELS
from common.profiling import profiled

warnings.filterwarnings("ignore", category=FutureWarning)  # detectron2 uses parts of torch that will go
try:
    from detectron2.engine import launch
    from detectron2.utils import comm
except ImportError:
    url = "git+https://github.com/facebookresearch/detectron2.git@02b5c4e295e990042a714712c21dc79b731e8833"
    sys.exit(f"error: detectron2 is missing: pip install --no-build-isolation '{url}'")


def join(args):
    """Print who is who and compare the flags of all ranks. Returns the device of this process."""
    if comm.get_world_size() > 1:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank at once, even one that waits for others
    local_rank = comm.get_local_rank()  # NEW: launch has set it and made it the current GPU
    device = torch.device("cuda", local_rank) if args.device == "cuda" else torch.device("cpu")
    torch.set_num_threads(max(1, torch.get_num_threads() // comm.get_local_size()))  # they share the cores
    node = os.environ.get("GROUP_RANK", args.nr)  # a launcher's, if one started this
    me = (node, comm.get_rank(), local_rank, str(device), os.getpid(), os.uname().nodename)
    introduce(comm.all_gather((vars(args), me)), comm.get_rank())  # NEW: any Python object, from all to all
    return device


def run_epoch(model, loader, device, optimizer=None):
    """Train, or test without an optimizer, on each batch. Returns the sums of loss, hits, images, float64 (3,)."""
    model.train(optimizer is not None)
    totals = torch.zeros(3, dtype=torch.float64, device=device)  # read once an epoch: that waits for the GPU
    loss_sum, hits, seen = totals  # views: what is added to them is added to totals
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        with torch.set_grad_enabled(optimizer is not None):
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
        if optimizer:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        loss_sum += loss.detach() * len(labels)
        hits += (logits.argmax(dim=1) == labels).sum()
        seen += len(labels)
    return totals


def train(args):
    """Train, test and report, one line an epoch."""
    try:
        device = join(args)
        seed = comm.shared_random_seed() if args.random_seed else args.seed  # NEW: drawn by rank 0, told to all
        torch.manual_seed(seed)
        train_set, test_set = load(args.dataset, args.data_dir)
        rank, world_size = comm.get_rank(), comm.get_world_size()
        sampler = DistributedSampler(train_set, world_size, rank, seed=seed, drop_last=True)
        share = args.batch_size // world_size
        train_loader = DataLoader(train_set, share, sampler=sampler, drop_last=True, collate_fn=whole_batch)
        mine = range(rank, len(test_set), world_size)  # no padding: each test image counts exactly once
        test_loader = DataLoader(test_set, 1000, sampler=mine, collate_fn=whole_batch)
        plain = MODELS[args.model](args.width, args.layers).to(device)
        model = DistributedDataParallel(plain) if world_size > 1 else plain  # NEW: launch makes no group for one
        optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6)  # 1e-8 makes steps of rounding errors

        for epoch in range(args.epochs):
            sampler.set_epoch(epoch)  # another order in each epoch, the same in each run
            comm.synchronize()  # NEW: a barrier, so that all clocks start together
            start = time.perf_counter()
            bar = tqdm(train_loader, leave=False, disable=None if rank == 0 else True)  # None: only on a terminal
            steps = profiled(bar, args.profile)
            totals = dict(zip(("loss", "hits", "seen"), run_epoch(model, steps, device, optimizer), strict=True))
            totals = comm.reduce_dict(totals, average=False)  # NEW: sums over all ranks, on rank 0
            seconds = time.perf_counter() - start
            tests = comm.gather(run_epoch(plain, test_loader, device).tolist())  # NEW: a list on rank 0, else empty
            if comm.is_main_process():
                _, test_hits, test_seen = (sum(column) for column in zip(*tests, strict=True))
                loss, hits, seen = (totals[name].item() for name in ("loss", "hits", "seen"))
                line = f"epoch {epoch + 1}/{args.epochs}  loss {loss / seen:.4f}  train {hits / seen:.2%}"
                line += f"  test {test_hits / test_seen:.2%}  {seconds:.2f} s  {seen / seconds:,.0f} images/s"
                print(line, flush=True)
            if comm.is_main_process() and args.savefile:  # other name first: a crash leaves the last one whole
                state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict()}
                with open(f"{args.savefile}.tmp", "wb") as file:
                    torch.save(state | {"epoch": epoch + 1, "args": vars(args)}, file)
                os.replace(f"{args.savefile}.tmp", args.savefile)
        comm.synchronize()  # leave together
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    os._exit(0)  # not through Python's shutdown, during which a thread of gloo may abort


def main():
    """Start the ranks of this node and wait for them. One that fails ends them all, with one line."""
    parser = flags(__doc__, node_index=("-r", "--rank", "-nr", "--nr"))
    parser.add_argument("--random_seed", action="store_true", help="draw a seed instead of --seed")
    args = parse(parser)
    if args.backend != ("nccl" if args.device == "cuda" else "gloo"):
        parser.error("detectron2 takes nccl on GPUs and gloo on CPUs: leave --backend out")
    if args.meeting_file:
        parser.error("launch does not meet reliably by file:// over several nodes: use --init_method tcp://<ip>:8888")
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # launch uses GPUs wherever it sees one
    wait = timedelta(seconds=args.timeout)
    url = f"tcp://{args.ip}:{args.port}" if args.port else "auto"
    try:
        args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)  # once per node, before its ranks start
        if args.nr > 0:  # launch would wait for ever if another program had the port
            with deadline(args, "reach node 0"):
                dist.TCPStore(args.ip, args.port, timeout=wait, wait_for_workers=False)
        if "RANK" in os.environ:
            if args.device == "cuda":
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))  # else launch does it
            dist.init_process_group(args.backend, timeout=wait)
            comm.create_local_process_group(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
            train(args)
        else:
            # NEW: starts the ranks, forms the group and calls train(args) in each
            launch(train, args.gpus, args.nodes, args.nr, url, (args,), wait)
    except (Exception, KeyboardInterrupt) as error:
        return explain(error, args)
    finally:
        for process in mp.active_children():
            process.kill()


if __name__ == "__main__":
    sys.exit(main())
