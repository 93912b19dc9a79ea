"""Run a command of each lesson's docstring on the CPU, for one epoch of small data if it trains.

    python tests/develop/smoke.py                    # all lessons
    python tests/develop/smoke.py tensor_parallel    # some of them

It uses nothing that only Linux has, so it tells whether the lessons run on another system. It
prints a line for each lesson, and its status is the number of lessons that have failed.
"""

import importlib.util
import os
import shlex
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
from lessons import LESSONS, PATHS, ROOT, described_commands, small_data


def first_command(lesson):
    """Return the words of a short run of a lesson, and its variables.

    It is the first command of the docstring that needs no download, on the CPU.
    """
    command = next(each for each in described_commands(lesson) if "--pretrained" not in each)
    words = shlex.split(command)
    variables = {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    program = [sys.executable]
    if words.pop(0) == "torchrun":
        program += ["-m", "torch.distributed.run"]
    words += ["--device", "cpu"]
    text = PATHS[lesson].read_text()
    trains = "flags.training(" in text or "flags.ranks(" in text
    if trains and "--dataset" not in words:
        words += ["--dataset", small_data(lesson)]
    if trains or '"--epochs"' in text:
        words += ["--epochs", "1"]
    return [*program, *words], variables


def main():
    """Run the lessons one after another. Returns how many have failed."""
    failed = 0
    for name in sys.argv[1:] or LESSONS:
        if name == "distributed_data_parallel2" and not importlib.util.find_spec("detectron2"):
            print(f"{name}: left out, because detectron2 is not installed", flush=True)
            continue
        words, variables = first_command(name)
        status = subprocess.run(words, cwd=ROOT, env=os.environ | variables).returncode
        print(f"{name}: {'ok' if status == 0 else f'status {status}'}", flush=True)
        failed += status != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
