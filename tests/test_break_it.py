"""The exercises in the docstrings end as playground/pages/answers.md says. Each is done on a copy.

One of model_parallel.py needs a GPU, so it is in test_gpu.py.
"""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from conftest import (
    ASLEEP,
    DIGITS,
    FEWER,
    ROOT,
    by_torchrun,
    each_epoch,
    epochs,
    lesson_path,
    run,
    single_gpu,
    torchrun,
    train,
    wait_for_epoch,
)
from lessons import LESSONS

TWO_EPOCHS = (*DIGITS, "--epochs", 2)
# The rows of the table of profile_steps.py.
STEPS = r"^(\d+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) *$"


def ends(lesson, *flags, processes=2, status=0):
    """Run a lesson, by default for two epochs, and check its status. Returns its output, too."""
    text = lesson.read_text()
    several = by_torchrun(lesson) or "mp.spawn(" in text or "launch(" in text
    count = processes if several else None
    return train(lesson, *TWO_EPOCHS, *flags, processes=count, status=status)


def losses(lesson, *flags, **options):
    """Run a lesson for two epochs and return its losses."""
    return [line["loss"] for line in epochs(ends(lesson, *flags, **options).stdout)]


@pytest.fixture
def reference():
    """The losses of single_gpu.py, which every lesson has, unless it is broken."""
    return [line["loss"] for line in single_gpu(*TWO_EPOCHS)]


def test_each_exercise_has_an_answer():
    """playground/pages/answers.md answers as many exercises of each lesson as its docstring has."""
    answers = (ROOT / "playground" / "pages" / "answers.md").read_text()
    for path in [*map(lesson_path, LESSONS), ROOT / "playground" / "figures" / "compare.py"]:
        docstring = path.read_text().split('"""')[1]
        exercises = re.split("Try breaking it|Break it", docstring, maxsplit=1)[1]
        heading = rf"^## `{path.stem}\.py`\n"
        given = re.search(rf"{heading}(.*?)(?=^## |\Z)", answers, re.M | re.S)
        assert exercises and given, path
        numbers = set(re.findall(r"^  (\d)\. |\((\d)\) ", exercises, re.M))
        assert len(re.findall(r"^\d\. ", given[1], re.M)) >= max(1, len(numbers)), path


def test_a_buffer_that_is_too_short(change):
    """Rank 1 expects three numbers and gets four: gloo ends it."""
    old = "torch.zeros(4, device=device)"
    new = "torch.zeros(3 if rank == 1 else 4, device=device)"
    done = run(change("blocking_p2p", (old, new)), status=1)
    assert "16 vs 12" in done.stderr
    assert done.stderr.strip().endswith("process 1 terminated with signal SIGABRT")


def test_a_rank_that_receives_from_itself(change):
    """It has no connection to itself."""
    copy = change("blocking_p2p", ("src=rank - 1", "src=1"))
    done = run(copy, "--timeout", 5, status=1)
    assert "-- Process 1 terminated" in done.stderr
    assert "not connected" in done.stderr.strip().splitlines()[-1]


def test_a_buffer_that_is_changed_while_it_travels(change):
    """Rank 0 gets the 9s, because rank 1's message waited for it. Rank 0's own left before."""
    old = "    compute(mine.device)  #"
    out = run(change("nonblocking_p2p", (old, f"    mine.fill_(9)\n{old}"))).stdout
    assert "nonblocking, rank 0: [-1.0, -1.0] -> [9.0, 9.0]" in out
    assert "nonblocking, rank 1: [-1.0, -1.0] -> [0.0, 0.0]" in out


def test_single_gpu_without_its_order(change, reference):
    """The batches have an order that no other lesson has, and it is the same in each run."""
    copy = change(
        "single_gpu", ("train_loader.sampler.generator.manual_seed(args.seed + epoch)", "pass")
    )
    broken = losses(copy)
    assert abs(broken[0] - reference[0]) > 1e-4
    assert losses(copy) == broken


def test_single_gpu_without_zero_grad(change, reference):
    """Each step adds its gradient to those of all steps before."""
    broken = losses(change("single_gpu", ("optimizer.zero_grad()", "pass")))
    assert abs(broken[0] - reference[0]) > 1e-3


