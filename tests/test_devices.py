"""Which device a lesson chooses, on simulated machines: PyTorch is told which GPUs there are.

Tests that need a real GPU are in test_gpu.py.
"""

import argparse
import importlib

import pytest
import torch
from launch import IS_REAL, STANDIN, launched, one_line
from lessons import LESSONS, by_torchrun, lesson_path, talks

from common.flags import accelerator

STOPPED = 42  # the exit status of a lesson that would train now; @record turns 0 into a return
TALKING = [lesson for lesson in LESSONS if talks(lesson)]
ON_CPU = ("finding_hangs", "thousand_ranks")  # by default, on any machine


@pytest.fixture
def machine(monkeypatch):
    """Return a function that lets torch see some GPUs. Their driver works, or it is too old."""

    def simulate(gpus, works=True):
        def init():
            if not works:
                raise RuntimeError("The NVIDIA driver on your system is too old\nand more lines")

        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # it hides the real ones
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: works)
        monkeypatch.setattr(torch.cuda, "init", init)
        backends = ["gloo", "nccl"]
        monkeypatch.setattr(torch.distributed, "is_backend_available", backends.__contains__)

    return simulate


@pytest.fixture
def chosen(main, monkeypatch):
    """Return a function that calls a lesson's main(), and returns the flags that it trains with."""

    def called(name, *flags):
        seen = {}

        def stop(*given, args=(), **_):  # launch has its args by name, mp.spawn by position
            found = [*given, *args]
            for each in given:
                if isinstance(each, tuple):
                    found += each
            seen["args"] = next(each for each in found if isinstance(each, argparse.Namespace))
            raise SystemExit(STOPPED)

        if not IS_REAL:
            monkeypatch.syspath_prepend(STANDIN)
        lesson = importlib.import_module(name)
        path = lesson.__file__
        stubs = {"fetch": lambda dataset, *_: dataset or "digits", "launch": stop}
        stubs["download"] = lambda args: None
        stubs["open_store"] = lambda args: torch.distributed.HashStore()
        stubs["check_files"] = lambda parser, args: None  # of sharded_data.py
        if "mp.spawn(" in lesson_path(path).read_text():
            monkeypatch.setattr(lesson.mp, "spawn", stop)
        else:
            stubs |= {"train": stop, "talk": stop}
        for stub, function in stubs.items():
            if hasattr(lesson, stub):
                monkeypatch.setattr(lesson, stub, function)
        needed = 2 if name == "trainer_and_generator" else 1
        env = launched(needed) if by_torchrun(path) else {}
        main(name, *flags, status=STOPPED, env=env)
        return seen["args"]

    return called


def test_apples_gpu(monkeypatch):
    """It is left out, because no backend sends its tensors."""
    found = torch.device("mps")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: found)
    assert accelerator() == "cpu"
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("xpu"))
    assert accelerator() == "xpu"


@pytest.mark.parametrize("lesson", LESSONS)
def test_the_device(lesson, machine, main, chosen):
    """A lesson uses the GPU if there is one whose driver works, and the CPU otherwise.

    Lessons that only talk need two GPUs, and three lessons take them only if they are told to. If
    no GPU works, --device cuda ends with status 2 and one line.
    """
    flags = () if lesson in TALKING else ("--batch_size", 120)
    for gpus, works in [(8, False), (1, True), (2, True)]:
        machine(gpus, works)
        args = chosen(lesson, *flags)
        device = "cuda" if works and (gpus == 2 or lesson not in TALKING) else "cpu"
        device = "cpu" if lesson in ON_CPU else device
        assert args.device == device, (gpus, works)
        if lesson == "model_parallel":
            devices = [str(each) for each in importlib.import_module(lesson).choose_devices(args)]
            assert devices == (["cuda:0", "cuda:1"] if gpus == 2 else [device] * 2)
    assert chosen(lesson, *flags, "--device", "cpu").device == "cpu"
    if lesson == "model_parallel":
        assert chosen(lesson, "--devices", "cuda:1", "cpu").devices == ["cuda:1", "cpu"]
        one_line(main(lesson, "--devices", "cpu", "cuda:2"), "--devices", "cpu")
    machine(8, works=False)
    env = launched() if by_torchrun(lesson) else None
    done = main(lesson, "--device", "cuda", env=env)
    one_line(done, "--device", "this machine has no working cuda: use cpu")


@pytest.mark.parametrize(
    "lesson",
    [
        "blocking_p2p",
        "manual_data_parallel",
        "distributed_data_parallel",
        "distributed_data_parallel_torchrun",
    ],
)
def test_a_rank_has_the_gpu_of_its_local_rank(lesson, monkeypatch):
    """Local rank 1 makes GPU 1 the current one before it joins, and it passes GPU 1 to NCCL.

    Collectives of objects use the current GPU. The other lessons repeat these functions.
    """
    module = importlib.import_module(lesson)
    calls = []

    def joined(backend, *_, device_id=None, **__):
        calls.append((backend, device_id))

    for name, value in launched(rank=1).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(torch.accelerator, "set_device_index", calls.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", joined)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)

    def gathered(everyone, mine):
        everyone[:] = [mine, mine]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gathered)
    flags = {"nr": 0, "gpus": 2, "nodes": 1, "ip": "127.0.0.1", "port": 1}
    flags |= {"init_method": None, "backend": None, "timeout": 60}
    args = argparse.Namespace(device="cuda", **flags)
    local_rank = () if by_torchrun(lesson) else (1,)
    gpu = torch.device("cuda", 1)
    assert module.join(*local_rank, args)[:2] == (1, gpu)
    assert calls == [gpu, ("nccl", gpu)]
