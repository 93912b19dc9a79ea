"""The checks of the exercises are checked: they accept what is right, and tell what is wrong."""

import ast
import importlib
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from check import ORDER
from launch import Job
from lessons import FOLDERS, READING_ORDER, ROOT, docstring
from nodes import until

FOLDER = ROOT / "playground" / "exercises"
CHECK = FOLDER / "check.py"
JUDGING = FOLDER / "judging"
JUDGE_ANSWERS = ROOT / "tests" / "programs" / "judge_answers.py"
EXERCISES = sorted(path.stem for path in (JUDGING / "checks").glob("*.py"))
QUICK = ("ring_all_reduce", "average_gradients")
NAMES = [pytest.param(name, marks=[pytest.mark.quick] * (name in QUICK)) for name in EXERCISES]


def check_of(name):
    """Return what the check of an exercise has."""
    return importlib.import_module("judging.trial").check_of(name)


def in_ranks(sizes):
    """Return numbers of ranks as text."""
    return importlib.import_module("judging.words").in_ranks(sizes)


def judged(tmp_path, name, answers):
    """Judge answers to an exercise in one process. Returns the lines of each verdict.

    Args:
        tmp_path: a folder.
        name: the exercise.
        answers: a list of (file, function, seconds for a case, numbers of ranks). See
            judge_answers.py.

    Fails if a verdict has more than 20 lines, or if a process or a file is left behind.
    """
    empty = tmp_path / "empty"
    empty.mkdir(exist_ok=True)
    request = [[file and str(file), *rest] for file, *rest in answers]
    words = [JUDGE_ANSWERS, json.dumps([name, request])]
    done = Job(*words, env={"TMPDIR": str(empty)}, cwd=empty, cold=False).wait(300)
    assert not list(empty.iterdir())
    assert not done.stderr, done.stderr
    verdicts = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(verdicts) == len(answers), done.stdout
    assert all(len(lines) <= 20 for lines in verdicts)
    return verdicts


def test_the_tasks():
    """A task says which lesson to read, where to write, and what passes. Its lesson names it.

    They are in the order of the lessons, in the row of their part. There are three hints.
    """
    positions = []
    assert sorted(ORDER) == EXERCISES
    for name in ORDER:
        check = check_of(name)
        task = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text()))
        assert "playground/exercises/answers/" in task, name
        assert f"    python playground/exercises/{name}.py" in task
        lesson = re.search(r"^Lesson: ([\w/]+)\.py\.$", task, re.M)[1].rpartition("/")[2]
        positions.append(READING_ORDER.index(lesson))
        assert f"{name}.py" in docstring(lesson), (name, lesson)
        assert "your answer passes" in " ".join(task.lower().split()), name
        assert len(check.HINTS.strip().split("\n\n")) == 3, name
    assert positions == sorted(positions)


# The lesson's own function, for those exercises with two rungs that ask for the same function.
OF_LESSONS = {"average_gradients": "manual_data_parallel", "ring_all_reduce": "nonblocking_p2p"}


def of_lesson(file, name):
    """Write the lesson's function as the answer to an exercise. Returns the file."""
    folders = [str(ROOT), *map(str, FOLDERS)]
    import_it = f"from {OF_LESSONS[name]} import {check_of(name).NAME}"
    file.write_text(f"import sys\nsys.path[:0] = {folders}\n{import_it}\n")
    return file


@pytest.mark.parametrize("name", NAMES)
def test_the_judge(name, tmp_path):
    """The solution is right, the lesson's function on rung 1. The task and mistakes are told."""
    check = check_of(name)
    sizes = check.WORLD_SIZES
    # With 1, 3 and 5 ranks. The lesson's function and the mistakes, which are right in the cases
    # before the one that shows them, are judged with 2.
    some = sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]})
    answers = [[None, None, 30, some], [FOLDER / f"{name}.py", None, 4, [2]]]
    # One that hangs after 4 s may only be slow.
    answers += [[None, words, 4, [2]] for words in check.MISTAKES]
    if name in OF_LESSONS:
        answers.append([of_lesson(tmp_path / "answer.py", name), None, 30, [2]])
    solution, task, *told = judged(tmp_path, name, answers)
    assert solution == [f"RIGHT with {in_ranks(some)}"]
    assert task == ["your turn"]
    if name in OF_LESSONS:
        next_rung = f"RIGHT {check.RUNG_1} with 2 ranks. Next: {check.RUNG_2}"
        assert told.pop()[0] in ("RIGHT with 2 ranks", next_rung)
    pairs = zip(check.MISTAKES, told, strict=True)
    missed = [words for words, lines in pairs if words not in " ".join(lines)]
    told = judged(tmp_path, name, [[None, words, 30, sizes[:4]] for words in missed])
    for words, lines in zip(missed, told, strict=True):
        assert words in " ".join(lines), lines
    assert len(check.MISTAKES) >= 3