def test_the_keys_of_replicas(change):
    """They begin with the name of the model inside, whose own keys do not."""
    old = "    fit(model, optimizer, train_loader, test_loader, device, args)\n"
    keys = """    print(list(model.state_dict()))
    print(list(model.module.state_dict()))
"""
    out = ends(change("data_parallel", (old, old + keys)), "--by", "hand", "-g", 2).stdout
    wrapped, inside = [json.loads(line.replace("'", '"')) for line in out.splitlines()[-2:]]
    assert wrapped == [f"module.{name}" for name in inside]


def test_replicas_with_parameters_of_their_own(change):
    """They get the gradients, and the model that the optimizer changes gets none."""
    loop = "    for epoch in range(args.epochs):\n"
    where = """        if epoch == 1:
            inside = [parameter.grad is None for parameter in model.module.parameters()]
            each = [replica.stage1[1].weight.grad is None for replica in model.replicas]
            print("without a gradient:", all(inside), each)
"""
    copy = change(
        "data_parallel",
        ("functional_call(replica, parameters, part.to(device))", "replica(part)"),
        (loop, loop + where),
    )
    done = ends(copy, "--by", "hand", "-g", 2)
    assert [line["loss"] for line in epochs(done.stdout)] == pytest.approx([2.31, 2.31], abs=0.01)
    assert "without a gradient: True [False, False]" in done.stdout


@pytest.mark.parametrize(
    ("call", "second"), [("    send_weights(model)  #", 1.6639), ("    average(model)  #", 1.5555)]
)
def test_manual_data_parallel_needs_both_parts(change, call, second):
    """Without the parameters of rank 0, or without averaging, the second loss is not 1.4064."""
    copy = change("manual_data_parallel", (call, "    pass  #"))
    broken = losses(copy, "--batch_size", 120)  # as in playground/pages/answers.md
    assert broken[1] == pytest.approx(second, abs=1e-3)


def test_a_pipeline_without_the_share_of_a_micro_batch(change):
    """The gradients are 8 times too large with 8 micro-batches."""
    step = "            optimizer.step()\n"
    show = (
        "            if dist.get_rank() == 0:\n"
        "                first = optimizer.param_groups[0]['params'][0]\n"
        "                print('gradient', first.grad.sum().item())\n"
    )
    norms = []
    for factor in (" * len(labels) / self.batch_size", ""):
        pairs = (" * len(labels) / self.batch_size", factor), (step, show + step)
        copy = change("manual_pipeline", *pairs)
        flags = ("--batch_size", 1200, "--epochs", 1, "--double")
        out = train(copy, *DIGITS, *flags, processes=2).stdout
        norms.append(float(re.search(r"^gradient (\S+)$", out, re.M)[1]))
    assert norms[1] == pytest.approx(8 * norms[0], rel=1e-9)


def test_lists_that_deadlock():
    """Rank 0 waits for a gradient and rank 1 for activations, until the time is up.

    The other lists of the answer end.
    """
    lists = ("--schedule", "F0,B0,F1,B1", "F0,F1,B0,B1")
    done = ends(lesson_path("manual_pipeline"), *lists, "--timeout", 10, status=1)
    waits = set(re.findall(r"^    dist.recv\((\w+)", done.stderr, re.M))
    assert waits <= {"gradient", "inputs"} and waits
    lists = {"F0,B0,F1,B1": 1, "F0,F1,B0,B1": 2}
    for first, second in (("F0,F1,B0,B1", "F0,B0,F1,B1"), *zip(lists, lists, strict=True)):
        out = ends(lesson_path("manual_pipeline"), "--schedule", first, second).stdout
        kept = re.findall(r"the activations of at most (\d) micro-batch", out)
        assert kept == [str(lists[first]), str(lists[second])]


