r"""What parallelism gains and costs: this tool runs the lessons with the same flags.

Parallelism pays if it saves more computing than it costs in messages, in starting Python again, and
in a second copy of the model. This cannot be predicted, but it can be measured. The tool has three
parts. Each run is a process of its own, which is started by the command line of a lesson.

  parity   The training lessons run, and the tool compares the losses and accuracies that they
           print. The same runs show images/s, start-up time and memory. A second run of each lesson
           computes in float64. Its losses have twelve digits, so they show any difference that is
           more than rounding.
  steps    profile_steps.py shows where the time of a step goes: when DDP averages the gradients,
           and when the lesson averages them by hand.
  widths   A single process and DDP train wider and wider layers. The tool shows the width at which
           DDP becomes faster.

In the part widths, each process computes with one thread.

Run it:
    pip install -r playground/pages/figures/requirements.txt
    python playground/pages/figures/compare.py
    python playground/pages/figures/compare.py --dataset digits --epochs 2
    python playground/pages/figures/compare.py --only widths --widths 64 256 1024 4096 --out wide

The second command takes many minutes without a GPU, the third one some minutes.

It prints tables for each part (numbers will differ):
    | lesson                                      | images/s | start-up s | peak memory MiB | ...
    | ------------------------------------------- | -------- | ---------- | --------------- | ...
    | single_gpu.py                               |  253,824 |        2.9 |             957 | ...
    | tensor_parallel.py, 2 processes             |   94,421 |        4.4 |             960 | ...

A lesson that fails has a row with its error. The folder --out gets results.json, two figures, and
what each run has left: its output, and traces for https://ui.perfetto.dev.

What is approximate:
  - A traced step takes longer than others. So compare the parts of a step, not its length.
  - "Computing" is the rest of a step without data and messages, so it includes Python's own work.
  - The time of a message includes waiting for a rank that is late. On CPUs, the threads that send
    share the cores with those that compute. On GPUs, a kernel may belong to the step before.
  - Start-up is the time to the first epoch line, without the training of that epoch. So it includes
    the first test.
  - Memory is that of the largest process, without the memory of GPUs. The C library keeps some
    freed memory, unless MALLOC_MMAP_THRESHOLD_=1000000 is set (glibc).
  - Memory on a GPU is what the tensors of a process take at most, until its end. PyTorch counts it
    (torch.accelerator.max_memory_allocated).
"""

import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import sys
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import mean, median

import torch
from tqdm import tqdm

PLAYGROUND = Path(__file__).resolve().parents[2]
for folder in ("..", "replicated", "pages"):
    sys.path.append(str(PLAYGROUND / folder))  # find common/, profile_steps.py and figures/
from profile_steps import step_times

from common import flags
from common.data import ROW, fetch
from common.language import SHARING
from figures.charts import draw_steps, draw_widths
from figures.processes import cores, follow, gpu_memory, gpu_variables, last_words
from figures.report import PARITY, SPEED, STEPS, WIDTHS, table

PARTS = ("parity", "steps", "widths")
LESSONS = (  # N stands for --gpus, GRID for a mesh of as many ranks
    "single_gpu",
    "data_parallel",
    "manual_data_parallel -g N",
    "manual_data_parallel -g N --bucket",
    "overlapped_data_parallel -g N",
    "distributed_data_parallel -g N",
    "distributed_data_parallel2 -g N",
    "distributed_data_parallel_torchrun",
    "resumable",
    "sharded_optimizer",
    "manual_fully_sharded",
    "fully_sharded_data_parallel",
    "model_parallel",
    "model_parallel --pipelined",
    "manual_pipeline",
    "pipeline_parallel",
    "tensor_parallel",
    "tensor_parallel --by dtensor",
    "hybrid_parallel --mesh GRID",
)
OF_TRANSFORMERS = (  # with --model transformer or language only
    "mixed_precision --precision full",
    "mixed_precision --precision full --sharded",
    "activation_checkpointing",
    "activation_checkpointing --sharded",
    "sequence_parallel",
    "sequence_parallel --sequence",
    "sequence_parallel --by dtensor --sequence",
)
OF_LANGUAGE = (  # with --model language only
    "context_parallel",
    "context_parallel --by ulysses",
    "language_model --precision full --constant --clip 0",
    "vocabulary_parallel",
    "vocabulary_parallel --by dtensor",
    "four_axes",
)
IN_ONE_PROCESS = ("single_gpu", "data_parallel", "model_parallel")
SIZES = ("model", "width", "layers", "tokens", "heads")
PASSED_ON = ("device", "epochs", "batch_size", "lr", *SIZES)
PASSED_ON += ("dataset", "data_dir", "seed")
# The last layer; in the CNN also two convolutions, in transformers also the embedding.
OTHER_LAYERS = {"mlp": 1, "cnn": 3, "transformer": 2, "language": 2}
CORES = cores()


