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
imports and loading; and the test accuracy after the last epoch. accelerate is optional.
"""

import argparse
import importlib.util
import sys
import time
from statistics import median

import torch
from benchmark import PATHS, TORCHRUN, epoch_lines, machine, run, torchvision_mnist
from single_gpu import run_epoch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from common.data import DATA_DIR, fetch, load
from common.flags import positive
from common.models import MODELS

ADAM = {"lr": 1e-3, "eps": 1e-6, "fused": True}  # the lessons' optimizer
CPU = torch.device("cpu")
PROGRAMS = {  # name: processes, command
    "single_gpu": (1, (PATHS["single_gpu"], "--device", "cpu")),
    "ddp": (2, (PATHS["distributed_data_parallel"], "--device", "cpu", "-g", "2")),
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


def show(epoch: int, epochs: int, accuracy: float, seconds: float, speed: float) -> None:
    """Print the line of an epoch as the lessons do."""
    print(
        f"epoch {epoch + 1}/{epochs}  test {accuracy:.2%}  {seconds:.2f} s  {speed:,.0f} images/s",
        flush=True,
    )


def naive(train_set: Dataset, test_set: Dataset, model: str, epochs: int, batch_size: int) -> None:
    """Train, test and report as single_gpu.py does, on images that are read one by one."""
    torch.manual_seed(0)
    train_loader = DataLoader(train_set, batch_size, shuffle=True, drop_last=True)
    test_loader = DataLoader(test_set, 1000)
    network = MODELS[model]()
    optimizer = torch.optim.Adam(network.parameters(), **ADAM)
    for epoch in range(epochs):
        start = time.perf_counter()
        _, _, seen = run_epoch(network, train_loader, CPU, optimizer)
        seconds = time.perf_counter() - start
        _, hits, tested = run_epoch(network, test_loader, CPU)
        show(epoch, epochs, hits / tested, seconds, seen / seconds)


def accelerated(
    train_set: Dataset, test_set: Dataset, model: str, epochs: int, batch_size: int
) -> None:
    """Train, test and report with accelerate, in as many processes as were started."""
    from accelerate import Accelerator  # here, because the other programs do not need it

    accelerator = Accelerator(cpu=True)
    processes = accelerator.num_processes
    torch.set_num_threads(max(1, torch.get_num_threads() // processes))  # they divide the cores
    torch.manual_seed(0)
    network = MODELS[model]()
    network, optimizer, train_loader, test_loader = accelerator.prepare(
        network,
        torch.optim.Adam(network.parameters(), **ADAM),
        DataLoader(train_set, batch_size // processes, shuffle=True, drop_last=True),
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

        network.eval()
        hits = 0
        for images, labels in test_loader:
            with torch.no_grad():
                guesses = network(images).argmax(dim=1)
            # Each test image then counts once.
            guesses, labels = accelerator.gather_for_metrics((guesses, labels))
            hits += (guesses == labels).sum().item()
        if accelerator.is_main_process:
            seen = len(train_loader) * batch_size
            show(epoch, epochs, hits / len(test_set), seconds, seen / seconds)
    accelerator.end_training()


def main() -> None:
    """Measure the programs that were asked for, in turn, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=MODELS, default="mlp")
    add("--dataset", choices=["mnist", "digits"], default="mnist")
    add("--data_dir", default=DATA_DIR, help="default: data/ beside playground/")
    add("--epochs", type=positive, default=3)
    add("--batch_size", type=positive, default=128, help="images in a step, over all processes")
    add("--repeats", type=positive, default=5, help="runs of each program")
    add("--only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), metavar="NAME", help="some")
    add("--be", choices=["torchvision", "accelerate"], help="be this program, and no more")
    args = parser.parse_args()
    if args.be:
        sets = images_one_by_one(args.dataset, args.data_dir)
        program = accelerated if args.be == "accelerate" else naive
        program(*sets, args.model, args.epochs, args.batch_size)
        return

    fetch(args.dataset, args.data_dir, args.batch_size)  # before any measurement
    names = args.only
    if importlib.util.find_spec("accelerate") is None:
        names = [name for name in names if "accelerate" not in name]
        print("accelerate is not installed: pip install accelerate", file=sys.stderr)
    what = f"{args.model}, {args.dataset}, batch {args.batch_size}, {args.epochs} epochs"
    print(f"{machine()}; {what}; {args.repeats} repeats\n", flush=True)
    same_for_all = ("model", "dataset", "data_dir", "epochs", "batch_size")
    flags = [f"--{name}={getattr(args, name)}" for name in same_for_all]
    threads = str(torch.get_num_threads())  # of each program; its processes divide them
    runs = {name: [] for name in names}
    for name in tqdm(names * args.repeats, leave=False, disable=None):  # shown in a terminal only
        seconds, output = run(*PROGRAMS[name][1], *flags, OMP_NUM_THREADS=threads)
        runs[name].append((seconds, epoch_lines(output, args.epochs)))

    print("| program | processes | images/s | seconds, command to exit | test accuracy |")
    print("|---|---|---|---|---|")
    for name, measured in runs.items():
        speeds = []
        for _, epochs in measured:
            warm = epochs[1:] or epochs  # of a single epoch, that one
            speeds += [speed for _, speed in warm]
        seconds = median([seconds for seconds, _ in measured])
        accuracy = median([epochs[-1][0] for _, epochs in measured])
        row = [f"{median(speeds):,.0f}", f"{seconds:.2f}", f"{accuracy:.2f}%"]
        print("|", " | ".join([name, str(PROGRAMS[name][0]), *row]), "|")


if __name__ == "__main__":
    main()