@pytest.mark.parametrize("by", ["each", "buckets"])
def test_overlap_with_a_frozen_parameter(by, change):
    """It cannot have a hook. If both classes skip it, the losses are those of average_gradients."""
    sent, frozen = (
        "    send_weights(model)\n",
        "    next(model.parameters()).requires_grad_(False)\n",
    )
    copy = change("overlapped_data_parallel", (sent, sent + frozen))
    done = ends(copy, "--by", by, status=1)
    assert "cannot register a hook on a tensor that doesn't require gradient" in done.stderr
    loop = r"^        for parameter in (model\.parameters\(\)|reversed\(.*\)):\n"
    skip = "            if not parameter.requires_grad:\n                continue\n"
    text, count = re.subn(loop, rf"\g<0>{skip}", copy.read_text(), flags=re.M)
    assert count == 2
    copy.write_text(text)
    skipped = losses(copy, "--by", by)
    manual, sent = lesson_path("manual_data_parallel").read_text(), "    send_weights(model)  #"
    assert manual.count(sent) == 1
    plain = copy.with_name("manual_data_parallel.py")
    plain.write_text(manual.replace(sent, f"{frozen}{sent}"))
    assert skipped == pytest.approx(losses(plain), abs=2e-4)


def test_overlap_without_waiting(change, reference):
    """The optimizer takes gradients that are not complete."""
    broken = losses(change("overlapped_data_parallel", ("        self.handle.wait()\n", "")))
    assert abs(broken[1] - reference[1]) > 1e-3


def test_without_set_epoch_the_first_order_repeats(change, reference):
    """The first epoch is as before, the second is not."""
    broken = losses(
        change("distributed_data_parallel", ("train_loader.sampler.set_epoch(epoch)", "pass"))
    )
    assert broken[0] == pytest.approx(reference[0], abs=2e-4)
    assert abs(broken[1] - reference[1]) > 1e-3


@pytest.mark.parametrize(("count", "words"), [(1, "by peer"), (3, "by peer|signal SIGABRT")])
def test_a_collective_on_rank_0_only(count, words, change):
    """Rank 0 waits in an all_reduce. Rank 1 has ended, or is in the next epoch."""
    old = "        _, test_correct, test_images = run_epoch("
    copy = change("distributed_data_parallel", (old, f"        if rank == 0:\n    {old}"))
    done = ends(copy, "--epochs", count, "--timeout", 10, status=1)
    assert re.search(words, done.stderr.strip().splitlines()[-1])


@pytest.mark.parametrize("found", [False, True])
def test_a_layer_that_is_not_used(change, found):
    """DDP misses its gradient and names the parameters. It looks for them only if told to."""
    layers = "        self.stage1 = nn.Sequential(nn.Flatten(), "
    unused = "        self.unused = nn.Linear(1, 1)\n"
    copy = change("distributed_data_parallel", (layers, unused + layers), path="common/models.py")
    if found:
        text = copy.read_text()
        wrapped = "DistributedDataParallel(model"
        assert text.count(wrapped + ")") == 1
        copy.write_text(text.replace(wrapped, f"{wrapped}, find_unused_parameters=True"))
    done = ends(copy, "--epochs", 1, status=0 if found else 1)
    assert ("Expected to have finished reduction in the prior iteration" in done.stderr) != found
    assert ("did not receive grad for rank" in done.stderr) != found
    assert len(epochs(done.stdout)) == found


def test_averages_where_sums_belong(change, reference):
    """Losses, correct ones and images are divided by the number of ranks: only images show it."""
    images = '        images = sums["images"].item()\n'
    shown = f"{images}        print(f'{{images:.0f}} images', flush=True)\n"
    pairs = [("average=False", "average=True"), (images, shown)]
    done = ends(change("distributed_data_parallel2", *pairs))
    assert [line["loss"] for line in epochs(done.stdout)] == pytest.approx(reference, abs=2e-4)
    assert "\n704 images\n" in done.stdout  # half of 11 x 128


@pytest.mark.parametrize("count", [1, 2])
def test_gather_on_rank_0_only(count, change):
    """Rank 0 waits in gather, rank 1 has ended or waits in the barrier of the next epoch."""
    gather = "        parts = comm.gather(run_epoch(plain, test_loader, device))\n"
    condition = "        if comm.is_main_process():\n"
    moved = f"{condition}    {gather}"
    copy = change("distributed_data_parallel2", (gather + condition, moved))
    done = ends(copy, "--epochs", count, "--timeout", 10, status=1)
    words = ["closed by peer|reset by peer", "Timed out waiting 10000ms|by peer"][count - 1]
    assert re.search(words, done.stderr.strip().splitlines()[-1])


