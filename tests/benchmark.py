"""Measure the lessons on the CPU and MNIST against targets. It prints a Markdown table.

    python tests/benchmark.py                             # all rows, five repeats of each
    python tests/benchmark.py --only single_gpu loader    # some rows
    python tests/benchmark.py --data_dir data --repeats 1

pytest does not run this file. It needs MNIST in data/ or --data_dir, and downloads it if it can. Do
not use the machine for anything else meanwhile. The two things that a row compares, A and B, are
measured in turn: A, B, A, B, ... The table has their medians and the ratio A / B.

The first six rows compare a lesson with its bare program in bare.py. Each gives two lines: an
epoch (the median of all epochs except a run's first), and the whole run, from command to exit. Both
programs must print the same losses.

    single_gpu     single_gpu.py
    ddp            distributed_data_parallel_torchrun.py, 2 ranks
    fsdp           fully_sharded_data_parallel.py, 2 ranks
    tensor         tensor_parallel.py --by dtensor, 2 ranks
    pipeline       pipeline_parallel.py, 2 ranks
    transformer    distributed_data_parallel_torchrun.py --model transformer, 2 ranks
    naive          single_gpu.py and a program that reads single images in eight DataLoader workers,
                   from command to exit (without a target; `python tests/benchmark.py --naive` is
                   that program)
    loader         images/s of single_gpu.py's DataLoader alone, and of torchvision's MNIST, which
                   reads single images
    start_up       distributed_data_parallel.py -g 2, from command to first optimizer step, and its
                   limit: 2 s and twice `python -c "import torch"`, because first the command and
                   then its ranks import torch
    bucket         an epoch of manual_data_parallel.py -g 2 --bucket, and of
                   distributed_data_parallel.py -g 2; also an epoch without --bucket (no target)
    two_processes  images/s of distributed_data_parallel.py with two processes, and of
                   single_gpu.py, with one thread in each process, --model cnn --batch_size 512
    two_stages     images/s of manual_pipeline.py with two ranks, and of single_gpu.py, with one
                   thread in each process, --width 512 --layers 8 --batch_size 2048
    by_hand        an epoch of tensor_parallel.py by hand, and with --by dtensor, 2 ranks,
                   --width 1024 --batch_size 512; also both with the default flags (no target)
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
from single_gpu import run_epoch

from common.data import DATA_DIR, Images, fetch, load, whole_batch
from common.models import MODELS

CPU = torch.device("cpu")
EPOCHS = 3  # the lessons' defaults
BATCH_SIZE = 128
LR = 1e-3
TRAINED = 60_000 // BATCH_SIZE * BATCH_SIZE  # images in an epoch: drop_last drops the rest
ADAM = {"lr": LR, "eps": 1e-6, "fused": True}  # the lessons' optimizer
WIDE = ("--width", "1024", "--batch_size", "512")  # enough work for what splitting a layer costs
LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


class Compared(NamedTuple):
    """A lesson that has a bare program."""

    lesson: str
    ranks: int  # that torchrun starts; 0: a single process without torchrun
    flags: tuple[str, ...] = ()


COMPARED = {  # by bare.py's first argument
    "single_gpu": Compared("single_gpu", 0),
    "ddp": Compared("distributed_data_parallel_torchrun", 2),
    "fsdp": Compared("fully_sharded_data_parallel", 2),
    "tensor": Compared("tensor_parallel", 2, ("--by", "dtensor")),
    "pipeline": Compared("pipeline_parallel", 2),
    "transformer": Compared("distributed_data_parallel_torchrun", 2, ("--model", "transformer")),
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


def torchrun(ranks: int) -> tuple[str, ...]:
    """Return Python's arguments that start so many ranks; none for 0, a single process."""
    if not ranks:
        return ()
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))


