"""Flags that several lessons have, and a parser whose errors are a single line.

A lesson adds its own flags to them:

    parser = flags.Parser(__doc__, parents=[flags.training()])
    parser.add_argument("--batch_size", type=int, default=128)
"""

import argparse
import contextlib
import os
import sys
import time
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.errors import record

from common.data import DATA_DIR
from common.models import MODELS


class Parser(argparse.ArgumentParser):
    """argparse's parser. An error is a single line, without the usage.

    Args:
        doc: the docstring of the lesson. --help begins with its first paragraph.
        parents: parsers whose flags this one has, too.
    """

    def __init__(self, doc: str, parents: list[argparse.ArgumentParser] | None = None):
        first_paragraph = doc.partition("\n\n")[0]
        super().__init__(
            parents=parents or [],
            description=first_paragraph,
            usage="%(prog)s [flags]",
            epilog="The beginning of the file has commands to run, and what they print.",
        )

    def error(self, message: str) -> NoReturn:
        """Print one line on stderr and exit with status 2."""
        exit_with(f"{self.prog}: error: {message}", 2)


def exit_with(line: str, status: int) -> NoReturn:
    """Print a line with an error on stderr and exit.

    Most often all ranks of torchrun find the same error. Of the ranks on a node, only the first one
    prints it, and torchrun's report repeats it.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if os.environ["LOCAL_RANK"] != "0":
            time.sleep(10)  # torchrun ends this rank meanwhile, if the first one has ended
        with contextlib.suppress(ValueError):
            _tell_torchrun(line.partition("error: ")[2] or line)
    print(line, file=sys.stderr, flush=True)
    sys.exit(status)


@record
def _tell_torchrun(message: str) -> None:
    """Raise an error, which `record` writes to the file that torchrun reads."""
    raise ValueError(message) from None


def training() -> argparse.ArgumentParser:
    """Return the flags of the model and the data, which training needs in a single process, too."""
    parser = argparse.ArgumentParser(add_help=False)
    add = parser.add_argument_group("the model and the data").add_argument
    add("--epochs", type=int, default=3)
    add("--lr", type=float, default=1e-3, help="Adam's learning rate")
    add("--model", choices=MODELS, default="mlp")
    add("--width", type=int, help="neurons in a layer; default: 64 (mlp), 120 (cnn), 32")
    add("--layers", type=int, help="hidden layers; default: 3 (mlp), 1 (cnn), 2 blocks")
    add("--tokens", type=int, help="tokens of an image (transformer); default: 28")
    add("--heads", type=int, help="attention heads of a block (transformer); default: 4")
    add("--dataset", choices=["mnist", "digits"], help="default: mnist, or digits without mnist")
    add("--data_dir", default=DATA_DIR, help="default: data/ beside playground/")
    add("--seed", type=int, default=0)
    add("--double", action="store_true", help="compute in float64, and print 12 digits")
    return parser
