"""MNIST, or scikit-learn's handwritten digits, as tensors in memory.

`fetch` puts the files on disk, once on each node. `load` reads them. `whole_batch` belongs to the
DataLoader:

    DataLoader(train_set, batch_size=128, sampler=sampler, collate_fn=whole_batch)

`loaders` makes the DataLoaders that distributed_data_parallel_torchrun.py shows in full.
"""

import argparse
import contextlib
import http.client
import math
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy
import torch
from filelock import FileLock, Timeout
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

DATASETS = {"mnist": 60_000, "digits": 1_500}  # training images
DATA_DIR = str(Path(__file__).resolve().parents[1] / "data")

MNIST_FILES = {  # bytes of each: a header of 16 or 8 bytes, then one byte a pixel or label
    "train-images-idx3-ubyte": 16 + 60_000 * 28 * 28,
    "train-labels-idx1-ubyte": 8 + 60_000,
    "t10k-images-idx3-ubyte": 16 + 10_000 * 28 * 28,
    "t10k-labels-idx1-ubyte": 8 + 10_000,
}


class Images(Dataset):
    """Images and labels that are in memory already, read one by one or a whole batch at once.

    Args:
        images: floating point (N, 1, 28, 28), normalised.
        labels: int64 (N,), the classes 0 to 9.
    """

    def __init__(self, images: Tensor, labels: Tensor):
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return one image, (1, 28, 28), and its label, int64 ()."""
        return self.images[index], self.labels[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Return a batch, (B, 1, 28, 28) and int64 (B,). DataLoader calls this if it is there."""
        index = torch.from_numpy(numpy.array(indices))  # faster than torch.tensor(indices)
        return self.images.index_select(0, index), self.labels.index_select(0, index)


