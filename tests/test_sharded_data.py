"""sharded_data.py: its files, and a run that stops in the middle of an epoch."""

import argparse
import os
import pickle
import re
import time

import numpy
import pytest
import torch
from launch import DIGITS, epochs, launched, one_line, one_process, run
from sharded_data import Files, add_flags, beginning, make_loader, resume, save

from common import flags

LESSON = "sharded_data"
FLAGS = (*DIGITS, "--batch_size", 120, "--epochs", 2, "--double")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The flag with the folder of the files of the digits, in float64."""
    flag = ("--files", tmp_path_factory.mktemp("files"))
    run(LESSON, "--make", *FLAGS, *flag)
    return flag


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


def test_a_run_that_stops_in_an_epoch(files, tmp_path):
    """It resumes with another number of ranks, and ends with the numbers of one process.

    When it stops, the workers have read more than the five batches that the model has seen.
    """
    saved = tmp_path / "c.pt"
    own = ("--workers", 1, "--savefile", saved, "--every", 5)
    assert not epochs(run(LESSON, *FLAGS, *files, *own, "--stop", processes=3).stdout)
    out = run(LESSON, *FLAGS, *files, *own, processes=2).stdout
    assert f"{saved}: 600 images of epoch 1 are done\n" in out
    assert epochs(out) == one_process(*FLAGS, apart=1e-10)


def test_what_a_run_must_resume_with(tmp_path):
    """The error names the checkpoint and what differs. No unfinished file is left."""
    model = torch.nn.Linear(1, 1)
    saved = tmp_path / "c.pt"
    parser = flags.ranks("")
    add_flags(parser)
    args = parser.parse_args(["--savefile", str(saved)])
    args.images = [1500, 297]
    save(model, torch.optim.Adam(model.parameters()), args, beginning(0))
    assert os.listdir(tmp_path) == ["c.pt"]
    for name, value in (("seed", 3), ("lr", 0.5), ("images", [1493, 297])):
        changed = argparse.Namespace(**vars(args) | {name: value})
        words = f"{saved} was written with {name} {getattr(args, name)}, not {value}"
        with pytest.raises(ValueError, match=re.escape(words)):
            resume(model, None, changed)


def test_files_that_are_missing(main, tmp_path):
    """One line tells how to make them, also if only the test files are missing.

    Without --dataset, it takes the folder that is there.
    """
    folder = tmp_path / "digits"
    folder.mkdir()
    command = f"use python {LESSON}.py --files {tmp_path} --make"
    for part, words in (("train", [command]), ("test", ["--batch_size must be at most 50"])):
        one_line(main(LESSON, "--files", tmp_path, env=launched()), command)
        for kind in ("images", "labels"):
            numpy.save(folder / f"{part}-0-{kind}.npy", numpy.zeros(50))
        one_line(main(LESSON, "--files", tmp_path, env=launched()), *words)


class Slow(torch.utils.data.Dataset):
    """A data set that does not answer in time."""

    def __getitem__(self, number):
        time.sleep(15)


def test_a_worker_that_does_not_answer():
    """It is an error after --timeout seconds."""
    args = argparse.Namespace(device="cpu", workers=1, timeout=2)
    with pytest.raises(RuntimeError, match="timed out after 2 seconds"):
        next(iter(make_loader(Slow(), [[0]], args)))
