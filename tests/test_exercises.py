"""The checks of the exercises are checked: they accept what is right, and tell what is wrong."""

import ast
import importlib
import os
import re
import shutil
import signal
import sys
import time

import pytest
from conftest import ROOT, Job, committed

FOLDER = ROOT / "playground" / "exercises"
CHECK = FOLDER / "check.py"
WRONG = ROOT / "tests" / "wrong_answers"
EXERCISES = sorted(path.stem for path in (FOLDER / "checks").glob("*.py"))
RIGHT = "RIGHT with 1, 2, 3, 4 and 5 ranks"
# With append=True, what common/ ignores is still ignored.
STRICT = """
import warnings
warnings.filterwarnings("error", category=FutureWarning, append=True)
"""


def source(name):
    """Return an exercise as it is committed."""
    return committed(f"playground/exercises/{name}.py")


def check_of(name):
    """Return the module that checks an exercise."""
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(f"checks.{name}")
    finally:
        sys.path.pop(0)


def function_of(name):
    """Return the name of the function that a learner writes."""
    return getattr(check_of(name), "NAME", name)


def sizes_of(name):
    """Return the numbers of ranks with which an exercise is checked."""
    return getattr(check_of(name), "WORLD_SIZES", (1, 2, 3, 4, 5))


def functions(path):
    """Return the functions and classes of a file by name."""
    nodes = ast.parse(path.read_text()).body
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name: node for node in nodes if isinstance(node, kinds)}


def is_fault(name):
    """Return whether an exercise is a program with a fault, to be repaired."""
    return hasattr(check_of(name), "FAULT")


def begins(printed, verdict):
    """Return whether a verdict is printed: all pieces between the dots, in this order."""
    pattern = ".*".join(re.escape(piece) for piece in verdict.split(" ... "))
    return re.match(pattern, " ".join(printed.split())) is not None


def wrong_answers():
    """Return (exercise, function, the verdict that it must get) of all wrong answers."""
    found = []
    for name in EXERCISES:
        for function, node in functions(WRONG / f"{name}.py").items():
            if not function.startswith("_"):
                docstring = " ".join(ast.get_docstring(node).split())
                found.append(pytest.param(name, function, docstring, id=f"{name}-{function}"))
    return found


def checked(tmp_path, *words, cold=False, timeout=60):
    """Run check.py. Returns its output and its status.

    Fails if it prints more than 20 lines, or leaves a process or a file behind.
    """
    empty = tmp_path / "empty"
    empty.mkdir()
    command = [sys.executable] * cold
    job = Job(*command, CHECK, *words, env={"TMPDIR": str(empty)}, cwd=empty, cold=cold)
    done = job.wait(timeout)
    assert not list(empty.iterdir())
    assert len(done.stdout.splitlines()) <= 20
    assert not done.stderr, done.stderr
    return done.stdout, done.returncode


@pytest.mark.parametrize("name", EXERCISES)
def test_the_files_of_an_exercise(name):
    """Its file has a task and one function; there are three hints, and a solution that says why."""
    text = source(name)
    task = ast.get_docstring(ast.parse(text))
    goal = "It is repaired if" if is_fault(name) else "Your answer passes if"
    for words in ("Lesson: ", goal, "Check it:", f"exercises/{name}.py"):
        assert words in task, words
    assert ('("your turn")' in text) != is_fault(name)
    assert task.startswith("Find the fault: ") == is_fault(name)
    lesson = re.search(r"^Lesson: (\w+\.py)\.$", task, re.M)
    assert (ROOT / "playground" / lesson[1]).exists()
    assert text.endswith('\n\nif __name__ == "__main__":\n    check(__file__)\n')
    assert len(check_of(name).HINTS) == 3
    solution = FOLDER / "solutions" / f"{name}.py"
    assert ast.get_docstring(ast.parse(solution.read_text())).startswith("Why: ")
    written = functions(solution)[function_of(name)]
    if isinstance(written, ast.FunctionDef):
        assert written.end_lineno - written.lineno < 25


