"""The checks of the exercises are checked: they accept what is right, and tell what is wrong."""

import ast
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from check import ORDER
from launch import Job
from lessons import FOLDERS, ROOT, docstring
from nodes import until

FOLDER = ROOT / "playground" / "exercises"
CHECK = FOLDER / "check.py"
JUDGING = FOLDER / "judging"
JUDGE_ANSWERS = ROOT / "tests" / "programs" / "judge_answers.py"
EXERCISES = sorted(path.stem for path in (JUDGING / "checks").glob("*.py"))
RIGHT = "RIGHT with 1, 2, 3, 4 and 5 ranks"
QUICK = ("all_gather", "average_gradients", "fault_too_many_images")  # one of each kind
NAMES = [pytest.param(name, marks=[pytest.mark.quick] * (name in QUICK)) for name in EXERCISES]


def check_of(name):
    """Return an Exercise."""
    return importlib.import_module("judging.exercise").Exercise(name)


def begins(lines, verdict):
    """Return whether a verdict is told: all pieces between the dots, in this order."""
    pattern = ".*".join(re.escape(piece) for piece in verdict.split(" ... "))
    return re.match(pattern, " ".join(" ".join(lines).split())) is not None


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
    """A task says which lesson to read, where to write, and what passes. There are three hints."""
    for name in EXERCISES:
        check = check_of(name)
        task = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text()))
        assert "playground/exercises/answers/" in task, name
        commands = re.findall(r"^    python (\S+)", task, re.M)
        assert set(commands) == {f"playground/exercises/{name}.py"}
        lesson = re.search(r"^Lesson: ([\w/]+\.py)\.$", task, re.M)
        assert (ROOT / "playground" / lesson[1]).exists()
        goals = ["your answer passes if"]
        if check.FAULT:
            goals = ["it is repaired if"]
        if check.RUNG_1:
            goals = ["rung 1", "your answer passes it if", "rung 2", "your answer passes it if"]
        assert re.search(".*".join(goals), " ".join(task.lower().split())), name
        assert len(check.HINTS.strip().split("\n\n")) == 3, name
        answer = importlib.import_module("judging.solution").answer(name)
        assert re.search(r'^Why: |^    """Why: ', answer, re.M), name
        assert len(answer.splitlines()) < 90, name


@pytest.mark.parametrize("name", NAMES)
def test_the_judge(name, tmp_path):
    """The solution is right, the lesson's function on rung 1. The task and mistakes are told."""
    check = check_of(name)
    sizes = check.WORLD_SIZES
    two = [min((size for size in sizes if size > 1), default=1)]
    fault = check.FAULT or "your turn"
    at_fault = re.match(r"[A-Z]+ with (\d+)", fault)
    # With 1, 3 and 5 ranks. The lesson's function and the mistakes, which are right in the cases
    # before the one that shows them, are judged with 2.
    some = sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]})
    answers = [
        [None, None, 30, some],
        [FOLDER / f"{name}.py", None, 4, [int(at_fault[1])] if at_fault else two],
    ]
    mistakes = list(check.MISTAKES)
    assert len(mistakes) >= 3 - bool(check.FAULT), "it needs more MISTAKES"
    # Most are at fault with two ranks. One that hangs after 4 s may only be slow.
    answers += [[None, words, 4, two] for words in mistakes]
    if name in OF_LESSONS:
        folders = [str(ROOT), *map(str, FOLDERS)]
        of_lesson = tmp_path / "answer.py"
        import_it = f"from {OF_LESSONS[name]} import {check.NAME or name}"
        of_lesson.write_text(f"import sys\nsys.path[:0] = {folders}\n{import_it}\n")
        answers.append([of_lesson, None, 30, two])
    solution, task, *told = judged(tmp_path, name, answers)
    in_words = importlib.import_module("judging.words").sizes_in_words
    assert solution == [f"RIGHT with {in_words(some)}"]
    assert begins(task, fault), task
    if name in OF_LESSONS:
        next_rung = f"RIGHT {check.RUNG_1} with {in_words(two)}. Next: {check.RUNG_2}"
        assert told.pop()[0] in (f"RIGHT with {in_words(two)}", next_rung)
    pairs = zip(mistakes, told, strict=True)
    missed = [words for words, lines in pairs if words not in " ".join(lines)]
    told = judged(tmp_path, name, [[None, words, 30, sizes[:4]] for words in missed])
    for words, lines in zip(missed, told, strict=True):
        assert words in " ".join(lines), lines


