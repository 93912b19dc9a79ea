"""What did parallelism buy? This closing lesson runs the others with the same flags and compares what they report.

Parallelism pays when what it saves in computing is more than what it costs: messages, a second start of Python, a
second copy of the model. None of this can be known beforehand, but all of it can be measured. It has four parts, and
each of their runs is a process of its own, through the lesson's command line:

    parity     every training lesson: loss, accuracies, weights; images/s, start-up time and memory of the same runs
    scaling    distributed_data_parallel.py with 1, 2, 4, ... processes, a thread each: the same batch for all of them
               together (strong scaling), and the same batch for each of them (weak scaling)
    steps      where a step's time goes: data, computing, messages that are waited for, messages hidden by computing
    widths     from which width of the layers on two processes are faster than one, a thread each

    python playground/compare.py                                   # all of it: some ten minutes on two cores
    python playground/compare.py --dataset digits --epochs 2       # two minutes, and less to see
    python playground/compare.py --only scaling --processes 1 2 4 8 --model cnn --batch_size 512
    python playground/compare.py --only widths --widths 64 256 1024 4096 --out wide

It prints a table and a few sentences for each part, and writes results.json, four figures and the output, checkpoint
and traces of each run (for ui.perfetto.dev) into --out (numbers will differ):

    | lesson                          |   loss |  train |   test | largest weight difference | note |
    |---------------------------------|--------|--------|--------|---------------------------|------|
    | single_gpu.py                   | 1.4709 | 70.67% | 83.50% |                     0e+00 |      |
    | distributed_data_parallel.py -g 2 | 1.4709 | 70.67% | 83.50% |                     1e-07 |      |

What is approximate: a traced step takes longer than others, so compare its parts rather than its length. On a CPU
"computing" is what is left after data and messages, with Python's own work between two operations; a message's time
includes waiting for a rank that comes later, and gloo's threads take time from the cores that compute. On GPUs the
kernels of these steps may belong to the step before. Memory is the main memory of the largest process, not a GPU's.

Break it, in a copy beside it (cp playground/compare.py playground/broken.py):
  1. Let `minus` return its first argument as it is: no message seems hidden any more. Which part of the table shows it?
  2. Set OMP_NUM_THREADS to "2" where it says "1", with two cores: one process gets faster. What becomes of the speed-up?
  3. Leave the weak scaling's `--batch_size` out: both lines of the figure are one. Why does weak scaling look better?
"""

import contextlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from statistics import mean, median

import torch
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common.data import fetch
from common.figures import draw_scaling, draw_speed, draw_steps, draw_widths
from common.flags import flags, parse
from common.profiling import step_times

PARTS = ("parity", "scaling", "steps", "widths")
LESSONS = (  # N: --gpus
    "single_gpu", "data_parallel", "manual_data_parallel -g N", "manual_data_parallel -g N --bucket",
    "distributed_data_parallel -g N", "distributed_data_parallel2 -g N", "distributed_data_parallel_torchrun",
    "model_parallel", "model_parallel --pipelined", "pipeline_parallel -g N",
)  # fmt: skip
PASSED_ON = ("device", "epochs", "batch_size", "lr", "model", "width", "layers", "dataset", "data_dir", "seed")
LAUNCHER = r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE|NAME)|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+"  # not for the lessons
EPOCH = r"epoch \d+/\d+  loss (\S+)  train (\S+)%  test (\S+)%  (\S+) s  (\S+) images/s"
CORES = len(os.sched_getaffinity(0))


