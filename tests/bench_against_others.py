"""Measure the lessons beside the same training written in other ways, on the CPU. Prints a Markdown table.

    python tests/bench_against_others.py                            # MNIST, all programs, many minutes
    python tests/bench_against_others.py --model cnn --repeats 1
    python tests/bench_against_others.py --dataset digits --epochs 1 --repeats 1    # a quick try, without MNIST

The programs, for --only; all train the same model with the same global batch, learning rate and number of epochs:

    single_gpu      playground/single_gpu.py
    ddp             playground/distributed_data_parallel.py -g 2
    torchvision     the loop of single_gpu.py with what tutorials feed it: a shuffling DataLoader, each image turned
                    into a tensor and normalised by torchvision when it is asked for
    accelerate      Hugging Face accelerate around the same DataLoader, in one process
    accelerate_2    the same in two processes, started by torchrun, because `accelerate launch --cpu --num_processes 2`
                    starts only one where it is not told of MPI

They run in turn, again and again (single_gpu, ddp, ..., single_gpu, ddp, ...); leave the machine alone meanwhile. The
table has the images/s of training, as the median of all epochs but the first of each run; the seconds from command to
exit, imports and loading included; and the test accuracy after the last epoch. accelerate is optional. A program that
fails is told in its row, the others go on, and the exit status is 1. Ctrl-C prints what there is by then.
"""

import argparse
import importlib.util
import re
import sys
import time
from statistics import median

import torch
from benchmark import ADAM, ROOT, epoch_lines, machine, naive, run, torchvision_mnist
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from common.data import DATA_DIR, fetch, load
from common.models import MODELS

SINGLE, DDP = (ROOT / "playground" / f"{name}.py" for name in ("single_gpu", "distributed_data_parallel"))
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
PROGRAMS = {  # name: processes, command
    "single_gpu": (1, (SINGLE, "--device", "cpu")),
    "ddp": (2, (DDP, "--device", "cpu", "-g", "2")),
    "torchvision": (1, (__file__, "--be", "torchvision")),
    "accelerate": (1, (__file__, "--be", "accelerate")),
    "accelerate_2": (2, (*TORCHRUN, __file__, "--be", "accelerate")),
}


def images_one_by_one(dataset: str, data_dir: str) -> tuple[Dataset, Dataset]:
    """Return training and test set, of pairs of an image, float32 (1, 28, 28), and its label."""
    if dataset == "mnist":
        return torchvision_mnist(data_dir, train=True), torchvision_mnist(data_dir, train=False)
    # scikit-learn's digits are tensors already: enough to try this script, not to time a transform
    return tuple(list(zip(part.images, part.labels, strict=True)) for part in load(dataset, data_dir))


def accelerated(train_set: Dataset, test_set: Dataset, model: str, epochs: int, batch_size: int) -> None:
    """Train, test and report with accelerate, in as many processes as have been started. Arguments as for `naive`."""
    from accelerate import Accelerator  # here, because the other programs do without it

    accelerator = Accelerator(cpu=True)
    torch.set_num_threads(max(1, torch.get_num_threads() // accelerator.num_processes))  # they share the cores
    torch.manual_seed(0)
    share = batch_size // accelerator.num_processes
    network = MODELS[model]()
    network, optimizer, train_loader, test_loader = accelerator.prepare(
        network,
        torch.optim.Adam(network.parameters(), **ADAM),
        DataLoader(train_set, share, shuffle=True, drop_last=True),
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
        speed = len(train_loader) * share * accelerator.num_processes / seconds

        network.eval()
        hits = 0
        for images, labels in test_loader:
            with torch.no_grad():
                guesses = network(images).argmax(dim=1)
            guesses, labels = accelerator.gather_for_metrics((guesses, labels))  # each image once
            hits += (guesses == labels).sum().item()
        accuracy = hits / len(test_set)
        accelerator.print(f"epoch {epoch + 1}/{epochs}  test {accuracy:.2%}  {seconds:.2f} s  {speed:,.0f} images/s")
    accelerator.end_training()


def reason(error: BaseException) -> str:
    """Return the last line of a failed program's output that names an error; if none does, the last line."""
    lines = str(error).strip().splitlines()
    # torchrun prints some more behind its workers' errors
    sign = r"(\[rank\d+\]: )?[\w.]+(Error|Exception)(: \S.*)?|error: .+"
    named = [line for line in lines[1:] if re.fullmatch(sign, line)]
    return (named or lines)[-1].replace("|", "\\|")


def print_table(runs: dict[str, list[tuple[float, list[tuple[float, int]]]]], failures: dict[str, str]) -> None:
    """Print a row for each program, and whether their test accuracies agree.

    Args:
        runs: of each program, for each run the seconds it took, and each epoch's test accuracy in % and images/s.
        failures: of each program that could not run, the reason.
    """
    accuracies = []
    print("| program | processes | images/s | seconds, command to exit | test accuracy |\n|---|---|---|---|---|")
    for name, measured in runs.items():
        row = [failures.get(name, "not measured"), "-", "-"]
        if measured and name not in failures:
            speed = median(speed for _, epochs in measured for _, speed in epochs[1:] or epochs)
            accuracies.append(median(epochs[-1][0] for _, epochs in measured))
            row = [f"{speed:,.0f}", f"{median(seconds for seconds, _ in measured):.2f}", f"{accuracies[-1]:.2f}%"]
        print("|", " | ".join([name, str(PROGRAMS[name][0]), *row]), "|")
    if len(accuracies) > 1:
        apart = max(accuracies) - min(accuracies)
        verdict = "agree within 1 point" if apart <= 1 else "do NOT agree within 1 point"
        print(f"\nThe test accuracies {verdict}: they are {apart:.2f} points apart.")


def main() -> int:
    """Measure the programs asked for, in turn, and print the table. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--dataset", choices=["mnist", "digits"], default="mnist")
    parser.add_argument("--data_dir", default=DATA_DIR, help="default: data/ beside playground/")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=128, help="images in a step, over all processes")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each program")
    names = ", ".join(PROGRAMS)
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), metavar="NAME", help=names)
    parser.add_argument("--be", choices=["torchvision", "accelerate"], help="be this program, and no more")
    args = parser.parse_args()
    for name in ("epochs", "batch_size", "repeats"):
        if (value := getattr(args, name)) < 1:
            parser.error(f"--{name} {value}: must be 1 or more")
    if args.be:
        sets = images_one_by_one(args.dataset, args.data_dir)
        what = {"model": args.model, "epochs": args.epochs, "batch_size": args.batch_size}
        return accelerated(*sets, **what) if args.be == "accelerate" else naive(*sets, **what, workers=0)

    fetch(args.dataset, args.data_dir, args.batch_size)  # before any measurement
    print(f"{machine()}; {args.model}, {args.dataset}, batch {args.batch_size}, {args.epochs} epochs", end="; ")
    print(f"{args.repeats} repeats\n", flush=True)
    runs, failures, interrupted = {name: [] for name in args.only}, {}, False
    if importlib.util.find_spec("accelerate") is None:
        failures = dict.fromkeys(("accelerate", "accelerate_2"), "not installed: pip install accelerate")
    same = [f"--{name}={getattr(args, name)}" for name in ("model", "dataset", "data_dir", "epochs", "batch_size")]
    bar = tqdm([*args.only] * args.repeats, leave=False, disable=None)  # None: only on a terminal
    try:
        for name in bar:
            if name in failures:
                continue
            bar.set_description(name)
            try:  # as many threads for each program, which its processes share
                seconds, output = run(*PROGRAMS[name][1], *same, OMP_NUM_THREADS=str(torch.get_num_threads()))
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
