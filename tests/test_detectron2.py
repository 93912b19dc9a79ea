"""The lesson with detectron2's helpers: a seed for all ranks, and errors of one process."""

import re

from conftest import SHORT, epochs, lesson_path, run

LESSON = "distributed_data_parallel2"
SEED = "    torch.manual_seed(args.seed)\n"


def changed(line, folder):
    """Return a copy of the lesson with a line after the seed is set."""
    text = lesson_path(LESSON).read_text()
    assert text.count(SEED) == 1
    copy = folder / f"{LESSON}.py"
    copy.write_text(text.replace(SEED, SEED + line))
    return copy


def test_a_random_seed_for_all_ranks(tmp_path):
    """The ranks have the same seed, and the next run has a different one."""
    copy = changed('    print(f"seed {args.seed}", flush=True)\n', tmp_path)
    # Forked runs would share the state of numpy's generator, from which detectron2 draws.
    first = run(copy, *SHORT, "-g", 2, "--random_seed", cold=True).stdout
    second = run(copy, *SHORT, "-g", 1, "--random_seed", cold=True).stdout
    assert len(epochs(first)) == len(epochs(second)) == 1
    zero, one = re.findall(r"seed (\d+)", first)
    (other,) = re.findall(r"seed (\d+)", second)
    assert zero == one != other


def test_a_mistake_in_a_single_process(tmp_path):
    """launch then calls train() in the process of main(): one traceback, and nothing added."""
    copy = changed('    assert rank == 5, "my own mistake"\n', tmp_path)
    done = run(copy, *SHORT, "-g", 1, status=1)
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.splitlines()[-1] == "AssertionError: my own mistake"
