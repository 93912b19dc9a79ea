"""Flags that do not fit the number of ranks, or each other, in lessons that torchrun starts."""

import pytest
from conftest import DIGITS, one_line

CIRCULAR = ("--layers", 7, "--schedule", "Interleaved1F1B", "--micro_batches", 7)
DUAL = ("--schedule", "DualPipeV", "--micro_batches", 3)

LANGUAGE = ("--model", "language", "--dataset", "text")


@pytest.mark.parametrize(
    ("lesson", "ranks", "flags", "words"),
    [
        ("pipeline_parallel", 5, (), ("5 stages, but only 4 layers", "a larger --layers")),
        ("pipeline_parallel", 2, ("--micro_batches", 7), ("divide --batch_size 120", "use", "119")),
        ("pipeline_parallel", 2, ("--micro_batches", 1), ("1F1B needs 2", "use --micro_batches 2")),
        ("pipeline_parallel", 4, CIRCULAR, ("a multiple of 4", "use --micro_batches 8")),
        ("pipeline_parallel", 1, ("--schedule", "Interleaved1F1B"), ("needs 2 ranks or more",)),
        ("pipeline_parallel", 2, DUAL, ("DualPipeV needs 4", "use --micro_batches 4")),
        ("tensor_parallel", 3, (), ("3 ranks cannot split --width 64: use 63",)),
        ("tensor_parallel", 7, ("--model", "cnn"), ("--width 120", "use 119")),
        ("tensor_parallel", 2, ("--model", "transformer"), ("sequence_parallel.py", "mlp or cnn")),
        ("hybrid_parallel", 4, ("--mesh", "3x2"), ("--mesh 3x2 needs 6 ranks, not 4",)),
        ("hybrid_parallel", 4, ("--mesh", "0x4"), ("--mesh: 0 must be 1 or more",)),
        ("hybrid_parallel", 3, ("--mesh", "1x3"), ("a tp group of 3", "--width 64: use 63")),
        ("hybrid_parallel", 7, (), ("7 ranks cannot divide --batch_size 120: use 119",)),
        ("hybrid_parallel", 2, ("--model", "transformer"), ("sequence_parallel.py", "mlp or cnn")),
        ("sequence_parallel", 3, (), ("3 ranks cannot split --heads 4: use 3",)),
        (
            "sequence_parallel",
            8,
            ("--heads", 8, "--sequence"),
            ("split 28 tokens", "--sequence out"),
        ),
        ("sequence_parallel", 2, ("--model", "mlp"), ("tensor_parallel.py", "transformer")),
        ("sequence_parallel", 4, LANGUAGE, ("split --heads 4: use 8",)),
        ("context_parallel", 2, ("--model", "mlp"), ("reads images", "use --model language")),
        ("context_parallel", 3, LANGUAGE, ("3 ranks cannot split 128 tokens", "use 2, 4 or 8")),
        ("context_parallel", 4, (*LANGUAGE, "--by", "ulysses"), ("--heads 4", "use --by ring")),
        ("language_model", 2, ("--model", "mlp"), ("does not write", "use --model language")),
        ("vocabulary_parallel", 3, LANGUAGE, ("3 ranks cannot split 256 words: use 2",)),
        ("vocabulary_parallel", 2, ("--model", "mlp"), ("no vocabulary", "use --model language")),
        ("four_axes", 8, ("--mesh", "2x2x2", *LANGUAGE), ("not have 4 axes", "use --mesh 1x8x1x1")),
        ("four_axes", 5, ("--mesh", "5x1x1x1", *LANGUAGE), ("5 stages, but only 4", "--layers")),
        ("four_axes", 2, ("--mesh", "1x2x1x1", "--tied", *LANGUAGE), ("use --mesh 2x...",)),
        ("four_axes", 2, ("--micro_batches", 1, *LANGUAGE), ("each stage: use --micro_batches 2",)),
        ("four_axes", 14, LANGUAGE, ("7 ranks along dp with 4", "--batch_size 120: use 112")),
        ("four_axes", 4, ("--mesh", "1x1x1x4", *LANGUAGE), ("along tp", "--heads 4: use 8")),
        (
            "four_axes",
            3,
            ("--mesh", "1x1x1x3", *LANGUAGE),
            ("along tp", "256 tokens: use 2, 4 or 8"),
        ),
        ("four_axes", 2, ("--model", "cnn"), ("has no vocabulary", "use --model language")),
        ("expert_parallel", 3, (), ("3 ranks cannot divide --experts 4: use 3",)),
        ("expert_parallel", 2, ("--experts", 1), ("--experts 1: use 2",)),
        ("expert_parallel", 2, ("--model", "mlp"), ("has no tokens", "use --model transformer")),
        ("token_mean", 7, LANGUAGE, ("7 ranks cannot divide --batch_size 120: use 119",)),
        ("token_mean", 2, ("--model", "mlp"), ("--model mlp reads images", "use language")),
        (
            "token_mean",
            30,
            (*LANGUAGE, "--micro_batches", 5),
            ("4 paragraphs in a step", "use --micro_batches 4"),
        ),
        ("activation_checkpointing", 2, ("--model", "mlp"), ("has no blocks", "transformer")),
        ("mixed_precision", 2, ("--double", "--precision", "bfloat16"), ("leave out --precision",)),
        ("mixed_precision", 2, ("--clip", -1), ("--clip", "0 or more")),
        ("sharded_data", 7, (), ("7 ranks cannot divide --batch_size 120: use 119",)),
        (
            "sharded_data",
            2,
            ("--files", "/none"),
            ("not all files are in /none/digits", "python", "--files /none --make"),
        ),
        ("sharded_muon", 2, ("--layers", 1), ("no layer between", "use --layers 2")),
        ("fully_sharded_checkpoints", 3, ("--async_save",), ("--async_save", "--run_dir")),
        ("fully_sharded_export", 3, ("--savefile", "/proc/c/c.pt"), ("cannot write /proc/c/c.pt",)),
    ],
)
def test_flags_that_cannot_work(lesson, ranks, flags, words, main):
    """Status 2 and one line that says what to type."""
    refused(main, lesson, ranks, flags, words)


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        (["F0,F1,B0,B1"], "2 ranks need GPipe, 1F1B, or 2 lists"),
        (["GPipe", "1F1B"], "rank 0 needs F0 B0, each once"),
        (["F0,B0", "F0,B0,F1,B1"], "rank 1 needs F0 B0, each once"),
        (["F0,F1,B0,B1", "F1,F0,B0,B1"], "rank 1 needs F0 F1 B0 B1, each once"),
        (["F0,B0", "B0,F0"], "rank 1 needs F0 B0, each once"),
    ],
)
def test_lists_that_cannot_work(lists, words, main):
    """The passes of manual_pipeline.py: the line says what is wrong with them."""
    refused(main, "manual_pipeline", 2, ("--schedule", *lists), (words,))


def refused(main, lesson, ranks, flags, words):
    """Call the main() of a lesson as one of so many ranks, which must refuse its flags."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": f"{ranks}"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    one_line(main(lesson, *DIGITS, "--batch_size", 120, *flags, env=env), *words)