def threads_of(ranks: int) -> str:
    """Return the threads of each rank. Under torchrun the ranks do not divide the cores."""
    return str(max(1, torch.get_num_threads() // (ranks or 1)))


def run_lesson(
    name: str, data_dir: str, *flags: str, ranks: int = 0, **variables: str
) -> tuple[float, str]:
    """Run a lesson on the CPU and MNIST, by its name. Returns as `run`."""
    path = PATHS[name]
    data = ("--device", "cpu", "--dataset", "mnist", "--data_dir", data_dir)
    return run(*torchrun(ranks), path, *data, "--epochs", str(EPOCHS), *flags, **variables)


def epoch_lines(output: str, epochs: int = EPOCHS) -> list[tuple[float, int]]:
    """Return each epoch's test accuracy in % and training speed in images/s, from an output."""
    pattern = r"^epoch .*  test ([\d.]+)%  [\d.]+ s  ([\d,]+) images/s"
    found = re.findall(pattern, output, re.M)
    assert len(found) == epochs, f"{epochs} epoch lines expected, these found: {found} in\n{output}"
    return [(float(test), int(speed.replace(",", ""))) for test, speed in found]


def warm_speeds(output: str) -> list[int]:
    """Return the images/s of each epoch except the first, from what a program printed."""
    return [speed for _, speed in epoch_lines(output)[1:]]


def warm_seconds(output: str) -> float:
    """Return the median of the seconds of all epochs except the first, with batches of 128."""
    # From images/s, because the seconds are printed with two decimals only.
    return median(TRAINED / speed for speed in warm_speeds(output))


def epoch_seconds(name: str, data_dir: str, *flags: str, ranks: int = 0) -> float:
    """Run a lesson and return the median of the seconds of its epochs, except the first."""
    threads = threads_of(ranks)
    _, output = run_lesson(name, data_dir, *flags, ranks=ranks, OMP_NUM_THREADS=threads)
    return warm_seconds(output)


def in_turn(name: str, repeats: int, *measurements: Callable) -> list[list]:
    """Take all measurements in turn, again and again, so that a slow minute affects all of them.

    Returns a list for each measurement.
    """
    rounds = []
    for _ in tqdm(range(repeats), desc=name, leave=False, file=sys.stderr):
        rounds.append([measure() for measure in measurements])
    return [list(values) for values in zip(*rounds, strict=True)]


def medians(name: str, repeats: int, *measurements: Callable[[], float]) -> list[float]:
    """Take all measurements in turn and return the median of each."""
    return [median(values) for values in in_turn(name, repeats, *measurements)]


def cells(
    what: str,
    measured: str,
    ratio: float,
    at_most: float | None = None,
    at_least: float | None = None,
) -> list[str]:
    """Return the cells of a line: what, measured, ratio, target, and whether it is met."""
    if at_most is not None:
        target = f"at most {at_most:g}"
        met = ratio <= at_most
    elif at_least is not None:
        target = f"at least {at_least:g}"
        met = ratio >= at_least
    else:
        return [what, measured, f"{ratio:.4g}", "-", "-"]
    return [what, measured, f"{ratio:.4g}", target, "met" if met else "missed"]


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


def naive_program(
    train_set: Dataset,
    test_set: Dataset,
    model: str = "mlp",
    epochs: int = EPOCHS,
    batch_size: int = BATCH_SIZE,
    workers: int = 8,
) -> None:
    """Train, test and report as single_gpu.py does, on images that are read one by one.

    Args:
        train_set, test_set: pairs of an image, float32 (1, 28, 28), and its label.
        model: a key of common.models.MODELS.
        epochs, batch_size: as the lessons' flags.
        workers: processes that read the images; 0 means this one.
    """
    torch.manual_seed(0)
    train_loader = DataLoader(
        train_set, batch_size, shuffle=True, drop_last=True, num_workers=workers
    )
    test_loader = DataLoader(test_set, 1000, num_workers=workers)
    network = MODELS[model]()
    optimizer = torch.optim.Adam(network.parameters(), **ADAM)
    for epoch in range(epochs):
        start = time.perf_counter()
        loss, hits, seen = run_epoch(network, train_loader, CPU, optimizer)
        seconds = time.perf_counter() - start
        _, test_hits, test_seen = run_epoch(network, test_loader, CPU)
        print(
            f"epoch {epoch + 1}/{epochs}  loss {loss / seen:.4f}  train {hits / seen:.2%}"
            f"  test {test_hits / test_seen:.2%}  {seconds:.2f} s  {seen / seconds:,.0f} images/s",
            flush=True,
        )


def against_bare(kind: str, data_dir: str, repeats: int) -> list[list[str]]:
    """Compare a lesson with its bare program, in seconds: an epoch, and from command to exit.

    Raises:
        SystemExit: if they print different losses.
    """
    lesson = COMPARED[kind].lesson
    ranks = COMPARED[kind].ranks
    flags = COMPARED[kind].flags
    threads = threads_of(ranks)
    bare_flags = (kind, "mnist", data_dir, str(BATCH_SIZE), str(EPOCHS))

    def run_the_lesson() -> tuple[float, str]:
        return run_lesson(lesson, data_dir, *flags, ranks=ranks, OMP_NUM_THREADS=threads)

    def run_bare() -> tuple[float, str]:
        bare = ROOT / "tests" / "bare.py"
        return run(*torchrun(ranks), bare, *bare_flags, OMP_NUM_THREADS=threads)

    epochs = []
    whole = []
    losses = []
    for runs in in_turn(kind, repeats, run_the_lesson, run_bare):
        epochs.append(median([warm_seconds(output) for _, output in runs]))
        whole.append(median([seconds for seconds, _ in runs]))
        last_output = runs[-1][1]
        losses.append(re.findall(r"^epoch .*  loss ([\d.]+)", last_output, re.M))
    if losses[0] != losses[1]:
        sys.exit(f"error: {lesson}.py prints the losses {losses[0]}, bare.py {losses[1]}")
    words = " ".join([f"{lesson}.py", *flags])
    what = f"{words}, {ranks} ranks" if ranks else words
    measured_epochs = f"{epochs[0]:.3f} s, {epochs[1]:.3f} s"
    measured_whole = f"{whole[0]:.2f} s, {whole[1]:.2f} s"
    return [
        cells(f"epoch: {what}; bare", measured_epochs, epochs[0] / epochs[1], at_most=1.15),
        cells(f"command to exit: {what}; bare", measured_whole, whole[0] / whole[1], at_most=1.1),
    ]


def naive(data_dir: str, repeats: int) -> list[list[str]]:
    """Compare all of single_gpu.py with `naive_program`, from command to exit, in seconds."""
    lesson, other = medians(
        "naive",
        repeats,
        lambda: run_lesson("single_gpu", data_dir)[0],
        lambda: run(__file__, "--naive", "--data_dir", data_dir)[0],
    )
    what = "command to exit: single_gpu.py; a program with 8 DataLoader workers"
    return [cells(what, f"{lesson:.2f} s, {other:.2f} s", lesson / other)]


def loader(data_dir: str, repeats: int) -> list[list[str]]:
    """Compare single_gpu.py's DataLoader with torchvision's single images, in images/s."""
    fast = lesson_loader(load("mnist", data_dir)[0])
    some_images = Subset(torchvision_mnist(data_dir, train=True), range(5000))
    slow = DataLoader(some_images, BATCH_SIZE, shuffle=True)

    def speed(batches: DataLoader) -> float:
        start = time.perf_counter()
        images = sum(len(labels) for _, labels in batches)
        return images / (time.perf_counter() - start)

    speed(fast)  # warm up
    speed(slow)
    ours, theirs = medians("loader", repeats, lambda: speed(fast), lambda: speed(slow))
    measured = f"{ours:,.0f} images/s, {theirs:,.0f} images/s"
    what = "single_gpu.py's DataLoader; torchvision's MNIST"
    return [cells(what, measured, ours / theirs, at_least=100)]


def start_up(data_dir: str, repeats: int) -> list[list[str]]:
    """Compare DDP's time from command to first step, on two ranks, with its limit, in seconds."""
    source = (ROOT / "playground" / "distributed_data_parallel.py").read_text()
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

        first, torch_import = medians(
            "start_up", repeats, first_step, lambda: run("-c", "import torch")[0]
        )
    limit = 2 * torch_import + 2
    measured = f"{first:.2f} s, 2 x {torch_import:.2f} s + 2 s = {limit:.2f} s"
    what = "distributed_data_parallel.py -g 2 to its first step; 2 x `import torch` + 2 s"
    return [cells(what, measured, first / limit, at_most=1)]


def bucket(data_dir: str, repeats: int) -> list[list[str]]:
    """Compare an epoch of manual_data_parallel.py --bucket with one of DDP, in seconds."""
    one, ddp, many = medians(
        "bucket",
        repeats,
        lambda: epoch_seconds("manual_data_parallel", data_dir, "-g", "2", "--bucket"),
        lambda: epoch_seconds("distributed_data_parallel", data_dir, "-g", "2"),
        lambda: epoch_seconds("manual_data_parallel", data_dir, "-g", "2"),
    )
    what = "epoch: manual_data_parallel.py -g 2 --bucket; distributed_data_parallel.py -g 2"
    measured = f"{one:.3f} s, {ddp:.3f} s; without --bucket {many:.3f} s"
    return [cells(what, measured, one / ddp, at_most=1.15)]


def two_processes(data_dir: str, repeats: int) -> list[list[str]]:
    """Compare DDP in two processes with single_gpu.py, one thread in each, in images/s."""
    flags = ("--model", "cnn", "--batch_size", "512")

    def speed(name: str, *more: str, threads: int) -> float:
        _, output = run_lesson(name, data_dir, *flags, *more, OMP_NUM_THREADS=str(threads))
        return median(warm_speeds(output))

    ddp, single = medians(
        "two_processes",
        repeats,
        lambda: speed("distributed_data_parallel", "-g", "2", threads=2),  # its ranks divide them
        lambda: speed("single_gpu", threads=1),
    )
    what = f"distributed_data_parallel.py -g 2; single_gpu.py; {' '.join(flags)}, 1 thread each"
    measured = f"{ddp:,.0f} images/s, {single:,.0f} images/s"
    return [cells(what, measured, ddp / single, at_least=1.7)]


def two_stages(data_dir: str, repeats: int) -> list[list[str]]:
    """Compare a pipeline of two ranks with single_gpu.py, one thread in each, in images/s."""
    flags = ("--width", "512", "--layers", "8", "--batch_size", "2048")

    def speed(name: str, ranks: int) -> float:
        _, output = run_lesson(name, data_dir, *flags, ranks=ranks, OMP_NUM_THREADS="1")
        return median(warm_speeds(output))

    pipeline, single = medians(
        "two_stages", repeats, lambda: speed("manual_pipeline", 2), lambda: speed("single_gpu", 0)
    )
    what = f"manual_pipeline.py, 2 ranks; single_gpu.py; {' '.join(flags)}, 1 thread each"
    measured = f"{pipeline:,.0f} images/s, {single:,.0f} images/s"
    return [cells(what, measured, pipeline / single, at_least=1.3)]


def by_hand(data_dir: str, repeats: int) -> list[list[str]]:
    """Compare an epoch of tensor parallelism by hand with one of DTensor's, in seconds."""

    def seconds(by: str, *flags: str) -> float:
        return epoch_seconds("tensor_parallel", data_dir, "--by", by, *flags, ranks=2)

    hand, dtensor, narrow_hand, narrow_dtensor = medians(
        "by_hand",
        repeats,
        lambda: seconds("hand", *WIDE),
        lambda: seconds("dtensor", *WIDE),
        lambda: seconds("hand"),
        lambda: seconds("dtensor"),
    )
    measured = f"{hand:.3f} s, {dtensor:.3f} s"
    measured += f"; default flags {narrow_hand:.3f} s, {narrow_dtensor:.3f} s"
    what = f"epoch: tensor_parallel.py by hand; --by dtensor; 2 ranks, {' '.join(WIDE)}"
    return [cells(what, measured, hand / dtensor, at_most=1.2)]


def ring(data_dir: str, repeats: int) -> list[list[str]]:
    """Compare ring attention on one rank with PyTorch's attention, in seconds. It reads no data."""
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
    by_ring, by_pytorch = medians("ring", repeats, lambda: seconds(ours), lambda: seconds(theirs))
    dist.destroy_process_group()
    measured = f"{by_ring:.3f} s, {by_pytorch:.3f} s"
    return [cells("RingAttention, 1 rank; PyTorch's attention", measured, by_ring / by_pytorch)]


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
    """Compare the memory that the loader takes with the images in it, in bytes."""

    def growth() -> int:  # a process that spawn starts has imported this file and done nothing else
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
            return fresh.submit(loader_growth, data_dir).result()

    images = sum(part.images.nbytes for part in load("mnist", data_dir))
    [peak] = medians("loader_memory", repeats, growth)
    measured = f"{peak / 1e6:.0f} MB, {images / 1e6:.0f} MB"
    what = "memory of load() and a pass over the DataLoader; its images"
    return [cells(what, measured, peak / images, at_most=1.5)]


OTHERS = (naive, loader, start_up, bucket, two_processes, two_stages, by_hand, ring, loader_memory)
ROWS = {kind: functools.partial(against_bare, kind) for kind in COMPARED}
ROWS |= {row.__name__: row for row in OTHERS}


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
    names = ", ".join(ROWS)
    add("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="NAME", help=names)
    add("--naive", action="store_true", help="be the program of the row naive, and no more")
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats}: must be 1 or more")
    fetch("mnist", args.data_dir)  # before any measurement
    if args.naive:
        train_set = torchvision_mnist(args.data_dir, train=True)
        test_set = torchvision_mnist(args.data_dir, train=False)
        naive_program(train_set, test_set)
        return

    print(f"{machine()}; {args.repeats} repeats\n")
    print("| row | what | measured (medians) | ratio | target | met |")
    print("|---|---|---|---|---|---|", flush=True)
    for name in args.only:
        for line in ROWS[name](args.data_dir, args.repeats):
            print("|", " | ".join([name, *line]), "|", flush=True)


if __name__ == "__main__":
    main()
