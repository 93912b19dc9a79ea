"""The runs of lessons that the pages show, as watch.py has recorded them.

    python recordings.py             # records all of them again
    python recordings.py deadlock    # only this one

A page asks first what the reader expects, and shows the recording beside the answer.
"""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

COURSE = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent / "static/recorded"


@dataclass
class Recording:
    """A run, and a question about it: the first of its three answers is the right one."""

    lesson: str
    command: str  # what stands behind `python playground/tools/watch.py --html PAGE`
    question: str
    answers: tuple[str, str, str]
    why: str


TORCHRUN = "torchrun --standalone --nproc-per-node 2"
RECORDINGS = {
    "deadlock": Recording(
        lesson="blocking_p2p.py",
        command="playground/blocking_p2p.py --deadlock",
        question="Both ranks send first. Which of them waits?",
        answers=(
            "both, each for the other",
            "only rank 1, because rank 0 sends first",
            "neither: gloo keeps the message until the other rank receives",
        ),
        why="Each rank waits in its send, for three seconds, until the group's timeout. Then, at"
        " the right, comes the cure: the even rank sends first, and the odd one receives first.",
    ),
    "each_gradient": Recording(
        lesson="manual_data_parallel.py",
        command="playground/manual_data_parallel.py -g 2",
        question="The model has eight parameters: four matrices and four vectors. How many messages"
        " does a step have?",
        answers=("eight, 236,840 bytes together", "one, of 236,840 bytes", "one for each image"),
        why="average_gradients() calls all_reduce once for each parameter, and waits each time.",
    ),
    "bucket": Recording(
        lesson="manual_data_parallel.py",
        command="playground/manual_data_parallel.py -g 2 --bucket",
        question="And with `--bucket`?",
        answers=(
            "one message, of as many bytes",
            "eight messages, but all at the same time",
            "one message, of an eighth of the bytes",
        ),
        why="The bytes are the same, but only one call has to start and wait for the other rank.",
    ),
    "fsdp": Recording(
        lesson="fully_sharded_data_parallel.py",
        command="playground/sharded/fully_sharded_data_parallel.py",
        question="With four layers, which calls does a step have?",
        answers=(
            "8 all_gathers and 4 reduce_scatters",
            "4 all_gathers and 4 reduce_scatters",
            "4 all_reduces",
        ),
        why="Each layer is gathered for forward() and again for backward(), which then adds up and"
        " divides its gradients.",
    ),
    "pipeline": Recording(
        lesson="pipeline_parallel.py",
        command="playground/split/pipeline_parallel.py",
        question="Each rank has one stage. What must rank 1 have before it can compute in a step?",
        answers=(
            "the first stage's output for one micro-batch",
            "the first stage's output for the whole batch",
            "the labels, and nothing from rank 0",
        ),
        why="It receives 4,096 bytes for each micro-batch, and sends as many back, the gradient of"
        " what it has received. A send with gloo waits, too, until the other rank receives.",
    ),
}


def command_of(name: str, page: str = "page.html") -> str:
    """Return the command that records a run, as one types it in the checkout."""
    command = RECORDINGS[name].command
    launcher = "python" if " -g " in command or "p2p" in command else TORCHRUN
    return f"{launcher} playground/tools/watch.py --html {page} {command}"


def record(name: str, page: Path) -> None:
    """Run a lesson, and write the page of watch.py about it."""
    program, *words = command_of(name, str(page)).split()
    program = Path(sys.executable).with_name(program)
    subprocess.run([program, *words], cwd=COURSE, check=True, stdout=subprocess.DEVNULL)


def calls(page: Path) -> dict[int, list[tuple]]:
    """Return the calls of each rank in the step that a page shows: their kinds, sizes, bytes."""
    data = json.loads(re.search(r"^const data = (.*);$", page.read_text(), re.M)[1])
    begin, end = data["step"]
    return {
        each["rank"]: [
            (call["kind"], call.get("size"), call.get("bytes"))
            for call in each["calls"]
            if begin <= call["span"][0] <= end
        ]
        for each in data["ranks"]
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for each in sys.argv[1:] or RECORDINGS:
        record(each, FOLDER / f"{each}.html")