def plan(args):
    """List the runs in their order: the part they are for, the lesson, its own flags, and what the part must know."""
    lessons = [words.replace("N", str(args.gpus)).split() for words in LESSONS]
    chosen = ("single_gpu", *args.lessons)  # the others are compared with it
    runs = [{"part": "parity", "lesson": name, "words": words} for name, *words in lessons if name in chosen]
    ddp = {"lesson": "distributed_data_parallel", "words": ["-g", str(args.gpus)]}
    for count in args.processes:
        note = {"note": "more processes than cores"} if args.device == "cpu" and count > CORES else {}
        run = ddp | {"part": "scaling", "processes": count, "one_thread": True} | note
        runs.append(run | {"kind": "strong", "words": ["-g", str(count)]})
        if count > 1:
            words = ["-g", str(count), "--batch_size", str(count * args.batch_size)]
            runs.append(run | {"kind": "weak", "words": words})
    for name, *words in lessons[4:5] + lessons[2:4]:
        runs.append({"part": "steps", "lesson": name, "words": words, "traced": True})
    for width in args.widths:
        size = ["--model", "mlp", "--width", str(width)]
        run = {"part": "widths", "width": width, "one_thread": True}
        runs.append(run | {"kind": "one", "lesson": "single_gpu", "words": size})
        runs.append(run | ddp | {"kind": "several", "words": ddp["words"] + size})
        runs.append(run | ddp | {"kind": "traced", "words": ddp["words"] + size, "traced": True})
    runs = [run | {"name": " ".join([f"{run['lesson']}.py", *run["words"]])} for run in runs]
    return [run for run in runs if run["part"] in args.only]


def command(run, args, folder):
    """Return the command line of a run, and the environment variables that it needs."""
    start, keep = [sys.executable], ["--savefile", f"{folder}/checkpoint.pt"]
    threads = os.environ.get("OMP_NUM_THREADS", CORES)
    if run["lesson"].endswith("torchrun"):
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.gpus)]
        keep = ["--run_dir", str(folder)]
        threads = max(1, int(threads) // args.gpus)  # the other lessons share the cores by themselves
    if run.get("traced"):
        keep += ["--profile", str(folder), "--epochs", "1"]  # a trace is of a few steps
    flags = [f"--{name}={value}" for name in PASSED_ON if (value := getattr(args, name)) is not None]
    lesson = str(Path(__file__).with_name(f"{run['lesson']}.py"))
    variables = {"OMP_NUM_THREADS": "1" if run.get("one_thread") else str(threads)}  # 1: else one would use all cores
    return [*start, lesson, *flags, *run["words"], *keep], variables


def end(process):
    """End a lesson that still runs, with all of its processes, and wait for it."""
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGTERM)  # not SIGKILL: torchrun's ranks have sessions of their own, it ends them
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def follow(process, printed, seconds):
    """Wait for a lesson. Returns its epoch lines, each with the time at which it appeared, and its memory in MiB."""
    epochs, deadline = [], time.monotonic() + seconds
    while time.monotonic() < deadline:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        for line in printed:
            if found := re.match(EPOCH, line):
                numbers = [float(text.replace(",", "")) for text in found.groups()]
                names = ("loss", "train", "test", "seconds", "images_per_s")
                epochs.append(dict(zip(names, numbers, strict=True)) | {"at": time.monotonic()})
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return epochs, usage.ru_maxrss / 1024  # of the largest process, itself or one that it has waited for
        time.sleep(0.01)
    raise TimeoutError(f"took longer than {seconds} s: give it more with --timeout")


