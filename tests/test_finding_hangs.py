"""finding_hangs.py: each fault ends, and it shows where all ranks are, as watch.py does.

What the docstring shows is compared by test_readme.py.
"""

import re

import pytest
from launch import run
from lessons import lesson_path
from test_watch import places

LESSON = lesson_path("finding_hangs")
BARRIER = "dist.barrier()"
REDUCE = "dist.all_reduce(numbers)"
RECEIVE = "dist.recv(torch.empty(4), left)"
FORWARD = "model(torch.ones(8, 4))"
BACKWARD = f"{FORWARD}.sum().backward()"
# Of each rank: its line, and what stands in its call that is not done, if there is one.
FOUND = {
    "early": [
        (REDUCE, "#5 all_reduce [4]"),
        (BARRIER, "#5 barrier"),
        (REDUCE, "#5 all_reduce [4]"),
    ],
    "root": [(REDUCE, "#2 all_reduce [4]"), (BARRIER, "#2 barrier"), (BARRIER, "#2 barrier")],
    "test": [(FORWARD, "broadcast [3]"), (BARRIER, "barrier"), (BARRIER, "barrier")],
    "peer": [(RECEIVE, None), ("request.wait()", None), (RECEIVE, None)],
    "shapes": [(REDUCE, "#3 all_reduce [4]"), (REDUCE, "#2 all_reduce [5]"), (REDUCE, "#3 ")],
    "loader": [
        ("dist.all_reduce(batch)", "#7 all_reduce [4]"),
        ("time.sleep(3 * args.timeout)", None),
        ("dist.all_reduce(batch)", "#7 all_reduce [4]"),
    ],
    "shard": [(BACKWARD, "gather"), (BARRIER, "barrier"), (BACKWARD, "gather")],
}


def number_of(fault, code):
    """Return the number of the line in the function of a fault that has this code."""
    lines = LESSON.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(f"def {fault}("))
    return next(i for i in range(first, len(lines)) if lines[i].strip() == code) + 1


def run_fault(fault, folder, *watch, **options):
    """Run the lesson, with watch.py and its flags in front if there are any.

    Returns the lines about each rank by the kind of evidence, with the ranks' errors, and what
    watch.py prints. Fails if a process is left behind.
    """
    flags = ("--fault", fault, "--timeout", 8, "--out", folder)
    done = run(*watch, LESSON, *flags, **options)
    rows = {"errors": dict(re.findall(r"^rank (\d): (.*)", done.stdout, re.M))}
    for kind, lines in re.findall(r"^(\w+)\n((?:  rank .*\n)+)", done.stdout, re.M):
        rows[kind] = re.findall(r"^  rank \d  (.*)", lines, re.M)
    return rows, done.stderr


def seen(fault, folder):
    """Return, for each rank, the line in its last note, and watch.py's and both pending calls."""
    rows, said = run_fault(fault, folder, "watch", "--hang", 2)
    assert rows["process"] == ["was there"] * 3, (rows, said)
    watched = places(said.rpartition("watch: no progress")[2])
    pending = []
    for calls in (*rows["recorder"], *map(watched.get, range(3))):
        last = calls.replace("(", "[").replace(")", "]").rpartition("#")
        pending.append("".join(last[1:]) if "not done" in calls else "")
    return rows["stacks"], watched, pending[:3], pending[3:]


@pytest.mark.parametrize("fault", FOUND)
def test_a_hang(fault, tmp_path):
    """The lesson shows the line of each rank, and its call that is not done. So does watch.py.

    A rank may be ending already when it writes its last note. That happens by chance, not always.
    """
    for attempt in range(3):
        try:
            stacks, watched, *pending = seen(fault, tmp_path)
            for rank, (code, call) in enumerate(FOUND[fault]):
                line = f"line {number_of(fault, code)}"
                assert stacks[rank] == f"{line}: {code}"
                assert re.search(rf"{line} in \w+: {re.escape(code)}\n    now in ", watched[rank])
                for calls in pending:
                    assert call in calls[rank] if call else not calls[rank]
            return
        except AssertionError:
            if attempt == 2:
                raise


def test_a_killed_rank(tmp_path):
    """Its process is gone, as watch.py says, too. The others lose their connections."""
    rows, said = run_fault("killed", tmp_path, "watch", "--hang", 2)
    assert rows["process"] == ["was there", "has ended, exit code -9", "was there"]
    assert re.findall(r"^rank (\d) .* has ended without a word", said, re.M) == ["1"]
    assert "1" not in rows["errors"] and "Connection" in rows["errors"]["0"]


def test_detail(tmp_path):
    """PyTorch compares the calls, and names the sizes that differ."""
    env = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    rows, _ = run_fault("shapes", tmp_path, env=env, cold=True)
    assert any("Tensor shapes: " in words for words in rows["errors"].values())
