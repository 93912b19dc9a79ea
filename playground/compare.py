"""What did parallelism buy? This closing lesson runs the others with the same flags and compares what they report.

Parallelism pays when what it saves in computing is more than what it costs: messages, a second start of Python, a
second copy of the model. You can't know that beforehand, but you can measure it. This lesson does so in four parts, and
each of their runs is a process of its own, through the other lesson's command line:

    parity     every training lesson: loss, accuracies, weights; images/s, start-up time and memory of the same runs.
               A second run of each, one epoch in float64, shows how much of the difference is rounding
    scaling    distributed_data_parallel.py with 1, 2, 4, ... processes, a thread each: the same batch for all of them
               together (strong scaling), and the same batch for each of them (weak scaling)
    steps      profile_steps.py: where a step's time goes when DDP averages the gradients, and when it is done by hand
    widths     from which width of the layers on two processes are faster than one, a thread each

    python playground/compare.py                                   # all of it: many minutes without a GPU
    python playground/compare.py --dataset digits --epochs 2       # some minutes
    python playground/compare.py --only scaling --processes 1 2 4 8 --model cnn --batch_size 512
    python playground/compare.py --only widths --widths 64 256 1024 4096 --out wide

It prints a table and some sentences for each part, and writes results.json, four figures and what each run has left
(output, checkpoint, traces for ui.perfetto.dev) into --out. A lesson that fails is a row with its error (times differ):

    | lesson                                      | images/s | start-up s | peak memory MiB | messages     | note |
    | ------------------------------------------- | -------- | ---------- | --------------- | ------------ | ---- |
    | single_gpu.py                               |  253,824 |        2.9 |             957 |            – |      |
    | tensor_parallel.py, 2 processes             |   94,421 |        4.4 |             960 | 3 all_reduce |      |

What is approximate: a traced step takes longer than others, so look at its parts, not at its length. "Computing" is
what is left after data and messages, with Python's own work; a message's time includes waiting for a rank that is late;
gloo's threads share the cores with those that compute. A GPU's kernels may belong to the step before. Start-up is what
comes before the first epoch's line, but for its training: the first test, too. Memory is that of the largest process,
without the GPU's, up to that line: a checkpoint may collect a model that was shared out; and the C library keeps some
of what was freed, unless MALLOC_MMAP_THRESHOLD_=1000000 is set (glibc). "Messages" are those that a lesson counts:
collectives of each rank in a step.

Break it, in a copy beside it (cp playground/compare.py playground/broken.py):
  1. Give all runs OMP_NUM_THREADS "2" where it says "1", with two cores: one process gets faster. And the speed-up?
  2. Leave the weak scaling's "--batch_size" out: what is left between the two kinds of scaling?
  3. In playground/measure/traces.py let `minus` return union(spans): which column of `--only steps` is 0 now, and why?
"""

import argparse
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import sys
from datetime import datetime
from pathlib import Path
from statistics import mean, median

import torch
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common.data import DATA_DIR, fetch
from common.guard_rails import check, explained
from common.models import MODELS
from measure.figures import draw_scaling, draw_speed, draw_steps, draw_widths
from measure.processes import follow, last_words, messages
from measure.report import tell_parity, tell_scaling, tell_speed, tell_steps, tell_widths
from measure.traces import step_times

PARTS = ("parity", "scaling", "steps", "widths")
LESSONS = (  # N: --gpus; GRID: a mesh of so many ranks
    "single_gpu", "data_parallel", "manual_data_parallel -g N", "manual_data_parallel -g N --bucket",
    "distributed_data_parallel -g N", "distributed_data_parallel2 -g N", "distributed_data_parallel_torchrun",
    "distributed_data_parallel_resumable", "model_parallel", "model_parallel --pipelined", "pipeline_parallel",
    "manual_sharding --stage 2", "manual_sharding --stage 3", "fully_sharded_data_parallel", "tensor_parallel",
    "tensor_parallel --by dtensor", "hybrid_parallel --mesh GRID",
)  # fmt: skip
TORCHRUN = ("distributed_data_parallel_torchrun", "distributed_data_parallel_resumable", "pipeline_parallel",
            "manual_sharding", "fully_sharded_data_parallel", "tensor_parallel", "hybrid_parallel",
            "profile_steps")  # it starts their processes  # fmt: skip
