"""Measure two lessons and the same training written in other ways, on the CPU.

    python tests/bench_against_others.py                            # MNIST and all programs
    python tests/bench_against_others.py --model cnn --repeats 1
    python tests/bench_against_others.py --dataset digits --epochs 1 --repeats 1    # a quick trial

It prints a Markdown table.

The programs, for --only, train the same model with the same global batch, learning rate and number
of epochs:

    single_gpu      playground/single_gpu.py
    ddp             playground/distributed_data_parallel.py -g 2
    torchvision     the loop of single_gpu.py with the data of most tutorials: a shuffling
                    DataLoader, and torchvision converts and normalises each image when it is read
    accelerate      Hugging Face accelerate with the same DataLoader, in one process
    accelerate_2    the same in two processes, which torchrun starts, because `accelerate launch
                    --cpu --num_processes 2` starts only one process unless it uses MPI

They run in turn, again and again (single_gpu, ddp, ..., single_gpu, ddp, ...). Do not use the
machine for anything else meanwhile. The table has three figures for each program: the median of the
images/s in training, over all epochs except a run's first; the seconds from command to exit, with
imports and loading; and the test accuracy after the last epoch. accelerate is optional. If a
program fails, its row has the error, the others are measured, and the exit status is 1. After
Ctrl-C the table has what was measured by then.
"""

import argparse
import importlib.util
import re
import sys
import time
from statistics import median

import torch
from benchmark import ADAM, ROOT, epoch_lines, machine, naive_program, run, torchvision_mnist
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from common.data import DATA_DIR, fetch, load
from common.models import MODELS

SINGLE = ROOT / "playground" / "single_gpu.py"
DDP = ROOT / "playground" / "distributed_data_parallel.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
PROGRAMS = {  # name: processes, command
    "single_gpu": (1, (SINGLE, "--device", "cpu")),
    "ddp": (2, (DDP, "--device", "cpu", "-g", "2")),
    "torchvision": (1, (__file__, "--be", "torchvision")),
    "accelerate": (1, (__file__, "--be", "accelerate")),
    "accelerate_2": (2, (*TORCHRUN, __file__, "--be", "accelerate")),
}


def images_one_by_one(dataset: str, data_dir: str) -> tuple[Dataset, Dataset]:
    """Return the training set and the test set.

    Their items are pairs of an image, float32 (1, 28, 28), and its label.
    """
    if dataset == "mnist":
        return torchvision_mnist(data_dir, train=True), torchvision_mnist(data_dir, train=False)
    # scikit-learn's digits are tensors already. That is enough for a trial of this script, but no
    # transform is timed.
    parts = load(dataset, data_dir)
    return tuple(list(zip(part.images, part.labels, strict=True)) for part in parts)


