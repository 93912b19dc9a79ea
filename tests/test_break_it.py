"""The exercises in the docstrings end as playground/pages/answers.md says. Each is done on a copy.

One of model_parallel.py needs a GPU, so it is in test_gpu.py. test_resumable.py kills ranks.
"""

import argparse
import re
import runpy
from datetime import timedelta

import pytest
import torch
from conftest import (
    ASLEEP,
    DIGITS,
    ROOT,
    by_torchrun,
    epochs,
    lesson_path,
    losses,
    run,
    single_gpu,
    torchrun,
    train,
)
from forked import in_group
from lessons import LESSONS
from torch.nn.parallel import DistributedDataParallel

ANSWERS = (ROOT / "playground" / "pages" / "answers.md").read_text()
TWO_EPOCHS = (*DIGITS, "--batch_size", 120, "--epochs", 2)  # as in answers.md
# The rows of the table of profile_steps.py.
STEPS = r"^(\d+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) *$"
FREEZE = "    next(model.parameters()).requires_grad_(False)\n"


def ends(lesson, *flags, status=0, **options):
    """Run a copy for two epochs, with two processes if it has several. Returns its end."""
    text = lesson.read_text()
    several = by_torchrun(lesson) or "mp.spawn(" in text or "launch(" in text
    processes = 2 if several else None
    return train(lesson, *TWO_EPOCHS, *flags, processes=processes, status=status, **options)


@pytest.fixture
def reference():
    """The losses of single_gpu.py, which every lesson has, unless it is broken."""
    return [line["loss"] for line in single_gpu(*TWO_EPOCHS)]


def test_each_exercise_has_an_answer():
    """playground/pages/answers.md answers as many exercises of each lesson as its docstring has."""
    for path in [*map(lesson_path, LESSONS), ROOT / "playground" / "figures" / "compare.py"]:
        docstring = path.read_text().split('"""')[1]
        exercises = re.split("Try breaking it|Break it", docstring, maxsplit=1)[1]
        heading = rf"^## `{path.stem}\.py`\n"
        given = re.search(rf"{heading}(.*?)(?=^## |\Z)", ANSWERS, re.M | re.S)
        assert exercises and given, path
        numbers = set(re.findall(r"^  (\d)\. |\((\d)\) ", exercises, re.M))
        assert len(re.findall(r"^\d\. ", given[1], re.M)) >= max(1, len(numbers)), path


MODEL = "    model = make_model(args).to(device)\n"
UNUSED = (MODEL, f"{MODEL}    model.unused = torch.nn.Linear(1, 1).to(device)\n")
WRAPPED = "DistributedDataParallel(model"
FIND = (WRAPPED, f"{WRAPPED}, find_unused_parameters=True")
ORDER = ("train_loader.sampler.set_epoch(epoch)", "pass")
DDP = "distributed_data_parallel"
# A lesson, what is replaced, whether the first loss is still right, and the second one as printed
# in answers.md.
END_WELL = [
    ("single_gpu", [("optimizer.zero_grad()", "pass")], False, "1.4891"),
    ("manual_data_parallel", [("    send_weights(model)  #", "    pass  #")], False, "1.6639"),
    ("manual_data_parallel", [("    average(model)  #", "    pass  #")], False, "1.5555"),
    (DDP, [ORDER], True, "1.3936"),
    (DDP, [UNUSED, FIND], True, "1.4064"),
    ("model_parallel", [(".to(self.devices[1])", "")], True, "1.4064"),
]


@pytest.mark.parametrize(("lesson", "edits", "first_is_right", "second"), END_WELL)
def test_a_loss(lesson, edits, first_is_right, second, change, reference):
    """There is no error, and the page has the second loss."""
    broken = losses(ends(change(lesson, *edits)).stdout)
    assert (abs(broken[0] - reference[0]) < 3e-4) == first_is_right
    assert broken[1] == pytest.approx(float(second), abs=1e-3)
    assert second in ANSWERS


