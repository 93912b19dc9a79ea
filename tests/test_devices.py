"""Which device a lesson chooses, on simulated machines: PyTorch is told which GPUs there are.

Tests that need a real GPU are in test_gpu.py.
"""

import argparse
import importlib
import os
import re

import pytest
import torch
from conftest import IS_REAL, ROOT, STANDIN, by_torchrun, lesson_path, one_line, talks
from lessons import LESSONS

from common.flags import accelerator

STARTED = {  # the environment of a rank that a launcher has started
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}
STOPPED = 42  # the exit status of a lesson that would train now; @record turns 0 into a return
TALKING = [lesson for lesson in LESSONS if talks(lesson)]
ON_CPU = ("finding_hangs", "thousand_ranks")  # by default, on any machine


@pytest.fixture
def machine(monkeypatch):
    """Return a function that lets torch see some GPUs.

    CUDA_VISIBLE_DEVICES hides some of them, as on a real machine. With `works=False` the driver
    lists them, but it is too old to use them.
    """

    def simulate(gpus, works=True):
        def visible():
            shown = os.environ.get("CUDA_VISIBLE_DEVICES")
            if shown is None:
                return gpus
            return len([number for number in shown.split(",") if number])

        def init():
            if visible() == 0:
                raise RuntimeError("No CUDA GPUs are available")
            if not works:
                raise RuntimeError("The NVIDIA driver on your system is too old\nand more lines")

        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # it hides the real ones
        monkeypatch.setattr(torch.cuda, "device_count", visible)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: works and visible() > 0)
        monkeypatch.setattr(torch.cuda, "init", init)
        backends = ["gloo", "nccl"]
        monkeypatch.setattr(torch.distributed, "is_backend_available", backends.__contains__)

    return simulate


@pytest.fixture
def chosen(main, monkeypatch):
    """Return a function that calls main() of a lesson until it would train, and returns its flags.

    They have one more entry: CUDA_VISIBLE_DEVICES as the processes that it starts would see it.
    """

    def called(name, *flags, env=None):
        seen = {}

        def stop(*given, args=(), **_):  # launch has its args by name, mp.spawn by position
            found = [*given, *args]
            for each in given:
                if isinstance(each, tuple):
                    found += each
            seen["args"] = next(each for each in found if isinstance(each, argparse.Namespace))
            seen["args"].shown = os.environ.get("CUDA_VISIBLE_DEVICES")
            raise SystemExit(STOPPED)

        if not IS_REAL:
            monkeypatch.syspath_prepend(STANDIN)
        lesson = importlib.import_module(name)
        path = lesson.__file__
        stubs = {"fetch": lambda dataset, *_: dataset or "digits", "plan": stop, "launch": stop}
        stubs["download"] = lambda args: None
        stubs["check_files"] = lambda parser, args: None  # of sharded_data.py
        if "mp.spawn(" in lesson_path(path).read_text():
            monkeypatch.setattr(lesson.mp, "spawn", stop)
        else:
            stubs |= {"train": stop, "talk": stop}
        for stub, function in stubs.items():
            if hasattr(lesson, stub):
                monkeypatch.setattr(lesson, stub, function)
        if env is None:
            env = STARTED | {"WORLD_SIZE": "1"} if by_torchrun(path) else {}
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


def batch(lesson, images=120):
    """Return the flag for a batch that many numbers of processes divide; none for a p2p lesson."""
    return () if lesson in TALKING else ("--batch_size", images)


@pytest.mark.parametrize("lesson", LESSONS)
def test_the_device(lesson, machine, main, chosen):
    """A lesson uses the GPU if there is one whose driver works, and the CPU otherwise.

    The p2p lessons need two GPUs, and two lessons take them only if they are told to. If no GPU
    works, --device cuda ends with status 2 and one line.
    """
    flags = batch(lesson)
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
    env = STARTED if by_torchrun(lesson) else None
    done = main(lesson, "--device", "cuda", env=env)
    one_line(done, "--device", "this machine has no working cuda: use cpu")


@pytest.mark.parametrize(
    "lesson",
    [
        "blocking_p2p",
        "data_parallel",
        "manual_data_parallel",
        "distributed_data_parallel",
        "distributed_data_parallel2",
        "figures.compare",
    ],
)
def test_how_many_processes(lesson, machine, main, chosen):
    """There is a process for each visible GPU, or there are two without GPUs; -g says how many.

    data_parallel.py has one process, which uses all GPUs. If -g is too large, one line has the
    largest number that works.
    """
    flags = batch(lesson)
    machine(1, works=False)
    assert chosen(lesson, *flags).gpus == (1 if lesson == "data_parallel" else 2)
    machine(1)
    assert chosen(lesson, *flags).gpus == (2 if lesson in TALKING else 1)
    machine(8)
    assert chosen(lesson, *flags).gpus == 8
    if lesson != "data_parallel":
        assert chosen(lesson, *flags, "-g", 3, "--device", "cpu").gpus == 3
    os.environ["CUDA_VISIBLE_DEVICES"] = "6,1,3"  # the fixture restores it
    assert chosen(lesson, *flags).gpus == 3
    done = main(lesson, *batch(lesson, 144), "--device", "cuda", "-g", 4)
    one_line(done, "this machine has 3", "use -g 3")


