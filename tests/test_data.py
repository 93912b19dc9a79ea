"""The data: what each rank tests on, and files that are missing or damaged."""

import argparse
import os
import shutil

import pytest
import torch
from torchvision.datasets import MNIST
from torchvision.transforms import Compose, Normalize, ToTensor

from common.data import Images, fetch, load, loaders
from watch_ranks.ranks import call

# Bytes of the unpacked files.
SIZES = {
    "train-images-idx3-ubyte": 47_040_016,
    "train-labels-idx1-ubyte": 60_008,
    "t10k-images-idx3-ubyte": 7_840_016,
    "t10k-labels-idx1-ubyte": 10_008,
}
ARCHIVES = [f"{name}.gz" for name in SIZES]


@pytest.fixture(autouse=True)
def no_mirror(monkeypatch):
    """Let torchvision download from a port that no program listens on.

    So no test needs or uses the Internet.
    """
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(MNIST, "mirrors", ["http://127.0.0.1:1/"])


def copied(mnist, folder, names):
    """Copy some files of MNIST into a data folder. Returns the folder that they are in."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in names:
        shutil.copyfile(mnist / "MNIST" / "raw" / name, raw / name)
    return raw


def sizes(folder):
    """Return the names and sizes of the unpacked files in a data folder."""
    paths = (folder / "MNIST" / "raw").iterdir()
    return {path.name: path.stat().st_size for path in paths if path.suffix != ".gz"}


def error_line(*args):
    """Call fetch(), which must end the program with one line. Returns the line."""
    with pytest.raises(SystemExit) as stop:
        fetch(*args)
    assert str(stop.value).startswith("error: ")
    assert len(str(stop.value).splitlines()) == 1
    return str(stop.value)


def fetch_as_rank(rank, folder):
    """Fetch as one of the ranks of a node. Returns what to train on."""
    os.environ["LOCAL_RANK"] = str(rank)
    return fetch(None, folder)


def test_the_test_loaders_of_all_ranks(monkeypatch):
    """Each image is there once, and all ranks have equally many batches, as FSDP needs it."""

    def numbers(*_):
        return [Images(torch.arange(size), torch.arange(size)) for size in (1500, 2500)]

    monkeypatch.setattr("common.data.load", numbers)
    flags = {"dataset": None, "data_dir": None, "seed": 0, "device": "cpu", "double": False}
    args = argparse.Namespace(batch_size=120, **flags)
    test_loaders = [loaders(args, rank, 8)[1] for rank in range(8)]
    assert {len(test_loader) for test_loader in test_loaders} == {3}
    tested = [labels for test_loader in test_loaders for _, labels in test_loader]
    assert torch.cat(tested).sort()[0].equal(torch.arange(2500))


def test_mnist_equals_torchvisions(mnist):
    """The archives are enough. The images equal those of torchvision's ToTensor and Normalize."""
    assert fetch(None, mnist) == "mnist"
    assert sizes(mnist) == SIZES
    transform = Compose([ToTensor(), Normalize((0.1307,), (0.3081,))])
    for part, train in zip(load("mnist", mnist), (True, False), strict=True):
        theirs = MNIST(mnist, train=train, transform=transform)
        assert len(part) == len(theirs)
        for index in (0, 4321, len(part) - 1):
            image, label = part[index]
            torch.testing.assert_close(image, theirs[index][0], atol=1e-6, rtol=0)
            assert label.dtype == torch.int64 and label == theirs[index][1]


def test_without_mirror(tmp_path, capfd):
    """Two processes both choose the digits, and the node warns once. MNIST by name is refused.

    A batch is compared with the data set that is used, not with the one that is missing.
    """
    assert call(fetch_as_rank, 2, tmp_path, group=False) == ["digits", "digits"]
    out, err = capfd.readouterr()
    [warning] = [line for line in err.splitlines() if line.startswith("WARNING: ")]
    assert out == "" and str(tmp_path) in warning
    line = error_line("mnist", tmp_path)
    assert str(tmp_path) in line and "--dataset digits" in line
    assert fetch(None, tmp_path, 1500) == "digits"
    assert "--batch_size must be at most 1500" in error_line(None, tmp_path, 1501)


def test_damaged_files_are_named(mnist, tmp_path):
    """A file that is cut short, or has a hole as a download can leave, is never trained on."""
    fetch("mnist", mnist)
    raw = copied(mnist, tmp_path, SIZES)
    holed = raw / "t10k-labels-idx1-ubyte"
    with open(holed, "r+b") as file:
        file.seek(5000)
        file.write(bytes(4000))
    assert f"{holed} is damaged: delete it" in error_line(None, tmp_path)
    short = raw / "train-images-idx3-ubyte"
    os.truncate(short, 23_520_008)
    assert f"{short} is damaged: delete it" in error_line("mnist", tmp_path)


def test_a_truncated_archive(mnist, tmp_path):
    """It is named, because it cannot be downloaded again."""
    damaged = copied(mnist, tmp_path, ARCHIVES) / "train-labels-idx1-ubyte.gz"
    os.truncate(damaged, damaged.stat().st_size // 2)
    assert f"{damaged} is damaged: delete it" in error_line(None, tmp_path)


def test_the_order():
    """With one rank, it is that of the seed."""
    args = argparse.Namespace(dataset="digits", data_dir="", double=False, device="cpu")
    args.batch_size = 120
    for args.seed in (0, 1):
        order = torch.randperm(1500, generator=torch.Generator().manual_seed(args.seed))
        assert [*loaders(args)[0].sampler] == order.tolist()


def test_a_download_that_breaks_off(tmp_path, monkeypatch):
    """Nothing stays of it, so the next run downloads all of it again."""
    raw = tmp_path / "MNIST" / "raw"

    def break_off(*args, **options):
        raw.mkdir(parents=True)
        (raw / next(iter(SIZES))).write_bytes(b"half of it")
        raise OSError("cut off")

    monkeypatch.setattr(MNIST, "__init__", break_off)
    assert fetch(None, tmp_path) == "digits"
    assert not [*raw.iterdir()]
