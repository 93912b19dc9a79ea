"""Time the lessons on the CPU against what they should cost, on MNIST. Prints a Markdown table; pytest doesn't run it.

    python tests/benchmark.py                               # all rows, five repeats of each, many minutes
    python tests/benchmark.py --only epoch loader           # some of them
    python tests/benchmark.py --data_dir data --repeats 1

It needs MNIST, in data/ or --data_dir, and fetches it if it can. Leave the machine alone meanwhile. What a row compares
is measured in turn (A, B, A, B, ...); the table has the medians and their ratio, the first divided by the second:

    end_to_end  single_gpu.py, command to exit, and bare.py, which computes the same without DataLoader, flags and
                messages; also told, but not judged: a naive program that trains on images which eight DataLoader
                workers decode and normalise one by one (`python tests/benchmark.py --naive` is that program)
    epoch       single_gpu.py's training epoch, and a bare loop over batches that are already cut
    loader      images/s of single_gpu.py's DataLoader alone, and of torchvision's MNIST, one image at a time
    ddp_cost    an epoch of distributed_data_parallel.py with one process, and of single_gpu.py
    start_up    distributed_data_parallel.py -g 2, command to first optimizer step, and what it may take:
                twice `python -c "import torch"`, once for the command and once for its ranks, and 2 s
    bucket      an epoch of manual_data_parallel.py -g 2 --bucket, and of distributed_data_parallel.py -g 2; also told,
                but not judged: an epoch of manual_data_parallel.py -g 2 without --bucket
    two_processes
                images/s of distributed_data_parallel.py with two processes, and of single_gpu.py, one thread in each
                process, with work enough for a message to pay: --model cnn --batch_size 512
    fsdp_cost   an epoch of fully_sharded_data_parallel.py with one rank, and of distributed_data_parallel_torchrun.py
                with one, --width 1024 --batch_size 512; also told, but not judged: both with the defaults, where a step
                has so little to compute that it is Python's work which is compared
    by_hand     an epoch of tensor_parallel.py with two ranks, by hand, and with DTensor (--by dtensor), --width 1024
                --batch_size 512; also told, but not judged: both with the defaults
    loader_memory
                how far single_gpu.py's data and a pass over its DataLoader raise the memory of a fresh process at the
                peak, and the bytes of the images, float32, of training and test set
"""

import argparse
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

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset
from torchvision import transforms
from torchvision.datasets import MNIST
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ and playground/ from any working directory
from common.data import DATA_DIR, Images, fetch, load, whole_batch
from common.models import MLP, MODELS
from playground.single_gpu import run_epoch

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
EPOCHS, BATCH_SIZE, LR = 3, 128, 1e-3  # the lessons' defaults
TRAINED = 60_000 // BATCH_SIZE * BATCH_SIZE  # images in an epoch: drop_last drops the rest
ADAM = {"lr": LR, "eps": 1e-6, "fused": True}  # the lessons' optimizer
WIDE = ("--width", "1024", "--batch_size", "512")  # work enough for what sharding and cutting cost
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run(*command: str | Path, **variables: str) -> tuple[float, str]:
    """Run Python with these arguments and, on top of ours, these environment variables.

    Returns:
        Seconds from command to exit, and what it printed on stdout.

    Raises:
        SystemExit: if it fails, with what it printed on stderr.
    """
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES} | variables
    start = time.monotonic()
    with subprocess.Popen(
        [sys.executable, *map(str, command)],
        env=environment, text=True, process_group=0,  # Ctrl-C comes here only
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            output, errors = process.communicate()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)  # not SIGKILL: what has started workers has to end them
            process.communicate()
            raise
    seconds = time.monotonic() - start
    if process.returncode:
        sys.exit(f"error: {' '.join(map(str, command))} failed with status {process.returncode}:\n{errors}")
    return seconds, output


