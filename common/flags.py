"""The flags of the lessons: a wrong one ends a lesson in one line, before anything starts."""

import argparse
import math
import os
import sys
import time
from typing import NoReturn

import torch
import torch.distributed as dist

from common.data import DATA_DIR, DATASETS
from common.models import HEADS, MODELS, PIXELS, WIDTH

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Parser(argparse.ArgumentParser):
    """argparse's parser. Its errors are a single line, and --help begins as the docstring does."""

    def __init__(self, doc: str):
        super().__init__(
            description=(doc or "").partition("\n\n")[0],
            usage="%(prog)s [flags]",
            epilog="The beginning of the file has commands to run, and what they print.",
        )

    def error(self, message: str) -> NoReturn:
        """Print one line on stderr and exit with status 2."""
        if os.environ.get("LOCAL_RANK", "0") != "0":
            # Most often the first rank of this node finds the same error. When it ends, torchrun
            # ends this rank, so the line is printed once.
            time.sleep(10)
        print(f"{self.prog}: error: {message}", file=sys.stderr, flush=True)
        sys.exit(2)

    def parse_args(self, words=None, namespace=None) -> argparse.Namespace:
        """Parse the flags. Refuse a model that does not fit its data or its own flags."""
        args = super().parse_args(words, namespace)
        if "heads" in args:
            self.check_model(args)
        # What a batch has, and a lesson counts in a second: a row of the text is 128 bytes.
        args.unit = "rows" if getattr(args, "dataset", None) == "text" else "images"
        return args

    def check_batch(self, batch_size: int, ranks: int) -> None:
        """Refuse a global batch that the ranks cannot divide into equal parts."""
        if batch_size % ranks:
            near = max(1, round(batch_size / ranks)) * ranks
            self.error(f"{ranks} ranks cannot divide --batch_size {batch_size}: use {near}")

    def check_model(self, args: argparse.Namespace) -> None:
        """Refuse data that the model cannot read, and heads that do not divide its width.

        The language model reads the text without --dataset, too.
        """
        if args.model == "language":
            args.dataset = args.dataset or "text"
        if (args.model == "language") != (args.dataset == "text"):
            self.error(f"--model {args.model} cannot read --dataset {args.dataset}")
        if args.tokens and args.model != "transformer":
            self.error(f"--tokens needs --model transformer, not {args.model}")
        if args.model in ("mlp", "cnn"):
            if args.heads:
                self.error(f"--heads needs --model transformer, not {args.model}")
            return
        width = args.width or WIDTH[args.model]
        heads = args.heads or HEADS
        if width % heads:
            self.error(f"--heads {heads} cannot divide --width {width}")
        if args.model == "language" and (heads % 2 or width // heads % 2):
            wrong = f"--heads {heads} --width {width}"
            self.error(f"{wrong}: the heads, and the numbers of a head, must be even (language)")

    def check_no_launcher(self) -> None:
        """Refuse to start ranks in each of the processes that a launcher has started."""
        if "RANK" in os.environ:
            lesson = "playground/distributed_data_parallel_torchrun.py"
            self.error(f"RANK is set, so a launcher has started this: use {lesson}, or unset RANK")

    def check_nodes(self, args: argparse.Namespace) -> None:
        """Refuse what a lesson that starts its ranks itself cannot start on this node."""
        if not 0 <= args.nr < args.nodes:
            self.error(f"-nr {args.nr}: the number of a node is 0 to {args.nodes - 1}")
        if args.nodes > 1 and not (args.ip or getattr(args, "init_method", None)):
            self.error(f"-n {args.nodes} needs -ip, the address of node 0")
        if args.ip and not args.ip.isprintable():  # as from a file that was written on Windows
            self.error(f"-ip {args.ip!r} has a character that is no part of an address")
        self.check_gpus(args.device, args.gpus, "-g")
        backend = getattr(args, "backend", None)
        if backend and not dist.is_backend_available(backend):
            self.error(f"this PyTorch has no backend {backend}: leave --backend out")
        if backend == "nccl" and args.device != "cuda":
            self.error("nccl needs NVIDIA's GPUs: leave --backend out")

    def check_torchrun(self, args: argparse.Namespace) -> None:
        """Refuse a rank that no launcher has started, and more ranks than this node has GPUs."""
        missing = [name for name in TORCHRUN if name not in os.environ]
        if missing:
            command = f"torchrun --standalone --nproc-per-node 2 {sys.argv[0]}"
            self.error(f"{', '.join(missing)} not set: start it with {command}")
        needed = os.environ.get("LOCAL_WORLD_SIZE", int(os.environ["LOCAL_RANK"]) + 1)
        self.check_gpus(args.device, int(needed), "--nproc-per-node")

    def check_gpus(self, device: str, needed: int, flag: str) -> None:
        """Refuse more ranks than there are GPUs."""
        found = torch.accelerator.device_count()
        if device != "cpu" and needed > found:
            self.error(f"this machine has {found} GPUs: use {flag} {found} or --device cpu")


def positive(text: str) -> int:
    """Parse a number that is 1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be 1 or more")
    return number


def rate(text: str) -> float:
    """Parse a finite number that is 0 or more."""
    number = float(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be a number, 0 or more")
    return number


def seed(text: str) -> int:
    """Parse a number that PyTorch takes as a seed, also after a rank or an epoch is added."""
    number = int(text)
    if not 0 <= number < 2**63:
        raise argparse.ArgumentTypeError(f"{text} must be from 0 to 2**63 - 1")
    return number


def port(text: str) -> int:
    """Parse the number of a TCP port."""
    number = int(text)
    if not 0 < number < 65536:
        raise argparse.ArgumentTypeError(f"{text} must be from 1 to 65535")
    return number


def tokens(text: str) -> int:
    """Parse a number of tokens, which are equal parts of an image."""
    number = positive(text)
    if PIXELS % number:
        raise argparse.ArgumentTypeError(f"{text} must divide the {PIXELS} pixels of an image")
    return number


def new_file(text: str) -> str:
    """Parse the path of a file that can be written."""
    path = os.path.expanduser(text)
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {text}")
    return path


def new_folder(text: str) -> str:
    """Parse the path of a folder that can be written to. Makes it if it is missing."""
    path = os.path.expanduser(text)
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {text}: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {text}")
    return path


def accelerator() -> str:
    """Return the type of this machine's accelerator, such as cuda, or cpu if it has none.

    Apple's GPU (mps) is left out, because no backend sends its tensors.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found and found.type != "mps" else "cpu"


def device(text: str) -> str:
    """Parse cpu, or the type of an accelerator that this machine has."""
    if text not in ("cpu", accelerator()):
        raise argparse.ArgumentTypeError(f"this machine has no working {text}: use {accelerator()}")
    return text


def training(doc: str) -> Parser:
    """Return a parser with the flags of the model, the data and the device."""
    parser = Parser(doc)
    add = parser.add_argument_group("the model and the data").add_argument
    add("--epochs", type=positive, default=3)
    add("--lr", type=rate, default=1e-3, help="Adam's learning rate")
    add("--model", choices=[*MODELS, "language"], default="mlp")
    add("--width", type=positive, help="default: 64 (mlp, language), 120 (cnn), 32 (transformer)")
    add("--layers", type=positive, help="hidden layers; default: 3 (mlp), 1 (cnn), 2 blocks")
    add("--tokens", type=tokens, help="tokens of an image (transformer); default: 28")
    add("--heads", type=positive, help="attention heads of a block; default: 4")
    add("--dataset", choices=DATASETS, help="default: mnist, or digits without mnist")
    folder = os.path.expanduser
    add("--data_dir", type=folder, default=DATA_DIR, help="default: data/ beside playground/")
    add("--seed", type=seed, default=0)
    add("--double", action="store_true", help="compute in float64, and print 12 digits")
    add("--device", type=device, default=accelerator(), help="cpu, or this machine's accelerator")
    add("--batch_size", type=positive, default=128, help="images in a step, over all ranks")
    return parser


def ranks(doc: str) -> Parser:
    """Return the same with what a rank needs that torchrun has started."""
    parser = training(doc)
    parser.add_argument("--timeout", type=positive, default=60, help="seconds to wait for a rank")
    return parser