TEST = "        _, test_correct, test_images = run_epoch("
ONLY_ON_0 = (TEST, f"        if rank == 0:\n    {TEST}")
GATHER = "        parts = comm.gather(run_epoch(plain, test_loader, device))\n"
CONDITION = "        if comm.is_main_process():\n"
MOVED = (GATHER + CONDITION, f"{CONDITION}    {GATHER}")
SENT = "    send_weights(model)\n"
SHORTER = ("torch.zeros(4, device=device)", "torch.zeros(4 - rank, device=device)")
ITSELF = ("src=rank - 1", "src=1")
NO_STEPS = ("            model.profiler.step()", "            pass")
FROZEN = (SENT, SENT + FREEZE)
NOT_REDUCED = "finished reduction in the prior.*`find_unused.*did not receive grad for rank .: 8 9"
ONE = ("--epochs", 1)
# A lesson, its flags, what is replaced, and a pattern in what it prints on stderr. After one epoch
# rank 1 has ended; otherwise it is in the next epoch.
END_WITH_AN_ERROR = [
    ("blocking_p2p", (), SHORTER, "16 vs 12.*process 1 terminated with signal SIGABRT$"),
    ("blocking_p2p", (), ITSELF, r"-- Process 1 terminated.* not connected[^\n]*$"),
    ("overlapped_data_parallel", ONE, FROZEN, "cannot register a hook on a tensor that doesn't"),
    (DDP, ONE, ONLY_ON_0, r"by peer[^\n]*$"),
    (DDP, ("--epochs", 3), ONLY_ON_0, r"(by peer|signal SIGABRT)[^\n]*$"),
    (DDP, ONE, UNUSED, NOT_REDUCED),
    (f"{DDP}2", ONE, MOVED, r"(closed|reset) by peer[^\n]*$"),
    (f"{DDP}2", (), MOVED, r"(Timed out waiting 5000ms|by peer)[^\n]*$"),
    ("profile_steps", ONE, NO_STEPS, r"ValueError: not enough values .*4, got 0\)"),
]


@pytest.mark.parametrize(("lesson", "flags", "edit", "pattern"), END_WITH_AN_ERROR)
def test_an_error(lesson, flags, edit, pattern, change, tmp_path):
    """The run ends with the message of the page."""
    copy = change(lesson, edit)
    if lesson == "blocking_p2p":
        done = run(copy, "--timeout", 5, status=1)
    else:
        done = ends(copy, *flags, "--timeout", 5, status=1, cwd=tmp_path)
    assert re.search(pattern, done.stderr.strip(), re.S), done.stderr


def test_a_buffer_that_is_changed_while_it_travels(change):
    """Rank 0 gets the 9s, because rank 1's message waited for it. Rank 0's own left before."""
    old = "    compute(mine.device)  #"
    out = run(change("nonblocking_p2p", (old, f"    mine.fill_(9)\n{old}"))).stdout
    assert "nonblocking, rank 0: [-1.0, -1.0] -> [9.0, 9.0]" in out
    assert "nonblocking, rank 1: [-1.0, -1.0] -> [0.0, 0.0]" in out


def test_single_gpu_without_its_order(change, reference):
    """The batches have an order that no other lesson has, and it is the same in each run."""
    order = "train_loader.sampler.generator.manual_seed(args.seed + epoch)"
    copy = change("single_gpu", (order, "pass"))
    broken = losses(ends(copy).stdout)
    assert abs(broken[0] - reference[0]) > 1e-4
    assert losses(ends(copy).stdout) == broken


def test_replicas_with_parameters_of_their_own(change):
    """The model gets no gradients, so Adam skips it. Keys of the wrapper have a prefix."""
    right = "functional_call(replica, parameters, part.to(device))"
    fit = "    fit(model, optimizer, train_loader, test_loader, device, args)\n"
    show = """    print("skipped:", len(optimizer.state) == 0)
    inside = model.module.state_dict()
    print("prefix:", list(model.state_dict()) == [f"module.{name}" for name in inside])
"""
    copy = change("data_parallel", (right, "replica(part)"), (fit, fit + show))
    out = ends(copy, "--by", "hand", "-g", 2).stdout
    assert losses(out) == pytest.approx([2.31, 2.31], abs=0.01)
    assert "skipped: True" in out and "prefix: True" in out


def test_overlap_with_a_frozen_parameter(change):
    """If both classes skip it, the losses are those of manual_data_parallel.py with it."""
    sent = "    send_weights(model)  #"
    plain = losses(ends(change("manual_data_parallel", (sent, FREEZE + sent))).stdout)
    copy = change("overlapped_data_parallel", (SENT, SENT + FREEZE))
    loop = r"^        for parameter in (model\.parameters\(\)|reversed\(.*\)):\n"
    skip = "            if not parameter.requires_grad:\n                continue\n"
    text, count = re.subn(loop, rf"\g<0>{skip}", copy.read_text(), flags=re.M)
    assert count == 2
    copy.write_text(text)
    for by in ("each", "buckets"):
        assert losses(ends(copy, "--by", by).stdout) == pytest.approx(plain, abs=2e-4)


