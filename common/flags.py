"""The flags of all lessons, defined once: the same name, meaning and default wherever a lesson has them.

parser = flags(__doc__)
parser.add_argument(...)  # the lesson's own
args = parse(parser)
"""

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from common.data import DATA_DIR
from common.models import MODELS


def flags(
    doc: str,
    training: bool = True,
    distributed: bool = True,
    node_index: tuple[str, ...] = ("-nr", "--nr"),
    spawns: bool = True,
) -> argparse.ArgumentParser:
    """Make the parser of a lesson.

    Args:
        doc: the lesson's docstring, which --help prints.
        training: add the flags of the training loop.
        distributed: add the flags that say which processes there are and how they meet. A launcher such as torchrun
            puts RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT into the environment (for srun and mpirun set them from
            SLURM_PROCID or OMPI_COMM_WORLD_RANK and the like). They are the defaults then: each process counts as a
            node of its own, with one rank.
        node_index: the names of the flag for this node's index.
        spawns: the lesson starts its processes itself; else a launcher does, or there is only one, and the lesson has a
            way of its own to save.

    A lesson may add a flag of these once more, to change its choices or its default.
    """
    raw, env = argparse.RawDescriptionHelpFormatter, os.environ
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=raw, usage=argparse.SUPPRESS, conflict_handler="resolve"
    )
    add = parser.add_argument
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: the GPUs if there are any")
    if training:
        add("--epochs", type=int, default=3)
        add("--batch_size", "--batch-size", type=int, default=128, help="images in a step, over all ranks")
        add("--lr", type=float, default=1e-3, help="Adam's learning rate")
        add("--model", choices=MODELS, default="mlp")
        add("--width", type=int, help="neurons in each hidden layer; default: 64 (mlp), 120 (cnn)")
        add("--layers", type=int, help="hidden layers, the linear ones in cnn; default: 3 (mlp), 1 (cnn)")
        add("--dataset", choices=["mnist", "digits"], help="default: mnist, or digits where it can't be had")
        add("--data_dir", default=DATA_DIR, help="default: data/ beside playground/")
        add("--seed", type=int, default=0)
        add("--profile", metavar="DIR", help="write a trace of some steps of each rank here, for ui.perfetto.dev")
        if spawns:
            add("-s", "--savefile", help="write a checkpoint here after each epoch")
    if distributed:
        add("-n", "--nodes", type=int, default=env.get("WORLD_SIZE", 1), help="machines")
        add(
            "-g",
            "--gpus",
            type=int,
            default=1 if "RANK" in env or not spawns else None,
            help="processes per node; default: its GPUs, or 2",
        )
        add(*node_index, dest="nr", type=int, default=env.get("RANK", 0), help="index of this node, 0 to n-1")
        add("-ip", "--ip", default=env.get("MASTER_ADDR", "127.0.0.1"), help="address of node 0")
        add("--port", type=int, default=env.get("MASTER_PORT"), help="default: 8888, or any free one with -n 1")
        add(
            "--init_method",
            metavar="URL",
            help="env://, tcp://host:port or file:///shared/path, in place of -ip, --port",
        )
        add("--backend", help="default: nccl on GPUs, gloo on CPUs")
        add("--timeout", type=int, default=60, help="seconds to wait for another rank")
    return parser