ANYTHING = '''
import os
import signal
import subprocess
import time

import torch
import torch.distributed as dist


def computes(tensor):
    """HANG with 1 rank, 60 numbers (rung 1 of 2) rank 0 computes at your line"""
    while True:
        pass


def ends(tensor):
    """CRASH with 1 rank, 60 numbers (rung 1 of 2) rank 0: its process has ended with status 3"""
    os._exit(3)


def has_children(tensor):
    """CRASH with 1 rank, 60 numbers (rung 1 of 2) rank 0: ValueError: ten children"""
    for _ in range(9):
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    if os.fork() == 0:
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(0)
    raise ValueError("ten children")


def prints(tensor):
    """CRASH with 1 rank ... OSError: ... File too large ... rank 0 printed: more"""
    while True:
        print("more and more")


def allocates(tensor):
    """CRASH with 1 rank, 60 numbers ... rank 0: RuntimeError: a rank may use at most 1 GB"""
    torch.ones(50 * 2**30, dtype=torch.uint8)


def forbids(tensor):
    """FORBIDDEN with 1 rank, 60 numbers ... dist.all_reduce is not for this exercise: use batch"""
    try:
        dist.all_reduce(tensor)
    except Exception:
        pass


def too_short(tensor):
    """CRASH with 2 ranks, 60 numbers ... rank 1: its buffer has 12 bytes, but ... has 16"""
    if dist.get_world_size() > 1 and dist.get_rank() == 0:
        dist.send(torch.ones(4), 1)
    if dist.get_rank() == 1:
        dist.recv(torch.ones(3), 0)

'''
STARTS = {
    "import os\nos._exit(5)\n": "CRASH with 1 rank rank 0: its process has ended",
    "def f(:\n": "CRASH with 1 rank rank 0: ... SyntaxError",
    "x = 1\n": "CRASH with 1 rank rank 0: AttributeError: there is no",
}


def begins(lines, verdict):
    """Return whether a verdict is told: all pieces between the dots, in this order."""
    pattern = ".*".join(re.escape(piece) for piece in verdict.split(" ... "))
    return re.match(pattern, " ".join(" ".join(lines).split())) is not None


def test_anything_ends(tmp_path):
    """Whatever the function does, the check ends with a verdict and leaves nothing behind."""
    file = tmp_path / "anything.py"
    file.write_text(ANYTHING)
    answers = []
    verdicts = []
    for node in ast.parse(ANYTHING).body:
        if isinstance(node, ast.FunctionDef):
            verdicts.append(ast.get_docstring(node))
            answers.append([file, node.name, 2 if "HANG" in verdicts[-1] else 60, [1, 2]])
    for number, (text, verdict) in enumerate(STARTS.items()):
        start = tmp_path / f"start{number}.py"
        start.write_text(text)
        verdicts.append(verdict)
        answers.append([start, None, 60, [1]])
    told = judged(tmp_path, "ring_all_reduce", answers)
    for lines, verdict in zip(told, verdicts, strict=True):
        assert begins(lines, verdict), (lines, verdict)


def test_ctrl_c(tmp_path):
    """It ends the check and all that it has started."""
    file = tmp_path / "anything.py"
    words = ["ring_all_reduce", "--file", file, "--seconds", 1000]
    waits = ANYTHING.replace('raise ValueError("ten children")', "time.sleep(1000)")
    file.write_text(waits.replace("has_children", "ring_all_reduce"))
    job = Job(CHECK, *words, "--ranks", 2, env={"TMPDIR": str(tmp_path)}, cold=False)
    until(lambda: len(job.pids()) >= 19)  # 9 of each rank, and the check
    os.kill(job.process.pid, signal.SIGINT)
    done = job.wait()
    assert done.returncode == 130
    assert done.stderr == "interrupted\n"
    assert list(tmp_path.iterdir()) == [file]


@pytest.fixture
def copy(tmp_path):
    """The exercises of a fresh clone."""
    not_committed = shutil.ignore_patterns("__pycache__", "answers")
    for name in ("common", "playground/tools/watch_ranks", "playground/exercises"):
        shutil.copytree(ROOT / name, tmp_path / "co\xfcrse" / name, ignore=not_committed)
    return tmp_path / "co\xfcrse" / "playground" / "exercises"


def run(path, *words, cwd=None):
    """Run a file as a learner does. Returns what it prints and its status."""
    done = Job(path, *words, cwd=cwd, cold=False).wait()
    assert not done.stderr, done.stderr
    return done.stdout, done.returncode


def solved(folder, name):
    """Return the solution of an exercise as a file that checks itself."""
    path = folder / "judging" / "checks" / f"{name}.py"
    imported = r"^(?:import torch.*|from (?!judging).* import .*)\n"
    imports = re.findall(imported, path.read_text(), re.M)
    solution = importlib.import_module("judging.solution").text_of(path, name).rstrip()
    last = 'if __name__ == "__main__":\n    check(__file__)\n'
    return "\n\n".join(["from check import check\n" + "".join(imports), solution, last])