def run_lesson(name: str, data_dir: str, *flags: str, ranks: int = 0, **variables: str) -> tuple[float, str]:
    """Run a lesson on the CPU and MNIST, by its name in playground/, or so many ranks by torchrun. Returns as `run`."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)) if ranks else ()
    common = ("--device", "cpu", "--dataset", "mnist", "--data_dir", data_dir, "--epochs", str(EPOCHS))
    return run(*torchrun, ROOT / "playground" / f"{name}.py", *common, *flags, **variables)


def epoch_lines(output: str, epochs: int = EPOCHS) -> list[tuple[float, int]]:
    """Return each epoch's test accuracy in % and training speed in images/s, from what a lesson or `naive` printed."""
    found = re.findall(r"^epoch .*  test ([\d.]+)%  [\d.]+ s  ([\d,]+) images/s$", output, re.M)
    assert len(found) == epochs, f"{epochs} epoch lines expected, these found: {found} in\n{output}"
    return [(float(test), int(speed.replace(",", ""))) for test, speed in found]


def warm_speeds(name: str, data_dir: str, *flags: str, threads: int | None = None, ranks: int = 0) -> list[int]:
    """Run a lesson and return the images/s of each epoch but the first.

    Args:
        name, data_dir, flags, ranks: as for `run_lesson`.
        threads: of the lesson, which its ranks share, or of each of torchrun's ranks; None means as many as torch takes
            by default.
    """
    threads = threads or max(1, torch.get_num_threads() // (ranks or 1))  # torchrun's ranks don't share by themselves
    _, output = run_lesson(name, data_dir, *flags, ranks=ranks, OMP_NUM_THREADS=str(threads))
    return [speed for _, speed in epoch_lines(output)[1:]]


def epoch_seconds(name: str, data_dir: str, *flags: str, ranks: int = 0) -> float:
    """Run a lesson with the default batch size and return the median of the seconds that its warm epochs take."""
    # from images/s, because the seconds are printed with two decimals only
    return median(TRAINED / speed for speed in warm_speeds(name, data_dir, *flags, ranks=ranks))


def medians(name: str, repeats: int, *measurements: Callable[[], float]) -> list[float]:
    """Take all measurements in turn, again and again, so that a slow minute hits them alike. Returns their medians."""
    rounds = tqdm(range(repeats), desc=name, leave=False, file=sys.stderr)
    return [median(values) for values in zip(*[[measure() for measure in measurements] for _ in rounds], strict=True)]


def cells(
    what: str, measured: str, ratio: float, at_most: float | None = None, at_least: float | None = None
) -> list[str]:
    """Return the cells of a row behind its name: what, measured, ratio, target, and whether the target is met."""
    if at_most is None and at_least is None:
        return [what, measured, f"{ratio:.4g}", "-", "-"]
    target = f"at most {at_most:g}" if at_least is None else f"at least {at_least:g}"
    met = ratio <= at_most if at_least is None else ratio >= at_least
    return [what, measured, f"{ratio:.4g}", target, "met" if met else "missed"]


def torchvision_mnist(data_dir: str, train: bool) -> Dataset:
    """Return MNIST as tutorials read it: each image becomes a tensor and is normalised when it is asked for."""
    steps = [transforms.ToTensor(), transforms.Normalize(0.1307, 0.3081)]
    return MNIST(data_dir, train=train, transform=transforms.Compose(steps))


def lesson_loader(train_set: Images) -> DataLoader:
    """Return the training DataLoader of single_gpu.py, in the order of its first epoch."""
    sampler = RandomSampler(train_set, generator=torch.Generator().manual_seed(0))
    return DataLoader(train_set, BATCH_SIZE, sampler=sampler, drop_last=True, collate_fn=whole_batch)


def naive(
    train_set: Dataset,
    test_set: Dataset,
    model: str = "mlp",
    epochs: int = EPOCHS,
    batch_size: int = BATCH_SIZE,
    workers: int = 8,
) -> None:
    """Train, test and report as single_gpu.py does, on images that are read one by one.

    Args:
        train_set, test_set: of pairs of an image, float32 (1, 28, 28), and its label.
        model: a key of common.models.MODELS.
        epochs, batch_size: as the lessons' flags.
        workers: processes that read the images; 0 means this one.
    """
    torch.manual_seed(0)
    train_loader = DataLoader(train_set, batch_size, shuffle=True, drop_last=True, num_workers=workers)
    test_loader = DataLoader(test_set, 1000, num_workers=workers)
    network = MODELS[model]()
    optimizer = torch.optim.Adam(network.parameters(), **ADAM)
    for epoch in range(epochs):
        start = time.perf_counter()
        loss, hits, seen = run_epoch(network, train_loader, CPU, optimizer)
        seconds = time.perf_counter() - start
        _, test_hits, test_seen = run_epoch(network, test_loader, CPU)
        line = f"epoch {epoch + 1}/{epochs}  loss {loss / seen:.4f}  train {hits / seen:.2%}"
        line += f"  test {test_hits / test_seen:.2%}  {seconds:.2f} s  {seen / seconds:,.0f} images/s"
        print(line, flush=True)


def end_to_end(data_dir: str, repeats: int) -> list[str]:
    """Compare all of single_gpu.py with tests/bare.py, from command to exit, in seconds; tell that of `naive`."""
    last = {}

    def lesson_seconds() -> float:
        seconds, output = run_lesson("single_gpu", data_dir)
        last["lesson"] = re.findall(r"loss ([\d.]+)  train [\d.]+%  test ([\d.]+)%", output)[-1]
        return seconds

    def bare_seconds() -> float:
        seconds, output = run(ROOT / "tests" / "bare.py", data_dir)
        last["bare"] = re.findall(r"^([\d.]+) [\d.]+% ([\d.]+)%$", output, re.M)[-1]
        return seconds

    def naive_seconds() -> float:
        seconds, output = run(__file__, "--naive", "--data_dir", data_dir)
        last["naive"] = ("-", f"{epoch_lines(output)[-1][0]:.2f}")
        return seconds

    lesson, bare, naive = medians("end_to_end", repeats, lesson_seconds, bare_seconds, naive_seconds)
    numbers = "; ".join(f"{name} loss {loss}, test {test}%" for name, (loss, test) in last.items())
    measured = f"{lesson:.2f} s, {bare:.2f} s, {naive:.2f} s ({numbers})"
    what = "single_gpu.py, tests/bare.py; also a naive program"
    return cells(what, measured, lesson / bare, at_most=1.1)


def epoch(data_dir: str, repeats: int) -> list[str]:
    """Compare a training epoch of single_gpu.py with a bare loop over the same batches, in seconds."""
    loader = lesson_loader(load("mnist", data_dir)[0])
    batches = list(loader)

    def bare_loop(model: MLP, optimizer: torch.optim.Optimizer) -> None:
        for images, labels in batches:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def seconds(train: Callable[[MLP, torch.optim.Optimizer], None]) -> float:
        torch.manual_seed(0)
        model = MLP()
        optimizer = torch.optim.Adam(model.parameters(), **ADAM)
        start = time.perf_counter()
        train(model, optimizer)
        return time.perf_counter() - start

    def lesson_epoch(model: MLP, optimizer: torch.optim.Optimizer) -> None:
        run_epoch(model, loader, CPU, optimizer)

    seconds(lesson_epoch), seconds(bare_loop)  # the first ones also start threads and fill caches
    lesson, bare = medians("epoch", repeats, lambda: seconds(lesson_epoch), lambda: seconds(bare_loop))
    return cells("single_gpu.py's epoch, bare loop", f"{lesson:.3f} s, {bare:.3f} s", lesson / bare, at_most=1.1)


def loader(data_dir: str, repeats: int) -> list[str]:
    """Compare single_gpu.py's DataLoader with torchvision's images read one by one, in images/s."""
    fast = lesson_loader(load("mnist", data_dir)[0])
    slow = DataLoader(Subset(torchvision_mnist(data_dir, train=True), range(5000)), BATCH_SIZE, shuffle=True)

    def speed(batches: DataLoader) -> float:
        start = time.perf_counter()
        images = sum(len(labels) for _, labels in batches)
        return images / (time.perf_counter() - start)

    speed(fast), speed(slow)  # warm up
    ours, theirs = medians("loader", repeats, lambda: speed(fast), lambda: speed(slow))
    measured = f"{ours:,.0f} images/s, {theirs:,.0f} images/s"
    return cells("single_gpu.py's DataLoader, torchvision's MNIST", measured, ours / theirs, at_least=100)


def ddp_cost(data_dir: str, repeats: int) -> list[str]:
    """Compare an epoch of DDP in a single process with one of single_gpu.py, in seconds."""
    ddp, single = medians(
        "ddp_cost",
        repeats,
        lambda: epoch_seconds("distributed_data_parallel", data_dir, "-g", "1"),
        lambda: epoch_seconds("single_gpu", data_dir),
    )
    what = "epoch of distributed_data_parallel.py -g 1, of single_gpu.py"
    return cells(what, f"{ddp:.3f} s, {single:.3f} s", ddp / single, at_most=1.2)


def start_up(data_dir: str, repeats: int) -> list[str]:
    """Compare the time from command to first step of DDP on two ranks with what it may take, in seconds."""
    source = (ROOT / "playground" / "distributed_data_parallel.py").read_text()
    step = "            optimizer.step()\n"
    assert source.count(step) == 1, f"distributed_data_parallel.py has {source.count(step)} lines {step!r}, not one"
    # os.write: print may write a line in pieces, and those of two ranks would mix
    stop = '            os.write(1, f"first step {time.monotonic()}\\n".encode())\n            os._exit(0)\n'

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

        first, torch_import = medians("start_up", repeats, first_step, lambda: run("-c", "import torch")[0])
    limit = 2 * torch_import + 2
    measured = f"{first:.2f} s, 2 x {torch_import:.2f} s + 2 s = {limit:.2f} s"
    what = "distributed_data_parallel.py -g 2 to its first step, 2 x `import torch` + 2 s"
    return cells(what, measured, first / limit, at_most=1)


def bucket(data_dir: str, repeats: int) -> list[str]:
    """Compare an epoch of manual_data_parallel.py --bucket with one of DDP, in seconds; tell that without --bucket."""
    one, ddp, many = medians(
        "bucket",
        repeats,
        lambda: epoch_seconds("manual_data_parallel", data_dir, "-g", "2", "--bucket"),
        lambda: epoch_seconds("distributed_data_parallel", data_dir, "-g", "2"),
        lambda: epoch_seconds("manual_data_parallel", data_dir, "-g", "2"),
    )
    what = "epoch of manual_data_parallel.py -g 2 --bucket, of distributed_data_parallel.py -g 2"
    return cells(what, f"{one:.3f} s, {ddp:.3f} s; without --bucket {many:.3f} s", one / ddp, at_most=1.15)


def two_processes(data_dir: str, repeats: int) -> list[str]:
    """Compare DDP in two processes with single_gpu.py, a thread in each process, in images/s."""
    flags = ("--model", "cnn", "--batch_size", "512")
    ddp, single = medians(
        "two_processes",
        repeats,
        lambda: median(warm_speeds("distributed_data_parallel", data_dir, *flags, "-g", "2", threads=1)),
        lambda: median(warm_speeds("single_gpu", data_dir, *flags, threads=1)),
    )
    what = f"distributed_data_parallel.py -g 2, single_gpu.py; {' '.join(flags)}, one thread in each process"
    return cells(what, f"{ddp:,.0f} images/s, {single:,.0f} images/s", ddp / single, at_least=1.7)


def fsdp_cost(data_dir: str, repeats: int) -> list[str]:
    """Compare an epoch of FSDP in a single rank with one of DDP, in seconds; tell those of narrow layers."""
    lessons = ("fully_sharded_data_parallel", "distributed_data_parallel_torchrun")
    fsdp, ddp, *narrow = medians(
        "fsdp_cost",
        repeats,
        *(lambda name=name: epoch_seconds(name, data_dir, *WIDE) for name in lessons),
        *(lambda name=name: epoch_seconds(name, data_dir) for name in lessons),
    )
    what = (
        f"epoch of fully_sharded_data_parallel.py, of distributed_data_parallel_torchrun.py, 1 rank; {' '.join(WIDE)}"
    )
    measured = f"{fsdp:.3f} s, {ddp:.3f} s; defaults {narrow[0]:.3f} s, {narrow[1]:.3f} s"
    return cells(what, measured, fsdp / ddp, at_most=1.3)


def by_hand(data_dir: str, repeats: int) -> list[str]:
    """Compare an epoch of tensor parallelism by hand with one of DTensor's, in seconds; tell those of narrow layers."""
    kinds = [(by, flags) for flags in (WIDE, ()) for by in ("hand", "dtensor")]
    seconds = [
        lambda by=by, flags=flags: epoch_seconds("tensor_parallel", data_dir, "--by", by, *flags, ranks=2)
        for by, flags in kinds
    ]
    hand, dtensor, *narrow = medians("by_hand", repeats, *seconds)
    measured = f"{hand:.3f} s, {dtensor:.3f} s; defaults {narrow[0]:.3f} s, {narrow[1]:.3f} s"
    what = f"epoch of tensor_parallel.py by hand, with DTensor, 2 ranks; {' '.join(WIDE)}"
    return cells(what, measured, hand / dtensor, at_most=1.2)


def loader_growth(data_dir: str) -> int:
    """Load MNIST and pass over single_gpu.py's DataLoader. Returns the growth of this process at its peak, in bytes."""

    def resident(field: str) -> int:
        return int(re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)[1]) * 1024

    before = resident("VmRSS")
    train_set, test_set = load("mnist", data_dir)  # the test set stays in memory, as in the lesson
    for _ in lesson_loader(train_set):
        pass
    return resident("VmHWM") - before