def execute(run, args, folder):
    """Run a lesson as a process and add to the run what it reports, or a note that says why it failed."""
    shutil.rmtree(folder, ignore_errors=True)  # torchrun's lesson would go on with an earlier run
    folder.mkdir(parents=True)
    words, variables = command(run, args, folder)
    run |= {"command": shlex.join(words), "variables": variables, "folder": str(folder), "failed": True}
    environment = {name: value for name, value in os.environ.items() if not re.fullmatch(LAUNCHER, name)} | variables
    start = time.monotonic()
    with (
        open(folder / "out.txt", "w") as out,
        open(folder / "err.txt", "w") as err,
        open(folder / "out.txt") as printed,
    ):
        streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
        process = subprocess.Popen(words, env=environment, start_new_session=True, **streams)
        try:
            epochs, memory = follow(process, printed, args.timeout)
        except TimeoutError as error:
            run["note"] = str(error)
            return
        finally:
            end(process)
    if process.returncode or not epochs:
        said = (folder / "err.txt").read_text().split("\n")
        said = [line for line in said if line.startswith("error: ")] or [line for line in said if line.strip()]
        run["note"] = said[-1] if said else f"no epoch line, exit status {process.returncode}"
        run["missing"] = " is missing: pip install" in run["note"]  # an optional package: no fault of the lesson
        return
    first, *later = epochs
    test = later[0]["at"] - first["at"] - later[0]["seconds"] if later else 0  # one epoch: its test counts as start-up
    run |= {name: epochs[-1][name] for name in ("loss", "train", "test")} | {"epochs": epochs, "failed": False}
    run |= {"images_per_s": median(epoch["images_per_s"] for epoch in later or epochs), "memory_mib": memory}
    run |= {"start_up_s": first["at"] - start - first["seconds"] - test, "test_s": test if later else None}
    for epoch in epochs:
        epoch["at"] -= start
    if run.get("traced"):
        ranks = [step_times(json.loads(path.read_text())) for path in folder.glob("rank*.json")]
        run |= {name: mean(rank[name] for rank in ranks) for name in ranks[0]}


def weight_difference(run, reference):
    """Return the largest difference between two runs' weights."""
    newest = [max(Path(each["folder"]).glob("*.pt")) for each in (run, reference)]
    ours, theirs = [torch.load(path, map_location="cpu", weights_only=True)["model"] for path in newest]
    return max((ours[name] - theirs[name]).abs().max().item() for name in theirs)


def table(title, rows, columns):
    """Print runs as a Markdown table. What a run has not reported is a dash, and its note says why."""

    def cell(text, row):
        try:
            return text.format(**row)
        except (KeyError, TypeError):
            return "–"

    columns = columns | {"note": "{note}"}
    cells = [[cell(text, {"note": ""} | row).replace("|", "/") for text in columns.values()] for row in rows]
    cells.insert(0, list(columns))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    widths[-1] = 4  # notes may be long
    cells.insert(1, ["-" * width for width in widths])
    print(f"\n## {title}\n")
    for row in cells:
        first, *numbers, note = [text.rjust(width) for text, width in zip(row, widths, strict=True)]
        print("|", " | ".join([first.strip().ljust(widths[0]), *numbers, note.strip().ljust(4)]), "|")
    print()


def tell_parity(runs, args):
    """Say whether all lessons arrive at the same numbers."""
    one, *others = [run for run in runs if not run["failed"]] or [{"lesson": None}]
    for run in (one, *others) if one["lesson"] == "single_gpu" else ():
        run["weight_difference"] = weight_difference(run, one)
    columns = {"lesson": "{name}", "loss": "{loss:.4f}", "train": "{train:.2f}%", "test": "{test:.2f}%"}
    table("Parity: the last epoch", runs, columns | {"largest weight difference": "{weight_difference:.0e}"})
    if not others or one["lesson"] != "single_gpu":
        return print("There is nothing to compare single_gpu.py with.")
    alike = [run for run in others if abs(run["loss"] - one["loss"]) < 1.01e-4]  # one more: it may round up or down
    largest = max(run["weight_difference"] for run in others)
    print(
        f"{len(alike)} of {len(others)} arrive at single_gpu.py's loss; weights differ by up to {largest:.0e}:", end=" "
    )
    if largest < 1e-5:
        print("the same sums,\nrounded in another order. Parallelism changes the speed, not the result.")
    else:
        print(f"more than\nrounding does in a step; it grows, over {args.epochs} epochs here (README, Parity).")