def whole_batch(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The collate_fn for `Images`: its batches arrive whole, so there is nothing to stack."""
    return batch


def fetch(dataset: str | None, data_dir: str | Path, batch_size: int = 1) -> str:
    """Make sure that the data is on disk and fills a batch.

    Several processes may call it at the same time.

    Args:
        dataset: "mnist", "digits" or None, which means MNIST if possible and digits otherwise.
        data_dir: folder for the files, in torchvision's layout (data_dir/MNIST/raw).
        batch_size: images in a step.

    Returns:
        The data set to train on.

    Raises:
        SystemExit: with one line, if a file is truncated, if MNIST was asked for and cannot be
            fetched, or if the training set is smaller than a batch.
    """
    if dataset != "digits":
        try:
            _fetch_mnist(Path(data_dir))
            dataset = "mnist"
        except (OSError, RuntimeError, http.client.HTTPException) as error:
            words = f"{type(error).__name__}: {error}".split()
            end = " ".join(words[-12:])  # a long message gives its reason at its end
            reason = f"MNIST is not in {data_dir} and cannot be fetched ({end})"
            if dataset == "mnist":
                folder = f"{data_dir}/MNIST/raw"
                sys.exit(f"error: {reason}: copy its files to {folder}, or use --dataset digits")
            dataset = "digits"
            if os.environ.get("LOCAL_RANK", "0") == "0":
                instead = "training on scikit-learn's 1,797 digits instead"
                ours = f"to use MNIST, copy its files to {data_dir}/MNIST/raw"
                print(f"WARNING: {reason}: {instead} ({ours})", file=sys.stderr)
    most = DATASETS[dataset]
    if batch_size > most:
        sys.exit(f"error: --batch_size must be at most {most}, the number of training images")
    return dataset


def load(
    dataset: str, data_dir: str | Path, dtype: torch.dtype = torch.float32
) -> tuple[Images, Images]:
    """Read the data into memory, normalised once. Call `fetch` before it.

    Args:
        dataset: "mnist" (60,000 and 10,000 images) or "digits" (1,500 and 297, resized from 8x8).
        data_dir: the folder given to `fetch`.
        dtype: of the images.

    Returns:
        The training set and the test set.
    """
    if dataset == "mnist":
        from torchvision.datasets import MNIST  # here, because digits do without it

        parts = [MNIST(data_dir, train=train) for train in (True, False)]
        # The last two numbers are the mean and the standard deviation of all training pixels.
        numbers = (255, 0.1307, 0.3081)
        return tuple(_normalised(part.data, part.targets, dtype, *numbers) for part in parts)
    from sklearn.datasets import load_digits

    digits = load_digits()
    images, labels = torch.tensor(digits.images), torch.tensor(digits.target)
    # The digits of one writer follow each other in the file. So shuffle before the split.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    parts = (order[:1500], order[1500:])
    numbers = (16, 0.3051, 0.3245)
    return tuple(_normalised(images[part], labels[part], dtype, *numbers) for part in parts)


def loaders(
    args: argparse.Namespace, rank: int = 0, world_size: int = 1
) -> tuple[DataLoader, DataLoader]:
    """Return a DataLoader of this rank's training images, and one of its test images.

    Of n ranks, rank r trains on the images at the positions r, r + n, r + 2n, ... of an order that
    is the same on all ranks. train_loader.sampler.set_epoch(epoch) changes the order. The batches
    of all ranks together have --batch_size images. Each test image is on
    one rank only, and all ranks have equally many test batches.
    """
    dtype = torch.float64 if args.double else torch.float32
    train_set, test_set = load(args.dataset, args.data_dir, dtype)
    options = {"collate_fn": whole_batch, "pin_memory": args.device != "cpu"}
    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed, drop_last=True)
    per_rank_batch = args.batch_size // world_size
    train_loader = DataLoader(train_set, per_rank_batch, sampler=sampler, drop_last=True, **options)
    batches = torch.arange(len(test_set)).tensor_split(math.ceil(len(test_set) / 1000))
    own_batches = [batch[rank::world_size].tolist() for batch in batches]
    test_loader = DataLoader(test_set, batch_sampler=own_batches, **options)
    return train_loader, test_loader


def equal_batches(test_set: Dataset, rank: int, world_size: int) -> DataLoader:
    batches = torch.arange(len(test_set)).tensor_split(math.ceil(len(test_set) / 1000))
    own_batches = [batch[rank::world_size].tolist() for batch in batches]
    return DataLoader(test_set, batch_sampler=own_batches, collate_fn=whole_batch)


def _normalised(
    pixels: Tensor, labels: Tensor, dtype: torch.dtype, white: int, mean: float, std: float
) -> Images:
    """Scale pixels (N, H, W) from 0..white to mean 0 and standard deviation 1, resize to 28x28."""
    images = pixels.unsqueeze(1).to(dtype).div_(white)
    if images.shape[2:] != (28, 28):
        images = F.interpolate(images, size=(28, 28), mode="bilinear")
    return Images(images.sub_(mean).div_(std), labels.long())


@contextlib.contextmanager
def _patience(seconds: float) -> Iterator[None]:
    """Let urllib give up after so many seconds without an answer. By default it waits forever."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _fetch_mnist(data_dir: Path) -> None:
    """Let torchvision download and unpack what is missing, in one process at a time.

    Raises:
        OSError, RuntimeError: if a file is missing and cannot be fetched.
        SystemExit: if a file is damaged.
    """
    raw = data_dir / "MNIST" / "raw"
    if all(_size(raw / name) == size for name, size in MNIST_FILES.items()):
        return
    data_dir.mkdir(parents=True, exist_ok=True)
    lock = FileLock(data_dir / ".lock")
    waited = False
    try:
        lock.acquire(timeout=0)
    except Timeout:  # another process is downloading the files now
        waited = True
        lock.acquire()
    try:
        if not all((raw / name).is_file() for name in MNIST_FILES):
            if waited:
                raise OSError("another process has just tried")
            _download_mnist(data_dir, raw)
    finally:
        lock.release()
    for name, size in MNIST_FILES.items():
        path = raw / name
        if not path.is_file():
            raise OSError(f"{path} was not downloaded")
        if _size(path) != size:
            sizes = f"{_size(path):,} bytes, not {size:,}"
            sys.exit(f"error: {path} has {sizes}: delete it and start again")


def _download_mnist(data_dir: Path, raw: Path) -> None:
    """Download and unpack the files with torchvision.

    A damaged file is removed if it was downloaded just now, and named if it was there before.

    Raises:
        SystemExit: if a file was damaged before.
    """
    from torchvision.datasets import MNIST
    from torchvision.datasets.utils import check_integrity

    before = set(raw.glob("*.gz"))
    try:
        with _patience(10), contextlib.redirect_stdout(sys.stderr):
            MNIST(data_dir, download=True)
    except BaseException:
        for name, md5 in MNIST.resources:
            path = raw / name
            if path.is_file() and not check_integrity(path, md5):
                if path in before:
                    sys.exit(f"error: {path} is damaged: delete it and start again")
                path.unlink()
        raise


def _size(path: Path) -> int:
    """Return a file's size in bytes, 0 if there is none."""
    return path.stat().st_size if path.is_file() else 0