@dataclass
class Run:
    """A run of a lesson, and what came of it. None: it was not asked for, or is not known.

    Attributes:
        part: one of PARTS.
        lesson: its name.
        words: its own flags.
        kind: what the part does with it.
        ranks: how many processes torchrun starts; None: the lesson starts its processes itself.
        one_thread: whether each process has one core.
        width: which line of the part it belongs to.
        name: the lesson and its flags, for tables.
        command, variables, folder: how and where it was run.
        note: why it has failed, or what else a reader should know.
        missing: whether it lacks an optional package.
        epochs: what each epoch line says, a dict. loss, train and test are those of the last one.
        step, data, compute, waiting, hidden: the times of profile_steps.py, in ms.
    """

    part: str
    lesson: str
    words: list[str]
    kind: str = ""
    ranks: int | None = None
    one_thread: bool = False
    width: int | None = None
    name: str = ""
    command: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    folder: str = ""
    failed: bool = True
    missing: bool = False
    note: str = ""
    epochs: list[dict] = field(default_factory=list)
    loss: float | None = None
    train: float | None = None
    test: float | None = None
    images_per_s: float | None = None
    start_up_s: float | None = None
    memory_mib: float | None = None
    gpu_memory_mib: float | None = None
    loss_float64: float | None = None
    difference: float | None = None
    step: float | None = None
    data: float | None = None
    compute: float | None = None
    waiting: float | None = None
    hidden: float | None = None


def fitting_stages(gpus, model, layers):
    """Return how many stages a pipeline of at most so many ranks can have: one for each layer."""
    return min(gpus, layers + OTHER_LAYERS[model])


def fitting_pieces(gpus, width):
    """Return how many of at most so many ranks can split a layer into equal parts: 1, 2, 4 or 8."""
    return max(count for count in (1, 2, 4, 8) if count <= gpus and width % count == 0)


def fitting_heads(gpus, model, heads, tokens):
    """Return how many of at most so many ranks can split both heads and tokens into equal parts."""
    if model in ("mlp", "cnn"):
        return 1  # no lesson splits them
    if model == "language":
        heads = heads // SHARING  # some heads share their keys and values
        tokens = ROW
    possible = [count for count in (1, 2, 4, 8) if heads % count == 0 and tokens % count == 0]
    return max(count for count in possible if count <= gpus)


def fitting_batch(counts, batch_size):
    """Return the batch size nearest to this one that each of these counts divides."""
    least = math.lcm(*counts)
    return max(1, round(batch_size / least)) * least


def fitting_mesh(device, gpus, width):
    """Return the rows and columns of a mesh, with two columns if ranks and neurons are even."""
    ranks = gpus
    if device == "cpu":
        ranks = max(4, gpus)  # 2 x 2 on any CPU
    columns = 1
    if ranks % 2 == 0 and (width or 2) % 2 == 0:
        columns = 2
    return ranks // columns, columns


def plan(args):
    """List the Runs in their order."""
    runs = []
    if "parity" in args.only:
        runs += plan_parity(args)
    if "steps" in args.only:
        for average in ("ddp", "each", "bucket"):
            runs.append(Run("steps", "profile_steps", ["--average", average]))
    if "widths" in args.only and args.model != "language":  # an MLP cannot read the text
        runs += plan_widths(args)
    rows, columns = fitting_mesh(args.device, args.gpus, args.width)
    ranks = {
        "manual_pipeline": args.stages,
        "pipeline_parallel": args.stages,
        "tensor_parallel": args.pieces,
        "sequence_parallel": args.head_parts,
        "context_parallel": args.head_parts,
        "vocabulary_parallel": args.pieces,
        "four_axes": args.head_parts,
        "hybrid_parallel": rows * columns,
    }
    for run in runs:
        words = [word for word in run.words if word != "--double"]  # that is its kind
        run.name = " ".join([f"{run.lesson}.py", *words])
        if run.lesson not in IN_ONE_PROCESS and "-g" not in words:  # torchrun starts its ranks
            run.ranks = ranks.get(run.lesson, args.gpus)
            run.name += ", 1 process" if run.ranks == 1 else f", {run.ranks} processes"
    return runs


def plan_parity(args):
    """List the runs of all lessons: first in float32, then in float64."""
    rows, columns = fitting_mesh(args.device, args.gpus, args.width)
    blanks = {"N": str(args.gpus), "GRID": f"{rows}x{columns}"}
    has_blocks = args.model in ("transformer", "language")
    runs = []
    for kind, double in (("float32", []), ("float64", ["--double"])):
        lines = LESSONS
        if has_blocks:
            lines += OF_TRANSFORMERS
        if args.model == "language":
            lines += OF_LANGUAGE
        for line in lines:
            lesson, *words = [blanks.get(word, word) for word in line.split()]
            if lesson != "single_gpu" and lesson not in args.lessons:
                continue
            if has_blocks:  # these lessons do not split them
                if lesson == "tensor_parallel":
                    continue
                if lesson == "hybrid_parallel":
                    words += ["--kind", "hsdp"]
            runs.append(Run("parity", lesson, words + double, kind))
    return runs


