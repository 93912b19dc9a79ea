"""Which device a lesson chooses, on machines that are only played: PyTorch is told what GPUs there are.

What needs a real GPU is in test_gpu.py.
"""

import argparse
import importlib
import json
import os
import re
import types

import pytest
import torch
from conftest import DETECTRON2, LESSONS, ROOT, STANDIN, by_torchrun, run, talks

OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 12040). Please update it"
STARTED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
TRAINING = [lesson for lesson in LESSONS if not talks(lesson) and lesson != "compare"]
SPAWNING = ["manual_data_parallel", "distributed_data_parallel", "distributed_data_parallel2"]
TALKING = [lesson for lesson in LESSONS if talks(lesson)]


@pytest.fixture
def machine(monkeypatch):
    """Return a function that lets torch see some GPUs; with `works=False` a driver lists them that is too old to use.

    As a real one does, it leaves out what CUDA_VISIBLE_DEVICES hides.
    """

    def play(gpus, works=True):
        def visible():
            shown = os.environ.get("CUDA_VISIBLE_DEVICES")
            return gpus if shown is None else len([number for number in shown.split(",") if number])

        def init():
            if not (works and visible()):
                raise RuntimeError(f"{OLD_DRIVER}\nand more lines" if visible() else "No CUDA GPUs are available")

        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # the tests hide real ones
        monkeypatch.setattr(torch.cuda, "device_count", visible)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: works and visible() > 0)
        monkeypatch.setattr(torch.cuda, "init", init)
        monkeypatch.setattr(torch.distributed, "is_backend_available", lambda backend: backend != "mpi")

    return play


@pytest.fixture
def chosen(main, monkeypatch):
    """Return a function that calls main() of a lesson up to where it would train, and returns its flags.

    They also have what the processes that it starts would see: CUDA_VISIBLE_DEVICES.
    """

    def called(name, *flags, env=None):
        seen = {}

        def stop(*given, args=(), **_):  # launch names its args, mp.spawn does not
            found = [*given, *args, *next((one for one in given if isinstance(one, tuple)), ())]
            seen["args"] = next(one for one in found if isinstance(one, argparse.Namespace))
            seen["args"].shown = os.environ.get("CUDA_VISIBLE_DEVICES")
            raise SystemExit(0)

        if DETECTRON2 != "the real detectron2":
            monkeypatch.syspath_prepend(STANDIN)
        lesson = importlib.import_module(name)
        stubs = {"fetch": lambda dataset, *_: dataset or "digits", "meet": lambda args: None, "plan": stop}
        stubs |= {"train": stop, "launch": stop, "download": lambda args: None}
        if by_torchrun(name) or "mp.spawn(" not in (ROOT / "playground" / f"{name}.py").read_text():
            stubs |= {"talk": stop}
        else:
            stubs.pop("train")  # mp.spawn is given it
            monkeypatch.setattr(lesson.mp, "spawn", stop)
        for stub, function in stubs.items():
            if hasattr(lesson, stub):
                monkeypatch.setattr(lesson, stub, function)
        env = env or (STARTED | {"WORLD_SIZE": "1"} if by_torchrun(name) else {})
        main(name, *flags, status=0, env=env)
        return seen["args"]

    return called


def one_line(done, *words):
    """Check that stderr is a single line that holds all words."""
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize("lesson", LESSONS)
def test_the_device(lesson, machine, chosen):
    """A GPU where one works, except where messages need two; the CPU where there is none, or its driver is too old."""
    least = 2 if lesson in TALKING else 1
    flags = ("--batch_size", 120) if lesson not in TALKING else ()
    for gpus, works in [(0, True), (1, False), (8, False), (1, True), (2, True), (8, True)]:
        machine(gpus, works)
        args = chosen(lesson, *flags)
        assert args.device == ("cuda" if works and gpus >= least else "cpu"), (gpus, works)
        if lesson == "model_parallel":
            two = ["cuda:0", "cuda:1"] if gpus > 1 else ["cuda"] * 2
            assert args.devices == (two if works and gpus else ["cpu"] * 2)
        assert chosen(lesson, *flags, "--device", "cpu").device == "cpu"


