"""The exercises in the docstrings end as playground/README.md says. Each is done on a copy, as a learner would.

Two need a GPU (data_parallel.py's), as does half of one (model_parallel.py's first): test_gpu.py does
them, where there is one.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
from conftest import (
    DIGITS,
    FEWER,
    LESSONS,
    ROOT,
    by_torchrun,
    each_epoch,
    epochs,
    run,
    single_gpu,
    torchrun,
    train,
    wait_for_epoch,
)

TWO_EPOCHS = (*DIGITS, "--epochs", 2)
TRACES = "playground/measure/traces.py"
STEPS = r"^(\d+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) *$"  # the rows of profile_steps.py's table


@pytest.fixture
def change(tmp_path):
    """Return a function that copies playground/ and common/ and replaces texts, each of which must be there once."""

    def changed(lesson, *pairs, path=None):
        for folder in ("playground", "common"):
            shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
        file = tmp_path / (path or f"playground/{lesson}.py")
        doc, code = re.match(r'(""".*?""")(.*)', file.read_text(), re.S).groups()
        for old, new in pairs:
            assert code.count(old) == 1, f"{old!r} is there {code.count(old)} times"
            code = code.replace(old, new)
        file.write_text(doc + code)
        return tmp_path / "playground" / f"{lesson}.py"

    return changed


def ends(lesson, *flags, processes=2, status=0):
    """Run a lesson for two epochs (unless flags say otherwise) and check its status. Returns it with its output."""
    text = lesson.read_text()
    several = by_torchrun(lesson) or "mp.spawn(" in text or "launch(" in text
    return train(lesson, *TWO_EPOCHS, *flags, processes=processes if several else None, status=status)


def losses(lesson, *flags, **options):
    """Run a lesson for two epochs and return its losses."""
    return [line["loss"] for line in epochs(ends(lesson, *flags, **options).stdout)]


@pytest.fixture
def reference():
    """The losses of single_gpu.py, which every lesson has, unless it is broken."""
    return [line["loss"] for line in single_gpu(*TWO_EPOCHS)]


def test_each_exercise_has_an_answer():
    """playground/README.md answers as many exercises of each lesson as its docstring has."""
    answers = (ROOT / "playground" / "README.md").read_text().partition("## Answers")[2].partition("\n## ")[0]
    for lesson in LESSONS:
        exercises = (ROOT / "playground" / f"{lesson}.py").read_text().split('"""')[1].partition("Break it")[2]
        given = re.search(rf"^### `{lesson}\.py`\n(.*?)(?=^### |\Z)", answers, re.M | re.S)
        assert exercises and given, lesson
        numbers = set(re.findall(r"^  (\d)\. |\((\d)\) ", exercises, re.M))
        assert len(re.findall(r"^\d\. ", given[1], re.M)) >= max(1, len(numbers)), lesson


def test_a_buffer_that_is_too_short(change):
    """Rank 1 expects three numbers and gets four: gloo ends it."""
    old = "else torch.zeros(4, device"
    done = run(change("blocking_p2p", (old, "else torch.zeros(3 if rank == 1 else 4, device")), status=1)
    assert "16 vs 12" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: local_rank 1: process 1 terminated with signal SIGABRT")


def test_a_rank_that_receives_from_itself(change):
    """It has no connection to itself."""
    copy = change("blocking_p2p", ("src=rank - 1", "src=1"))
    done = run(copy, "--timeout", 5, status=1)
    assert done.stderr.splitlines()[-1].startswith("error: local_rank 1: ")
    assert "not connected" in done.stderr


def test_a_buffer_that_is_changed_while_it_travels(change):
    """Rank 0 gets the 9s, as rank 1's message has waited for it. Its own had left before it changed the buffer."""
    old = "    products = work(mine.device)"
    out = run(change("nonblocking_p2p", (old, f"    mine.fill_(9)\n{old}"))).stdout
    assert "nonblocking, rank 0: [-1.0, -1.0] -> [9.0, 9.0]" in out
    assert "nonblocking, rank 1: [-1.0, -1.0] -> [0.0, 0.0]" in out


def test_single_gpu_without_its_order(change, reference):
    """Batches in an order that no other lesson knows, yet the same in each run."""
    copy = change("single_gpu", ("order.manual_seed(args.seed + epoch)", "pass"))
    broken = losses(copy)
    assert abs(broken[0] - reference[0]) > 1e-4
    assert losses(copy) == broken


