"""Measure the lessons on the CPU and MNIST against targets. It prints a Markdown table.

    python tests/benchmark.py                             # all rows, five repeats of each
    python tests/benchmark.py --only single_gpu loader    # some rows
    python tests/benchmark.py --data_dir data --repeats 1

pytest does not run this file. It needs MNIST in data/ or --data_dir, and downloads it if it can. Do
not use the machine for anything else meanwhile. The two things that a row compares, A and B, are
measured in turn: A, B, A, B, ... The table has their medians and the ratio A / B. An epoch is the
median of all epochs except a run's first.

The first six rows compare a lesson with its bare program in bare.py. Each gives two lines: an
epoch, and the whole run, from command to exit. Both programs must print the same losses.

    single_gpu     single_gpu.py
    ddp            distributed_data_parallel_torchrun.py, 2 ranks
    fsdp           fully_sharded_data_parallel.py, 2 ranks
    tensor         tensor_parallel.py --by dtensor, 2 ranks
    pipeline       pipeline_parallel.py, 2 ranks
    transformer    distributed_data_parallel_torchrun.py --model transformer, 2 ranks
    bucket         an epoch of manual_data_parallel.py -g 2 --bucket, and of
                   distributed_data_parallel.py -g 2
    two_processes  images/s of distributed_data_parallel.py with two processes, and of
                   single_gpu.py, with one thread in each process, --model cnn --batch_size 512
    two_stages     images/s of manual_pipeline.py with two ranks, and of single_gpu.py, with one
                   thread in each process, --width 512 --layers 8 --batch_size 2048
    by_hand        an epoch of tensor_parallel.py by hand, and with --by dtensor, 2 ranks,
                   --width 1024 --batch_size 512
    loader         images/s of single_gpu.py's DataLoader alone, and of torchvision's MNIST, which
                   reads single images
    start_up       distributed_data_parallel.py -g 2, from command to first optimizer step, and its
                   limit: 2 s and twice `python -c "import torch"`, because first the command and
                   then its ranks import torch
    ring           a forward and a backward pass of context_parallel.py's RingAttention on one rank,
                   and of PyTorch's attention, 784 tokens of 12 images, one thread (no target)
    loader_memory  the peak memory that loading and one pass over single_gpu.py's DataLoader add to
                   a fresh process, and the bytes of all images as float32
"""

import argparse
import functools
import multiprocessing
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from lessons import FOLDERS, PATHS, ROOT
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset
from torchvision import transforms
from torchvision.datasets import MNIST
from tqdm import tqdm

sys.path += map(str, [ROOT, *FOLDERS])  # find common/ and the lessons
from context_parallel import RingAttention

from common.data import DATA_DIR, Images, fetch, load, whole_batch

EPOCHS = 3  # the lessons' defaults
BATCH_SIZE = 128
TRAINED = 60_000 // BATCH_SIZE * BATCH_SIZE  # images in an epoch: drop_last drops the rest
BARE = ROOT / "tests" / "bare.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
COMPARED = {  # lessons that have a bare program, by its first argument
    "single_gpu": "single_gpu",
    "ddp": "torchrun distributed_data_parallel_torchrun",
    "fsdp": "torchrun fully_sharded_data_parallel",
    "tensor": "torchrun tensor_parallel --by dtensor",
    "pipeline": "torchrun pipeline_parallel",
    "transformer": "torchrun distributed_data_parallel_torchrun --model transformer",
}


class Pair(NamedTuple):
    """Two lessons that are compared, with their flags."""

    first: str
    second: str
    flags: str  # of both
    unit: str  # of an epoch: s, or images/s
    target: str
    one_thread: bool = False  # in each process; otherwise the processes divide the cores