def test_overlap_without_waiting(change, reference):
    """The optimizer takes gradients that are not complete."""
    copy = change("overlapped_data_parallel", ("        self.handle.wait()\n", ""))
    assert abs(losses(ends(copy).stdout)[1] - reference[1]) > 1e-3


def test_averages_where_sums_belong(change, reference):
    """Losses, correct ones and images are divided by the number of ranks: only images show it."""
    images = '        images = sums["images"].item()\n'
    shown = f"{images}        print(f'{{images:.0f}} images', flush=True)\n"
    pairs = [("average=False", "average=True"), (images, shown)]
    out = ends(change("distributed_data_parallel2", *pairs)).stdout
    assert losses(out) == pytest.approx(reference, abs=2e-4)
    assert "\n720 images\n" in out  # half of 12 x 120


def test_an_assertion_under_torchrun_without_record(change):
    """The report says how to get a traceback. test_torchrun.py has a report with @record."""
    join = "    rank, device = join(args)\n"
    failing = (join, f"{join}    {ASLEEP}\n    assert rank == 0\n")
    copy = change("distributed_data_parallel_torchrun", failing, ("@record", ""))
    done = torchrun(copy, *TWO_EPOCHS).wait()
    assert done.returncode == 1
    before, _, report = done.stderr.partition("Root Cause")
    assert "rank      : 1 (local_rank: 1)" in report
    assert "To enable traceback see" in report and "AssertionError" not in report
    assert "AssertionError" in before


def test_a_start_without_the_optimizer(change, tmp_path):
    """Adam's averages start at zero again, so the loss of the third epoch differs."""
    load = '    optimizer.load_state_dict(state["optimizer"])\n'
    copy = change("distributed_data_parallel_resumable", (load, ""))
    ends(copy, "--run_dir", tmp_path / "run")
    (wrong,) = losses(ends(copy, "--run_dir", tmp_path / "run", "--epochs", 3).stdout)
    assert wrong == pytest.approx(0.7156, abs=1e-3)
    assert single_gpu(*TWO_EPOCHS, "--epochs", 3)[-1]["loss"] == pytest.approx(0.6618, abs=1e-3)


def compare_resnet_steps(rank, paths):
    """Train a small model with the steps of a lesson and of two copies, in 4 micro-batches."""
    weights = []
    for path in paths:
        update = runpy.run_path(str(path))["update"]
        torch.manual_seed(rank)
        model = DistributedDataParallel(torch.nn.Linear(5, 3).double())
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-6)
        for _ in range(5):
            update(model, optimizer, 4, torch.randn(8, 5).double(), torch.arange(8) % 3)
        weights.append(model.module.weight.detach())
    right, averaged, larger = weights
    torch.testing.assert_close(averaged, right, atol=1e-12, rtol=0)
    torch.testing.assert_close(larger, right, atol=1e-6, rtol=0)  # the steps were 1e-3 long
    assert not larger.equal(right)


def test_what_a_resnet_hardly_notices(change, tmp_path):
    """Averaging after each micro-batch changes nothing, and Adam divides by a constant factor."""
    lesson = "distributed_data_parallel_resnet"
    averaged = change(lesson, ("else model.no_sync():", "else nullcontext():"))
    averaged = averaged.rename(tmp_path / "averaged.py")
    larger = change(lesson, ("(loss * fraction).backward()  #", "loss.backward()  #"))
    in_group(compare_resnet_steps, 2, [lesson_path(lesson), averaged, larger])


def test_the_sum_of_mean_losses(change, reference):
    """Gradients and loss are as many times too large as there are micro-batches."""
    old = "            loss = F.cross_entropy(logits, labels)\n"
    new = """            loss = 0
            count = model.micro_batches
            parts = zip(logits.tensor_split(count), labels.tensor_split(count))
            for part_of_logits, part_of_labels in parts:
                loss += F.cross_entropy(part_of_logits, part_of_labels)
"""
    lines = epochs(ends(change("model_parallel", (old, new)), "--pipelined").stdout)
    four_times = [4 * loss for loss in reference]
    assert [line["loss"] for line in lines] == pytest.approx(four_times, rel=0.03)
    for line, right in zip(lines, single_gpu(*TWO_EPOCHS), strict=True):
        assert line["test"] == pytest.approx(right["test"], abs=3)  # Adam hardly reacts