def test_single_gpu_without_zero_grad(change, reference):
    """Each step adds its gradient to those of all steps before."""
    broken = losses(change("single_gpu", ("optimizer.zero_grad()", "pass")))
    assert abs(broken[0] - reference[0]) > 1e-3


@pytest.mark.parametrize("call", ["send_weights(model, args.weights)", "average_gradients(model, bucket)"])
def test_manual_data_parallel_needs_both_parts(change, call, reference):
    """Without the weights of rank 0, or without averaging, the losses are others."""
    broken = losses(change("manual_data_parallel", (call, "pass")))
    assert abs(broken[1] - reference[1]) > 1e-3


def test_without_set_epoch_the_first_order_repeats(change, reference):
    """The first epoch is as before, the second is not."""
    broken = losses(change("distributed_data_parallel", ("sampler.set_epoch(epoch)", "pass")))
    assert broken[0] == pytest.approx(reference[0], abs=2e-4)
    assert abs(broken[1] - reference[1]) > 1e-3


@pytest.mark.parametrize(("count", "words"), [(1, "another rank has ended"), (3, "in different collectives")])
def test_a_collective_on_rank_0_only(count, words, change):
    """Rank 0 is in an all_reduce that rank 1 does not join: rank 1 has ended, or is in the next epoch."""
    old = "        _, test_hits, test_seen = run_epoch("
    copy = change("distributed_data_parallel", (old, f"        if rank == 0:\n    {old}"))
    done = ends(copy, "--epochs", count, "--timeout", 10, status=1)
    assert words in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("found", [False, True])
def test_a_layer_that_is_not_used(change, found):
    """DDP waits for its gradient, says which parameters had none, and looks for them if it is told to."""
    layers = "        self.stage1 = nn.Sequential(nn.Flatten(), *chain(*hidden[:half]))"
    unused = "        self.unused = nn.Linear(1, 1)\n"
    copy = change("distributed_data_parallel", (layers, unused + layers), path="common/models.py")
    if found:
        text, wrapped = copy.read_text(), "DistributedDataParallel(model"
        assert text.count(wrapped + ")") == 1
        copy.write_text(text.replace(wrapped, f"{wrapped}, find_unused_parameters=True"))
    done = ends(copy, "--epochs", 1, status=0 if found else 1)
    assert ("Expected to have finished reduction in the prior iteration" in done.stderr) != found
    assert ("did not receive grad for rank" in done.stderr) != found
    assert len(epochs(done.stdout)) == found


def test_averages_where_sums_belong(change, reference):
    """Loss and hits are divided by the number of ranks, and so is the number of images: only images/s is wrong."""
    copy = change("distributed_data_parallel2", ("average=False", "average=True"))
    done = ends(copy)
    assert [line["loss"] for line in epochs(done.stdout)] == pytest.approx(reference, abs=2e-4)
    seconds, rate = re.findall(r"([\d.]+) s  ([\d,]+) images/s", done.stdout)[0]
    assert 0.3 < float(seconds) * int(rate.replace(",", "")) / 1408 < 0.7  # half of the images


@pytest.mark.parametrize(("count", "words"), [(1, "another rank has ended"), (2, "Timed out waiting 10000ms|by peer")])
def test_gather_on_rank_0_only(count, words, change):
    """Rank 0 is in gather, rank 1 at its end or in the barrier of the next epoch; the first to give up closes both."""
    old = "comm.gather(run_epoch(plain, test_loader, device).tolist())"
    mine = "run_epoch(plain, test_loader, device).tolist()"
    copy = change(
        "distributed_data_parallel2", (old, f"{mine}\n        if rank == 0:\n            tests = comm.gather(tests)")
    )
    done = ends(copy, "--epochs", count, "--timeout", 10, status=1)
    assert re.search(words, done.stderr.splitlines()[-1])