def parse(parser: argparse.ArgumentParser, least: int = 1, spawns: bool = True) -> argparse.Namespace:
    """Parse the command line, fill in what was left open and refuse what can't work.

    Args:
        parser: from `flags`, with the lesson's own flags added.
        least: how many processes the lesson needs. Without -g, a machine with fewer GPUs runs 2 processes on its CPU.
        spawns: as for `flags`.

    Returns:
        The flags, all of them plain values; distributed lessons get `world_size`, the number of processes, as well.

    Raises:
        SystemExit: with status 2 and one line that says what to type.
    """
    args, gpus_here = parser.parse_args(), torch.cuda.device_count()
    for name in ("epochs", "batch_size", "nodes", "gpus", "timeout", "micro_batches", "accumulate", "width", "layers"):
        if (value := getattr(args, name, None)) is not None and value < 1:
            parser.error(f"--{name} {value}: must be 1 or more")

    if getattr(args, "dataset", None) == "cifar10" and args.model != "resnet18":
        parser.error(f"--model {args.model} takes grey images of 28x28 pixels: use --model resnet18")
    if getattr(args, "pretrained", False) and args.model != "resnet18":
        parser.error(f"there are no weights for --model {args.model}: leave --pretrained out, or use --model resnet18")

    wanted = getattr(args, "gpus", 1)
    if "RANK" in os.environ and wanted is not None:
        env = os.environ  # the launcher's others on this node need GPUs, too
        wanted = max(int(env.get("LOCAL_WORLD_SIZE", 1)), int(env.get("LOCAL_RANK", 0)) + 1)
    if args.device == "auto":
        args.device = "cuda" if gpus_here >= (least if wanted is None else 1) else "cpu"
    if wanted is None:
        wanted = args.gpus = gpus_here if args.device == "cuda" and gpus_here >= least else 2
    if args.device == "cuda" and wanted > gpus_here:
        fewer = f"--nproc-per-node {gpus_here}" if "RANK" in os.environ else f"-g {gpus_here}"
        instead = f"{fewer} or --device cpu" if gpus_here and hasattr(args, "gpus") else "--device cpu"
        parser.error(f"{wanted} GPUs are needed, this machine has {gpus_here}: use {instead}")
    if hasattr(args, "gpu_ids"):
        ids = args.gpu_ids
        if ids is None:
            args.gpu_ids = list(range(wanted))
        elif not all(0 <= gpu < gpus_here for gpu in ids):
            parser.error(f"--gpu_ids {ids}: this machine has {gpus_here} GPUs, numbered from 0")
        elif len(set(ids)) < max(wanted, len(ids)):
            parser.error(f"--gpu_ids {ids}: name a GPU for each of the {wanted} processes, none twice")
    if not spawns and getattr(args, "init_method", None) not in (None, "env://"):
        parser.error("torchrun says where to meet: leave --init_method out")
    if hasattr(args, "nodes"):
        _check_processes(parser, args, least)
        if not spawns and args.world_size > 1 and "RANK" not in os.environ:
            start = f"torchrun --standalone --nproc-per-node {args.gpus} {sys.argv[0]}"
            parser.error(f"torchrun starts the processes: {start if args.nodes == 1 else 'see run/torchrun_node.sh'}")
    if getattr(args, "model", None) == "resnet18" and (args.width or args.layers):
        parser.error("--model resnet18 has its own --width and --layers: leave them out, or use --model mlp")
    if getattr(args, "savefile", None) and getattr(args, "nr", 0) == 0:
        _check_file(parser, args, "savefile")
    if getattr(args, "plot", None) and getattr(args, "nr", 0) == 0:
        if Path(args.plot).suffix not in (".png", ".pdf", ".svg"):
            parser.error(f"--plot {args.plot} is of a format that can't be drawn: use {Path(args.plot).stem}.png")
        _check_file(parser, args, "plot")
    for name in ("profile", "out"):
        if folder := getattr(args, name, None):
            _check_folder(parser, name, folder, Path(folder))
    return args


def _check_file(parser: argparse.ArgumentParser, args: argparse.Namespace, name: str) -> None:
    """Refuse a file that can't be written: now rather than after an hour of training."""
    path = getattr(args, name)
    if os.path.isdir(path):
        parser.error(f"can't write --{name} {path} (is a folder): choose another")
    _check_folder(parser, name, path, Path(path).parent)


