"""Measure the lessons on the CPU and MNIST against targets. It prints a Markdown table.

    python tests/benchmark.py                             # all rows, five repeats of each
    python tests/benchmark.py --only single_gpu loader    # some rows
    python tests/benchmark.py --data_dir data --repeats 1

It needs MNIST in data/ or --data_dir, and downloads it if it can. Do not use the machine for
anything else meanwhile. The two things that a row compares, A and B, are measured in turn: A, B, A,
B, ... The table has their medians and the ratio A / B. An epoch is the median of all epochs except
a run's first.

The first seven rows compare a lesson with its bare program in bare.py. Each gives two lines: an
epoch, and the whole run, from command to exit. Both programs must print the same losses. The next
four compare two lessons (see COMMANDS). In images/s and tokens/s, each process has one thread. The
last three:

    loader         images/s of single_gpu.py's DataLoader alone, and of torchvision's MNIST, which
                   reads single images
    start_up       distributed_data_parallel.py -g 2, from command to first optimizer step, and its
                   limit: 2 s and twice `python -c "import torch"`, because first the command and
                   then its ranks import torch
    loader_memory  the peak memory that loading and one pass over single_gpu.py's DataLoader add to
                   a fresh process, and the bytes of all images as float32
"""

import argparse
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median

import torch
from lessons import PATHS, ROOT
from torch.utils.data import DataLoader, RandomSampler, Subset
from torchvision import transforms
from torchvision.datasets import MNIST
from tqdm import tqdm

sys.path.append(str(ROOT))  # find common/
from common.data import DATA_DIR, fetch, load, whole_batch

EPOCHS = 3  # the lessons' defaults
BATCH_SIZE = 128
TRAINED = 60_000 // BATCH_SIZE * BATCH_SIZE  # images in an epoch: drop_last drops the rest
PROGRAMS = PATHS | {"bare": ROOT / "tests" / "bare.py"}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
LAUNCHERS = {"torchrun": (*TORCHRUN, "2"), "torchrun1": (*TORCHRUN, "1")}
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
COMMANDS = {  # A; B; the flags of both; target
    "single_gpu": "single_gpu; bare single_gpu; ; at most 1.15 s",
    "ddp": "torchrun distributed_data_parallel_torchrun; torchrun bare ddp; ; at most 1.15 s",
    "fsdp": "torchrun fully_sharded_data_parallel; torchrun bare fsdp; ; at most 1.15 s",
    "tensor": "torchrun tensor_parallel --by dtensor; torchrun bare tensor; ; at most 1.15 s",
    "pipeline": "torchrun pipeline_parallel --schedule GPipe; torchrun bare pipeline;"
    " ; at most 1.15 s",
    "transformer": "torchrun distributed_data_parallel_torchrun --model transformer;"
    " torchrun bare transformer; ; at most 1.15 s",
    "language": "torchrun1 language_model --precision full --rows 128 --constant --clip 0"
    " --lr 1e-3 --batch_size 128 --sample 1; bare language; ; at least 0.91 tokens/s",
    "bucket": "manual_data_parallel -g 2 --bucket; distributed_data_parallel -g 2;"
    " ; at most 1.15 s",
    "two_processes": "distributed_data_parallel -g 2; single_gpu;"
    " --model cnn --batch_size 512; at least 1.7 images/s",
    "two_stages": "torchrun manual_pipeline; single_gpu;"
    " --width 512 --layers 8 --batch_size 2048; at least 1.3 images/s",
    "by_hand": "torchrun tensor_parallel --by hand; torchrun tensor_parallel --by dtensor;"
    " --width 1024 --batch_size 512; at most 1.2 s",
}


def run(*command, **variables):
    """Run Python with these arguments, in our environment with these variables added.

    Returns the seconds from command to exit, and what it printed on stdout.
    """
    kept = {key: value for key, value in os.environ.items() if key not in LAUNCHED}
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env=kept | variables,
        text=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )
    seconds = time.monotonic() - start
    if done.returncode:
        sys.exit(f"error: {command} failed with status {done.returncode}:\n{done.stderr}")
    return seconds, done.stdout