PASSED_ON = ("device", "epochs", "batch_size", "lr", "model", "width", "layers", "dataset", "data_dir", "seed")
CORES = len(os.sched_getaffinity(0))


def fitting(gpus, shares, model, width, layers, batch_size):
    """Return how many stages, and how many pieces of a layer, so many GPUs can have, and the nearest batch that fits.

    Each stage needs a layer with weights, each piece as many neurons, each of 2, 4, ... processes as many images.
    """
    hidden, others, neurons = {"mlp": (3, 1, 64), "cnn": (1, 3, 120)}[model]
    pieces = max(count for count in (1, 2, 4, 8) if count <= gpus and (width or neurons) % count == 0)
    least = math.lcm(*shares)
    return min(gpus, (layers or hidden) + others), pieces, max(1, round(batch_size / least)) * least


def plan(args):
    """List the runs in their order: the part they are for, the lesson, its own flags, and what the part must know."""
    grid = args.gpus if args.device == "cuda" else max(4, args.gpus)  # 2x2 on any CPU, however many cores it has
    columns = 2 if grid % 2 == 0 and (args.width or 2) % 2 == 0 else 1
    ranks = {"pipeline_parallel": args.stages, "tensor_parallel": args.pieces, "hybrid_parallel": grid}
    blanks = {"N": str(args.gpus), "GRID": f"{grid // columns}x{columns}"}
    runs, lessons = [], [[blanks.get(word, word) for word in words.split()] for words in LESSONS]
    chosen = [each for each in lessons if each[0] in ("single_gpu", *args.lessons)]  # the others are compared with it
    for kind, flags in (("float32", []), ("float64", ["--double", "--epochs", "1"])):
        for name, *own in chosen:
            more = ["--compare"] * (name == "tensor_parallel" and kind == "float64")  # counts messages, takes memory
            runs.append({"part": "parity", "kind": kind, "lesson": name, "words": own, "flags": flags + more})
    ddp = {"lesson": "distributed_data_parallel", "words": ["-g", str(args.gpus)]}
    for count in args.processes:
        note = {"note": "more processes than cores"} if args.device == "cpu" and count > CORES else {}
        run = ddp | {"part": "scaling", "processes": count, "one_thread": True} | note
        runs.append(run | {"kind": "strong", "words": ["-g", str(count)]})
        if count > 1:
            words = ["-g", str(count), "--batch_size", str(count * args.batch_size)]
            runs.append(run | {"kind": "weak", "words": words})
    for average in ("ddp", "each", "bucket"):
        runs.append({"part": "steps", "lesson": "profile_steps", "words": ["--average", average]})
    for width in args.widths:
        size = ["--model", "mlp", "--width", str(width)]
        run = {"part": "widths", "width": width, "one_thread": True}
        runs.append(run | {"kind": "one", "lesson": "single_gpu", "words": size})
        runs.append(run | ddp | {"kind": "several", "words": ddp["words"] + size})
        runs.append(run | {"kind": "traced", "lesson": "profile_steps", "words": size})
    for run in runs:
        run["name"] = " ".join([f"{run['lesson']}.py", *run["words"]])
        if run["lesson"] in TORCHRUN:
            run["ranks"] = ranks.get(run["lesson"], args.gpus)
            run["name"] += f", {run['ranks']} process" + "es" * (run["ranks"] > 1)
    return [run for run in runs if run["part"] in args.only]