@pytest.mark.parametrize("recorded", [True, False])
def test_an_assertion_under_torchrun(change, recorded):
    """With @record the report has rank 1's traceback, without it a line about how to get it."""
    join = "    rank, device = join(args)\n"
    pairs = [(join, f"{join}    {ASLEEP}\n    assert rank == 0\n")]
    if not recorded:
        pairs.append(("@record", ""))
    copy = change("distributed_data_parallel_torchrun", *pairs)
    done = torchrun(copy, *TWO_EPOCHS).wait()
    assert done.returncode == 1
    report = done.stderr.partition("Root Cause")[2]
    assert "rank      : 1 (local_rank: 1)" in report
    assert ("AssertionError" in report) == recorded
    assert ("To enable traceback see" in report) != recorded


def test_a_killed_rank_is_restarted(tmp_path):
    """The run resumes, and its last line has the numbers of a run without the kill."""
    name, flags = "distributed_data_parallel_resumable", (*DIGITS, "--epochs", 5)
    whole = train(name, *flags, "--run_dir", tmp_path / "whole", processes=2)
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    copy = each_epoch(name, "time.sleep(999 * (epoch == 3 and done == 0))", tmp_path)
    job = torchrun(copy, *flags, "--run_dir", tmp_path / "killed", restarts=1, env=env)
    said = iter(job.process.stdout.readline, "")
    victim = next(line.split()[-1] for line in said if line.startswith("rank 0 is process "))
    wait_for_epoch(tmp_path / "killed", 3, job)
    os.kill(int(victim), signal.SIGKILL)
    done = job.wait()
    assert done.returncode == 0, done.stderr
    assert "3 of 5 epochs are done" in done.stdout
    expected = epochs(whole.stdout)[-1]["loss"]
    assert epochs(done.stdout)[-1]["loss"] == pytest.approx(expected, abs=2e-4)


def test_a_start_without_the_optimizer(change, tmp_path):
    """Adam's averages start at zero again, so the loss of the next epoch differs."""
    name = "distributed_data_parallel_resumable"
    load = '    optimizer.load_state_dict(state["optimizer"])\n'
    lesson = lesson_path(name)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    ends(lesson, "--run_dir", cut, processes=1)
    shutil.copytree(cut, whole)
    (right,) = losses(lesson, "--run_dir", whole, "--epochs", 3, processes=1)
    copy = change(name, (load, ""))
    (wrong,) = losses(copy, "--run_dir", cut, "--epochs", 3, processes=1)
    assert abs(right - wrong) > 1e-3


RESNET = ("--device", "cpu", "--dataset", "fake", "--workers", 0, "--batch_size", 60, "--double")


def resnet(copy, micro_batches):
    """Run the ResNet lesson for an epoch, in so many micro-batches. Returns its loss."""
    done = train(copy, *RESNET, "--epochs", 1, "--accumulate", micro_batches, processes=2)
    return epochs(done.stdout)[0]["loss"]