# The lesson's own function, for those exercises with two rungs that ask for the same function.
OF_LESSONS = {
    "average_gradients": "manual_data_parallel",
    "ring_all_reduce": "nonblocking_p2p",
    "shard_optimizer": "sharded_optimizer",
}
ANYTHING = '''
import os
import signal
import subprocess
import time

import torch
import torch.distributed as dist


def computes(tensor):
    """HANG with 1 rank, 4 numbers rank 0 computes at your line"""
    while True:
        pass


def ends(tensor):
    """CRASH with 1 rank, 4 numbers rank 0: its process has ended with status 3"""
    os._exit(3)


def has_children(tensor):
    """CRASH with 1 rank, 4 numbers rank 0: ValueError: ten children"""
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
    """CRASH with 1 rank, 4 numbers rank 0: RuntimeError: a rank may use at most 1 GB"""
    torch.ones(50 * 2**30, dtype=torch.uint8)


def too_short(tensor):
    """CRASH with 2 ranks, 4 numbers rank 1: its buffer has 12 bytes, but the message ... has 16"""
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
    told = judged(tmp_path, "tree_broadcast", answers)
    for lines, verdict in zip(told, verdicts, strict=True):
        assert begins(lines, verdict), (lines, verdict)


def test_ctrl_c(tmp_path):
    """It ends the check and all that it has started."""
    file = tmp_path / "anything.py"
    words = ["tree_broadcast", "--file", file, "--seconds", 1000]
    waits = ANYTHING.replace('raise ValueError("ten children")', "time.sleep(1000)")
    file.write_text(waits.replace("has_children", "tree_broadcast"))
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
    for name in ("common", "playground/tools/instruments", "playground/exercises"):
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
    task = copy / "all_gather.py"
    answer = copy / "answers" / "all_gather.py"
    line = "your turn: write the function in playground/exercises/answers/all_gather.py\n"
    assert run("playground/exercises/all_gather.py", cwd=copy.parents[1]) == (line, 1)
    assert answer.read_text() == task.read_text()
    answer.write_text(solved(copy, "all_gather"))
    for file in (task, answer):
        assert run(file, "--ranks", 1, 2) == ("RIGHT with 1 and 2 ranks\n", 0)
    assert answer.read_text() == solved(copy, "all_gather")
    done = Job(copy / "check.py", "all_gather", "--ranks", 0, cold=False).wait()
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("error: --ranks: at least 1")
    # A program to repair is judged at once.
    words = ["fault_never_returns", "--seconds", 2, "--ranks", 2]
    line, _, verdict = run(copy / "check.py", *words)[0].partition("\n")
    answer = copy / "answers" / "fault_never_returns.py"
    assert line == f"your turn: repair the function in {os.path.relpath(answer)}"
    assert begins(verdict.splitlines(), check_of("fault_never_returns").FAULT)


def test_an_error_that_is_not_the_learners(copy):
    """A folder that cannot be written, and an error of the check, are no verdict on the answer."""
    answers = copy / "answers"
    answers.touch()
    done = Job(copy / "check.py", "all_gather", cold=False).wait()
    assert (done.returncode, done.stdout) == (1, "")
    where = os.path.relpath(answers)
    assert done.stderr == f"error: your answers cannot be written to {where}: File exists\n"
    answers.unlink()
    answers.mkdir()
    (answers / "all_gather.py").write_text(solved(copy, "all_gather"))
    # A low limit of the user is no error. With -P, Python does not look beside check.py.
    command = f"ulimit -f 50000 && exec {sys.executable} -P {copy}/check.py all_gather --ranks 2"
    done = Job("bash", "-c", command).wait()
    assert (done.stdout, done.stderr) == ("RIGHT with 2 ranks\n", "")
    trial = copy / "judging" / "trial.py"
    failing = trial.read_text().replace('if part == "join":', 'if part == "join" and 1 / 0:')
    trial.write_text(failing)
    done = Job(copy / "check.py", "all_gather", "--ranks", 1, cold=False).wait()
    assert (done.returncode, done.stdout) == (1, "")
    assert re.match("RuntimeError: 1 ranks could not.*ZeroDivision", done.stderr.splitlines()[-1])
    assert not (answers / "verdicts.json").exists()


def test_the_evidence(copy):
    """The solutions are right on it. It names no folder of a machine."""
    for path in copy.glob("evidence/*/*"):
        assert not re.search(r'["\[]/', path.read_text()), path
    for name in ("fault_late_rank", "fault_waits_alone", "fault_equal_stacks"):
        solution = copy / "judging" / "checks" / f"{name}.py"
        assert run(copy / "check.py", name, "--file", solution) == ("RIGHT with 1 rank\n", 0)
    # What the first look finds: rank 0 waits alone, or nothing.
    for name, places in (("waits_alone", [1, 3, 3, 3]), ("equal_stacks", [4, 4, 4, 4])):
        stacks = [(copy / "evidence" / name / f"stack{rank}.txt").read_text() for rank in range(4)]
        assert [stacks.count(stack) for stack in stacks] == places


def test_what_is_shown():
    """--hint and --answer print what stands in the check, with the solution's helper."""
    shown = run(CHECK, "ring_attention", "--hint", 2)[0]
    assert shown == check_of("ring_attention").HINTS.split("\n\n")[1] + "\n"
    answer = run(CHECK, "ring_attention", "--answer")[0]
    source = (JUDGING / "checks" / "ring_attention.py").read_text()
    assert [each.name for each in ast.parse(answer).body] == ["pass_on", "ring_attention"]
    for part in answer.strip().split("\n\n\n"):
        assert f"\n{part}\n" in source
    changed = run(CHECK, "fault_wrong_gradient", "--answer")[0].splitlines()
    assert changed[0].startswith("Why: ")
    task = (FOLDER / "fault_wrong_gradient.py").read_text().splitlines()
    assert {line[1:] for line in changed[1:] if line[0] in " -"} <= {*task, ".."}
    assert any(line[0] == "+" for line in changed) and any(line[0] == "-" for line in changed)


def test_reset(copy):
    """It puts the task back, and keeps each old answer under a name that it prints."""
    answer = copy / "answers" / "all_gather.py"
    task = (copy / "all_gather.py").read_text()
    answer.parent.mkdir()
    for number in (1, 2):
        answer.write_text(f"answer {number}")
        printed, status = run(copy / "check.py", "all_gather", "--reset")
        assert (answer.read_text(), status) == (task, 0)
    old = Path(re.search(r"^Your old answer is (\S+) now\.$", printed, re.M)[1])
    assert old.read_text() == "answer 2"
    assert (copy / "answers" / "all_gather-1.py").read_text() == "answer 1"
    # The task itself is not kept as an old answer.
    assert "old answer" not in run(copy / "check.py", "all_gather", "--reset")[0]


def test_the_page(copy):
    """The function of README.md gets the verdict that it shows."""
    page = (FOLDER / "README.md").read_text()
    [answer] = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    sessions = re.findall(r"^```console\n\$ python (\S+) ?(.*?)\n(.*?)^```$", page, re.M | re.S)
    [(first, no_flags, your_turn), (path, flags, shown)] = sessions
    assert not no_flags
    course = copy.parents[1]
    assert run(first, cwd=course)[0] == your_turn
    file = course / your_turn.split()[-1]
    head, _, rest = file.read_text().partition("\ndef ")
    foot = rest.partition('"your turn")\n')[2]
    file.write_text(f"{head}\n{answer}{foot}")
    assert run(path, *flags.split(), cwd=course)[0] == shown
    assert f"`{RIGHT}`" in " ".join(page.split())


def test_watch(copy):
    """It checks an answer when it is saved, and ends at Ctrl-C."""
    job = Job(copy / "check.py", "--watch", "--ranks", 2, cold=False)
    line = job.process.stdout.readline()
    assert line == f"Save a file in {os.path.relpath(copy / 'answers')} to have it checked." + (
        " Ctrl-C ends this.\n"
    )
    (copy / "answers").mkdir()
    (copy / "solved.py").write_text(solved(copy, "all_gather"))
    os.replace(copy / "solved.py", copy / "answers" / "all_gather.py")  # never half there
    lines = [job.process.stdout.readline() for _ in range(3)]
    assert lines[0] == "\n"
    assert lines[1].startswith("all_gather, saved at ")
    assert lines[2] == "RIGHT with 2 ranks\n"
    os.kill(job.process.pid, signal.SIGINT)
    assert job.wait().returncode == 130


def test_all_and_the_next(copy):
    """All are listed in order, and the last line has the command for the next one."""
    first, second = ORDER[:2]
    for name in ("average_gradients", first):
        run(copy / "check.py", name)
        (copy / "answers" / f"{name}.py").write_text(solved(copy, name))
    check = os.path.relpath(copy / "check.py")
    shown = run(copy / "check.py", first)
    assert shown == (f"{RIGHT}\nnext: python {check} {second}\n", 0)
    answer = copy / "answers" / "average_gradients.py"
    answer.write_text(answer.read_text().replace("if parameter.requires_grad", "if True"))
    shown = run(copy / "check.py")[0].splitlines()
    states = dict(line.split(maxsplit=1) for line in shown if line.startswith("  "))
    assert list(states) == ORDER
    assert states[first] == RIGHT
    assert states[second] == "your turn"
    fault = "COSTLY with 2 ranks, tied and frozen parameters"
    assert states["average_gradients"] == f"rung 1 of 2 is RIGHT, rung 2: {fault}"
    assert shown[-2:] == [f"1 of {len(EXERCISES)} are right", f"next: python {check} {second}"]


def test_verdicts_are_kept(copy, tmp_path):
    """An answer runs again only if it, its check, what judges it or PyTorch has changed."""
    imports = tmp_path / "imports"  # one line for each rank that was started
    imports.touch()
    answer = copy / "answers" / "order_1f1b.py"
    answer.parent.mkdir()
    note = f"with open({str(imports)!r}, 'a') as file:\n    print(file=file)\n"
    answer.write_text(f"{solved(copy, 'order_1f1b')}\n{note}")
    own_check = copy / "judging" / "checks" / "order_1f1b.py"
    own_check.write_text(own_check.read_text().replace("(1, 2, 3, 4, 5, 8)", "(1,)"))

    def is_judged(change="", text="\n# changed\n", **options):
        if change:
            path = copy / change
            path.write_text(path.read_text() + text)
        before = imports.read_text()
        printed = Job(copy / "check.py", cold=False, **options).wait().stdout
        assert f"{'order_1f1b':<31}RIGHT with 1 rank\n" in printed
        return imports.read_text() != before

    assert is_judged()
    assert not is_judged("judging/checks/gpipe.py")
    assert is_judged("answers/order_1f1b.py")
    assert is_judged("judging/checks/order_1f1b.py")
    assert is_judged("judging/traffic.py")
    assert is_judged("answers/verdicts.json", "{")
    other = tmp_path / "other" / "torch-0.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 0.0\n")
    assert is_judged(env={"PYTHONPATH": str(other.parent)})
    names = {path.name for path in answer.parent.iterdir()}
    assert names == {"order_1f1b.py", "verdicts.json"}


def test_a_reader_that_has_ended():
    """As `| head` does. The check ends without a word."""
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, CHECK, "all_gather", "--hint", "1"]
    done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_where_the_exercises_stand():
    """They are in the order of the lessons, in the row of their part. Their lesson names them."""
    listed = (ROOT / "playground" / "README.md").read_text()
    lessons = re.findall(r"^\| \d+\. \[`(\w+)\.py`\]", listed, re.M)
    page = (FOLDER / "README.md").read_text()
    parts = dict(re.findall(r"^\| (\S.*) \| (.*) \|$", page, re.M))
    assert sorted(ORDER) == EXERCISES
    positions = []
    for name in ORDER:
        lesson = re.search(r"^Lesson: (\S+)\.py\.$", (FOLDER / f"{name}.py").read_text(), re.M)[1]
        part, slash, lesson = lesson.rpartition("/")
        assert f"[`{name}`]({name}.py)" in parts[part + slash or "The playground"], name
        positions.append(lessons.index(lesson))
        assert f"{name}.py" in docstring(lesson), (name, lesson)
    assert positions == sorted(positions)
    asked = ["git", "check-ignore", "-q", "--no-index", "playground/exercises/answers/x.py"]
    assert subprocess.run(asked, cwd=ROOT).returncode == 0  # git does not see the answers