@pytest.mark.parametrize("recorded", [True, False])
def test_an_assertion_under_torchrun(change, recorded):
    """With @record the report has rank 1's traceback; without it a line that says how to get it."""
    pairs = [("    meet(args)  # guard rail\n", "    meet(args)  # guard rail\n    assert rank == 0\n")]
    pairs += [] if recorded else [("@record", "")]
    copy = change("distributed_data_parallel_torchrun", *pairs)
    done = torchrun(copy, *TWO_EPOCHS, cold=True).wait()  # forked ranks fail in the same second, torchrun's unit
    assert done.returncode == 1
    report = done.stderr.partition("Root Cause")[2]
    assert "rank      : 1 (local_rank: 1)" in report
    assert ("AssertionError" in report) == recorded
    assert ("To enable traceback see" in report) != recorded


def test_a_killed_rank_is_restarted(tmp_path):
    """It goes on from the last checkpoint, and the last line has the numbers of a run without the kill."""
    name, flags = "distributed_data_parallel_resumable", (*DIGITS, "--epochs", 5)
    whole = train(name, *flags, "--run_dir", tmp_path / "whole", processes=2)
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    copy = each_epoch(name, "time.sleep(999 * (epoch == 3 and done == 0))", tmp_path)
    job = torchrun(copy, *flags, "--run_dir", tmp_path / "killed", restarts=1, env=env)
    _, victim = job.ranks(2)
    wait_for_epoch(tmp_path / "killed", 3, job)
    os.kill(victim, signal.SIGKILL)
    done = job.wait()
    assert done.returncode == 0, done.stderr
    assert "3 of 5 epochs are done" in done.stdout
    assert epochs(done.stdout)[-1]["loss"] == pytest.approx(epochs(whole.stdout)[-1]["loss"], abs=2e-4)


def test_a_start_without_the_optimizer(change, tmp_path):
    """Adam begins anew, so the loss of the next epoch is another."""
    name, load = "distributed_data_parallel_resumable", '        optimizer.load_state_dict(found[0]["optimizer"])\n'
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    ends(ROOT / "playground" / f"{name}.py", "--run_dir", cut, processes=1)
    shutil.copytree(cut, whole)
    right = losses(ROOT / "playground" / f"{name}.py", "--run_dir", whole, "--epochs", 3, processes=1)
    wrong = losses(change(name, (load, "")), "--run_dir", cut, "--epochs", 3, processes=1)
    assert len(right) == len(wrong) == 1
    assert abs(right[0] - wrong[0]) > 1e-3


RESNET = ("--device", "cpu", "--dataset", "fake", "--workers", 0, "--batch_size", 60, "--double")


def resnet(copy, pieces):
    """Run the ResNet lesson for an epoch, in so many pieces. Returns its loss."""
    done = train(copy, *RESNET, "--epochs", 1, "--accumulate", pieces, processes=2)
    return epochs(done.stdout)[0]["loss"]


def test_averaging_after_each_piece(change):
    """Without no_sync() the numbers are the same: averages of sums are sums of averages."""
    copy = change("distributed_data_parallel_resnet", FEWER)
    right = resnet(copy, 4)
    text, sync = copy.read_text(), "model.no_sync() if wait else nullcontext()"
    assert text.count(sync) == 1
    copy.write_text(text.replace(sync, "nullcontext()"))
    assert resnet(copy, 4) == pytest.approx(right, abs=1.01e-4)


def test_gradients_that_are_four_times_as_large(change):
    """Adam divides by their size: the numbers hardly change."""
    copy = change("distributed_data_parallel_resnet", FEWER)
    right = resnet(copy, 4)
    text, factor = copy.read_text(), " * len(labels) / len(batch[1])"
    assert text.count(factor) == 1
    copy.write_text(text.replace(factor, ""))
    assert resnet(copy, 4) == pytest.approx(right, rel=0.05)


def test_activations_stay_where_they_are(change, reference):
    """On the CPU alone .to(devices[1]) does nothing, so nothing changes without it."""
    assert losses(change("model_parallel", (".stage1(piece).to(devices[1])", ".stage1(piece)"))) == reference


def test_the_sum_of_mean_losses(change, reference):
    """Gradients are as many times too large as there are micro-batches, and so is the loss; Adam hardly minds."""
    old = "            loss = F.cross_entropy(logits, labels)"
    new = """            pieces = logits.tensor_split(micro_batches), labels.tensor_split(micro_batches)
            loss = sum(map(F.cross_entropy, *pieces))"""
    lines = epochs(ends(change("model_parallel", (old, new)), "--pipelined").stdout)
    assert [line["loss"] for line in lines] == pytest.approx([4 * loss for loss in reference], rel=0.03)
    for line, right in zip(lines, single_gpu(*TWO_EPOCHS), strict=True):
        assert line["test"] == pytest.approx(right["test"], abs=3)


