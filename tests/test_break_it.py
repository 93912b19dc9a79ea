"""The exercises in the docstrings end as playground/pages/answers.md says. Each is done on a copy.

Here are those that end with other losses or sums. test_resumable.py kills ranks.
"""

import re

import pytest
from conftest import DIGITS, ROOT, lesson_path, losses, run, single_gpu, train
from lessons import LESSONS

ANSWERS = (ROOT / "playground" / "pages" / "answers.md").read_text()
TWO_EPOCHS = (*DIGITS, "--batch_size", 120, "--epochs", 2)  # as in answers.md


def answers_of(path):
    """Return the section of answers.md about a lesson."""
    return re.search(rf"^## `{path.stem}\.py`\n(.*?)(?=^## |\Z)", ANSWERS, re.M | re.S)[1]


def test_each_exercise_has_an_answer():
    """answers.md answers as many exercises of each lesson as its docstring has."""
    for path in map(lesson_path, LESSONS):
        docstring = path.read_text().split('"""')[1]
        exercises = re.split("Try breaking it|Break it", docstring, maxsplit=1)[1]
        numbers = set(re.findall(r"^  (\d)\. |\((\d)\) ", exercises, re.M))
        given = re.findall(r"^\d\. ", answers_of(path), re.M)
        assert exercises and len(given) >= max(1, len(numbers)), path


ORDER = "train_loader.sampler.set_epoch(epoch)"
OWN_PARAMETERS = "functional_call(replica, parameters, part.to(device))"
WAY_BACK = "agreed - parameter"
OWN_GRADIENT = "F.linear(AddGradients.apply(inputs), "
SEED = "torch.manual_seed(args.seed)\n    model = "
HOOK = "        parameter.register_hook(partial(all_reduce, group=group))\n"
# A lesson, its flags, its processes, what is replaced, and the second loss as answers.md has it.
OTHER_LOSSES = [
    ("single_gpu", (), None, "optimizer.zero_grad()", "pass", "1.4891"),
    ("data_parallel", ("--by", "hand", "-g", 2), None, OWN_PARAMETERS, "replica(part)", "2.31"),
    ("manual_data_parallel", (), 2, "    send_weights(model)  #", "    pass  #", "1.6639"),
    ("manual_data_parallel", (), 2, "    average(model)  #", "    pass  #", "1.5555"),
    ("distributed_data_parallel", (), 1, ORDER, "pass", "1.3936"),
    ("sending_less", ("--by", "diloco"), 2, WAY_BACK, "parameter - agreed", "2.2781"),
    ("tensor_parallel", (), 2, OWN_GRADIENT, "F.linear(inputs, ", "1.5168"),
    ("tensor_parallel", (), 2, SEED, SEED.replace("args.seed", "args.seed + rank"), "1.4322"),
    ("tensor_parallel", (), 2, ORDER, ORDER.replace("epoch)", "epoch + rank)"), "2.04"),
    ("hybrid_parallel", (), 4, ORDER, ORDER.replace("epoch)", "epoch + rank)"), "2.0458"),
    ("sequence_parallel", ("--sequence",), 2, HOOK, "        pass\n", "1.3345"),
]
IDS = [f"{lesson}-{second}" for lesson, *_, second in OTHER_LOSSES]


@pytest.mark.parametrize(
    ("lesson", "flags", "processes", "old", "new", "second"), OTHER_LOSSES, ids=IDS
)
def test_another_loss(lesson, flags, processes, old, new, second, change):
    """There is no error, but the second loss is the one in answers.md."""
    copy = change(lesson, (old, new))
    found = losses(train(copy, *TWO_EPOCHS, "--double", *flags, processes=processes).stdout)
    assert found[1] == pytest.approx(float(second), abs=0.01 if len(second) < 5 else 1e-3)
    assert second in answers_of(lesson_path(lesson))


def test_a_start_without_the_optimizer(change, tmp_path):
    """Adam's averages start at zero again, so the loss of the third epoch differs."""
    load = '    optimizer.load_state_dict(state["optimizer"])\n'
    copy = change("resumable", (load, ""))
    flags = (*TWO_EPOCHS, "--run_dir", tmp_path / "run")
    train(copy, *flags, processes=1)
    (wrong,) = losses(train(copy, *flags, "--epochs", 3, processes=1).stdout)
    assert wrong == pytest.approx(0.7156, abs=1e-3)
    assert single_gpu(*TWO_EPOCHS, "--epochs", 3)[-1]["loss"] == pytest.approx(0.6618, abs=1e-3)


def test_two_all_reduces_in_a_different_order_and_a_shorter_broadcast(change):
    """There is no error: rank 0's numbers meet rank 1's ones, and rank 1 keeps its last number."""
    reduce, broadcast = "    dist.all_reduce(mine)\n", "    dist.broadcast(mine, src=0)\n"
    swapped = """    ones = torch.ones_like(mine)
    for tensor in (mine, ones) if rank == 0 else (ones, mine):
        dist.all_reduce(tensor)
"""
    shorter = broadcast.replace("mine", "mine[:1] if rank == 0 else mine")
    out = run(change("collectives", (reduce, swapped), (broadcast, shorter))).stdout
    assert "rank 1: [20.0, 21.0] -> [10.0, 21.0]\nscatter: " in out
    assert "rank 0: [10.0, 11.0] -> [11.0, 12.0]\nrank 1: [20.0, 21.0] -> [21.0, 22.0]" in out
