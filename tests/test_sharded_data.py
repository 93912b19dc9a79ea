"""sharded_data.py: who reads which image, and a run that stops in the middle of an epoch."""

import importlib.util
import itertools
import pickle

import numpy
import pytest
from conftest import DIGITS, epochs, one_line, run, single_gpu, train
from sharded_data import Files, own_batches

LESSON = "sharded_data"
FLAGS = (*DIGITS, "--batch_size", 120, "--epochs", 2, "--double")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The flag with the folder of the files of the digits, in float64."""
    flag = ("--files", tmp_path_factory.mktemp("files"))
    run(LESSON, "--make", *FLAGS, *flag)
    return flag


def test_what_each_rank_reads():
    """Any number of ranks reads the same global batches, equally many images each, from any place.

    1,500 images in batches of 120 are 12 whole batches.
    """
    one = own_batches(1500, 120, 5, 1, 0, 0, 1)
    assert [len(batch) for batch in one] == [120] * 12
    assert len(set(itertools.chain(*one))) == 1440
    assert own_batches(1500, 120, 5, 2, 0, 0, 1) != one != own_batches(1500, 120, 4, 1, 0, 0, 1)
    for ranks, done in ((2, 0), (3, 600), (4, 1320), (3, 1440)):
        parts = [own_batches(1500, 120, 5, 1, done, rank, ranks) for rank in range(ranks)]
        assert all(len(batch) == 120 // ranks for batch in itertools.chain(*parts))
        together = [sorted(itertools.chain(*batch)) for batch in zip(*parts, strict=True)]
        assert together == [sorted(batch) for batch in one[done // 120 :]]


def test_files_of_unequal_length(tmp_path):
    """Each image has its number, the labels are its own, and no array is sent to a worker."""
    start = 0
    for number, length in enumerate([4, 1, 1000]):
        images = numpy.arange(start, start + length).repeat(784).reshape(length, 1, 28, 28)
        numpy.save(tmp_path / f"train-{number}-images.npy", images.astype(numpy.float32))
        numpy.save(tmp_path / f"train-{number}-labels.npy", images[:, 0, 0, 0] + 7)
        start += length
    read = Files(tmp_path, "train")
    assert len(read) == start
    for number in range(start):
        image, label = read[number]
        assert image.shape == (1, 28, 28) and (image == number).all() and label == number + 7
    assert len(pickle.dumps(read)) < 5_000 < 1000 * 784 * 4


@pytest.mark.parametrize("by", ["hand", "torchdata"])
def test_a_run_that_stops_in_an_epoch(by, files, tmp_path):
    """It resumes with another number of ranks, and ends with the numbers of one process.

    When it stops, the workers have read more than the five batches that the model has seen. With
    another seed, that position means nothing, so the error names the seed.
    """
    if by == "torchdata":
        pytest.importorskip("torchdata")
    saved = tmp_path / "c.pt"
    flags = (*FLAGS, *files, "--by", by, "--savefile", saved, "--every", 5)
    assert not epochs(train(LESSON, *flags, "--stop", processes=3).stdout)
    refused = train(LESSON, *flags, "--seed", 3, processes=1, status=1).stderr
    assert f"ValueError: {saved} was written with seed 0, not 3" in refused
    out = train(LESSON, *flags, processes=2).stdout
    assert f"{saved}: 600 images of epoch 1 are done\n" in out
    right = single_gpu(*FLAGS)
    assert epochs(out) == [
        line | {"loss": pytest.approx(line["loss"], abs=1e-10)} for line in right
    ]


def test_without_torchdata(main, monkeypatch):
    """One line says what to install."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    one_line(main(LESSON, "--by", "torchdata", env=env), "pip install torchdata")