def plan_widths(args):
    """List the runs for each width: one process, several processes, and traced steps of these."""
    runs = []
    for width in args.widths:
        size = ["--model", "mlp", "--width", str(width)]
        several = ["-g", str(args.gpus), *size]
        for kind, lesson, words in (
            ("one", "single_gpu", size),
            ("several", "distributed_data_parallel", several),
            ("traced", "profile_steps", size),
        ):
            runs.append(Run("widths", lesson, words, kind, one_thread=True, width=width))
    return runs


def command(run, args, folder):
    """Return the command line of a run, and the environment variables that it needs."""
    start = [sys.executable]
    threads = int(os.environ.get("OMP_NUM_THREADS", CORES))
    if run.ranks:
        count = run.ranks
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        # Lessons that start their own processes divide the cores by themselves.
        threads = max(1, threads // count)
    if run.one_thread:
        threads = 1  # otherwise a single process would use all cores
    variables = {"OMP_NUM_THREADS": str(threads)}
    if args.device == "cuda":
        variables |= gpu_variables(folder)
    keep = []
    if run.lesson == "resumable":
        keep = ["--run_dir", str(folder)]
    if run.lesson == "profile_steps":
        keep = ["--out", str(folder), "--epochs", "1"]  # a trace has a few steps only
    passed_on = []
    for name in PASSED_ON:
        if run.width and name in SIZES:
            continue  # the words of the run name its own model
        value = getattr(args, name)
        if value is not None:
            passed_on.append(f"--{name}={value}")
    lesson = str(next(PLAYGROUND.rglob(f"{run.lesson}.py")))
    return [*start, lesson, *passed_on, *run.words, *keep], variables


def execute(run, args, folder):
    """Run a lesson as a process, and add what it reports to the run. A note says why it failed."""
    shutil.rmtree(folder, ignore_errors=True)  # the resumable lesson would resume an earlier run
    folder.mkdir(parents=True)
    words, variables = command(run, args, folder)
    run.command = shlex.join(words)
    run.variables = variables
    run.folder = str(folder)
    try:
        status, epochs, memory = follow(words, variables, folder, args.seconds)
    except TimeoutError as error:
        run.note = str(error)
        return
    if status or not epochs:
        run.note = last_words(folder) or f"no epoch line, exit status {status}"
        run.missing = "pip install" in run.note  # an optional package is no fault
        return
    run.failed = False
    run.epochs = epochs
    run.loss, run.train, run.test = [epochs[-1][name] for name in ("loss", "train", "test")]
    # The first epoch also warms up.
    timed = epochs[1:] or epochs
    run.images_per_s = median(epoch["images_per_s"] for epoch in timed)
    run.start_up_s = epochs[0]["at"] - epochs[0]["seconds"]
    run.memory_mib = memory
    run.gpu_memory_mib = gpu_memory(folder)
    if run.lesson == "profile_steps":
        traces = [json.loads(path.read_text()) for path in folder.glob("rank*.json")]
        times = [step_times(trace) for trace in traces]
        for name in times[0]:
            setattr(run, name, mean(of_rank[name] for of_rank in times))


def add_float64(runs):
    """Add to the float32 runs what the lessons print in float64.

    These are the last loss, and the largest difference of a loss from that of single_gpu.py in the
    same epoch. Returns the float32 runs. Those that have failed in float64 get a note.
    """
    rows = [run for run in runs if run.kind == "float32"]
    by_name = {row.name: row for row in rows}
    doubles = [run for run in runs if run.kind == "float64"]
    for run in doubles:
        row = by_name[run.name]
        if run.failed:
            row.note = f"float64: {run.note}"
            continue
        row.loss_float64 = run.loss
        if doubles[0].failed:
            continue  # there is nothing to compare with
        differences = []
        for found, expected in zip(run.epochs, doubles[0].epochs, strict=True):
            differences.append(abs(found["loss"] - expected["loss"]))
        row.difference = max(differences)
    return rows


def by_width(runs, args):
    """Return a row for each width: images/s with one and several processes, share of messages."""
    rows = []
    for width in args.widths:
        of_kind = {run.kind: run for run in runs if run.width == width}
        row = {"width": width, "messages": None}
        for kind in ("one", "several"):
            row[kind] = of_kind[kind].images_per_s if kind in of_kind else None
        if "traced" in of_kind and of_kind["traced"].step:
            row["messages"] = of_kind["traced"].waiting / of_kind["traced"].step
        notes = [run.note for run in of_kind.values() if run.note]
        row["note"] = notes[0] if notes else ""
        rows.append(row)
    return rows


def tell(runs, args, interrupted):
    """Print the tables, write results.json and draw the figures."""
    of_part = {}
    for part in PARTS:
        of_part[part] = [run for run in runs if run.part == part]
    of_part["parity"] = add_float64(of_part["parity"])
    widths = by_width(of_part["widths"], args)
    if of_part["parity"]:
        table("Parity: the last epoch", of_part["parity"], PARITY)
        good = [run for run in of_part["parity"] if not run.failed]
        table("Speed, start-up, memory", good, SPEED)
    if of_part["steps"]:
        table("Where the time of a step goes", of_part["steps"], STEPS)
    if of_part["widths"]:
        table("Width of the layers", widths, WIDTHS)
    gpus = []
    if args.device == "cuda":
        gpus = [torch.cuda.get_device_name(index) for index in range(args.gpus)]
    results = {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": {"cpu": cpu_name(), "cores": CORES, "gpus": gpus},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "interrupted": interrupted,
        "flags": vars(args) | {"out": str(args.out)},
        "runs": [asdict(run) for run in runs],
        "widths": widths,
    }
    (args.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    draw_steps(of_part["steps"], args.out / "steps.png")
    draw_widths(widths, args.out / "widths.png")


def cpu_name():
    """Return what Linux says about the CPU, or its architecture."""
    path = Path("/proc/cpuinfo")
    found = None
    if path.exists():
        found = re.search(r"model name\s*: (.*)", path.read_text())
    return found[1] if found else platform.machine()


def complete(parser, args):
    """Choose what was not given: numbers of processes and a batch that fit all runs."""
    if args.double:
        parser.error("--double: leave it out, because the part parity runs each lesson with it")
    if args.gpus is None:
        args.gpus = torch.cuda.device_count() if args.device == "cuda" else 2
    args.widths = sorted(set(args.widths))
    parser.check_gpus(args.device, args.gpus, "-g")
    args.stages = fitting_stages(args.gpus, args.model, args.layers)
    args.pieces = fitting_pieces(args.gpus, args.width)
    args.head_parts = fitting_heads(args.gpus, args.model, args.heads, args.tokens)
    counts = {args.gpus}
    if "parity" in args.only:
        counts.add(8)  # micro-batches of the pipeline
    nearest = fitting_batch(counts, args.batch_size or 128)
    if args.batch_size not in (None, nearest):
        wrong = f"--batch_size {args.batch_size} cannot be divided by each of {sorted(counts)}"
        parser.error(f"{wrong}: use --batch_size {nearest}")
    args.batch_size = nearest
    args.out = Path(args.out)


def main():
    """Make the runs, one after the other, and report. After Ctrl-C report what there is."""
    parser = flags.training(__doc__)
    add = parser.add_argument
    names = sorted({line.split()[0] for line in LESSONS + OF_TRANSFORMERS + OF_LANGUAGE})
    folder = "folder for all that is written"
    add("--out", type=flags.new_folder, metavar="DIR", default="comparison", help=folder)
    add("--only", nargs="+", choices=PARTS, default=PARTS, help="some of the parts")
    add("--lessons", nargs="+", choices=names, default=names, help="for parity, and single_gpu")
    number = flags.positive
    processes = "processes of a lesson with several; default: all GPUs, or 2"
    add("-g", "--gpus", type=number, help=processes)
    add("--widths", nargs="+", type=number, default=[64, 256, 1024], help="for widths")
    add("--timeout", dest="seconds", type=number, default=900, help="seconds that a run may take")
    parser.set_defaults(batch_size=None)  # 128, or what all numbers of processes divide near it
    args = parser.parse_args()
    complete(parser, args)
    runs = []
    interrupted = False
    try:
        args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
        progress = tqdm(plan(args), disable=None)  # None: only on a terminal
        for number, run in enumerate(progress, start=1):
            progress.set_description(run.lesson)
            failed = [(other.part, other.name) for other in runs if other.failed]
            if (run.part, run.name) in failed:
                continue  # it would fail in float64, too
            execute(run, args, args.out / "runs" / f"{number:02}")
            runs.append(run)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the report is written even after another one
        interrupted = True
    tell(runs, args, interrupted)
    if interrupted:
        print(f"interrupted: wrote what there is to {args.out}", file=sys.stderr)
        return 130
    failed = [run.name for run in runs if run.failed and not run.missing]
    if failed:
        return f"error: failed: {'; '.join(failed)}"  # sys.exit prints it, and the status is 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