@functools.cache
def right_resnet():
    """Return the loss of the lesson as it is."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "resnet.py"
        copy.write_text(lesson_path("distributed_data_parallel_resnet").read_text().replace(*FEWER))
        return resnet(copy, 4)


def test_averaging_after_each_micro_batch(change):
    """Without no_sync() the numbers are the same: averages of sums are sums of averages."""
    copy = change("distributed_data_parallel_resnet", FEWER)
    text, sync = copy.read_text(), "else model.no_sync():"
    assert text.count(sync) == 1
    copy.write_text(text.replace(sync, "else nullcontext():"))
    assert resnet(copy, 4) == pytest.approx(right_resnet(), abs=1e-10)


def test_gradients_that_are_four_times_as_large(change):
    """Adam divides by their size: the numbers hardly change."""
    copy = change("distributed_data_parallel_resnet", FEWER)
    text, weighted = copy.read_text(), "(loss * fraction).backward()  #"
    assert text.count(weighted) == 1
    copy.write_text(text.replace(weighted, "loss.backward()  #"))
    assert resnet(copy, 4) == pytest.approx(right_resnet(), rel=0.05)


def test_activations_stay_where_they_are(change, reference):
    """On the CPU alone .to() does nothing, so nothing changes without it."""
    old = ".stage1(micro_batch).to(self.devices[1])"
    assert losses(change("model_parallel", (old, ".stage1(micro_batch)"))) == reference


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


def test_a_last_stage_without_labels(change):
    """Only the last rank computes the loss, so only it complains. The others lose a connection."""
    old = "schedule.step(*inputs, target=labels)"
    done = ends(change("pipeline_parallel", (old, "schedule.step(*inputs)")), status=1)
    complaints = re.findall(r"Stage \d: loss_fn and target required", done.stderr)
    if torch.__version__.startswith("2.9."):
        complaints = re.findall(r"TypeError: 'NoneType' object is not subscriptable", done.stderr)
    assert complaints and not any("Stage 0" in complaint for complaint in complaints)


def test_a_rank_that_computes_longer(change, tmp_path):
    """Rank 1's computing has the 50 ms that it sleeps, and rank 0 waits longer than rank 1."""
    old = "            loss.backward()"
    new = f"            time.sleep(0.05 * dist.get_rank())\n{old}"
    copy = change("profile_steps", (old, new))
    out = ends(copy, "--epochs", 1, "--batch_size", 64, "--out", tmp_path / "traces").stdout
    zero, one = re.findall(STEPS, out, re.M)
    assert float(one[3]) >= 50
    assert float(zero[4]) > float(one[4])


def test_a_profiler_without_steps(change, tmp_path):
    """The schedule waits for the end of its warm-up, so the trace has no steps."""
    copy = change("profile_steps", ("            model.profiler.step()", "            pass"))
    flags = ("--epochs", 1, "--batch_size", 64, "--out", tmp_path / "traces")
    done = ends(copy, *flags, status=1)
    assert len(epochs(done.stdout)) == 1
    assert "ValueError: not enough values to unpack (expected 4, got 0)" in done.stderr


def scaling(copy):
    """Return what a copy of compare.py runs for scaling with 1 and 2 processes: flags, threads."""
    code = """import argparse, json, compare
args = argparse.Namespace(**dict.fromkeys(compare.PASSED_ON))
vars(args).update(gpus=2, stages=2, pieces=2, head_parts=2, processes=[1, 2])
vars(args).update(only=["scaling"], batch_size=128)
runs = compare.plan(args)
print(json.dumps([run["words"] + [compare.command(run, args, "folder")[1]] for run in runs]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=copy.parent,
        capture_output=True,
        text=True,
        env={"OMP_NUM_THREADS": "2"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_two_threads_for_one_process(change):
    """All runs get two threads, which two DDP processes share: only the single one changes."""
    copy = change("figures/compare", ("        threads = 1 ", "        threads = 2 "))
    assert [words[-1] for words in scaling(copy)] == [{"OMP_NUM_THREADS": "2"}] * 3
    text = (copy.parents[1] / "distributed_data_parallel.py").read_text()
    assert "torch.set_num_threads(" in text


def test_weak_scaling_without_its_batch(change):
    """What is left is strong scaling, twice: the same command."""
    line = '            words = words + ["--batch_size", str(count * args.batch_size)]\n'
    copy = change("figures/compare", (line, ""))
    _, strong, weak = scaling(copy)
    assert strong == weak
    assert strong[:2] == ["-g", "2"]


def test_messages_are_never_hidden(change, tmp_path):
    """Without computing, all messages count as waited for, so "hidden" is 0."""
    waiting = "        waiting = messages & ~computing\n"
    copy = change("profile_steps", (waiting, f"        computing[:] = False\n{waiting}"))
    flags = ("--epochs", 1, "--batch_size", 64, "--width", 512, "--out", tmp_path / "traces")
    rows = [[float(ms) for ms in row] for row in re.findall(STEPS, ends(copy, *flags).stdout, re.M)]
    assert len(rows) == 2
    assert [row[5] for row in rows] == [0, 0]
    assert all(row[4] > 0 for row in rows)
