"""Every training lesson arrives at the numbers of single_gpu.py, from any number of processes.

In float64 the printed losses must agree to 1e-10, and the parameters and gradients of each step as
first_difference.py compares them, because then only rounding differs in float32. test_readme.py
compares what the lessons print in float32.
"""

import functools
import json

import first_difference
import pytest
import torch
from launch import DIGITS, epochs, once, run, single_gpu
from lessons import LESSONS, NEWER, own_flags, talks

pytestmark = pytest.mark.quick
# What is trained: a lesson with its flags, the processes (None: it takes no such flag), the model.
# A lesson that reads the layers of a model trains both models.
RUNS = """
data_parallel --by hand; 3; transformer
manual_data_parallel; 3; mlp
manual_data_parallel --bucket; 2; mlp
overlapped_data_parallel; 3; mlp
distributed_data_parallel; 3; mlp
distributed_data_parallel2; 3; mlp
distributed_data_parallel_torchrun; 3; language
resumable; 3; mlp
model_parallel; None; mlp
model_parallel --pipelined --micro_batches 7; None; transformer
manual_pipeline --micro_batches 7; 3; mlp
manual_pipeline --schedule 1F1B; 3; language
manual_pipeline --schedule F0,F1,I0,F2,I1,W0,I2,W1,W2 F0,I0,F1,I1,W0,F2,B2,W1; 2; mlp
pipeline_parallel --schedule GPipe; 2; cnn
pipeline_parallel --schedule Interleaved1F1B; 2; mlp
pipeline_parallel --schedule InterleavedZeroBubble; 2; mlp
pipeline_parallel --schedule 1F1B; 3; language
pipeline_parallel --schedule ZBVZeroBubble; 1; mlp
pipeline_parallel --schedule DualPipeV; 2; language
sharded_optimizer; 3; language
sharded_optimizer; 2; cnn
manual_fully_sharded; 3; mlp
manual_fully_sharded --keep_weights; 2; language
fully_sharded_data_parallel --meta; 3; mlp
fully_sharded_data_parallel --replicas 2; 4; language
fully_sharded_checkpoints; 1; transformer
tensor_parallel; 4; mlp
tensor_parallel; 2; cnn
tensor_parallel --by dtensor; 2; mlp
hybrid_parallel; 4; mlp
profile_steps; 3; mlp
sending_less; 3; transformer
sharded_data --workers 1; 2; language
mixed_precision --precision full --sharded; 3; language
activation_checkpointing --checkpoint second --sharded; 2; language
head_parallel; 2; language
head_parallel --by dtensor; 2; transformer
sequence_parallel; 4; transformer
sequence_parallel; 2; transformer
sequence_parallel --by dtensor; 2; language
ulysses; 2; language
context_parallel; 4; language
context_parallel --by ring; 4; language
context_parallel --by ring --order plain; 2; language
expert_parallel --experts 1; 1; transformer
language_model --constant --clip 0 --lr 1e-3 --rows 7; 3; language
vocabulary_parallel; 4; language
vocabulary_parallel --by dtensor; 2; language
four_axes --mesh 2x1x2x1; 4; language
"""
MODEL = {"mlp": (*DIGITS, "--batch_size", 240, "--epochs", 2)}  # flags that select a model
MODEL["cnn"] = (*MODEL["mlp"], "--model", "cnn", "--width", 16)
MODEL["transformer"] = (*MODEL["mlp"], "--model", "transformer", "--tokens", 8, "--width", 16)
MODEL["language"] = ("--batch_size", 120, "--epochs", 2, "--model", "language", "--width", 16)
NO_PARITY = {
    "single_gpu",
    "resnet",  # has batch norm
    "token_mean",  # has batches of paragraphs. test_token_mean.py compares its runs
}


def noted(lesson, *flags, folder, processes=None):
    """Run a lesson in float64. Its ranks note their steps in the folder.

    Returns the epoch lines.
    """
    flags = (*flags, *own_flags(lesson, folder))
    env = {"NOTES": str(folder), "DOCUMENTS": "40"}
    if lesson == "sharded_data":
        run(lesson, "--make", "--double", *flags, env=env)
    return epochs(run(lesson, "--double", *flags, processes=processes, env=env).stdout)


@functools.cache
def expected(model):
    """Return the epoch lines and the steps of single_gpu.py. It runs once for each model."""

    def make(folder):
        (folder / "lines").write_text(json.dumps(noted("single_gpu", *MODEL[model], folder=folder)))

    folder = once(("parity", model), make)
    return json.loads((folder / "lines").read_text()), first_difference.read(folder)


def test_all_training_lessons_are_here():
    """A lesson that trains has parity, or a reason why it can't."""
    trained = {row.split(";")[0].split()[0] for row in RUNS.strip().splitlines()}
    assert trained | NO_PARITY == {lesson for lesson in LESSONS if not talks(lesson)}


@pytest.mark.parametrize("row", RUNS.strip().splitlines())
def test_float64(row, tmp_path):
    """The same losses, accuracies, parameters and gradients. The ranks alone show no fault."""
    command, processes, model = row.split("; ")
    lesson, *own = command.split()
    if lesson in NEWER and torch.__version__.startswith("2.9."):
        pytest.skip("PyTorch 2.9 cannot run this lesson")
    flags = (*MODEL[model], *own)
    processes = None if processes == "None" else int(processes)
    lines = noted(lesson, *flags, folder=tmp_path, processes=processes)
    right, steps = expected(model)
    assert lines == [line | {"loss": pytest.approx(line["loss"], abs=1e-10)} for line in right]
    noted_by_ranks = first_difference.read(tmp_path)
    status, words = first_difference.compare(steps, noted_by_ranks)
    assert status == 0, words
    if len(noted_by_ranks) > 1:  # in a lesson, the ranks have different parts at most by design
        status, words = first_difference.compare_ranks(tmp_path)
        assert status != 1, words


def test_the_flags_matter():
    """Parity would mean nothing if every run gave the same numbers whatever it was told.

    With --double, the losses are those of float32, with more digits.
    """
    right = single_gpu(*MODEL["mlp"], "--double")[-1]["loss"]
    assert single_gpu(*MODEL["mlp"])[-1]["loss"] == pytest.approx(right, abs=2e-4)
    assert round(right, 4) != right
    for flags in (("--lr", 2e-3), ("--seed", 1), ("--batch_size", 60)):
        assert abs(single_gpu(*MODEL["mlp"], *flags)[-1]["loss"] - right) > 1e-3, flags