@pytest.mark.parametrize("name", EXERCISES)
def test_the_stub(name, tmp_path):
    """What is committed is not solved: a stub, or a program whose fault the verdict shows."""
    stub = tmp_path / f"{name}.py"
    stub.write_text(source(name))
    printed, status = checked(tmp_path, name, "--file", stub)
    assert begins(printed, getattr(check_of(name), "FAULT", "your turn")), printed
    assert status == 1


@pytest.mark.parametrize("name", EXERCISES)
def test_the_solution(name, tmp_path):
    """It is right, and prints nothing in its ranks. PyTorch's FutureWarning would be an error."""
    text = (FOLDER / "solutions" / f"{name}.py").read_text()
    solution = tmp_path / f"{name}.py"
    solution.write_text(f"{text}\n\n{STRICT}")
    printed, status = checked(tmp_path, name, "--file", solution)
    sizes = sizes_of(name)
    expected = f"RIGHT with {', '.join(map(str, sizes[:-1]))} and {sizes[-1]} ranks"
    assert (printed, status) == (f"{expected}\n", 0)


@pytest.mark.parametrize("name, function, verdict", wrong_answers())
def test_a_wrong_answer(name, function, verdict, tmp_path):
    """It gets the verdict of its docstring.

    A verdict is about the smallest number of ranks at fault, so larger ones are not run, which
    takes a fifth of the time. They are needed for "right for even numbers of ranks only".
    """
    words = [name, "--file", WRONG / f"{name}.py", "--function", function, "--seconds", 4]
    at_fault = re.match(r"[A-Z]+ with (\d+)", verdict)
    if at_fault and not re.search(r"\bright (for|with)\b", verdict):
        words += ["--ranks", *[size for size in sizes_of(name) if size <= int(at_fault[1])]]
    printed, status = checked(tmp_path, *words)
    assert begins(printed, verdict), printed
    assert status == 1


@pytest.mark.parametrize("name", EXERCISES)
def test_typical_wrong_answers_have_words_of_their_own(name):
    """There are at least three, and no two get the same verdict."""
    verdicts = [param.values[2] for param in wrong_answers() if param.values[0] == name]
    assert len(verdicts) >= 3
    assert len(set(verdicts)) == len(verdicts)
    assert all(re.match("WRONG|COSTLY|CRASH|HANG", verdict) for verdict in verdicts)


@pytest.mark.parametrize(
    "name", [name for name in EXERCISES if hasattr(check_of(name), "LESSON")] or [None]
)
def test_the_function_of_the_lesson(name, tmp_path):
    """What a lesson shows is right."""
    file, function = check_of(name).LESSON
    path = ROOT / "playground" / file
    printed, _ = checked(tmp_path, name, "--file", path, "--function", function)
    assert printed == f"{RIGHT}\n"


RIGHT_TOO = {
    "ring_all_reduce": """
def ring_all_reduce(tensor):
    rank = dist.get_rank()
    n = dist.get_world_size()
    chunks = tensor.view(-1).tensor_split(n)
    for step in range(2 * (n - 1)):
        kept = chunks[(rank - step - 1) % n]
        received = torch.empty_like(kept)
        send_request = dist.isend(chunks[(rank - step) % n], (rank + 1) % n)
        dist.irecv(received, (rank - 1) % n).wait()
        send_request.wait()
        kept.copy_(received if step >= n - 1 else kept + received)
""",
    "fault_newer_parameters": """
def train(parameters, gradient, steps):
    right = (dist.get_rank() + 1) % dist.get_world_size()
    left = (dist.get_rank() - 1) % dist.get_world_size()
    received = torch.empty_like(parameters)
    for _ in range(steps):
        request = dist.isend(parameters.clone(), right)
        parameters -= 0.5 * gradient(parameters)
        dist.recv(received, left)
        request.wait()
        parameters += received
        parameters /= 2
""",
    "save_and_resume": """
import os

def save_and_resume(path, model, optimizer, epochs, train_epoch):
    state = [None]
    if dist.get_rank() == 0 and os.path.exists(path):
        state = [torch.load(path)]
    dist.broadcast_object_list(state, src=0)
    done = 0
    if state[0]:
        model.load_state_dict(state[0]["model"])
        optimizer.load_state_dict(state[0]["optimizer"])
        torch.set_rng_state(state[0]["random"])
        done = state[0]["done"]
    for epoch in range(done, epochs):
        train_epoch(epoch)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        state |= {"random": torch.get_rng_state(), "done": epoch + 1}
        if dist.get_rank() == 0:
            torch.save(state, "new.pt")
            os.replace("new.pt", path)
""",
}


