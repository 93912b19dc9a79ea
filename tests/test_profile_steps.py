"""profile_steps.py: the numbers of single_gpu.py, a trace of each rank, and the parts of a step."""

import ast
import json

import pytest
from conftest import DIGITS, SHORT, epochs, lesson_path, one_process, train

from playground.profile_steps import covered, step_times

# three layers with parameters of 1 MiB or more, and the last with 20 KiB
WIDE = (*DIGITS, "--width", 512, "--batch_size", 300, "--epochs", 1)


def trace(path):
    """Return the events of a trace that have a duration."""
    return [
        event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"
    ]


def traced(folder, *flags, processes=2):
    """Run the lesson to its end. Returns it and the traces of its ranks, each a list of events."""
    done = train("profile_steps", *flags, "--out", folder, processes=processes)
    paths = sorted(folder.glob("*.json"))
    assert [path.name for path in paths] == [f"rank{rank}.json" for rank in range(processes)]
    return done, [trace(path) for path in paths]


def steps(events):
    """Return the events of each step, in order of time. Each step has an update."""
    found = []
    for step in (event for event in events if event["name"].startswith("ProfilerStep")):
        inside = [event for event in events if step["ts"] <= event["ts"] < step["ts"] + step["dur"]]
        assert any(event["name"].startswith("Optimizer.step") for event in inside)
        found.append(sorted(inside, key=lambda event: event["ts"]))
    return found


@pytest.mark.parametrize("name", ["average_gradients", "average_in_one_bucket"])
def test_gradients_are_averaged_as_in_an_earlier_lesson(name):
    """What manual_data_parallel.py does by hand, and its tests try, is measured."""
    code = []
    for lesson in ("profile_steps", "manual_data_parallel"):
        for node in ast.parse(lesson_path(lesson).read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                node.body = node.body[1:]  # without the docstring
                code.append(ast.unparse(node))
    assert len(code) == 2 and code[0] == code[1]


def test_a_trace_for_each_rank(tmp_path):
    """Seven of twelve steps are traced, after five to warm up. The profiler logs nothing."""
    done, ranks = traced(tmp_path / "made" / "here", *SHORT, processes=3)
    assert "USDT" not in done.stderr and "STAGE" not in done.stderr
    for events in ranks:
        names = [event["name"] for event in events]
        assert len(steps(events)) == 7
        assert any("DataLoader" in name for name in names)
        assert "aten::addmm" in names or "aten::mm" in names
    rows = done.stdout[done.stdout.index("rank  step (ms)") :].splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["0", "1", "2"]
    for row, path in zip(rows, sorted((tmp_path / "made" / "here").iterdir()), strict=True):
        times = list(map(float, row.split()[1:]))
        assert times == pytest.approx(
            list(step_times(json.loads(path.read_text())).values()), abs=0.006
        )
        assert times[0] == pytest.approx(sum(times[1:4]), abs=0.03)


@pytest.mark.parametrize(
    ("flags", "messages", "early"),
    [
        (
            ("--bucket_cap_mb", 1),
            3,
            True,
        ),  # one for each wide layer; the last layer is in the bucket before
        (("--bucket_cap_mb", 1000), 1, False),
        (("--average", "each"), 8, False),
        (("--average", "bucket"), 1, False),
    ],
)
def test_messages_of_a_step(flags, messages, early, tmp_path):
    """How many they are, and whether the first one travels while backward() still computes."""
    _, ranks = traced(tmp_path, *WIDE, *flags)
    for events in ranks:
        for step in steps(events):
            names = [event["name"] for event in step]
            assert (
                names.count("c10d::allreduce_")
                == len([n for n in names if n.startswith("gloo:")])
                == messages
            )
            backward = [
                place for place, name in enumerate(names) if name.endswith(": AddmmBackward0")
            ]
            assert len(backward) == 4
            assert (names.index("c10d::allreduce_") < backward[-1]) == early


def test_one_process_and_an_epoch_of_a_single_step(tmp_path):
    """Without steps to warm up, and with a second epoch: the numbers of single_gpu.py."""
    flags = (*DIGITS, "--batch_size", 1500, "--epochs", 2)
    done = train("profile_steps", *flags, "--out", tmp_path, processes=1)
    assert epochs(done.stdout) == one_process(*flags)
    assert len(steps(trace(tmp_path / "rank0.json"))) == 1


def test_what_is_covered():
    """Known answers: events that overlap, that begin before a step, and that end after it."""
    step = event("ProfilerStep#1", 1, 1.01, "user_annotation")
    times = [(0.5, 0.6), (0.9, 1.002), (1.001, 1.003), (1.005, 1.006), (1.009, 2), (1.02, 1.03)]
    events = [event("aten::mul", *each) for each in times]
    events.append(event("gloo:all_reduce", 1, 1.01, "user_annotation"))
    found = covered(events, step, "cpu_op aten::")
    assert found.tolist() == [True, True, True, False, False, True, False, False, False, True]
    assert covered(events, step, "user_annotation gloo:").all()
    assert not covered(events, step, "aten::").any()


def event(name, start, end, cat="cpu_op", tid=1):
    """Make an event of a trace; times in ms."""
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "ts": 1000 * start,
        "dur": 1000 * (end - start),
        "tid": tid,
    }


def test_a_trace_of_a_cpu():
    """Two steps of 10 ms: 1 ms data, 6 ms messages, of which 2.5 ms are hidden."""
    events = [{"ph": "M", "name": "process_name"}]
    for start in (0, 10):
        at = [
            event("ProfilerStep#1", 0, 10, "user_annotation"),
            event(
                "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
                0,
                1,
                "user_annotation",
            ),
            event("aten::index_select", 0, 1),  # the loader's
            event("aten::linear", 1, 4),
            event("aten::addmm", 2, 3),  # inside the one before
            event("autograd::engine::evaluate_function: AddmmBackward0", 1, 9),  # it also waits
            event("gloo:all_reduce", 2, 3.5, "user_annotation", tid=2),
            event("gloo:all_reduce", 3.5, 8, "user_annotation", tid=2),
            event("aten::mul", 7.5, 8),
            event("Optimizer.step#Adam.step", 8, 9.5, "user_annotation"),
        ]
        events += [one | {"ts": one["ts"] + 1000 * start} for one in at]
    found = step_times({"traceEvents": events})
    assert found == pytest.approx(
        {"step": 10, "data": 1, "compute": 5.5, "waiting": 3.5, "hidden": 2.5}
    )


def test_a_trace_of_a_gpu():
    """The kernels are what is computed and sent; data counts while the GPU does neither."""
    events = [
        event("ProfilerStep#1", 0, 10, "user_annotation"),
        event("ProfilerStep#1", 0, 10, "gpu_user_annotation"),
        event("Optimizer.step#Adam.step", 1, 2, "user_annotation"),
        event(
            "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 3, "user_annotation"
        ),
        event("aten::linear", 0, 10),
        event("ampere_sgemm_128x64_tn", 2, 6, "kernel"),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 5, 8, "kernel"),
    ]
    found = step_times({"traceEvents": events})
    assert found == pytest.approx({"step": 10, "data": 2, "compute": 6, "waiting": 2, "hidden": 1})
