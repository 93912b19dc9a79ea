"""profile_steps.py: a trace of each rank, and the parts of a step. Its losses: test_parity.py."""

import json

import pytest
from launch import SHORT, run
from profile_steps import step_times


def test_a_trace_for_each_rank(tmp_path):
    """Seven of twelve steps are traced, after five to warm up. The profiler logs nothing."""
    done = run("profile_steps", *SHORT, "--out", tmp_path / "made" / "here", processes=3)
    assert "USDT" not in done.stderr and "STAGE" not in done.stderr
    rows = done.stdout[done.stdout.index("rank  step (ms)") :].splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["0", "1", "2"]
    for row in rows:
        rank, *times = row.split()
        trace = json.loads((tmp_path / "made" / "here" / f"rank{rank}.json").read_text())
        names = [
            each["name"] for each in trace["traceEvents"] if each.get("cat") == "user_annotation"
        ]
        assert sum(name.startswith("ProfilerStep") for name in names) == 7
        assert sum(name.startswith("Optimizer.step") for name in names) == 7
        times = list(map(float, times))
        assert times == pytest.approx(list(step_times(trace).values()), abs=0.006)
        assert times[0] == pytest.approx(sum(times[1:4]), abs=0.03)


LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def event(name, start, end, cat="cpu_op"):
    """Make an event of a trace; times in ms."""
    times = {"ts": 1000 * start, "dur": 1000 * (end - start)}
    return {"ph": "X", "cat": cat, "name": name, **times}


def test_a_trace_of_a_cpu():
    """Two steps of 10 ms: 1 ms data, 6 ms messages, of which 2.5 ms are hidden."""
    events = [{"ph": "M", "name": "process_name"}]
    for start in (0, 10):
        events += [
            event("ProfilerStep#1", start, start + 10, "user_annotation"),
            event(LOADER, start, start + 1, "user_annotation"),
            event("aten::index_select", start, start + 1),  # the loader's
            event("aten::linear", start + 1, start + 4),
            event("aten::addmm", start + 2, start + 3),  # inside the one before
            event("autograd::engine::evaluate_function: A", start + 1, start + 9),  # it also waits
            event("gloo:all_reduce", start + 2, start + 3.5, "user_annotation"),
            event("gloo:all_reduce", start + 3.5, start + 8, "user_annotation"),
            event("aten::mul", start + 7.5, start + 8),
            event("Optimizer.step#Adam.step", start + 8, start + 9.5, "user_annotation"),
        ]
    parts = {"step": 10, "data": 1, "compute": 5.5, "waiting": 3.5, "hidden": 2.5}
    assert step_times({"traceEvents": events}) == pytest.approx(parts)


def test_a_trace_of_a_gpu():
    """The kernels are what is computed and sent; data counts while the GPU does neither.

    A step lasts until the first kernel of the next one, and not as long as Python needs for it.
    """
    events = [
        event("ProfilerStep#1", -2, 1, "user_annotation"),
        event("ProfilerStep#2", 10, 17, "gpu_user_annotation"),
        event("ProfilerStep#1", 0, 8, "gpu_user_annotation"),
        event("Optimizer.step#Adam.step", 1, 2, "user_annotation"),
        event(LOADER, 0, 3, "user_annotation"),
        event("aten::linear", 0, 10),
        event("ampere_sgemm_128x64_tn", 2, 6, "kernel"),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 5, 8, "kernel"),
    ]
    parts = {"step": 10, "data": 2, "compute": 6, "waiting": 2, "hidden": 1}
    assert step_times({"traceEvents": events}) == pytest.approx(parts)