@pytest.mark.parametrize("name", RIGHT_TOO)
def test_a_different_right_answer(name, tmp_path):
    """Messages that are not in a batch are right on CPUs, and so is a state that rank 0 sends."""
    file = tmp_path / "answer.py"
    file.write_text(f"import torch\nimport torch.distributed as dist\n{RIGHT_TOO[name]}")
    printed, status = checked(tmp_path, name, "--file", file)
    assert printed.startswith("RIGHT") and status == 0, printed


ANYTHING = '''
import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist


def computes(tensor):
    """HANG with 1 rank, 7 numbers rank 0 computes at your line"""
    while True:
        pass


def ends(tensor):
    """CRASH with 1 rank, 7 numbers rank 0: its process has ended with status 3"""
    os._exit(3)


def has_children(tensor):
    """CRASH with 1 rank, 7 numbers rank 0: ValueError: ten children"""
    for _ in range(9):
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(0)
    raise ValueError("ten children")


def is_two_processes(tensor):
    """CRASH with 1 rank, 7 numbers rank 0: ValueError: this is the rank"""
    if os.fork() > 0:
        time.sleep(0.2)
        raise ValueError("this is the rank")


def writes(tensor):
    """CRASH with 1 rank, 7 numbers rank 0: ValueError: a file"""
    open("file.txt", "w").write("text")
    raise ValueError("a file")


def prints(tensor):
    """HANG with 1 rank ... print ... rank 0 printed: more"""
    while True:
        print("more and more")


def allocates(tensor):
    """CRASH with 1 rank, 7 numbers rank 0: RuntimeError: a rank may use at most 1 GB"""
    torch.ones(50 * 2**30, dtype=torch.uint8)


def allocates_in_python(tensor):
    """CRASH with 1 rank, 7 numbers rank 0: MemoryError: a rank may use at most 1 GB"""
    bytearray(50 * 2**30)


def stops(tensor):
    """CRASH with 1 rank, 7 numbers rank 0: SystemExit: 3"""
    sys.exit(3)


def recurses(tensor):
    """CRASH with 1 rank, 7 numbers rank 0: RecursionError"""
    recurses(tensor)


def asks(tensor):
    """CRASH with 1 rank, 7 numbers rank 0: EOFError"""
    input()


def too_short(tensor):
    """CRASH with 2 ranks, 7 numbers rank 1: its buffer has 12 bytes, but the message ... has 16"""
    if dist.get_world_size() > 1 and dist.get_rank() == 0:
        dist.send(torch.ones(4), 1)
    if dist.get_rank() == 1:
        dist.recv(torch.ones(3), 0)


def ends_its_parent(tensor):
    """CRASH with 1 rank the process that watches the ranks was ended by SIGKILL"""
    os.kill(os.getppid(), signal.SIGKILL)


def hides_its_error(tensor):
    """HANG with 2 ranks, 7 numbers rank 0 has finished"""
    try:
        dist.send(tensor, 0)
    except Exception:
        pass


def is_never_received(tensor):
    """WRONG with 2 ranks"""
    if dist.get_rank() == 0 and dist.get_world_size() > 1:
        tensor.kept = dist.isend(tensor, 1)
'''
STARTS = {
    "dies_at_its_start": ("import os\nos._exit(5)\n", "CRASH with 1 rank rank 0: its process"),
    "hangs_at_its_start": ("while True:\n    pass\n", "HANG with 1 rank rank 0 computes at your"),
    "is_no_python": ("def f(:\n", "CRASH with 1 rank rank 0: .*SyntaxError"),
    "lacks_the_function": ("x = 1\n", "CRASH with 1 rank rank 0: AttributeError: there is no"),
}


