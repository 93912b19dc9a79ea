"""The exercises in the docstrings end as they say. Each is done on a copy of the lesson, as a learner would."""

import re
import shutil

import pytest
from conftest import DIGITS, ROOT, epochs, one_process, run


@pytest.fixture
def change(tmp_path):
    """Return a function that copies a lesson and common/, and replaces a text, which must be there once, by another."""

    def changed(lesson, old, new, path=None):
        for folder in ("playground", "common"):
            shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
        file = tmp_path / (path or f"playground/{lesson}.py")
        doc, code = re.match(r'(""".*?""")(.*)', file.read_text(), re.S).groups()
        assert code.count(old) == 1, f"{old!r} is there {code.count(old)} times"
        file.write_text(doc + code.replace(old, new))
        return tmp_path / "playground" / f"{lesson}.py"

    return changed


TWO_EPOCHS = (*DIGITS, "--epochs", 2)


def losses(lesson, *flags):
    """Run a lesson for two epochs on the digits and return its losses."""
    return [line["loss"] for line in epochs(run(lesson, *TWO_EPOCHS, *flags).stdout)]


@pytest.fixture
def reference():
    """The losses of single_gpu.py, which every lesson has, unless it is broken."""
    return [line["loss"] for line in one_process(*TWO_EPOCHS)]


def test_without_set_epoch_the_first_order_repeats(change, reference):
    """The first epoch is as before, the second is not."""
    broken = losses(change("distributed_data_parallel", "sampler.set_epoch(epoch)", "pass"), "-g", 2)
    assert broken[0] == pytest.approx(reference[0], abs=1.01e-4)
    assert abs(broken[1] - reference[1]) > 1e-3


def test_a_collective_on_rank_0_only(change):
    """One rank is in an all_reduce that the other does not join: it ends in time and says so."""
    old = "            _, test_hits, test_seen = run_epoch("
    copy = change("distributed_data_parallel", old, f"            if rank == 0:\n    {old}")
    for count, words in ((1, "is in another collective"), (3, "different collectives")):
        done = run(copy, *DIGITS, "-g", 2, "--epochs", count, "--timeout", 10, status=1)
        assert words in done.stderr.splitlines()[-1]


def test_the_rank_that_failed_first(change):
    """The last rank has no labels. The first only loses its connection, but may be seen first: here it always is."""
    copy = change("pipeline_parallel", "target=labels, ", "")
    text = copy.read_text()
    waiting = "        while not ranks.join():"
    assert text.count(waiting) == 1
    copy.write_text(text.replace(waiting, f"        [rank.join() for rank in ranks.processes]\n{waiting}"))
    done = run(copy, *DIGITS, "-g", 2, "--epochs", 1, status=1)
    assert "Process 1 terminated" in done.stderr
    assert done.stderr.strip().endswith("loss_fn and target required for last stage")
    assert "Connection closed" not in done.stderr


@pytest.mark.parametrize("found", [False, True])
def test_a_layer_that_is_not_used(change, found):
    """DDP waits for its gradient, says which parameters had none, and looks for them if it is told to."""
    layers = "self.stage1 = nn.Sequential(nn.Flatten(), *chain(*hidden[:half]))"
    unused = "self.unused = nn.Linear(1, 1)\n        "
    copy = change("distributed_data_parallel", layers, unused + layers, path="common/models.py")
    if found:
        text = copy.read_text()
        wrapped = "DistributedDataParallel(model"
        assert text.count(wrapped + ")") == 1
        copy.write_text(text.replace(wrapped, f"{wrapped}, find_unused_parameters=True"))
    done = run(copy, *DIGITS, "-g", 2, "--epochs", 1, status=0 if found else 1)
    assert ("Expected to have finished reduction in the prior iteration" in done.stderr) != found
    assert len(epochs(done.stdout)) == found


@pytest.mark.parametrize("call", ["send_weights(model, args)", "average_gradients(model, args)"])
def test_manual_data_parallel_needs_both_parts(change, call, reference):
    """Without the weights of rank 0, or without averaging, the losses are others."""
    text = (ROOT / "playground" / "manual_data_parallel.py").read_text()
    line = next(line for line in text.splitlines() if line.strip().startswith(call))
    broken = losses(change("manual_data_parallel", line, line.replace(call, "pass")), "-g", 2)
    assert abs(broken[1] - reference[1]) > 1e-3


def test_single_gpu_without_its_order(change, reference):
    """Batches in an order that no other lesson knows."""
    broken = losses(change("single_gpu", "order.manual_seed(args.seed + epoch)", "pass"))
    assert abs(broken[0] - reference[0]) > 1e-4


def test_single_gpu_without_zero_grad(change, reference):
    """Each step adds its gradient to those of all steps before."""
    broken = losses(change("single_gpu", "optimizer.zero_grad()", "pass"))
    assert abs(broken[0] - reference[0]) > 1e-3