@pytest.mark.parametrize("lesson", [*SPAWNING, *TALKING, "data_parallel", "compare"])
def test_how_many_processes(lesson, machine, chosen):
    """All GPUs, or two processes without; of data_parallel.py, which has one process, all GPUs."""
    flags = ("--batch_size", 120) if lesson not in TALKING else ()
    for gpus in (1, 2, 8):
        machine(gpus)
        assert chosen(lesson, *flags).gpus == (max(gpus, 2) if lesson in TALKING else gpus)
        if lesson != "data_parallel":
            assert chosen(lesson, *flags, "-g", 3, "--device", "cpu").gpus == 3
    for gpus, works in [(0, True), (1, False)]:
        machine(gpus, works)
        assert chosen(lesson, *flags).gpus == (1 if lesson == "data_parallel" else 2)
    machine(8)
    os.environ["CUDA_VISIBLE_DEVICES"] = "6,1,3"  # put back by the fixture
    assert chosen(lesson, *flags).gpus == 3


@pytest.mark.parametrize("lesson", LESSONS)
def test_cuda_that_does_not_work(lesson, machine, main):
    """Status 2 and one line with torch's own reason, for lessons that a launcher starts as well."""
    env = STARTED if by_torchrun(lesson) else None
    for gpus, works, reason in [
        (0, True, "No CUDA GPUs are available"),
        (1, False, OLD_DRIVER),
        (8, False, OLD_DRIVER),
    ]:
        machine(gpus, works)
        words = (f"this machine has 0 GPUs that work ({reason})", "use --device cpu")
        one_line(main(lesson, "--device", "cuda", env=env), *words)


def test_an_old_driver_as_a_user_sees_it(tmp_path):
    """torch warns of it as soon as it is asked whether there is a GPU; the line says the same, so it is said once."""
    code = f"""import warnings, torch
def is_available():
    warnings.warn("CUDA initialization: {OLD_DRIVER}")
    return False
def init():
    raise RuntimeError("{OLD_DRIVER}")
torch.cuda.is_available, torch.cuda.init, torch.cuda.device_count = is_available, init, lambda: 1
"""
    (tmp_path / "sitecustomize.py").write_text(code)
    env = {"PYTHONPATH": str(tmp_path)}  # Python reads it when it starts
    done = run("single_gpu", "--device", "cuda", status=2, env=env, cold=True)
    one_line(done, f"this machine has 0 GPUs that work ({OLD_DRIVER})")


@pytest.mark.parametrize("lesson", [*SPAWNING, *TALKING, "data_parallel", "compare"])
def test_more_processes_than_gpus(lesson, machine, main, chosen):
    """-g 9 on 8 GPUs, and 2 where one of two is visible: one line with the number that works."""
    flags = ("--batch_size", 144) if lesson not in TALKING else ()
    machine(8)
    one_line(main(lesson, *flags, "--device", "cuda", "-g", 9), "9 GPUs are needed, this machine has 8", "use -g 8")
    os.environ["CUDA_VISIBLE_DEVICES"] = "5"
    one_line(main(lesson, *flags, "--device", "cuda", "-g", 2), "2 GPUs are needed, this machine has 1", "use -g 1")


@pytest.mark.parametrize("lesson", [lesson for lesson in LESSONS if by_torchrun(lesson)] + TALKING)
def test_more_processes_of_a_launcher_than_gpus(lesson, machine, main, chosen):
    """What counts is how many it has started here; without that number, the local rank."""
    machine(1)
    for env in ({"LOCAL_WORLD_SIZE": "2"}, {"LOCAL_RANK": "1", "RANK": "1"}):
        done = main(lesson, "--device", "cuda", env=STARTED | env)
        one_line(done, "2 GPUs are needed, this machine has 1", "use --nproc-per-node 1")


@pytest.mark.parametrize("lesson", TALKING)
def test_ranks_by_hand_on_machines_with_one_gpu(lesson, machine, main, monkeypatch):
    """Each starts one rank, whatever -g would be for a lesson that starts them itself."""
    machine(1)
    module, ranks = importlib.import_module(lesson), []
    monkeypatch.setattr(module, "meet", lambda args: None)

    def talk(local_rank, args):
        ranks.append((local_rank, args.device))
        raise SystemExit(0)

    monkeypatch.setattr(module, "talk", talk)
    main(lesson, "--device", "cuda", status=0, env={**STARTED, "RANK": "1"})
    assert ranks == [(0, "cuda")]


JOINING = [lesson for lesson in LESSONS if "init_process_group(" in (ROOT / "playground" / f"{lesson}.py").read_text()]


