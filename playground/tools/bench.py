r"""Runs the lessons with the same flags, one after another, and shows what each gains and costs.

    pip install -r playground/pages/figures/requirements.txt
    python playground/tools/bench.py --double --dataset digits --batch_size 120 --epochs 2
    python playground/tools/bench.py --only single_gpu tensor_parallel -g 4 --width 3072

Flags that --help does not list go to each lesson. With the same flags, the lessons print the same
losses, up to rounding, and --double shows twelve digits of them. Each has a row with
    loss            that of the last epoch
    per s           how many images, or tokens of a language model, are trained on in a second: the
                    median of all epochs but the first
    seconds         from the command to its end
    MiB             the peak memory of the largest process
    MiB on a GPU    the same of the tensors on a GPU
    error           the last words of a lesson that failed

Each process has one thread, unless OMP_NUM_THREADS is set.

With --pairs, two programs are compared at a time, on MNIST and CPUs. They run in turn, so a slow
minute affects both. "times" is the speed of the first, divided by that of the second. A bare
program (tests/programs/bare.py) is a lesson without a DataLoader, flags or files.
"""

import argparse
import contextlib
import os
import signal
import sys
from pathlib import Path
from statistics import median

from tabulate import tabulate
from tqdm import tqdm

from instruments.runs import run

PLAYGROUND = Path(__file__).resolve().parents[1]
RUNS = [  # N stands for -g
    "single_gpu",
    "data_parallel",
    "manual_data_parallel -g N",
    "manual_data_parallel -g N --bucket",
    "replicated/overlapped_data_parallel -g N",
    "distributed_data_parallel -g N",
    "torchrun N distributed_data_parallel_torchrun",
    "torchrun N sharded/sharded_optimizer",
    "torchrun N sharded/manual_fully_sharded",
    "torchrun N sharded/fully_sharded_data_parallel",
    "model_parallel --pipelined",
    "torchrun N split/manual_pipeline",
    "torchrun N split/pipeline_parallel",
    "torchrun N split/tensor_parallel",
    "torchrun N split/tensor_parallel --by dtensor",
    "torchrun N split/hybrid_parallel",
]
DDP = "torchrun 2 distributed_data_parallel_torchrun"
TENSOR = "torchrun 2 split/tensor_parallel"
LANGUAGE = "torchrun 1 language/language_model --precision full --constant --clip 0 --lr 1e-3"
LANGUAGE += " --dataset text --rows 128 --batch_size 128 --sample 1"
CNN = "--model cnn --batch_size 512"
DEEP = "--width 512 --layers 8 --batch_size 2048"
WIDE = "--width 1024 --batch_size 512"
PAIRS = [  # and how many times as fast as the second the first should be
    ("single_gpu", "bare mlp mnist", 0.87),
    (DDP, "torchrun 2 bare mlp mnist", 0.87),
    (LANGUAGE, "bare language text", 0.91),
    ("manual_data_parallel -g 2 --bucket", "distributed_data_parallel -g 2", 0.87),
    (f"distributed_data_parallel -g 2 {CNN}", f"single_gpu {CNN}", 1.7),
    (f"torchrun 2 split/manual_pipeline {DEEP}", f"single_gpu {DEEP}", 1.3),
    (f"{TENSOR} {WIDE}", f"{TENSOR} --by dtensor {WIDE}", 0.83),
]
OF_PAIRS = ["--device", "cpu", "--dataset", "mnist", "--epochs", "3"]


def command(line, flags):
    """Return the command of a line. Its own flags come last, so they count."""
    launcher = ["python"]
    program, *own = line.split()
    if program == "torchrun":
        launcher = ["torchrun", "--standalone", "--nproc-per-node", own[0]]
        program, *own = own[1:]
    path = PLAYGROUND / f"{program}.py"
    if program == "bare":
        path = PLAYGROUND.parent / "tests/programs/bare.py"
        own += [str(PLAYGROUND.parent / "data"), "128", "3"]  # batch size and epochs
        flags = []
    return [*launcher, str(path), *flags, *own]


def speed(runs):
    """Return how many images or tokens the runs of a line train on in a second."""
    speeds = []
    for each in runs:
        later = each.epochs[1:] or each.epochs
        speeds.append(median(epoch["speed"] for epoch in later))
    return median(speeds)


def row(line, runs):
    """Return the row of a line in the table."""
    for each in runs:
        if each.status or not each.epochs:
            return {"lesson": line, "error": each.last_words}
    cells = {
        "lesson": line,
        "loss": runs[-1].epochs[-1]["loss"],
        "per s": f"{speed(runs):,.0f}",
        "seconds": f"{median(each.seconds for each in runs):.1f}",
        "MiB": f"{median(each.memory for each in runs):,.0f}",
    }
    if runs[0].gpu_memory:
        cells["MiB on a GPU"] = f"{median(each.gpu_memory for each in runs):,.0f}"
    return cells


def rows_of(lines, least, flags, repeats):
    """Run one line, or two of them in turn, so many times. Returns their rows."""
    rounds = []
    for _ in range(repeats):
        rounds.append([run(command(line, flags)) for line in lines])
    of_lines = list(zip(*rounds, strict=True))
    rows = [row(line, runs) for line, runs in zip(lines, of_lines, strict=True)]
    if least and not any("error" in each for each in rows):
        first, second = map(speed, of_lines)
        rows[0] |= {"times": f"{first / second:.2f}", "at least": least}
    return rows


def main():
    """Make the runs and print the table. Ctrl-C ends them, and prints what there is."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    add = parser.add_argument
    add("-g", default="2", metavar="N", help="processes of a lesson that has several; default: 2")
    add("--only", nargs="+", default=[""], metavar="WORD", help="lessons with one of these words")
    add("--pairs", action="store_true", help="compare two programs at a time")
    add("--repeats", type=int, default=1, metavar="N", help="runs of each; the table has medians")
    args, flags = parser.parse_known_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    lists = [(line.replace("N", args.g), None) for line in RUNS]
    if args.pairs:
        lists = PAIRS
        flags = [*OF_PAIRS, *flags]
    lists = [each for each in lists if any(word in each[0] for word in args.only)]
    rows = []
    complete = False
    with contextlib.suppress(KeyboardInterrupt):
        for *lines, least in tqdm(lists, disable=None):  # None: only on a terminal
            rows += rows_of(lines, least, flags, args.repeats)
        complete = True
    options = {"disable_numparse": True, "stralign": "right", "colalign": ["left"]}
    print(tabulate(rows, headers="keys", tablefmt="github", **options))
    return 0 if complete and not any("error" in each for each in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