PAIRS = {
    "bucket": Pair(
        "manual_data_parallel -g 2 --bucket",
        "distributed_data_parallel -g 2",
        "",
        "s",
        "at most 1.15",
    ),
    "two_processes": Pair(
        "distributed_data_parallel -g 2",
        "single_gpu",
        "--model cnn --batch_size 512",
        "images/s",
        "at least 1.7",
        one_thread=True,
    ),
    "two_stages": Pair(
        "torchrun manual_pipeline",
        "single_gpu",
        "--width 512 --layers 8 --batch_size 2048",
        "images/s",
        "at least 1.3",
        one_thread=True,
    ),
    "by_hand": Pair(
        "torchrun tensor_parallel --by hand",
        "torchrun tensor_parallel --by dtensor",
        "--width 1024 --batch_size 512",
        "s",
        "at most 1.2",
    ),
}


def run(*command: str | Path, **variables: str) -> tuple[float, str]:
    """Run Python with these arguments, in our environment with these variables added.

    Returns:
        The seconds from command to exit, and what it printed on stdout.

    Raises:
        SystemExit: if it fails, with what it printed on stderr.
    """
    kept = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
    start = time.monotonic()
    with subprocess.Popen(
        [sys.executable, *map(str, command)],
        env=kept | variables,
        text=True,
        process_group=0,  # Ctrl-C reaches only this process
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            output, errors = process.communicate()
        except KeyboardInterrupt:
            # Not SIGKILL, because a program that has started others has to end them.
            process.send_signal(signal.SIGINT)
            process.communicate()
            raise
    seconds = time.monotonic() - start
    if process.returncode:
        words = " ".join(map(str, command))
        sys.exit(f"error: {words} failed with status {process.returncode}:\n{errors}")
    return seconds, output


def run_lesson(command: str, data_dir: str, one_thread: bool = False) -> tuple[float, str]:
    """Run a lesson on the CPU and MNIST, such as "torchrun tensor_parallel". Returns as `run`."""
    words = command.split()
    launcher = TORCHRUN if words[0] == "torchrun" else ()
    name, *flags = words[1:] if launcher else words
    spawns = "-g" in flags  # then its ranks divide the threads
    if one_thread:
        threads = 2 if spawns else 1
    else:
        threads = max(1, torch.get_num_threads() // (2 if launcher else 1))
    data = ("--device", "cpu", "--dataset", "mnist", "--data_dir", data_dir)
    flags += ["--epochs", str(EPOCHS)]
    return run(*launcher, PATHS[name], *data, *flags, OMP_NUM_THREADS=str(threads))


def epoch_lines(output: str, epochs: int = EPOCHS) -> list[tuple[float, int]]:
    """Return each epoch's test accuracy in % and training speed in images/s, from an output."""
    pattern = r"^epoch .*  test ([\d.]+)%  [\d.]+ s  ([\d,]+) images/s"
    found = re.findall(pattern, output, re.M)
    assert len(found) == epochs, f"{epochs} epoch lines expected, these found: {found} in\n{output}"
    return [(float(test), int(speed.replace(",", ""))) for test, speed in found]


def warm_speed(output: str) -> float:
    """Return the median of the images/s of each epoch except the first."""
    return median([speed for _, speed in epoch_lines(output)[1:]])


def in_turn(name: str, repeats: int, *measurements: Callable) -> list[list]:
    """Take all measurements in turn, again and again, so that a slow minute affects all of them.

    Returns a list for each measurement.
    """
    rounds = []
    for _ in tqdm(range(repeats), desc=name, leave=False, file=sys.stderr):
        rounds.append([measure() for measure in measurements])
    return [list(values) for values in zip(*rounds, strict=True)]


def cells(what: str, a: float, b: float, unit: str, target: str = "-") -> list[str]:
    """Return the cells of a line: what, A, B, ratio, target, and whether it is met."""
    digits = 3 if unit == "s" else 0
    met = "-"
    if target != "-":
        limit = float(target.split()[-1])
        reached = a / b <= limit if "at most" in target else a / b >= limit
        met = "met" if reached else "missed"
    numbers = [f"{value:,.{digits}f} {unit}" for value in (a, b)]
    return [what, *numbers, f"{a / b:.4g}", target, met]


def against_bare(kind: str, data_dir: str, repeats: int) -> list[list[str]]:
    """Compare a lesson with its bare program: an epoch, and from command to exit.

    Raises:
        SystemExit: if they print different losses.
    """
    lesson = COMPARED[kind]
    ranks = 2 if "torchrun" in lesson else 1
    threads = str(max(1, torch.get_num_threads() // ranks))
    bare = (BARE, kind, "mnist", data_dir, str(BATCH_SIZE), str(EPOCHS))

    def run_bare() -> tuple[float, str]:
        return run(*(TORCHRUN if ranks == 2 else ()), *bare, OMP_NUM_THREADS=threads)

    epochs = []
    whole = []
    losses = []
    for runs in in_turn(kind, repeats, lambda: run_lesson(lesson, data_dir), run_bare):
        epochs.append(TRAINED / median([warm_speed(output) for _, output in runs]))
        whole.append(median([seconds for seconds, _ in runs]))
        losses.append(re.findall(r"^epoch .*  loss ([\d.]+)", runs[-1][1], re.M))
    if losses[0] != losses[1]:
        sys.exit(f"error: {lesson} prints the losses {losses[0]}, bare.py {losses[1]}")
    return [
        cells(f"epoch: {lesson}; bare", *epochs, "s", "at most 1.15"),
        cells(f"command to exit: {lesson}; bare", *whole, "s", "at most 1.1"),
    ]


def two_lessons(name: str, data_dir: str, repeats: int) -> list[list[str]]:
    """Compare the epochs of a pair of lessons."""
    pair = PAIRS[name]

    def speed(command: str) -> float:
        _, output = run_lesson(f"{command} {pair.flags}", data_dir, pair.one_thread)
        return warm_speed(output)

    speeds = in_turn(name, repeats, lambda: speed(pair.first), lambda: speed(pair.second))
    values = [median(found) for found in speeds]
    if pair.unit == "s":
        values = [TRAINED / value for value in values]
    what = f"{pair.first}; {pair.second}; both {pair.flags or 'with the default flags'}"
    return [cells(what, *values, pair.unit, pair.target)]


def torchvision_mnist(data_dir: str, train: bool) -> Dataset:
    """Return MNIST as tutorials read it: an image is converted and normalised when it is read."""
    steps = [transforms.ToTensor(), transforms.Normalize(0.1307, 0.3081)]
    return MNIST(data_dir, train=train, transform=transforms.Compose(steps))


def lesson_loader(train_set: Images) -> DataLoader:
    """Return the training DataLoader of single_gpu.py, in the order of its first epoch."""
    sampler = RandomSampler(train_set, generator=torch.Generator().manual_seed(0))
    return DataLoader(
        train_set, BATCH_SIZE, sampler=sampler, drop_last=True, collate_fn=whole_batch
    )


def loader(data_dir: str, repeats: int) -> list[list[str]]:
    """Compare single_gpu.py's DataLoader with torchvision's single images."""
    fast = lesson_loader(load("mnist", data_dir)[0])
    some_images = Subset(torchvision_mnist(data_dir, train=True), range(5000))
    slow = DataLoader(some_images, BATCH_SIZE, shuffle=True)

    def speed(batches: DataLoader) -> float:
        start = time.perf_counter()
        images = sum(len(labels) for _, labels in batches)
        return images / (time.perf_counter() - start)

    speed(fast)  # warm up
    speed(slow)
    speeds = in_turn("loader", repeats, lambda: speed(fast), lambda: speed(slow))
    what = "single_gpu.py's DataLoader; torchvision's MNIST"
    return [cells(what, *map(median, speeds), "images/s", "at least 100")]


def start_up(data_dir: str, repeats: int) -> list[list[str]]:
    """Compare DDP's time from command to first step, on two ranks, with its limit."""
    source = PATHS["distributed_data_parallel"].read_text()
    step = "            optimizer.step()\n"
    assert source.count(step) == 1, f"there are {source.count(step)} lines {step!r}, not one"
    # print() may write a line in parts, and the parts of two ranks would mix. os.write() does not.
    line = 'f"first step {time.monotonic()}\\n".encode()'
    stop = f"            os.write(1, {line})\n            os._exit(0)\n"

    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "distributed_data_parallel.py"
        copy.write_text(source.replace(step, step + stop))

        def first_step() -> float:
            flags = ("--device", "cpu", "--dataset", "mnist", "--data_dir", data_dir, "-g", "2")
            start = time.monotonic()  # the same clock in all processes of a machine
            _, output = run(copy, *flags, PYTHONPATH=str(ROOT))  # the copy finds common/
            ends = [float(end) for end in re.findall(r"^first step ([\d.]+)$", output, re.M)]
            assert len(ends) == 2, f"two ranks, but these first steps: {ends} in\n{output}"
            return max(ends) - start

        first, torch_import = in_turn(
            "start_up", repeats, first_step, lambda: run("-c", "import torch")[0]
        )
    limit = 2 * median(torch_import) + 2
    what = "distributed_data_parallel.py -g 2 to its first step; 2 x `import torch` + 2 s"
    return [cells(what, median(first), limit, "s", "at most 1")]


def ring(data_dir: str, repeats: int) -> list[list[str]]:
    """Compare ring attention on one rank with PyTorch's attention. It reads no data."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    places = [torch.arange(784)]
    size = (12, 4, 784, 8)  # images, heads, tokens, numbers of a token in a head

    def seconds(attention: Callable) -> float:
        query, key, value = (torch.randn(size, requires_grad=True) for _ in range(3))
        start = time.perf_counter()
        attention(query, key, value).sum().backward()
        return time.perf_counter() - start

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return RingAttention.apply(query, key, value, places, dist.group.WORLD)

    theirs = functools.partial(F.scaled_dot_product_attention, is_causal=True)
    found = in_turn("ring", repeats, lambda: seconds(ours), lambda: seconds(theirs))
    dist.destroy_process_group()
    return [cells("RingAttention, 1 rank; PyTorch's attention", *map(median, found), "s")]


def loader_growth(data_dir: str) -> int:
    """Load MNIST and pass over single_gpu.py's DataLoader.

    Returns how much the memory of this process grew at its peak, in bytes.
    """

    def resident(field: str) -> int:
        status = Path("/proc/self/status").read_text()
        return int(re.search(rf"^{field}:\s+(\d+) kB$", status, re.M)[1]) * 1024

    before = resident("VmRSS")
    train_set, test_set = load("mnist", data_dir)  # the test set stays in memory, as in the lesson
    for _ in lesson_loader(train_set):
        pass
    return resident("VmHWM") - before


def loader_memory(data_dir: str, repeats: int) -> list[list[str]]:
    """Compare the memory that the loader takes with the images in it."""

    def growth() -> int:  # a process that spawn starts has imported this file and done nothing else
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
            return fresh.submit(loader_growth, data_dir).result()

    images = sum(part.images.nbytes for part in load("mnist", data_dir))
    [peaks] = in_turn("loader_memory", repeats, growth)
    what = "memory of load() and a pass over the DataLoader; its images"
    return [cells(what, median(peaks) / 1e6, images / 1e6, "MB", "at most 1.5")]


ROWS = {kind: functools.partial(against_bare, kind) for kind in COMPARED}
ROWS |= {name: functools.partial(two_lessons, name) for name in PAIRS}
ROWS |= {row.__name__: row for row in (loader, start_up, ring, loader_memory)}


def machine() -> str:
    """Return what the figures depend on: the machine, the versions and the load, in one line."""
    cpus = f"{os.cpu_count()} CPUs, {torch.get_num_threads()} threads"
    system = f"{platform.system()} {platform.machine()}"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{cpus}, {system}, {versions}; load {os.getloadavg()[0]:.1f} at the start"


def main() -> None:
    """Measure the rows that were asked for and print each when it is known."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data_dir", default=DATA_DIR, help="default: data/ beside playground/")
    add("--repeats", type=int, default=5, help="measurements of each kind")
    add("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="NAME", help="some rows")
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats}: must be 1 or more")
    fetch("mnist", args.data_dir)  # before any measurement
    print(f"{machine()}; {args.repeats} repeats\n")
    print("| row | A; B | A | B | ratio | target | met |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name in args.only:
        for line in ROWS[name](args.data_dir, args.repeats):
            print("|", " | ".join([name, *line]), "|", flush=True)


if __name__ == "__main__":
    main()