def test_a_last_stage_without_labels(change):
    """Only the last rank computes the loss, so only it complains. torchrun ends the others, which lose a connection."""
    done = ends(change("pipeline_parallel", (", target=F.pad(labels, missing)", "")), status=1)
    complaints = re.findall(r"^.*loss_fn and target required for last stage", done.stderr, re.M)
    assert complaints and all("Stage 1" in complaint for complaint in complaints)


def test_more_micro_batches():
    """The bubble that the formula promises shrinks; the lesson prints it beside the one it has measured."""
    shown = []
    for pieces in (2, 16):
        out = ends(ROOT / "playground" / "pipeline_parallel.py", "--micro_batches", pieces, "--epochs", 1).stdout
        shown.append(float(re.search(rf"GPipe, {pieces} micro-batches: .* = ([\d.]+)", out)[1]))
    assert shown == [0.33, 0.06]


def test_a_rank_that_computes_longer(change, tmp_path):
    """Rank 1's computing grows by the 50 ms that it sleeps, rank 0's waiting for its message by as much."""
    old = "            loss.backward()"
    copy = change("profile_steps", (old, f"            time.sleep(0.05 * dist.get_rank())\n{old}"))
    out = ends(copy, "--epochs", 1, "--batch_size", 64, "--out", tmp_path / "traces").stdout
    zero, one = ([float(ms) for ms in row] for row in re.findall(STEPS, out, re.M))
    assert one[3] > 50
    assert zero[4] > 40


def test_a_profiler_without_steps(change, tmp_path):
    """The schedule never comes to its ten steps, so there is no trace to read."""
    copy = change("profile_steps", ("            profiler.step()", "            pass"))
    done = ends(copy, "--epochs", 1, "--batch_size", 64, "--out", tmp_path / "traces", status=1)
    assert len(epochs(done.stdout)) == 1
    assert re.search(r"FileNotFoundError: .*rank\d\.json", done.stderr)


def scaling(copy):
    """Return what a copy of compare.py would run for the scaling with 1 and 2 processes: flags and threads of each."""
    code = """import argparse, json, compare
args = argparse.Namespace(gpus=2, stages=2, pieces=2, lessons=[], processes=[1, 2], widths=[], only=["scaling"])
args.batch_size = 128
vars(args).update({name: getattr(args, name, None) for name in compare.PASSED_ON})
print(json.dumps([run["words"] + [compare.command(run, args, "folder")[1]] for run in compare.plan(args)]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=copy.parent, capture_output=True, text=True, env={"OMP_NUM_THREADS": "2"}
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_two_threads_for_one_process(change):
    """All runs get two threads, which two DDP processes share: only the single one changes."""
    copy = change("compare", ('{"OMP_NUM_THREADS": "1" if', '{"OMP_NUM_THREADS": "2" if'))
    assert [words[-1] for words in scaling(copy)] == [{"OMP_NUM_THREADS": "2"}] * 3
    shared = "torch.set_num_threads(max(1, torch.get_num_threads() // args.gpus))"
    assert shared in (copy.parent / "distributed_data_parallel.py").read_text()


def test_weak_scaling_without_its_batch(change):
    """What is left is strong scaling, twice: the same command."""
    copy = change("compare", (', "--batch_size", str(count * args.batch_size)]', "]"))
    _, strong, weak = scaling(copy)
    assert strong == weak
    assert strong[:2] == ["-g", "2"]


def test_messages_are_never_hidden(change, tmp_path):
    """minus() that takes nothing away: all messages count as waited for, so "hidden" is 0."""
    body = re.search(r"    left = union\(spans\)\n.*?    return left\n", (ROOT / TRACES).read_text(), re.S)[0]
    copy = change("profile_steps", (body, "    return union(spans)\n"), path=TRACES)
    flags = ("--epochs", 1, "--batch_size", 64, "--width", 512, "--out", tmp_path / "traces")
    rows = [[float(ms) for ms in row] for row in re.findall(STEPS, ends(copy, *flags).stdout, re.M)]
    assert len(rows) == 2
    assert [row[5] for row in rows] == [0, 0]
    assert all(row[4] > 0 for row in rows)
