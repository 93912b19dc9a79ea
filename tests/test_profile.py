"""--profile: a trace for each rank, in Chrome's format, with its operations and its messages."""

import json

import pytest
from conftest import SHORT, run


def trace(path):
    """Return the events of a trace that have a duration."""
    return [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]


@pytest.mark.parametrize(
    ("lesson", "flags", "ranks", "messages"),
    [
        ("single_gpu", (), 1, None),
        ("data_parallel", (), 1, None),
        ("manual_data_parallel", ("-g", 2), 2, "gloo:all_reduce"),
        ("distributed_data_parallel", ("-g", 2), 2, "gloo:all_reduce"),
        ("distributed_data_parallel2", ("-g", 2), 2, "gloo:all_reduce"),
        ("distributed_data_parallel_torchrun", (), 1, "gloo:all_reduce"),
        ("model_parallel", ("--pipelined",), 1, None),
        ("pipeline_parallel", ("-g", 3), 3, "gloo:"),
    ],
)
def test_a_trace_for_each_rank(lesson, flags, ranks, messages, tmp_path):
    """Seven of the twelve steps (five are for warming up): what is computed, read and sent. Nothing on stderr."""
    where = ("--run_dir", tmp_path / "run") if lesson.endswith("torchrun") else ()
    done = run(lesson, *SHORT, *flags, *where, "--profile", tmp_path / "made" / "trace")
    assert "USDT" not in done.stderr and "STAGE" not in done.stderr
    paths = sorted((tmp_path / "made" / "trace").iterdir())
    assert [path.name for path in paths] == [f"rank{rank}.json" for rank in range(ranks)]
    for path in paths:
        events = trace(path)
        names = [event["name"] for event in events]
        steps = [event for event in events if event["name"].startswith("ProfilerStep#")]
        assert len(steps) == 7
        assert any("DataLoader" in name for name in names)
        assert "aten::addmm" in names or "aten::mm" in names
        sent = [event for event in events if event["name"].startswith("gloo:")]
        if messages:
            assert any(event["name"].startswith(messages) and event["dur"] > 0 for event in sent)
        assert bool(sent) == bool(messages)


def test_an_epoch_of_a_single_step(tmp_path):
    """Is traced, too; the numbers are those of a run without --profile."""
    flags = ("--dataset", "digits", "--device", "cpu", "--batch_size", 1500, "--epochs", 2)
    with_trace = run("single_gpu", *flags, "--profile", tmp_path).stdout
    assert [line.split("  ")[:4] for line in with_trace.splitlines()] == [
        line.split("  ")[:4] for line in run("single_gpu", *flags).stdout.splitlines()
    ]
    assert any(event["name"].startswith("Optimizer.step") for event in trace(tmp_path / "rank0.json"))


def test_a_folder_that_cannot_be_made(tmp_path, main):
    """Status 2, one line, before anything is trained."""
    (tmp_path / "file").touch()
    done = main("single_gpu", *SHORT, "--profile", tmp_path / "file" / "trace")
    assert len(done.stderr.strip().splitlines()) == 1
    assert f"can't write --profile {tmp_path}/file/trace" in done.stderr