def run_lesson(command, data_dir, one_thread):
    """Run a lesson on MNIST, such as "torchrun tensor_parallel", or a bare program.

    Without `one_thread` in each process, the processes divide the cores. Returns as `run`.
    """
    words = command.split()
    launcher = LAUNCHERS.get(words[0], ())
    name, *flags = words[1:] if launcher else words
    dataset = "text" if "language" in command else "mnist"
    threads = max(1, torch.get_num_threads() // (2 if words[0] == "torchrun" else 1))
    if one_thread:
        threads = 2 if "-g" in flags else 1  # the lesson's own processes divide them
    if name == "bare":
        flags += [dataset, data_dir, BATCH_SIZE, EPOCHS]
    else:
        flags += ["--device", "cpu", "--dataset", dataset, "--data_dir", data_dir]
        flags += ["--epochs", EPOCHS]
    return run(*launcher, PROGRAMS[name], *flags, OMP_NUM_THREADS=str(threads))


def speeds_of(output):
    """Return the training speed of each epoch, in images/s or tokens/s, from an output."""
    pattern = r"^epoch .* s  ([\d,]+) \w+/s"
    found = re.findall(pattern, output, re.M)
    assert len(found) == EPOCHS, output
    return [int(speed.replace(",", "")) for speed in found]


def in_turn(name, repeats, *measurements):
    """Take all measurements in turn, again and again, so that a slow minute affects all of them.

    Returns a list for each measurement.
    """
    rounds = []
    for _ in tqdm(range(repeats), desc=name, leave=False, file=sys.stderr):
        rounds.append([measure() for measure in measurements])
    return [list(values) for values in zip(*rounds, strict=True)]


def cells(what, a, b, unit, target):
    """Return the cells of a line: what, A, B, ratio, target, and whether it is met."""
    digits = 3 if unit == "s" else 0
    limit = float(target.split()[-1])
    reached = a / b <= limit if "at most" in target else a / b >= limit
    met = "met" if reached else "missed"
    numbers = [f"{value:,.{digits}f} {unit}" for value in (a, b)]
    return [what, *numbers, f"{a / b:.4g}", target, met]


def two_commands(name, data_dir, repeats):
    """Compare the epochs of two commands, and for a bare program also whole runs and losses."""
    *commands, flags, target = COMMANDS[name].split("; ")
    target, unit = target.rsplit(maxsplit=1)
    measure = []
    for command in commands:
        measure.append(partial(run_lesson, f"{command} {flags}", data_dir, unit != "s"))
    epochs, whole, losses = [], [], []
    for runs in in_turn(name, repeats, *measure):
        speeds = [median(speeds_of(output)[1:]) for _, output in runs]
        epochs.append(TRAINED / median(speeds) if unit == "s" else median(speeds))
        whole.append(median([seconds for seconds, _ in runs]))
        losses.append(re.findall(r"^epoch .*  loss ([\d.]+)", runs[-1][1], re.M))
    what = "; ".join([*commands, flags or "the default flags"])
    lines = [cells(f"epoch: {what}", *epochs, unit, target)]
    if "bare" in commands[1]:
        lines.append(cells(f"command to exit: {what}", *whole, "s", "at most 1.1"))
        if losses[0] != losses[1]:
            sys.exit(f"error: {what}: the losses {losses[0]} and {losses[1]}")
    return lines


def lesson_loader(train_set):
    """Return the training DataLoader of single_gpu.py, in the order of its first epoch."""
    sampler = RandomSampler(train_set, generator=torch.Generator().manual_seed(0))
    return DataLoader(
        train_set, BATCH_SIZE, sampler=sampler, drop_last=True, collate_fn=whole_batch
    )


def loader(data_dir, repeats):
    """Compare single_gpu.py's DataLoader with torchvision's single images."""
    fast = lesson_loader(load("mnist", data_dir)[0])
    steps = transforms.Compose([transforms.ToTensor(), transforms.Normalize(0.1307, 0.3081)])
    some_images = Subset(MNIST(data_dir, transform=steps), range(5000))
    slow = DataLoader(some_images, BATCH_SIZE, shuffle=True)

    def speed(batches):
        start = time.perf_counter()
        images = sum(len(labels) for _, labels in batches)
        return images / (time.perf_counter() - start)

    speed(fast)  # warm up
    speed(slow)
    speeds = in_turn("loader", repeats, partial(speed, fast), partial(speed, slow))
    what = "single_gpu.py's DataLoader; torchvision's MNIST"
    return [cells(what, *map(median, speeds), "images/s", "at least 100")]


def start_up(data_dir, repeats):
    """Compare DDP's time from command to first step, on two ranks, with its limit."""
    source = PATHS["distributed_data_parallel"].read_text()
    step = "            optimizer.step()\n"
    assert source.count(step) == 1
    # print() may write a line in parts, and the parts of two ranks would mix. os.write() does not.
    line = 'f"first step {time.monotonic()}\\n".encode()'
    stop = f"            os.write(1, {line})\n            os._exit(0)\n"

    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "distributed_data_parallel.py"
        copy.write_text(source.replace(step, step + stop))

        def first_step():
            flags = ("--device", "cpu", "--dataset", "mnist", "--data_dir", data_dir, "-g", "2")
            start = time.monotonic()  # the same clock in all processes of a machine
            _, output = run(copy, *flags, PYTHONPATH=str(ROOT))  # the copy finds common/
            ends = [float(end) for end in re.findall(r"^first step ([\d.]+)$", output, re.M)]
            assert len(ends) == 2, output
            return max(ends) - start

        imports = partial(run, "-c", "import torch")
        first, imported = in_turn("start_up", repeats, first_step, imports)
    limit = 2 * median([seconds for seconds, _ in imported]) + 2
    what = "distributed_data_parallel.py -g 2 to its first step; 2 x `import torch` + 2 s"
    return [cells(what, median(first), limit, "s", "at most 1")]


def loader_growth(data_dir):
    """Load MNIST and pass over single_gpu.py's DataLoader.

    Returns how much the memory of this process grew at its peak, in bytes.
    """

    def resident(field):
        status = Path("/proc/self/status").read_text()
        return int(re.search(rf"^{field}:\s+(\d+) kB$", status, re.M)[1]) * 1024

    before = resident("VmRSS")
    train_set, test_set = load("mnist", data_dir)  # the test set stays in memory, as in the lesson
    for _ in lesson_loader(train_set):
        pass
    return resident("VmHWM") - before


def loader_memory(data_dir, repeats):
    """Compare the memory that the loader takes with the images in it."""

    def growth():  # a process that spawn starts has imported this file and done nothing else
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
            return fresh.submit(loader_growth, data_dir).result()

    images = sum(part.images.nbytes for part in load("mnist", data_dir))
    [peaks] = in_turn("loader_memory", repeats, growth)
    what = "memory of load() and a pass over the DataLoader; its images"
    return [cells(what, median(peaks) / 1e6, images / 1e6, "MB", "at most 1.5")]


ROWS = {name: partial(two_commands, name) for name in COMMANDS}
ROWS |= {row.__name__: row for row in (loader, start_up, loader_memory)}


def machine():
    """Return what the figures depend on: the machine, the versions and the load, in one line."""
    cpus = f"{os.cpu_count()} CPUs, {torch.get_num_threads()} threads"
    system = f"{platform.system()} {platform.machine()}"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{cpus}, {system}, {versions}; load {os.getloadavg()[0]:.1f} at the start"


def main():
    """Measure the rows that were asked for and print each when it is known."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data_dir", default=DATA_DIR, help="default: data/ beside playground/")
    add("--repeats", type=int, default=5, help="measurements of each kind")
    add("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="NAME", help="some rows")
    args = parser.parse_args()
    fetch("mnist", args.data_dir)  # before any measurement
    print(f"{machine()}; {args.repeats} repeats\n")
    print("| row | A; B | A | B | ratio | target | met |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name in args.only:
        for line in ROWS[name](args.data_dir, args.repeats):
            print("|", " | ".join([name, *line]), "|", flush=True)


if __name__ == "__main__":
    main()
