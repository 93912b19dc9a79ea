"""Run the torchrun lesson on random images in CIFAR-10's layout, which is too large to come with the tests."""

import os
import pickle
import runpy
import sys
from pathlib import Path

import numpy
from filelock import FileLock
from torchvision.datasets import CIFAR10

CIFAR10._check_integrity = lambda self: True  # the files below are not the real ones
folder = Path(sys.argv[sys.argv.index("--data_dir") + 1]) / CIFAR10.base_folder
with FileLock(f"{folder}.lock"):
    if not folder.exists():
        folder.mkdir()
        numbers = numpy.random.default_rng(0)
        for name, _ in CIFAR10.train_list + CIFAR10.test_list:
            batch = {"data": numbers.integers(0, 256, (13, 3072), dtype="uint8"), "labels": list(range(10)) + [0, 1, 2]}
            (folder / name).write_bytes(pickle.dumps(batch))
        meta = {"label_names": list("abcdefghij")}
        (folder / CIFAR10.meta["filename"]).write_bytes(pickle.dumps(meta))
CIFAR10.meta = CIFAR10.meta | {"md5": None}
lesson = Path(__file__).parents[1] / "playground" / "distributed_data_parallel_torchrun.py"
sys.argv[0] = os.fspath(lesson)
runpy.run_path(sys.argv[0], run_name="__main__")