def loader_memory(data_dir: str, repeats: int) -> list[str]:
    """Compare the memory that the loader takes with the images in it, in bytes."""

    def growth() -> int:  # a process that spawn starts has imported this file and done nothing else
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
            return fresh.submit(loader_growth, data_dir).result()

    images = sum(part.images.nbytes for part in load("mnist", data_dir))
    [peak] = medians("loader_memory", repeats, growth)
    measured = f"{peak / 1e6:.0f} MB, {images / 1e6:.0f} MB"
    return cells("memory of load() and a pass over the DataLoader, its images", measured, peak / images, at_most=1.5)


ROWS = {
    row.__name__: row
    for row in (
        end_to_end, epoch, loader, ddp_cost, start_up, bucket, two_processes, fsdp_cost, by_hand, loader_memory,
    )
}  # fmt: skip


def machine() -> str:
    """Return, in a line, what figures depend on: the machine, the versions, and whether other programs were running."""
    hardware = f"{os.cpu_count()} CPUs, {torch.get_num_threads()} threads, {platform.system()} {platform.machine()}"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{hardware}, {versions}; load {os.getloadavg()[0]:.1f} at the start"


def main() -> None:
    """Measure the rows asked for and print each when it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", default=DATA_DIR, help="default: data/ beside playground/")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each kind")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="NAME", help=", ".join(ROWS))
    parser.add_argument("--naive", action="store_true", help="be the naive program of end_to_end, and no more")
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats}: must be 1 or more")
    fetch("mnist", args.data_dir)  # before any measurement
    if args.naive:
        return naive(*(torchvision_mnist(args.data_dir, train) for train in (True, False)))

    print(f"{machine()}; {args.repeats} repeats\n")
    print("| row | what | measured (medians) | ratio | target | met |\n|---|---|---|---|---|---|", flush=True)
    for name in args.only:
        print("|", " | ".join([name, *ROWS[name](args.data_dir, args.repeats)]), "|", flush=True)


if __name__ == "__main__":
    main()