def command(run, args, folder):
    """Return the command line of a run, and the environment variables that it needs."""
    start, keep = [sys.executable], ["--savefile", f"{folder}/checkpoint.pt"]
    threads = int(os.environ.get("OMP_NUM_THREADS", CORES))
    if ranks := run.get("ranks"):
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        threads = max(1, threads // ranks)  # the lessons that start their processes share the cores by themselves
    if run["lesson"] == "distributed_data_parallel_resumable":
        keep = ["--run_dir", str(folder)]
    if run["lesson"] == "profile_steps":
        keep = ["--out", str(folder), "--epochs", "1"]  # a trace is of a few steps
    flags = [f"--{name}={value}" for name in PASSED_ON if (value := getattr(args, name)) is not None]
    lesson = str(Path(__file__).with_name(f"{run['lesson']}.py"))
    variables = {"OMP_NUM_THREADS": "1" if run.get("one_thread") else str(threads)}  # 1: else one would use all cores
    return [*start, lesson, *flags, *run["words"], *run.get("flags", []), *keep], variables


def execute(run, args, folder):
    """Run a lesson as a process and add to the run what it reports, or a note that says why it failed."""
    shutil.rmtree(folder, ignore_errors=True)  # the resumable lesson would go on with an earlier run
    folder.mkdir(parents=True)
    words, variables = command(run, args, folder)
    run |= {"command": shlex.join(words), "variables": variables, "folder": str(folder), "failed": True}
    try:
        status, epochs, memory = follow(words, variables, folder, args.timeout)
    except TimeoutError as error:
        run["note"] = str(error)
        return
    if status or not epochs:
        run["note"] = last_words(folder) or f"no epoch line, exit status {status}"
        run["missing"] = "pip install" in run["note"]  # an optional package: no fault of the lesson
        return
    first, *later = epochs
    run |= {name: epochs[-1][name] for name in ("loss", "train", "test")} | {"epochs": epochs, "failed": False}
    run |= {"images_per_s": median(epoch["images_per_s"] for epoch in later or epochs), "memory_mib": memory}
    run |= {"start_up_s": first["at"] - first["seconds"]}
    run |= {"messages": counted} if (counted := messages(folder)) else {}
    if run["lesson"] == "profile_steps":
        ranks = [step_times(json.loads(path.read_text())) for path in folder.glob("rank*.json")]
        run |= {name: mean(rank[name] for rank in ranks) for name in ranks[0]}


def weight_differences(runs):
    """Return the float32 runs, with their weights' largest difference from single_gpu.py's, and messages of either."""
    kinds = {kind: [run for run in runs if run["kind"] == kind] for kind in ("float32", "float64")}
    for kind, (one, *others) in ((kind, each) for kind, each in kinds.items() if each and not each[0]["failed"]):
        for run in (one, *others):
            row = next(row for row in kinds["float32"] if row["name"] == run["name"])
            if run["failed"]:
                row.setdefault("note", f"{kind}: {run['note']}")
                continue
            newest = [max(Path(each["folder"]).glob("*.pt")) for each in (run, one)]
            ours, its = [torch.load(path, map_location="cpu", weights_only=True)["model"] for path in newest]
            row |= {"messages": run["messages"]} if "messages" in run else {}
            row[f"difference_{kind}"] = max((ours[name] - its[name]).abs().max().item() for name in its)
    return kinds["float32"]


def speed_ups(runs):
    """Add to the runs how much faster they are than the first, of one process, and the share of the ideal that is."""
    good = [run for run in runs if not run["failed"]]
    if good[:1] == runs[:1]:
        for run in good:
            run["speed_up"] = run["images_per_s"] / good[0]["images_per_s"]
            run["efficiency"] = run["speed_up"] / run["processes"]


def by_width(runs, args):
    """Return a row for each width: the images/s of one process and of several, and the share of messages in a step."""
    rows = []
    for width in args.widths:
        of = {run["kind"]: run for run in runs if run["width"] == width}
        one, several, traced = (of.get(kind, {}) for kind in ("one", "several", "traced"))
        row = {"width": width, "one": one.get("images_per_s"), "several": several.get("images_per_s")}
        row["messages"] = traced["exposed"] / traced["step"] if "step" in traced else None
        rows.append(row | {"note": next((run["note"] for run in of.values() if "note" in run), "")})
    return rows


def tell(runs, args, interrupted):
    """Print the tables, write results.json and draw the figures."""
    of = {part: [run for run in runs if run["part"] == part] for part in PARTS}
    of["parity"] = weight_differences(of["parity"])
    speed_ups(of["scaling"])
    widths = by_width(of["widths"], args)
    if of["parity"]:
        tell_parity(of["parity"], args)
        tell_speed([run for run in of["parity"] if not run["failed"]], args)
    if of["scaling"]:
        tell_scaling(of["scaling"], args)
    if of["steps"]:
        tell_steps(of["steps"], args)
    if of["widths"]:
        tell_widths(widths, args)
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    gpus = [torch.cuda.get_device_name(index) for index in range(args.gpus if args.device == "cuda" else 0)]
    results = {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": {"cpu": cpu[1] if cpu else platform.machine(), "cores": CORES, "gpus": gpus},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "interrupted": interrupted, "flags": vars(args) | {"out": str(args.out)}, "runs": runs, "widths": widths,
    }  # fmt: skip
    (args.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    draw_speed(of["parity"], args.out / "speed.png")
    draw_scaling(of["scaling"], args.out / "scaling.png")
    draw_steps(of["steps"], args.out / "steps.png")
    draw_widths(widths, args.out / "widths.png")


def main():
    """Make the runs, one after the other, and report. After Ctrl-C report what there is."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, usage=argparse.SUPPRESS)
    add = parser.add_argument
    add("--out", metavar="DIR", default="comparison", help="folder for results, figures and the runs' files")
    add("--only", nargs="+", choices=PARTS, default=PARTS, help="some of the parts")
    names = sorted({words.split()[0] for words in LESSONS})
    add("--lessons", nargs="+", choices=names, default=names, help="for parity; single_gpu is always there")
    add("-g", "--gpus", type=int, help="processes of lessons with several; default: the GPUs, or 2")
    add("--processes", nargs="+", type=int, help="for scaling; default: 1, 2, 4, ... up to the cores or GPUs")
    add("--widths", nargs="+", type=int, default=[64, 256, 1024], help="for widths")
    add("--timeout", type=int, default=900, help="seconds that a run may take")
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--epochs", type=int, default=3)
    add("--batch_size", type=int, help="images in a step; default: 128, or near it where processes can't share that")
    add("--lr", type=float, default=1e-3, help="Adam's learning rate")
    add("--model", choices=MODELS, default="mlp")
    add("--width", type=int, help="neurons in each hidden layer; default: 64 (mlp), 120 (cnn)")
    add("--layers", type=int, help="hidden layers, the linear ones in cnn; default: 3 (mlp), 1 (cnn)")
    add("--dataset", choices=["mnist", "digits"], help="default: mnist, or digits where it can't be had")
    add("--data_dir", default=DATA_DIR, help="default: data/ beside playground/")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    most = torch.cuda.device_count() if args.device == "cuda" else max(2, CORES)
    args.gpus = (most if args.device == "cuda" else 2) if args.gpus is None else args.gpus
    args.processes = sorted({1, *(args.processes or [n for n in (2, 4, 8, 16, 32, 64) if n <= most])})
    args.widths = sorted(set(args.widths))
    if min(args.processes + args.widths) < 1:
        parser.error("--processes and --widths: must be 1 or more")
    check(parser, args)  # guard rail
    shares = {args.gpus, *(args.processes if "scaling" in args.only else ())}
    shares |= {8} if "parity" in args.only else set()  # the pipeline's micro-batches
    sizes = args.model, args.width, args.layers, args.batch_size or 128
    args.stages, args.pieces, nearest = fitting(args.gpus, shares, *sizes)
    if args.batch_size not in (None, nearest):
        parser.error(f"--batch_size {args.batch_size} can't be cut into {sorted(shares)} equal parts: use {nearest}")
    args.batch_size = nearest

    args.out, runs, interrupted = Path(args.out), [], False
    try:
        args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
        bar = tqdm(plan(args), disable=None)  # None: only on a terminal
        for number, run in enumerate(bar, start=1):
            bar.set_description(run["lesson"])
            if any(other["failed"] and (other["part"], other["name"]) == (run["part"], run["name"]) for other in runs):
                continue  # in float64 it would fail again
            execute(run, args, args.out / "runs" / f"{number:02}")
            runs.append(run)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one must not cut the report short
        interrupted = True
    tell(runs, args, interrupted)
    if interrupted:
        print(f"interrupted: wrote what there is to {args.out}", file=sys.stderr)
        return 130
    failed = [run["name"] for run in runs if run["failed"] and not run.get("missing")]
    return f"error: failed: {'; '.join(failed)}" if failed else 0  # sys.exit prints it, with status 1


if __name__ == "__main__":
    with explained():  # guard rail
        sys.exit(main())