@pytest.mark.parametrize("lesson", JOINING)
def test_a_rank_has_the_gpu_of_its_local_rank(lesson, monkeypatch):
    """The current GPU before it joins, which object collectives use, and the one that NCCL connects: local rank 1's."""
    module, calls = importlib.import_module(lesson), []

    def joined(backend, device_id=None, **_):
        calls.append((backend, device_id))

    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(device))
    monkeypatch.setattr(torch.distributed, "init_process_group", joined)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda everyone, mine: None)
    flags = {"nr": 0, "gpus": 2, "nodes": 1, "ip": "127.0.0.1", "port": 1, "init_method": None, "gpu_ids": None}
    args = argparse.Namespace(device="cuda", backend=None, timeout=60, **flags)
    own, gpu = () if by_torchrun(lesson) else (1,), torch.device("cuda", 1)
    assert module.join(*own, args)[:2] == (1, gpu)
    assert calls == [gpu, ("nccl", gpu)]


def test_devices_of_model_parallel(machine, main, chosen):
    """Only what works can be named."""
    machine(2)
    assert chosen("model_parallel", "--devices", "cuda:1", "cpu").devices == ["cuda:1", "cpu"]
    for gpus, works in [(2, True), (8, False)]:
        machine(gpus, works)
        one_line(main("model_parallel", "--devices", "cpu", f"cuda:{gpus if works else 0}"), "--devices", "cpu")


def test_gpu_ids(machine, main, chosen):
    """The ResNet lesson's: a GPU for each process of this node, none twice, each of them there and in use."""
    lesson, env = "distributed_data_parallel_resnet", STARTED | {"LOCAL_WORLD_SIZE": "2"}
    machine(8)
    assert chosen(lesson, "--gpu_ids", "1,6", env=env).gpu_ids == [1, 6]
    for ids, flags in [("1", ()), ("1,1", ()), ("1,8", ()), ("0,1", ("--device", "cpu"))]:
        one_line(main(lesson, "--gpu_ids", ids, *flags, env=env), "--gpu_ids", "name a GPU for each process")
    machine(8, works=False)
    one_line(main(lesson, "--gpu_ids", "0,1", env=env), "--gpu_ids", "there are 0 GPUs")


@pytest.mark.parametrize(("flags", "refused"), [((), False), (("--weights", "send"), True), (("--bucket",), False)])
def test_gloo_on_gpus(flags, refused, machine, main, chosen):
    """It has no send for GPU memory, but what data parallelism needs."""
    machine(2)
    given = ("--device", "cuda", "--backend", "gloo")
    for lesson in TALKING:
        one_line(main(lesson, *given), "gloo can't send GPU memory", "--backend nccl", "--device cpu")
    assert chosen("distributed_data_parallel", *given).backend == "gloo"
    if refused:
        one_line(main("manual_data_parallel", *given, *flags), "gloo can't send GPU memory")
    else:
        assert chosen("manual_data_parallel", *given, *flags).backend == "gloo"