def _check_folder(parser: argparse.ArgumentParser, name: str, path: str, folder: Path) -> None:
    """Make the folder, and refuse one that can't be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        parser.error(f"can't write --{name} {path} ({error.strerror}): choose another")


def _check_processes(parser: argparse.ArgumentParser, args: argparse.Namespace, least: int) -> None:
    """Fill in and check the flags of a distributed lesson."""
    launched = "RANK" in os.environ
    if launched and "WORLD_SIZE" not in os.environ:
        parser.error("RANK is set, so set WORLD_SIZE, MASTER_ADDR and MASTER_PORT too, or unset RANK")
    if launched and (args.nodes, args.gpus, args.nr) != (int(os.environ["WORLD_SIZE"]), 1, int(os.environ["RANK"])):
        parser.error("RANK is set, so a launcher says how many processes there are: leave -n, -g and -nr out")
    args.world_size = args.nodes * args.gpus
    args.meeting_file = _place_to_meet(parser, args)
    args.port = args.port or (8888 if args.nodes > 1 else 0)  # 0: any free port
    args.backend = args.backend or ("nccl" if args.device == "cuda" else "gloo")
    if args.backend not in ("nccl", "gloo", "mpi"):
        parser.error(f"--backend {args.backend} is unknown: use nccl, gloo or mpi")
    if not dist.is_backend_available(args.backend):
        parser.error(f"this torch is built without {args.backend}: use --backend gloo")
    if args.backend == "nccl" and args.device == "cpu":
        parser.error("nccl needs GPUs: use --backend gloo")
    if args.backend == "gloo" and args.device == "cuda":
        parser.error("gloo can't send GPU memory: use --backend nccl or --device cpu")
    if not 0 <= args.nr < args.nodes:
        parser.error(f"node {args.nr}: with -n {args.nodes} its index must be 0 to {args.nodes - 1}")
    if args.nodes > 1 and args.ip == "127.0.0.1" and not launched and not args.init_method:
        parser.error(f"-n {args.nodes} needs -ip, the address of node 0")
    if args.world_size < least:
        parser.error(f"this lesson needs {least} processes: use -g {least}")
    if hasattr(args, "schedule"):
        _check_pipeline(parser, args)
    pieces = getattr(args, "micro_batches", args.world_size)
    if getattr(args, "batch_size", 0) % pieces:
        nearest = max(1, round(args.batch_size / pieces)) * pieces
        who = "micro-batches" if hasattr(args, "micro_batches") else "processes"
        parser.error(f"--batch_size {args.batch_size} can't be shared by {pieces} {who}: use --batch_size {nearest}")


def _check_pipeline(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse more stages than the model has layers with weights, and micro-batches that the schedule can't take."""
    interleaved = args.schedule.startswith("Interleaved")
    stages, (least, beside) = args.world_size * (1 + interleaved), {"mlp": (3, 1), "cnn": (1, 3)}[args.model]
    if (layers := (args.layers or least) + beside) < stages:
        parser.error(f"{stages} stages need as many layers, there are {layers}: use --layers {stages - beside}")
    fitting = max(1, args.micro_batches // args.world_size) * args.world_size
    if (args.schedule == "1F1B" and args.micro_batches < stages) or (interleaved and args.micro_batches != fitting):
        parser.error(f"{args.schedule} can't take {args.micro_batches} micro-batches: use --micro_batches {fitting}")


def _place_to_meet(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str | None:
    """Set --ip and --port from --init_method, or return the path of its file."""
    url = args.init_method
    if url is None:
        return None
    if url == "env://":
        if not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            parser.error("env:// reads the environment: first export MASTER_ADDR=<ip of node 0> MASTER_PORT=8888")
        args.ip, args.port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    elif found := re.fullmatch(r"tcp://(.+):(\d+)", url):
        args.ip, args.port = found[1].strip("[]"), int(found[2])
    elif not url.startswith("file:///"):
        parser.error(f"--init_method {url}: use env://, tcp://<ip of node 0>:8888 or file:///<a path all nodes see>")
    elif not (path := Path(url.removeprefix("file://"))).parent.is_dir() or path.is_dir():
        parser.error(f"--init_method {url}: name a file that can be made, in a folder that is there on all nodes")
    else:
        return str(path)
    return None
