"""The runs of lessons that the pages show, as watch.py has recorded them.

    python recordings.py             # records all of them again
    python recordings.py deadlock    # only this one

A page asks first what the reader expects, and shows the recording beside the answer.
"""

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

COURSE = Path(__file__).resolve().parents[2]
RECORDED = Path(__file__).parent / "recorded"
TEMPLATE = COURSE / "playground/tools/watching/page.html"
DATA = "/*DATA*/ null"  # stands there in place of a run


@dataclass
class Recording:
    """A run, and a question about it: the first of its three answers is the right one."""

    command: str
    question: str
    answers: tuple[str, str, str]
    why: str


WATCH = "playground/tools/watch.py --html page.html"
TORCHRUN = f"torchrun --standalone --nproc-per-node 2 {WATCH}"
RECORDINGS = {
    "deadlock": Recording(
        command=f"python {WATCH} playground/blocking_p2p.py --deadlock",
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
        command=f"python {WATCH} playground/manual_data_parallel.py -g 2",
        question="The model has eight parameters: four matrices and four vectors. How many messages"
        " does a step have?",
        answers=("eight, 236,840 bytes together", "one, of 236,840 bytes", "one for each image"),
        why="average_gradients() calls all_reduce once for each parameter, and waits each time.",
    ),
    "bucket": Recording(
        command=f"python {WATCH} playground/manual_data_parallel.py -g 2 --bucket",
        question="And with `--bucket`?",
        answers=(
            "one message, of as many bytes",
            "eight messages, but all at the same time",
            "one message, of an eighth of the bytes",
        ),
        why="The bytes are the same, but only one call has to start and wait for the other rank.",
    ),
    "fsdp": Recording(
        command=f"{TORCHRUN} playground/sharded/fully_sharded_data_parallel.py",
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
        command=f"{TORCHRUN} playground/split/pipeline_parallel.py",
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


def page_of(name: str) -> str:
    """Return the page that watch.py has written about a run: its template, with the data of it."""
    data = (RECORDED / f"{name}.json").read_text(encoding="utf-8")
    return TEMPLATE.read_text(encoding="utf-8").replace(DATA, data.strip())


def record(name: str) -> str:
    """Run a lesson below watch.py. Returns the data in the page that this writes."""
    program, *words = RECORDINGS[name].command.split()
    with tempfile.NamedTemporaryFile(suffix=".html") as page:
        words[words.index("page.html")] = page.name
        command = [Path(sys.executable).with_name(program), *words]
        subprocess.run(command, cwd=COURSE, check=True, stdout=subprocess.DEVNULL)
        written = Path(page.name).read_text(encoding="utf-8")
    before, after = TEMPLATE.read_text(encoding="utf-8").split(DATA)
    return written.removeprefix(before).removesuffix(after)


if __name__ == "__main__":
    for each in sys.argv[1:] or RECORDINGS:
        (RECORDED / f"{each}.json").write_text(record(each) + "\n", encoding="utf-8")