@pytest.mark.parametrize(
    ("gpus", "visible", "nodes", "processes", "shown"),
    [
        (8, None, 2, 2, "0,1"),
        (8, None, 2, 8, "0,1,2,3,4,5,6,7"),
        (8, None, 4, 3, "0,1,2"),
        (8, None, 1, 2, "0,1"),
        (8, "5,3,2", 2, 2, "5,3"),
        (8, "GPU-1a,GPU-2b", 2, 1, "GPU-1a"),
    ],
)
def test_launch_and_nccl_use_the_same_gpu(gpus, visible, nodes, processes, shown, machine, chosen, monkeypatch):
    """launch picks a GPU by local rank, NCCL is bound to global rank % visible GPUs: show one for each process."""
    machine(gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    several = ("-n", nodes, "-g", processes, "-ip", "10.0.0.1", "--batch_size", 48)
    for node in range(nodes):
        args = chosen("distributed_data_parallel2", *several, "-r", node)
        assert args.shown == shown
        for local_rank in range(processes):
            assert (node * processes + local_rank) % len(args.shown.split(",")) == local_rank


def test_launch_sees_no_gpu_with_device_cpu(machine, chosen):
    """It would use them without being asked."""
    machine(8)
    assert chosen("distributed_data_parallel2", "--device", "cpu", "-g", 2).shown == ""


@pytest.mark.parametrize("model", ["mlp", "cnn"])
@pytest.mark.parametrize("gpus", range(1, 9))
def test_every_run_of_compare_is_possible(gpus, model, machine, main, chosen, monkeypatch, tmp_path):
    """On 1 to 8 GPUs each lesson takes the flags and the number of processes that compare.py gives it."""
    import compare

    machine(gpus)
    plans, plan = [], compare.plan

    def planned(args):
        plans.append((args, plan(args)))
        raise SystemExit(0)

    monkeypatch.setattr(compare, "plan", planned)
    main("compare", "--dataset", "digits", "--model", model, "--out", tmp_path, status=0)
    ((args, runs),) = plans
    assert args.device == "cuda" and args.gpus == gpus and args.processes == [n for n in (1, 2, 4, 8) if n <= gpus]
    assert {run["lesson"] for run in runs} == set(TRAINING) - {"distributed_data_parallel_resnet"}
    done = set()
    for each in runs:
        words, _ = compare.command(each, args, tmp_path)
        lesson = each["lesson"]
        flags = words[next(place for place, word in enumerate(words) if word.endswith(f"/{lesson}.py")) + 1 :]
        if (lesson, *flags) in done:
            continue
        done.add((lesson, *flags))
        ranks = each.get("ranks", 1)
        assert ("--nproc-per-node" in words) == by_torchrun(lesson)
        env = STARTED | {"WORLD_SIZE": f"{ranks}", "LOCAL_WORLD_SIZE": f"{ranks}"} if by_torchrun(lesson) else None
        given = chosen(lesson, *flags, env=env)
        assert given.device == "cuda" and max(ranks, getattr(given, "gpus", 1)) <= gpus
        assert given.batch_size % max(ranks, getattr(given, "gpus", 1)) == 0 and given.batch_size <= 1500


def test_compare_on_a_machine_with_an_old_driver(machine, tmp_path):
    """It has run on the CPU, so it does not ask for the names of GPUs, which would fail."""
    import compare

    machine(2, works=False)
    args = argparse.Namespace(out=tmp_path, device="cpu", gpus=2, widths=[])
    compare.tell([], args, False)
    assert json.loads((tmp_path / "results.json").read_text())["machine"]["gpus"] == []


@pytest.mark.parametrize(("gpus", "works", "count"), [(0, True, 0), (1, True, 1), (8, True, 8), (8, False, 0)])
def test_what_quickstart_asks(gpus, works, count, machine, capsys):
    """Its line of Python, by which it chooses; test_run_scripts.py has what it does with the answer."""
    machine(gpus, works)
    line = re.search(r"^count='(.*)'$", (ROOT / "run" / "quickstart.sh").read_text(), re.M)[1]
    exec(line, {})
    assert capsys.readouterr().out == f"{count}\n"


@pytest.mark.parametrize("lesson", TRAINING)
def test_batches_travel_while_python_goes_on(lesson):
    """From pinned memory and without waiting; without a GPU nothing is pinned."""
    text = (ROOT / "playground" / f"{lesson}.py").read_text()
    assert len(re.findall(r'"pin_memory": (device.type == "cuda"|pinned)[},]', text)) == 1
    assert "non_blocking=True" in text
    assert not re.search(r"(images|labels)\.to\(device\)", text)


def test_convolutions_are_as_exact_as_on_a_cpu():
    """The models switch off cuDNN's TF32, which would round their inputs to 10 bits."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = True
    try:
        importlib.reload(importlib.import_module("common.models"))
        assert not torch.backends.cudnn.allow_tf32
    finally:
        torch.backends.cudnn.allow_tf32 = before


class Event:
    """What stands for torch.cuda.Event: it notes a time that a test has set."""

    clock = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        """Note the time, in ms, on a stream."""
        self.at, self.stream = Event.clock, stream

    def elapsed_time(self, end):
        """Return the ms to a later event of the same device."""
        assert self.stream == end.stream
        return end.at - self.at


def test_the_timeline_counts_by_events_of_each_gpu(monkeypatch):
    """Seconds since the origin of a span's own GPU, however late another one has begun."""
    from measure import timeline

    devices = [types.SimpleNamespace(type="cuda", index=index) for index in range(2)]
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device.index}")
    marks = []
    for at, worker, kind, border in [
        (0, 0, "origin", "start"), (40, 1, "origin", "start"), (1000, 0, "forward", "start"),
        (2000, 0, "forward", "end"), (3040, 1, "forward", "start"), (5040, 1, "forward", "end"),
    ]:  # fmt: skip
        Event.clock = at
        marks.append(((worker, kind, 0), border, timeline._moment(devices[worker])))
    spans = timeline._spans(marks)
    assert spans == [timeline.Span(0, "forward", 0, 1.0, 2.0), timeline.Span(1, "forward", 0, 3.0, 5.0)]
    assert isinstance(timeline._moment(torch.device("cpu")), float)
