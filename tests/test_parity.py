"""Every training lesson arrives at the numbers of single_gpu.py, from any number of processes."""

import pytest
import torch
from conftest import DIGITS, epochs, one_process, run

from common.models import MODELS

TWO_EPOCHS = (*DIGITS, "--batch_size", 120, "--epochs", 2)
DISTRIBUTED = {
    "manual_data_parallel": {(): (1, 2, 3, 4), ("--weights", "send", "--bucket"): (2, 3)},
    "distributed_data_parallel": {(): (1, 2, 3, 4)},
    "distributed_data_parallel2": {(): (1, 2, 3, 4)},
    "pipeline_parallel": {(): (1, 2, 3, 4), ("--schedule", "InterleavedZeroBubble"): (2,)},
}
ONE_PROCESS = {
    "data_parallel": ((),),
    "model_parallel": ((), ("--pipelined",), ("--pipelined", "--micro_batches", 7), ("--devices", "cpu", "cpu")),
}


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """The reference: single_gpu.py's output and checkpoint for each model."""
    folder = tmp_path_factory.mktemp("single")
    return {model: train("single_gpu", folder / f"{model}.pt", "--model", model) for model in MODELS}


def train(lesson, savefile, *flags):
    """Run a lesson on the digits. Returns its epoch lines and its checkpoint."""
    done = run(lesson, *TWO_EPOCHS, *flags, "--savefile", savefile)
    return epochs(done.stdout), torch.load(savefile, weights_only=True)


def assert_equal(result, reference):
    """Losses agree to four decimals, accuracies to all that are printed, weights to 1e-5."""
    (lines, checkpoint), (expected_lines, expected) = result, reference
    assert len(lines) == len(expected_lines) == 2
    for line, expected_line in zip(lines, expected_lines, strict=True):
        assert line["loss"] == pytest.approx(expected_line["loss"], abs=1.01e-4)  # one more: it may round up or down
        assert (line["train"], line["test"]) == (expected_line["train"], expected_line["test"])
    assert checkpoint["model"].keys() == expected["model"].keys()
    for name, weight in expected["model"].items():
        torch.testing.assert_close(checkpoint["model"][name], weight, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("lesson", "variant", "processes", "model"),
    [
        (lesson, variant, processes, model)
        for lesson, variants in DISTRIBUTED.items()
        for variant, world_sizes in variants.items()
        for processes in world_sizes
        for model in (MODELS if processes == 2 else ["mlp"])
    ],
)
def test_distributed_lesson_equals_single_gpu(lesson, variant, processes, model, single, tmp_path):
    """The same losses, accuracies and weights, for 1 to 4 processes; with 2 for both models."""
    assert_equal(train(lesson, tmp_path / "c.pt", "-g", processes, "--model", model, *variant), single[model])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("lesson", "variant"), [(lesson, variant) for lesson, variants in ONE_PROCESS.items() for variant in variants]
)
def test_one_process_lesson_equals_single_gpu(lesson, variant, model, single, tmp_path):
    """The same for the lessons with several devices in one process."""
    assert_equal(train(lesson, tmp_path / "c.pt", "--model", model, *variant), single[model])


def test_a_checkpoint_has_what_it_should(single):
    """Four keys, plain values, optimizer state for each weight: any lesson's model and optimizer load it."""
    for name, (_, checkpoint) in single.items():
        assert set(checkpoint) == {"model", "optimizer", "epoch", "args"}
        assert checkpoint["epoch"] == 2
        assert checkpoint["args"]["batch_size"] == 120
        model = MODELS[name]()
        model.load_state_dict(checkpoint["model"])
        optimizer = torch.optim.Adam(model.parameters())
        optimizer.load_state_dict(checkpoint["optimizer"])
        assert len(optimizer.state) == len(list(model.parameters()))


def test_mnist_gives_the_same_numbers(mnist, tmp_path):
    """An epoch on the real MNIST: the same losses and accuracies from two processes as from one.

    468 steps are enough for a ReLU to flip where the sums were rounded in another order, and Adam makes a small
    difference large; so weights may differ by more than 1e-5 here, and a few test images by their class.
    """
    flags = ("--data_dir", mnist, "--epochs", 1, "--device", "cpu")
    (one,) = epochs(run("single_gpu", *flags).stdout)
    (two,) = epochs(run("distributed_data_parallel", *flags, "-g", 2).stdout)
    assert one["test"] > 90
    assert two["loss"] == pytest.approx(one["loss"], abs=1.01e-4)
    assert two["train"] == pytest.approx(one["train"], abs=0.02)
    assert two["test"] == pytest.approx(one["test"], abs=0.2)


def test_the_learning_rate_and_the_seed_matter(single):
    """Parity would mean nothing if every run gave the same numbers whatever it was told."""
    reference = single["mlp"][0][-1]["loss"]
    for flags in (("--lr", 2e-3), ("--seed", 1), ("--batch_size", 60)):
        (*_, last) = one_process(*TWO_EPOCHS, *flags)
        assert abs(last["loss"] - reference) > 1e-3, flags
