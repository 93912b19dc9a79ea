"""Time the lessons on the CPU against what they should cost, on MNIST. Prints a Markdown table; pytest doesn't run it.

    python tests/benchmark.py                               # all rows, five repeats of each, many minutes
    python tests/benchmark.py --only epoch loader           # some of them
    python tests/benchmark.py --data_dir data --repeats 1

It needs MNIST, in data/ or --data_dir, and fetches it if it can. Leave the machine alone meanwhile. What a row compares
is measured in turn (A, B, A, B, ...); the table has the medians and their ratio, the first divided by the second:

    end_to_end  single_gpu.py, command to exit, and a naive program that trains the same way on images which eight
                DataLoader workers decode and normalise one by one (`python tests/benchmark.py --naive` is that program)
    epoch       single_gpu.py's training epoch, and a bare loop over batches that are already cut
    loader      images/s of single_gpu.py's DataLoader alone, and of torchvision's MNIST, one image at a time
    ddp_cost    an epoch of distributed_data_parallel.py with one process, and of single_gpu.py
    start_up    distributed_data_parallel.py -g 2, command to first optimizer step, and what it may take:
                twice `python -c "import torch"`, once for the command and once for its ranks, and 2 s
    bucket      an epoch of manual_data_parallel.py -g 2 with --bucket, and without it; an epoch of DDP to compare
"""

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset
from torchvision import transforms
from torchvision.datasets import MNIST
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ and playground/ from any working directory
from common.data import DATA_DIR, fetch, load, whole_batch
from common.models import MLP
from playground.single_gpu import run_epoch

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
EPOCHS, BATCH_SIZE, LR = 3, 128, 1e-3  # the lessons' defaults
TRAINED = 60_000 // BATCH_SIZE * BATCH_SIZE  # images in an epoch: drop_last drops the rest
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
    done = subprocess.run(
        [sys.executable, *map(str, command)], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    seconds = time.monotonic() - start
    if done.returncode:
        sys.exit(f"error: {' '.join(map(str, command))} failed with status {done.returncode}:\n{done.stderr}")
    return seconds, done.stdout


def run_lesson(name: str, data_dir: str, *flags: str, **variables: str) -> tuple[float, str]:
    """Run a lesson on the CPU and MNIST, by its name in playground/. Returns what `run` does."""
    common = ("--device", "cpu", "--dataset", "mnist", "--data_dir", data_dir, "--epochs", str(EPOCHS))
    return run(ROOT / "playground" / f"{name}.py", *common, *flags, **variables)


def epoch_lines(output: str) -> list[tuple[float, float]]:
    """Return each epoch's test accuracy in % and training time in seconds, from what a lesson or `naive` printed."""
    found = re.findall(r"^epoch .*  test ([\d.]+)%  [\d.]+ s  ([\d,]+) images/s$", output, re.M)
    assert len(found) == EPOCHS, f"{EPOCHS} epoch lines expected, these found: {found} in\n{output}"
    # from images/s, because the seconds are printed with two decimals only
    return [(float(test), TRAINED / int(speed.replace(",", ""))) for test, speed in found]


def epoch_seconds(name: str, data_dir: str, *flags: str) -> float:
    """Run a lesson and return the seconds that an epoch takes once it is warm, the median of all but the first."""
    # as many threads in each lesson, which its ranks share
    _, output = run_lesson(name, data_dir, *flags, OMP_NUM_THREADS=str(torch.get_num_threads()))
    return median(seconds for _, seconds in epoch_lines(output)[1:])


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


def lesson_loader(data_dir: str) -> DataLoader:
    """Return the training DataLoader of single_gpu.py, in the order of its first epoch."""
    train_set, _ = load("mnist", data_dir)
    sampler = RandomSampler(train_set, generator=torch.Generator().manual_seed(0))
    return DataLoader(train_set, BATCH_SIZE, sampler=sampler, drop_last=True, collate_fn=whole_batch)


def naive(data_dir: str) -> None:
    """Train, test and report as single_gpu.py does, on images that eight workers read one by one."""
    torch.manual_seed(0)
    train_set, test_set = torchvision_mnist(data_dir, train=True), torchvision_mnist(data_dir, train=False)
    train_loader = DataLoader(train_set, BATCH_SIZE, shuffle=True, drop_last=True, num_workers=8)
    test_loader = DataLoader(test_set, 1000, num_workers=8)
    model = MLP()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    for epoch in range(EPOCHS):
        start = time.perf_counter()
        loss, hits, seen = run_epoch(model, train_loader, CPU, optimizer).tolist()
        seconds = time.perf_counter() - start
        _, test_hits, test_seen = run_epoch(model, test_loader, CPU).tolist()
        line = f"epoch {epoch + 1}/{EPOCHS}  loss {loss / seen:.4f}  train {hits / seen:.2%}"
        line += f"  test {test_hits / test_seen:.2%}  {seconds:.2f} s  {seen / seconds:,.0f} images/s"
        print(line, flush=True)


def end_to_end(data_dir: str, repeats: int) -> list[str]:
    """Compare all of single_gpu.py with `naive`, each from command to exit, in seconds."""
    accuracies = {"lesson": [], "naive": []}

    def lesson_seconds() -> float:
        seconds, output = run_lesson("single_gpu", data_dir)
        accuracies["lesson"].append(epoch_lines(output)[-1][0])
        return seconds

    def naive_seconds() -> float:
        seconds, output = run(__file__, "--naive", "--data_dir", data_dir)
        accuracies["naive"].append(epoch_lines(output)[-1][0])
        return seconds

    lesson, other = medians("end_to_end", repeats, lesson_seconds, naive_seconds)
    ours, theirs = median(accuracies["lesson"]), median(accuracies["naive"])
    equal = "equal within 1 point" if abs(ours - theirs) <= 1 else "NOT equal within 1 point"
    measured = f"{lesson:.2f} s, {other:.2f} s; test accuracy {ours:.2f}%, {theirs:.2f}%: {equal}"
    return cells("single_gpu.py, naive program", measured, lesson / other, at_most=1 / 8)


def epoch(data_dir: str, repeats: int) -> list[str]:
    """Compare a training epoch of single_gpu.py with a bare loop over the same batches, in seconds."""
    loader = lesson_loader(data_dir)
    batches = list(loader)

    def bare_loop(model: MLP, optimizer: torch.optim.Optimizer) -> None:
        for images, labels in batches:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def seconds(train: Callable[[MLP, torch.optim.Optimizer], Tensor | None]) -> float:
        torch.manual_seed(0)
        model = MLP()
        optimizer = torch.optim.Adam(model.parameters(), lr=LR)
        start = time.perf_counter()
        train(model, optimizer)
        return time.perf_counter() - start

    def lesson_epoch(model: MLP, optimizer: torch.optim.Optimizer) -> Tensor:
        return run_epoch(model, loader, CPU, optimizer)

    seconds(lesson_epoch), seconds(bare_loop)  # the first ones also start threads and fill caches
    lesson, bare = medians("epoch", repeats, lambda: seconds(lesson_epoch), lambda: seconds(bare_loop))
    return cells("single_gpu.py's epoch, bare loop", f"{lesson:.3f} s, {bare:.3f} s", lesson / bare, at_most=1.15)


def loader(data_dir: str, repeats: int) -> list[str]:
    """Compare single_gpu.py's DataLoader with torchvision's images read one by one, in images/s."""
    fast = lesson_loader(data_dir)
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
    return cells(what, f"{ddp:.3f} s, {single:.3f} s", ddp / single, at_most=1.25)


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
            _, output = run(copy, *flags, PYTHONPATH=str(ROOT))
            ends = [float(end) for end in re.findall(r"^first step ([\d.]+)$", output, re.M)]
            assert len(ends) == 2, f"two ranks, but these first steps: {ends} in\n{output}"
            return max(ends) - start

        first, torch_import = medians("start_up", repeats, first_step, lambda: run("-c", "import torch")[0])
    limit = 2 * torch_import + 2
    measured = f"{first:.2f} s, 2 x {torch_import:.2f} s + 2 s = {limit:.2f} s"
    what = "distributed_data_parallel.py -g 2 to its first step, 2 x `import torch` + 2 s"
    return cells(what, measured, first / limit, at_most=1)


def bucket(data_dir: str, repeats: int) -> list[str]:
    """Compare an epoch of manual_data_parallel.py with and without --bucket, in seconds, and tell that of DDP."""
    one, many, ddp = medians(
        "bucket",
        repeats,
        lambda: epoch_seconds("manual_data_parallel", data_dir, "-g", "2", "--bucket"),
        lambda: epoch_seconds("manual_data_parallel", data_dir, "-g", "2"),
        lambda: epoch_seconds("distributed_data_parallel", data_dir, "-g", "2"),
    )
    what = "epoch of manual_data_parallel.py -g 2 with --bucket, without; of distributed_data_parallel.py -g 2"
    return cells(what, f"{one:.3f} s, {many:.3f} s; {ddp:.3f} s", one / many)


ROWS = {row.__name__: row for row in (end_to_end, epoch, loader, ddp_cost, start_up, bucket)}


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
        return naive(args.data_dir)

    machine = f"{os.cpu_count()} CPUs, {torch.get_num_threads()} threads, {platform.system()} {platform.machine()}"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    load_average = os.getloadavg()[0]  # tells whether other programs were running
    print(f"{machine}, {versions}; load {load_average:.1f} at the start; {args.repeats} repeats\n")
    print("| row | what | measured (medians) | ratio | target | met |\n|---|---|---|---|---|---|", flush=True)
    for name in args.only:
        print("|", " | ".join([name, *ROWS[name](args.data_dir, args.repeats)]), "|", flush=True)


if __name__ == "__main__":
    main()