def test_more_processes_of_a_launcher_than_gpus(machine, main):
    """The lesson compares the GPUs with the ranks that the launcher has started on this node.

    If it does not know their number, it uses its local rank.
    """
    machine(1)
    for lesson in ("blocking_p2p", "distributed_data_parallel_torchrun"):
        for env in ({"LOCAL_WORLD_SIZE": "2"}, {"LOCAL_RANK": "1", "RANK": "1"}):
            done = main(lesson, "--device", "cuda", env=STARTED | env)
            one_line(done, "this machine has 1", "use --nproc-per-node 1")


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

    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
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


def test_gloo_on_gpus(machine, main, chosen):
    """gloo cannot send GPU memory from rank to rank, but it has what DDP needs."""
    machine(2)
    flags = ("--device", "cuda", "--backend", "gloo")
    done = main("blocking_p2p", *flags)
    one_line(done, "gloo cannot send GPU memory: leave --backend out")
    assert chosen("distributed_data_parallel", *flags).backend == "gloo"


def test_launch_and_nccl_use_the_same_gpu(machine, chosen):
    """As many GPUs are visible as there are processes on a node: none with --device cpu.

    launch chooses a GPU by local rank. NCCL chooses number rank % GPUs. So both choose the same.
    """
    lesson = "distributed_data_parallel2"
    machine(8)
    several = ("-n", 2, "-nr", 1, "-ip", "10.0.0.1", "--batch_size", 48)
    assert chosen(lesson, *several, "-g", 8).shown == "0,1,2,3,4,5,6,7"
    for visible, shown in [("7,6,5,4", "7,6"), ("GPU-1a,GPU-2b,GPU-3c", "GPU-1a,GPU-2b")]:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible  # the fixture restores it
        assert chosen(lesson, *several, "-g", 2).shown == shown
    assert chosen(lesson, "--device", "cpu", "-g", 2).shown == ""


@pytest.mark.parametrize(("gpus", "model"), [(3, "mlp"), (8, "transformer"), (8, "language")])
def test_compares_runs_are_possible(gpus, model, machine, main, chosen, monkeypatch, tmp_path):
    """Each lesson accepts the flags and the number of processes of compare.py."""
    from figures import compare

    machine(gpus)
    plan = compare.plan
    plans = []

    def planned(args):
        plans.append((args, plan(args)))
        raise SystemExit(0)

    monkeypatch.setattr(compare, "plan", planned)
    dataset = "text" if model == "language" else "digits"
    main("figures.compare", "--dataset", dataset, "--model", model, "--out", tmp_path, status=0)
    [(args, runs)] = plans
    left_out = {"resnet", "expert_parallel", "fully_sharded_checkpoints", "fully_sharded_export"}
    left_out.add("sending_less")  # by default it is the DDP of an earlier lesson
    left_out.add("sharded_data")  # it is that DDP, too, with images from files
    left_out.add("sharded_muon")  # has an optimizer of its own
    left_out.add("token_mean")  # its batches are paragraphs, and no other lesson's
    if model == "mlp":
        left_out |= {line.split()[0] for line in compare.OF_TRANSFORMERS}
    else:
        left_out.add("tensor_parallel")
    if model != "language":
        left_out |= {line.split()[0] for line in compare.OF_LANGUAGE}
    assert {run.lesson for run in runs} == set(LESSONS) - set(TALKING) - left_out
    for each in runs:
        words, _ = compare.command(each, args, tmp_path)
        lesson = each.lesson
        [place] = [at for at, word in enumerate(words) if word.endswith(f"/{lesson}.py")]
        ranks = each.ranks or 1
        env = None
        if by_torchrun(lesson):
            env = STARTED | {"WORLD_SIZE": f"{ranks}", "LOCAL_WORLD_SIZE": f"{ranks}"}
        given = chosen(lesson, *words[place + 1 :], env=env)
        processes = max(ranks, getattr(given, "gpus", 1))
        assert given.device == "cuda" and processes <= gpus
        assert given.batch_size % processes == 0 and given.batch_size <= 1500


def test_what_quickstart_asks(machine, capsys):
    """The line of Python in quickstart.sh prints the number of GPUs that work.

    test_run_scripts.py tests what quickstart.sh does with this number.
    """
    line = re.search(r"^count='(.*)'$", (ROOT / "run" / "quickstart.sh").read_text(), re.M)[1]
    for gpus, works, count in [(0, True, 0), (8, True, 8), (8, False, 0)]:
        machine(gpus, works)
        exec(line, {})
        assert capsys.readouterr().out == f"{count}\n"