def tell_speed(runs, args):
    """Say what the same runs cost."""
    columns = {"lesson": "{name}", "images/s": "{images_per_s:,.0f}", "start-up s": "{start_up_s:.1f}"}
    table("Speed, start-up, memory", runs, columns | {"peak memory MiB": "{memory_mib:,.0f}"})
    if args.epochs == 1:
        print("With one epoch the time of its test can't be told from the start-up, and is in it.")
    good = {run["lesson"]: run for run in runs if not run["failed"]}
    if {"single_gpu", "distributed_data_parallel"} <= good.keys():
        one, ddp = good["single_gpu"], good["distributed_data_parallel"]
        faster, larger = (ddp[name] / one[name] for name in ("images_per_s", "memory_mib"))
        print(f"With DDP {args.gpus} processes train {faster:.2f} times as fast as one, and take", end=" ")
        print(
            f"{ddp['start_up_s'] - one['start_up_s']:.1f} s more to start: the ranks\nimport torch after the command has.",
            end=" ",
        )
        print(f"Each needs {larger:.2f} times the memory of one: it has a whole model, and all of the data.")


def tell_scaling(runs, args):
    """Say what more processes bring, with the same batch for all together and with the same batch for each."""
    good = [run for run in runs if not run["failed"]]
    for run in good if good[:1] == runs[:1] else ():  # the first is the one with one process
        run["speed_up"] = run["images_per_s"] / good[0]["images_per_s"]
        run["efficiency"] = run["speed_up"] / run["processes"]
    columns = {"lesson": "{name}", "scaling": "{kind}", "images/s": "{images_per_s:,.0f}"}
    table("Scaling", runs, columns | {"speed-up": "{speed_up:.2f}", "efficiency": "{efficiency:.0%}"})
    if args.device == "cpu" and CORES == 1:
        print("This machine has one core: nothing can get faster here, the processes take turns.")
    for kind, batch in (("strong", "the same batch for all together"), ("weak", "the same batch for each")):
        if known := [run for run in good if run["kind"] == kind and run["processes"] > 1 and "speed_up" in run]:
            best = max(known, key=lambda run: run["speed_up"])
            print(
                f"With {batch}, {best['processes']} processes are {best['speed_up']:.2f} times as fast as one", end=""
            )
            print(f" ({best['efficiency']:.0%} of what would be ideal).")
    print("All steps have messages of the same length. A smaller share of a batch leaves less to compute between them;")
    print("a batch that grows with the processes doesn't, but it trains in fewer, larger steps.")


def tell_steps(runs, args):
    """Say where a step's time goes."""
    columns = {"ms of a step of": "{name}", "step": "{step:.2f}", "data": "{data:.2f}", "computing": "{compute:.2f}"}
    table("Where a step's time goes", runs, columns | {"messages": "{exposed:.2f}", "hidden": "{hidden:.2f}"})
    print(
        "step = data + computing + messages. Hidden messages fly while it computes. A traced step is slower than others."
    )
    for run in (run for run in runs if not run["failed"]):
        hidden = run["hidden"] / max(run["hidden"] + run["exposed"], 1e-9)
        print(
            f"{run['name']}: {run['exposed'] / run['step']:.0%} of a step is waiting for messages, {hidden:.0%} of their time is hidden."
        )
    print(
        "DDP sends while backward() still computes; by hand they go after it, one for each weight, or one with --bucket."
    )


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


def tell_widths(rows, args):
    """Say from which width on several processes are faster than one."""
    columns = {"width": "{width}", "1 process, images/s": "{one:,.0f}", f"DDP, {args.gpus}, images/s": "{several:,.0f}"}
    table("Width of the layers", rows, columns | {"waits for messages": "{messages:.0%}"})
    known = [row for row in rows if row["one"] and row["several"]]
    pays = next((index for index, row in enumerate(known) if row["several"] > row["one"]), None)
    if pays is None:
        print("DDP starts to pay: not within these widths.")
    elif pays == 0:
        print(f"DDP pays from the first width on, {known[0]['width']}.")
    else:
        print(f"DDP starts to pay between the widths {known[pays - 1]['width']} and {known[pays]['width']}.")
    shares = [f"{row['messages']:.0%} at {row['width']}" for row in rows if row["messages"] is not None]
    print(
        f"Share of a step that waits for messages: {', '.join(shares)}. Computing and messages both grow with the",
        end=" ",
    )
    print(
        "square\nof the width, but what a message or a call costs however short it is does not: it weighs less and less."
    )


