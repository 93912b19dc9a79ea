"""What lessons print: the table of ranks, a progress bar, the line of an epoch.

Nothing here sends a message, and nothing here decides which rank prints.
"""

import argparse
import os
import platform
from collections.abc import Iterable, Sequence

import torch
from tqdm import tqdm

RANKS = "node  rank  local_rank  device  pid     host"  # the head of the table of ranks


def rank_row(node: int | str, rank: int, local_rank: int, device: torch.device) -> str:
    """Return this process's row for the table of ranks."""
    process = f"{os.getpid():<8}{platform.node()}"
    return f"{node:<6}{rank:<6}{local_rank:<12}{device!s:<8}{process}"


def bar(loader: Iterable, show: bool = True) -> Iterable:
    """Return a DataLoader with a progress bar, which is shown on a terminal only."""
    return tqdm(loader, leave=False, disable=None if show else True)


def epoch_line(
    args: argparse.Namespace,
    epoch: int,
    seconds: float,
    trained: Sequence[float],
    tested: Sequence[float],
) -> str:
    """Return the line of an epoch.

    Args:
        args: has epochs and double. In float64 the loss gets 12 digits, and all lessons print the
            same.
        epoch: its number, from 0.
        seconds: how long the training took, without the test.
        trained: three sums over the training images: the loss, the number classified correctly,
            the number of images.
        tested: the same sums over the test images.
    """
    loss, hits, images = trained
    _, test_hits, test_images = tested
    digits = 12 if args.double else 4
    return (
        f"epoch {epoch + 1}/{args.epochs}  loss {loss / images:.{digits}f}"
        f"  train {hits / images:.2%}  test {test_hits / test_images:.2%}"
        f"  {seconds:.2f} s  {images / seconds:,.0f} images/s"
    )