def test_where_a_learner_writes(copy, tmp_path):
    """The first check copies the task. From then on, every way to check it checks the copy."""
    task = copy / "ring_all_reduce.py"
    answer = copy / "answers" / "ring_all_reduce.py"
    line = "your turn: write the function in playground/exercises/answers/ring_all_reduce.py\n"
    assert run("playground/exercises/ring_all_reduce.py", cwd=copy.parents[1]) == (line, 1)
    assert answer.read_text() == task.read_text()
    answer.write_text(solved(copy, "ring_all_reduce"))
    for file in (task, answer):
        assert run(file, "--ranks", 1, 2) == ("RIGHT with 1 and 2 ranks\n", 0)
    assert answer.read_text() == solved(copy, "ring_all_reduce")
    done = Job(copy / "check.py", "ring_all_reduce", "--ranks", 0, cold=False).wait()
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("error: --ranks: at least 1")


def test_an_error_that_is_not_the_learners(copy):
    """A folder that cannot be written, and an error of the check, are no verdict on the answer."""
    answers = copy / "answers"
    answers.touch()
    done = Job(copy / "check.py", "ring_all_reduce", cold=False).wait()
    assert (done.returncode, done.stdout) == (1, "")
    where = os.path.relpath(answers)
    assert done.stderr == f"error: your answers cannot be written to {where}: File exists\n"
    answers.unlink()
    answers.mkdir()
    (answers / "ring_all_reduce.py").write_text(solved(copy, "ring_all_reduce"))
    # A low limit of the user is no error. With -P, Python does not look beside check.py.
    command = (
        f"ulimit -f 50000 && exec {sys.executable} -P {copy}/check.py ring_all_reduce --ranks 2"
    )
    done = Job("bash", "-c", command).wait()
    assert (done.stdout, done.stderr) == ("RIGHT with 2 ranks\n", "")
    trial = copy / "judging" / "trial.py"
    trial.write_text(
        trial.read_text().replace("                dist.init", "                1 / 0, dist.init")
    )
    done = Job(copy / "check.py", "ring_all_reduce", "--ranks", 1, cold=False).wait()
    assert (done.returncode, done.stdout) == (1, "")
    assert re.match(
        "RuntimeError: rank 0 could not join.*ZeroDivision", done.stderr.splitlines()[-1]
    )


def test_what_is_shown():
    """--hint and --answer print what stands in the check, with the solution's helper."""
    shown = run(CHECK, "ring_attention", "--hint", 2)[0]
    hints = importlib.import_module("judging.checks.ring_attention").HINTS
    assert shown == hints.split("\n\n")[1] + "\n"
    answer = run(CHECK, "ring_attention", "--answer")[0]
    source = (JUDGING / "checks" / "ring_attention.py").read_text()
    assert [each.name for each in ast.parse(answer).body] == ["pass_on", "ring_attention"]
    for part in answer.strip().split("\n\n\n"):
        assert f"\n{part}\n" in source


def test_reset(copy):
    """It puts the task back, and keeps each old answer under a name that it prints."""
    answer = copy / "answers" / "ring_all_reduce.py"
    task = (copy / "ring_all_reduce.py").read_text()
    answer.parent.mkdir()
    for number in (1, 2):
        answer.write_text(f"answer {number}")
        printed, status = run(copy / "check.py", "ring_all_reduce", "--reset")
        assert (answer.read_text(), status) == (task, 0)
    old = Path(re.search(r"^Your old answer is (\S+) now\.$", printed, re.M)[1])
    assert old.read_text() == "answer 2"
    assert (copy / "answers" / "ring_all_reduce-1.py").read_text() == "answer 1"
    # The task itself is not kept as an old answer.
    assert "old answer" not in run(copy / "check.py", "ring_all_reduce", "--reset")[0]


def test_the_page(copy):
    """The function of README.md gets the verdicts that it shows. The list has a row for it."""
    page = (FOLDER / "README.md").read_text()
    [answer] = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    sessions = re.findall(r"^```console\n\$ python (\S+) ?(.*?)\n(.*?)^```$", page, re.M | re.S)
    (task, no_flags, your_turn), *verdicts = sessions
    assert not no_flags and len(verdicts) == 2
    course = copy.parents[1]
    assert run(task, cwd=course)[0] == your_turn
    file = course / your_turn.split()[-1]
    head, _, rest = file.read_text().partition("\ndef ")
    foot = rest.partition('"your turn")\n')[2]
    file.write_text(f"{head}\n{answer}{foot}")
    for path, flags, shown in verdicts:
        assert run(path, *flags.split(), cwd=course)[0] == shown
    of_lesson(copy / "answers" / "average_gradients.py", "average_gradients")
    (copy / "answers" / "order_1f1b.py").write_text(solved(copy, "order_1f1b"))
    listed = run(copy / "check.py", "--ranks", 2, cwd=course)[0]
    rows = [line.split(maxsplit=1) for line in listed.splitlines() if line.startswith("  ")]
    assert [name for name, _ in rows] == ORDER
    told = {name: verdict for name, verdict in rows if verdict != "your turn"}
    assert told["swap_with_neighbour"].startswith("HANG with 2 ranks")
    assert re.fullmatch(r"[A-Z]+ with 2 ranks, .* \(rung 2 of 2\)", told["average_gradients"])
    assert told["order_1f1b"] == "RIGHT with 2 ranks"
    assert len(told) == 3 and f"\n1 of {len(ORDER)} are right\n" in listed