def compare_gradients(rank, right, wrong):
    """Compute a batch in 8 micro-batches with a lesson and a copy: the gradients."""
    gradients = []
    for path in (right, wrong):
        lesson = runpy.run_path(str(path))
        torch.manual_seed(0)
        stage = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10)).double()
        passes = lesson["gpipe"](0, 1, 8)
        model = lesson["Pipeline"](stage, None, passes, timedelta(seconds=60))
        model(torch.randn(16, 1, 28, 28).double(), torch.arange(16) % 10)
        gradients.append(stage[1].weight.grad)
    torch.testing.assert_close(gradients[1], 8 * gradients[0])


def test_a_pipeline_without_the_share_of_a_micro_batch(change):
    """The gradients are 8 times too large with 8 micro-batches."""
    copy = change("manual_pipeline", (" * len(labels) / self.batch_size", ""))
    in_group(compare_gradients, 1, lesson_path("manual_pipeline"), copy)


def test_lists_that_deadlock():
    """Rank 0 waits for a gradient and rank 1 for activations. The answer's other lists end."""
    lesson = lesson_path("manual_pipeline")
    first, second = "F0,B0,F1,B1", "F0,F1,B0,B1"
    done = ends(lesson, "--schedule", first, second, "--timeout", 5, status=1)
    waits = set(re.findall(r"^    dist.recv\((\w+)", done.stderr, re.M))
    assert waits <= {"gradient", "inputs"} and waits
    for lists, kept in (((second, first), ["2", "1"]), ((first, first), ["1", "1"])):
        out = ends(lesson, "--epochs", 1, "--schedule", *lists).stdout
        assert re.findall(r"the activations of at most (\d) micro-batch", out) == kept


def test_a_last_stage_without_labels(change):
    """Only the last rank computes the loss, so only it complains. The others lose a connection."""
    old = "schedule.step(*inputs, target=labels)"
    done = ends(change("pipeline_parallel", (old, "schedule.step(*inputs)")), status=1)
    complaints = re.findall(r"Stage \d: loss_fn and target required", done.stderr)
    if torch.__version__.startswith("2.9."):
        complaints = re.findall(r"TypeError: 'NoneType' object is not subscriptable", done.stderr)
    assert complaints and not any("Stage 0" in complaint for complaint in complaints)


def test_what_profile_steps_shows(change, tmp_path):
    """Rank 1's computing has the 50 ms that it sleeps, and rank 0 waits longer than rank 1.

    If all computing is forgotten, all messages count as waited for, so "hidden" is 0.
    """
    backward, waiting = "            loss.backward()", "        waiting = messages & ~computing\n"
    sleep = f"            time.sleep(0.05 * dist.get_rank())\n{backward}"
    flags = ("--epochs", 1, "--batch_size", 64, "--out", tmp_path / "traces")
    out = ends(change("profile_steps", (backward, sleep)), *flags).stdout
    zero, one = re.findall(STEPS, out, re.M)
    assert float(one[3]) >= 50
    assert float(zero[4]) > float(one[4])
    copy = change("profile_steps", (waiting, f"        computing[:] = False\n{waiting}"))
    rows = re.findall(STEPS, ends(copy, *flags, "--width", 512).stdout, re.M)
    assert [float(row[5]) for row in rows] == [0, 0]
    assert all(float(row[4]) > 0 for row in rows)


def test_what_compare_runs_for_scaling(change, monkeypatch):
    """With two threads for one process all runs have two; without its batch, weak is strong."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    threads = ("        threads = 1 ", "        threads = 2 ")
    batch = ('["--batch_size", str(count * args.batch_size)]', "[]")
    tool = runpy.run_path(str(change("figures/compare", threads, batch)))
    args = argparse.Namespace(**dict.fromkeys(tool["PASSED_ON"]))
    vars(args).update(gpus=2, stages=2, pieces=2, head_parts=2, processes=[1, 2])
    vars(args).update(only=["scaling"], batch_size=128)
    commands = [tool["command"](each, args, "folder") for each in tool["plan"](args)]
    assert [variables for _, variables in commands] == [{"OMP_NUM_THREADS": "2"}] * 3
    _, (strong, _), (weak, _) = commands
    assert strong == weak and strong[-2:] == ["-g", "2"]
    assert "torch.set_num_threads(" in lesson_path("distributed_data_parallel").read_text()
