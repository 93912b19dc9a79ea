"""A model too large for one process, for real: each process may take so much memory, and no more.

One process ends with PyTorch's error. Four that shard or split the model train it, under the
same limit each. A parameter has more than 32 MiB, because glibc keeps smaller freed blocks.
"""

import re
import resource
from pathlib import Path

import pytest
from launch import Lesson, epochs, ranks
from lessons import ROOT, lesson_path

WIDE = ("--dataset", "digits", "--epochs", 1, "--width", 3072)
FEWER_IMAGES = ("split([1500, 297])", "split([240, 60, 1497])[:2]")  # a step takes seconds
SHARING = ["fully_sharded_data_parallel", "tensor_parallel", "pipeline_parallel"]


def room(layers):
    """Return the bytes that parameters, gradients and Adam's state take."""
    return 16 * (784 * 3072 + (layers - 1) * 3072 * 3072 + 3072 * 10)


def limited(job, more):
    """Let a process that has just started take so many more bytes. Returns its Job."""
    pid = job.process.pid
    has = int(re.search(r"VmData:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[1]) * 1024
    resource.prlimit(pid, resource.RLIMIT_DATA, (has + more, has + more))
    return job


def test_a_model_too_large_for_one_process(change):
    """One process ends with status 1 and PyTorch's reason; four train it, in each way, alike."""
    # With fewer layers, four processes have too little room.
    flags = (*WIDE, "--device", "cpu", "--batch_size", 240, "--layers", 6)
    alone = change("single_gpu", FEWER_IMAGES, path="common/data.py")
    done = limited(Lesson(alone, *flags), room(6)).wait()
    assert done.returncode == 1 and not done.stdout
    assert "can't allocate memory: you tried to allocate" in done.stderr.splitlines()[-1]
    trained = []
    for lesson in SHARING:
        copy = alone.parents[1] / lesson_path(lesson).relative_to(ROOT)
        started = ranks(copy, *flags, "--timeout", 300, processes=4)
        jobs = [limited(job, room(6)) for job in started]
        ends = [job.wait(900) for job in jobs]
        assert not any(end.returncode for end in ends), "\n".join(end.stderr for end in ends)
        trained += epochs(ends[0].stdout)
    assert trained == [pytest.approx(trained[0], abs=0.5)] * 3, trained
    assert trained[1]["loss"] == pytest.approx(trained[0]["loss"], abs=2e-3)
