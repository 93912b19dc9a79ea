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

With --repeats, the lines take turns, so a slow minute affects them all: compare the "per s" of one
table, and not of two.
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


def command(line, flags):
    """Return the command of a line. Its own flags come last, so they count."""
    launcher = ["python"]
    program, *own = line.split()
    if program == "torchrun":
        launcher = ["torchrun", "--standalone", "--nproc-per-node", own[0]]
        program, *own = own[1:]
    return [*launcher, str(PLAYGROUND / f"{program}.py"), *flags, *own]


def row(line, runs):
    """Return the row of a line in the table."""
    for each in runs:
        if each.status or not each.epochs:
            return {"lesson": line, "error": each.last_words}
    speeds = [epoch["speed"] for each in runs for epoch in each.epochs[1:] or each.epochs]
    cells = {
        "lesson": line,
        "loss": runs[-1].epochs[-1]["loss"],
        "per s": f"{median(speeds):,.0f}",
        "seconds": f"{median(each.seconds for each in runs):.1f}",
        "MiB": f"{median(each.memory for each in runs):,.0f}",
    }
    if runs[0].gpu_memory:
        cells["MiB on a GPU"] = f"{median(each.gpu_memory for each in runs):,.0f}"
    return cells


def main():
    """Make the runs and print the table. Ctrl-C ends them, and prints what there is."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    add = parser.add_argument
    add("-g", default="2", metavar="N", help="processes of a lesson that has several; default: 2")
    add("--only", nargs="+", default=[""], metavar="WORD", help="lessons with one of these words")
    add("--repeats", type=int, default=1, metavar="N", help="runs of each; the table has medians")
    args, flags = parser.parse_known_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    lines = [line.replace("N", args.g) for line in RUNS]
    lines = [line for line in lines if any(word in line for word in args.only)]
    runs = {line: [] for line in lines}
    with contextlib.suppress(KeyboardInterrupt):
        for line in tqdm(lines * args.repeats, disable=None):  # None: only on a terminal
            runs[line].append(run(command(line, flags)))
    complete = all(len(each) == args.repeats for each in runs.values())
    rows = [row(line, each) for line, each in runs.items() if each]
    options = {"disable_numparse": True, "stralign": "right", "colalign": ["left"]}
    print(tabulate(rows, headers="keys", tablefmt="github", **options))
    return 0 if complete and not any("error" in each for each in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