def accelerated(
    train_set: Dataset, test_set: Dataset, model: str, epochs: int, batch_size: int
) -> None:
    """Train, test and report with accelerate, in as many processes as were started.

    The arguments are those of `naive_program`.
    """
    from accelerate import Accelerator  # here, because the other programs do not need it

    accelerator = Accelerator(cpu=True)
    processes = accelerator.num_processes
    torch.set_num_threads(max(1, torch.get_num_threads() // processes))  # they divide the cores
    torch.manual_seed(0)
    per_process_batch = batch_size // processes
    network = MODELS[model]()
    network, optimizer, train_loader, test_loader = accelerator.prepare(
        network,
        torch.optim.Adam(network.parameters(), **ADAM),
        DataLoader(train_set, per_process_batch, shuffle=True, drop_last=True),
        DataLoader(test_set, 1000),
    )
    for epoch in range(epochs):
        network.train()
        start = time.perf_counter()
        for images, labels in train_loader:
            loss = F.cross_entropy(network(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        seconds = time.perf_counter() - start
        speed = len(train_loader) * per_process_batch * processes / seconds

        network.eval()
        hits = 0
        for images, labels in test_loader:
            with torch.no_grad():
                guesses = network(images).argmax(dim=1)
            # Each test image then counts once.
            guesses, labels = accelerator.gather_for_metrics((guesses, labels))
            hits += (guesses == labels).sum().item()
        accuracy = hits / len(test_set)
        accelerator.print(
            f"epoch {epoch + 1}/{epochs}  test {accuracy:.2%}"
            f"  {seconds:.2f} s  {speed:,.0f} images/s"
        )
    accelerator.end_training()


def reason(error: BaseException) -> str:
    """Return the last line of a failed program's output that names an error.

    If no line does, return the last line.
    """
    lines = str(error).strip().splitlines()
    # After the errors of the ranks, torchrun prints a summary.
    sign = r"(\[rank\d+\]: )?[\w.]+(Error|Exception)(: \S.*)?|error: .+"
    named = [line for line in lines[1:] if re.fullmatch(sign, line)]
    return (named or lines)[-1].replace("|", "\\|")


def print_table(
    runs: dict[str, list[tuple[float, list[tuple[float, int]]]]], failures: dict[str, str]
) -> None:
    """Print a row for each program, and whether their test accuracies agree.

    Args:
        runs: of each program, for each run its seconds, and each epoch's test accuracy in % and
            images/s.
        failures: of each program that could not run, the reason.
    """
    accuracies = []
    print("| program | processes | images/s | seconds, command to exit | test accuracy |")
    print("|---|---|---|---|---|")
    for name, measured in runs.items():
        row = [failures.get(name, "not measured"), "-", "-"]
        if measured and name not in failures:
            speeds = []
            for _, epochs in measured:
                warm = epochs[1:] or epochs  # of a single epoch, that one
                speeds += [speed for _, speed in warm]
            seconds = median([seconds for seconds, _ in measured])
            accuracy = median([epochs[-1][0] for _, epochs in measured])
            accuracies.append(accuracy)
            row = [f"{median(speeds):,.0f}", f"{seconds:.2f}", f"{accuracy:.2f}%"]
        print("|", " | ".join([name, str(PROGRAMS[name][0]), *row]), "|")
    if len(accuracies) > 1:
        apart = max(accuracies) - min(accuracies)
        verdict = "agree within 1 point" if apart <= 1 else "do NOT agree within 1 point"
        print(f"\nThe test accuracies {verdict}: they are {apart:.2f} points apart.")


def main() -> int:
    """Measure the programs that were asked for, in turn, and print the table.

    Returns the exit status.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=MODELS, default="mlp")
    add("--dataset", choices=["mnist", "digits"], default="mnist")
    add("--data_dir", default=DATA_DIR, help="default: data/ beside playground/")
    add("--epochs", type=int, default=3)
    add("--batch_size", type=int, default=128, help="images in a step, over all processes")
    add("--repeats", type=int, default=5, help="runs of each program")
    names = ", ".join(PROGRAMS)
    add("--only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), metavar="NAME", help=names)
    add("--be", choices=["torchvision", "accelerate"], help="be this program, and no more")
    args = parser.parse_args()
    for name in ("epochs", "batch_size", "repeats"):
        value = getattr(args, name)
        if value < 1:
            parser.error(f"--{name} {value}: must be 1 or more")
    if args.be:
        sets = images_one_by_one(args.dataset, args.data_dir)
        options = {"model": args.model, "epochs": args.epochs, "batch_size": args.batch_size}
        if args.be == "accelerate":
            accelerated(*sets, **options)
        else:
            naive_program(*sets, **options, workers=0)
        return 0

    fetch(args.dataset, args.data_dir, args.batch_size)  # before any measurement
    what = f"{args.model}, {args.dataset}, batch {args.batch_size}, {args.epochs} epochs"
    print(f"{machine()}; {what}; {args.repeats} repeats\n", flush=True)
    runs = {name: [] for name in args.only}
    failures = {}
    interrupted = False
    if importlib.util.find_spec("accelerate") is None:
        missing = "not installed: pip install accelerate"
        failures = {"accelerate": missing, "accelerate_2": missing}
    same_for_all = ("model", "dataset", "data_dir", "epochs", "batch_size")
    flags = [f"--{name}={getattr(args, name)}" for name in same_for_all]
    threads = str(torch.get_num_threads())  # of each program; its processes divide them
    bar = tqdm([*args.only] * args.repeats, leave=False, disable=None)  # None: only on a terminal
    try:
        for name in bar:
            if name in failures:
                continue
            bar.set_description(name)
            try:
                seconds, output = run(*PROGRAMS[name][1], *flags, OMP_NUM_THREADS=threads)
                runs[name].append((seconds, epoch_lines(output, args.epochs)))
            except (SystemExit, AssertionError) as error:
                failures[name] = f"failed: {reason(error)}"
    except KeyboardInterrupt:
        interrupted = True
    bar.close()
    print_table(runs, failures)
    if interrupted:
        print("interrupted", file=sys.stderr)
        return 130
    return int(any(why.startswith("failed") for why in failures.values()))


if __name__ == "__main__":
    sys.exit(main())