@pytest.mark.parametrize("function", [*re.findall(r"^def (\w+)", ANYTHING, re.M), *STARTS])
def test_anything_ends(function, tmp_path):
    """Whatever the function does, the check ends with a verdict and leaves nothing behind."""
    file = tmp_path / "anything.py"
    file.write_text(ANYTHING)
    if function in STARTS:
        text, pattern = STARTS[function]
        file.write_text(text)
    else:
        docstring = ast.get_docstring(functions(file)[function])
        pattern = ".*".join(re.escape(piece) for piece in docstring.split(" ... "))
    words = ["ring_all_reduce", "--file", file, "--function", function]
    if "HANG" in pattern:
        words += ["--seconds", 4]
    printed, status = checked(tmp_path, *words)
    assert re.match(pattern, " ".join(printed.split())), printed
    assert status == 1


def test_ctrl_c(tmp_path):
    """It ends the check and all that it has started."""
    file = tmp_path / "anything.py"
    file.write_text(ANYTHING)
    words = ["ring_all_reduce", "--file", file, "--function", "has_children", "--seconds", "1000"]
    file.write_text(ANYTHING.replace('raise ValueError("ten children")', "time.sleep(1000)"))
    job = Job(CHECK, *words, env={"TMPDIR": str(tmp_path)}, cold=False)
    end = time.monotonic() + 60
    while len(job.pids()) < 20 and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(0.5)
    os.kill(job.process.pid, signal.SIGINT)
    done = job.wait(30)
    assert done.returncode == 130
    assert done.stderr == "interrupted\n"
    assert list(tmp_path.iterdir()) == [file]


@pytest.fixture
def copy(tmp_path):
    """A copy of the exercises, in which a learner writes."""
    folder = tmp_path / "course" / "playground" / "exercises"
    no_cache = shutil.ignore_patterns("__pycache__")
    shutil.copytree(FOLDER, folder, ignore=no_cache)
    shutil.copytree(ROOT / "common", tmp_path / "course" / "common", ignore=no_cache)
    for name in EXERCISES:
        (folder / f"{name}.py").write_text(source(name))
    return folder


def solve(folder, name):
    """Write the solution of an exercise into its file, as a learner would."""
    solution = (folder / "solutions" / f"{name}.py").read_text().partition('"""\n')[2]
    last = '\n\nif __name__ == "__main__":\n    check(__file__)\n'
    (folder / f"{name}.py").write_text(f"from check import check\n{solution}{last}")


def test_a_file_checks_itself(copy):
    """`python FILE` prints the verdict. It starts Python, as a learner does."""
    command = [sys.executable, copy / "ring_all_reduce.py"]
    done = Job(*command).wait(60)
    assert done.stdout.startswith("your turn: write the function in ")
    solve(copy, "ring_all_reduce")
    done = Job(*command, "--trace").wait(60)
    lines = done.stdout.splitlines()
    assert lines[:2] == [RIGHT, "who sends what to whom, with 3 ranks:"]
    assert re.fullmatch(r"  step 1:  0 -> 1: \[.*\]   1 -> 2: \[.*\]   2 -> 0: \[.*\]", lines[2])
    assert len(lines) == 2 + 4  # 2(n - 1) steps
    assert done.returncode == 0


def test_some_numbers_of_ranks(tmp_path):
    """--ranks checks with these only."""
    words = ["ring_all_reduce", "--file", FOLDER / "solutions" / "ring_all_reduce.py", "--ranks"]
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    assert checked(tmp_path / "one", *words, 3) == ("RIGHT with 3 ranks\n", 0)
    assert checked(tmp_path / "two", *words, 2, 4) == ("RIGHT with 2 and 4 ranks\n", 0)
    done = Job(CHECK, *words, 0, cold=False).wait(60)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("error: --ranks: at least 1")