def report(runs, args, interrupted):
    """Print the tables, write results.json and draw the figures."""
    of = {part: [run for run in runs if run["part"] == part] for part in PARTS}
    results = {"date": datetime.now().astimezone().isoformat(timespec="seconds"), "interrupted": interrupted}
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    results["machine"] = {"cpu": cpu[1] if cpu else platform.machine(), "cores": CORES, "gpus": gpus}
    results["versions"] = {"python": platform.python_version(), "torch": torch.__version__}
    figures = []
    if of["parity"]:
        tell_parity(of["parity"], args)
        tell_speed(of["parity"], args)
        figures.append((draw_speed, "speed", of["parity"]))
    if of["scaling"]:
        tell_scaling(of["scaling"], args)
        figures.append((draw_scaling, "scaling", of["scaling"]))
    if of["steps"]:
        tell_steps(of["steps"], args)
        figures.append((draw_steps, "steps", of["steps"]))
    if of["widths"]:
        results["widths"] = by_width(of["widths"], args)
        tell_widths(results["widths"], args)
        figures.append((draw_widths, "widths", results["widths"]))
    results |= {"flags": vars(args), "runs": runs}
    (args.out / "results.json").write_text(json.dumps(results, indent=1, default=str) + "\n")
    for draw, name, rows in figures:
        draw(rows, args.out / f"{name}.png")


def main():
    """Make the runs, one after the other, and report. After Ctrl-C report what there is."""
    parser = flags(__doc__, distributed=False, spawns=False)
    add = parser.add_argument
    add("--out", metavar="DIR", default="comparison", help="folder for results, figures and the runs' files")
    add("--only", nargs="+", choices=PARTS, default=PARTS, help="some of the parts")
    names = sorted({words.split()[0] for words in LESSONS})
    add("--lessons", nargs="+", choices=names, default=names, help="for parity; single_gpu is always there")
    add("-g", "--gpus", type=int, help="processes of lessons with several; default: the GPUs, or 2")
    add("--processes", nargs="+", type=int, help="for scaling; default: 1, 2, 4, ... up to the cores or GPUs")
    add("--widths", nargs="+", type=int, default=[64, 256, 1024], help="for widths")
    add("--timeout", type=int, default=900, help="seconds that a run may take")
    args = parse(parser, least=2)
    if args.profile:
        parser.error("the traces of the parts steps and widths are in --out: leave --profile out")
    most = torch.cuda.device_count() if args.device == "cuda" else CORES
    args.processes = sorted({1, *(args.processes or [2, *(n for n in (4, 8, 16, 32, 64) if n <= most)])})
    args.widths = sorted(set(args.widths))
    if min(args.processes + args.widths) < 1:
        parser.error("--processes and --widths: must be 1 or more")

    args.out, runs, interrupted = Path(args.out), [], False
    try:
        args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
        bar = tqdm(plan(args), disable=None)  # None: only on a terminal
        for number, run in enumerate(bar, start=1):
            bar.set_description(run["lesson"])
            execute(run, args, args.out / "runs" / f"{number:02}")
            runs.append(run)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one must not cut the report short
        interrupted = True
    report(runs, args, interrupted)
    if interrupted:
        print(f"interrupted: wrote what there is to {args.out}", file=sys.stderr)
        return 130
    failed = [run for run in runs if run["failed"] and not run.get("missing")]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