def test_hints_and_answer(tmp_path):
    """They are shown for each exercise."""
    for name in EXERCISES:
        for number in (1, 2, 3):
            assert Job(CHECK, name, "--hint", number, cold=False).wait(60).stdout.strip()
        shown = Job(CHECK, name, "--answer", cold=False).wait(60).stdout
        assert shown == (FOLDER / "solutions" / f"{name}.py").read_text()


def test_the_page(copy, tmp_path):
    """The function of README.md gets the verdict that it shows."""
    page = (FOLDER / "README.md").read_text()
    [answer] = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    sessions = re.findall(r"^```console\n\$ python (\S+) ?(.*?)\n(.*?)^```$", page, re.M | re.S)
    [(path, flags, shown)] = sessions
    file = tmp_path / "course" / path
    head, _, rest = file.read_text().partition("\ndef ")
    foot = rest.partition('"your turn")\n')[2]
    file.write_text(f"{head}\n{answer}{foot}")
    done = Job(sys.executable, path, *flags.split(), cwd=tmp_path / "course").wait(60)
    assert done.stdout == shown
    assert f"`{RIGHT}`" in " ".join(page.split())
    assert all(len(line) <= 100 for line in page.splitlines())


def test_watch(copy):
    """It checks a file when it is saved, and ends at Ctrl-C."""
    job = Job(copy / "check.py", "--watch", cold=False)
    assert job.process.stdout.readline().startswith("Save an exercise")
    time.sleep(1)
    solve(copy, "all_gather")
    lines = [job.process.stdout.readline() for _ in range(3)]
    assert lines[0] == "\n"
    assert lines[1].startswith("all_gather, saved at ")
    assert lines[2] == f"{RIGHT}\n"
    os.kill(job.process.pid, signal.SIGINT)
    assert job.wait(30).returncode == 130


def test_all_and_the_next(copy):
    """All are listed in order, and --next shows the first that is not right."""
    first, second = check_order()[:2]
    solve(copy, first)
    shown = Job(copy / "check.py", cold=False).wait(120).stdout.splitlines()
    assert [line.split()[0] for line in shown[:-1]] == check_order()
    assert shown[0].split(maxsplit=1)[1] == RIGHT
    assert shown[1].split(maxsplit=1)[1] == "your turn"
    assert shown[-1] == f"1 of {len(EXERCISES)} are right"
    shown = Job(copy / "check.py", "--next", cold=False).wait(60).stdout
    assert f"{second}.py: your turn\n\n" in shown
    assert ast.get_docstring(ast.parse(source(second))) in shown


def test_where_the_exercises_stand():
    """They are in the order of the lessons. The docstring of their lesson and README name them."""
    readme = (ROOT / "README.md").read_text()
    lessons = re.findall(r"^\| (?:★ )?\[`(\w+)\.py`\]", readme, re.M)
    positions = []
    for name in check_order():
        lesson = re.search(r"^Lesson: (\w+)\.py\.$", source(name), re.M)[1]
        positions.append(lessons.index(lesson))
        text = (ROOT / "playground" / f"{lesson}.py").read_text()
        assert f"{name}.py" in ast.get_docstring(ast.parse(text)), (name, lesson)
        part = readme.partition(f"[`{lesson}.py`]")[2].partition("\n## ")[0].partition("\n### ")[0]
        assert f"[`{name}`](playground/exercises/{name}.py)" in part, (name, lesson)
    assert positions == sorted(positions)


def check_order():
    """Return all exercises in the order of the lessons."""
    text = CHECK.read_text().partition("ORDER = [")[2].partition("]")[0]
    order = [name for name in re.findall(r'"(\w+)"', text) if name in EXERCISES]
    assert sorted(order) == EXERCISES
    return order
