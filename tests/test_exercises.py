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
import time
from pathlib import Path

import pytest
from conftest import ROOT, Job, lesson_path
from lessons import FOLDERS

FOLDER = ROOT / "playground" / "exercises"
CHECK = FOLDER / "check.py"
JUDGING = FOLDER / "judging"
JUDGE_ANSWERS = ROOT / "tests" / "judge_answers.py"
EXERCISES = sorted(path.stem for path in (JUDGING / "checks").glob("*.py"))
RIGHT = "RIGHT with 1, 2, 3, 4 and 5 ranks"
QUICK = ("all_gather", "average_gradients", "fault_same_order")  # one of each kind
NAMES = [pytest.param(name, marks=[pytest.mark.quick] * (name in QUICK)) for name in EXERCISES]


def source(name):
    """Return the task of an exercise."""
    return (FOLDER / f"{name}.py").read_text()


def check_of(name):
    """Return the module that checks an exercise."""
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(f"judging.checks.{name}")
    finally:
        sys.path.pop(0)


def function_of(name):
    """Return the name of the function that a learner writes."""
    return getattr(check_of(name), "NAME", name)


def sizes_of(name):
    """Return the numbers of ranks with which an exercise is checked."""
    return getattr(check_of(name), "WORLD_SIZES", (1, 2, 3, 4, 5))


def right_with(name, words="", sizes=None):
    """Return the first line about an answer that is right with these numbers of ranks, or all."""
    *others, last = map(str, sizes or sizes_of(name))
    return f"RIGHT {words}with {', '.join(others)} and {last} ranks"


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


def checked(tmp_path, *words, timeout=300):
    """Run check.py. Returns its output and its status.

    Fails if it prints more than 20 lines, or leaves a process or a file behind.
    """
    empty = tmp_path / "empty"
    empty.mkdir()
    job = Job(CHECK, *words, env={"TMPDIR": str(empty)}, cwd=empty, cold=False)
    done = job.wait(timeout)
    assert not list(empty.iterdir())
    assert len(done.stdout.splitlines()) <= 20
    assert not done.stderr, done.stderr
    return done.stdout, done.returncode


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


def sizes_for(name, verdict):
    """Return the numbers of ranks that a verdict needs; None: all of them.

    It is about the smallest number of ranks at fault. Larger ones only decide whether an answer is
    "right for even numbers of ranks only".
    """
    at_fault = re.match(r"[A-Z]+ with (\d+)", verdict)
    if not at_fault or re.search(r"\bright (for|with)\b", verdict):
        return None
    return [size for size in sizes_of(name) if size <= int(at_fault[1])]


@pytest.mark.parametrize("name", EXERCISES)
def test_the_task(name):
    """It says which lesson to read, where to write, and what passes. Its commands name its file."""
    text = source(name)
    task = ast.get_docstring(ast.parse(text))
    assert "playground/exercises/answers/" in task
    commands = re.findall(r"^    python (\S+)", task, re.M)
    assert set(commands) == {f"playground/exercises/{name}.py"}
    lesson = re.search(r"^Lesson: ([\w/]+\.py)\.$", task, re.M)
    assert (ROOT / "playground" / lesson[1]).exists()
    goals = ["Your answer passes if"]
    if is_fault(name):
        goals = ["It is repaired if"]
    if hasattr(check_of(name), "RUNG_1"):
        goals = ["rung 1", "your answer passes it if", "rung 2", "your answer passes it if"]
    rest = " ".join(task.lower().split())
    for goal in goals:
        assert goal.lower() in rest, goal
        rest = rest.partition(goal.lower())[2]


@pytest.mark.parametrize("name", EXERCISES)
def test_hints_and_the_solution(name):
    """There are three hints. The solution is short, and says why it is right."""
    assert len(check_of(name).HINTS.strip().split("\n\n")) == 3
    written = functions(JUDGING / "checks" / f"{name}.py")[function_of(name)]
    assert ast.get_docstring(written).startswith("Why: ")
    if isinstance(written, ast.FunctionDef):
        assert written.end_lineno - written.lineno < 32


def test_what_is_shown():
    """--hint and --answer print what stands in the check, with the solution's helper."""
    exercise = check_of("ring_attention")
    for number, hint in enumerate(exercise.HINTS.strip().split("\n\n"), start=1):
        shown = Job(CHECK, "ring_attention", "--hint", number, cold=False).wait().stdout
        assert shown == f"{hint}\n"
    answer = Job(CHECK, "ring_attention", "--answer", cold=False).wait().stdout
    source = (JUDGING / "checks" / "ring_attention.py").read_text()
    assert [each.name for each in ast.parse(answer).body] == ["pass_on", "ring_attention"]
    for part in answer.strip().split("\n\n\n"):
        assert f"\n{part}\n" in source


@pytest.mark.parametrize("name", NAMES)
def test_the_task_is_not_solved(name, tmp_path):
    """It is a stub, or a program whose fault the verdict shows."""
    verdict = getattr(check_of(name), "FAULT", "your turn")
    sizes = sizes_for(name, verdict) or [2]
    [lines] = judged(tmp_path, name, [[FOLDER / f"{name}.py", None, None, sizes]])
    assert begins("\n".join(lines), verdict), lines


@pytest.mark.parametrize("name", NAMES)
def test_the_solution(name, tmp_path):
    """It is right, and prints nothing in its ranks."""
    assert judged(tmp_path, name, [[None, None, None, None]]) == [[right_with(name)]]


@pytest.mark.parametrize("name", EXERCISES)
def test_the_mistakes(name, tmp_path):
    """Each typical mistake gets the words that are told on it. The others are listed."""
    mistakes = list(check_of(name).MISTAKES)
    assert len(mistakes) >= 3
    told = judged(tmp_path, name, [[None, words, 4, sizes_of(name)[:2]] for words in mistakes])
    missed = []
    for words, lines in zip(mistakes, told, strict=True):
        if words not in " ".join(lines):
            missed.append(words)
    # Some are at fault with more ranks only. And on a busy machine, one that hangs after 4 seconds
    # may only be slow.
    told = judged(tmp_path, name, [[None, words, 30, None] for words in missed])
    for words, lines in zip(missed, told, strict=True):
        assert words in " ".join(lines)


# Answers that only call what the lesson has; each exercise with two rungs has at least one.
OF_LESSONS = {
    "checkpoint_block": [
        """
from activation_checkpointing import Checkpointed
class CheckpointBlock:
    def apply(block, inputs, *parameters):
        return Checkpointed(block)(inputs)
"""
    ],
    "expert_dispatch": [
        """
from types import SimpleNamespace
import torch
import torch.distributed as dist
from expert_parallel import Mixture
def expert_dispatch(tokens, expert, experts):
    load = torch.bincount(expert, minlength=len(experts) * dist.get_world_size())
    mixture = SimpleNamespace(experts=experts, load=load)
    order = expert.argsort()
    outputs = torch.empty_like(tokens)
    outputs[order] = Mixture.compute(mixture, tokens[order])
    return outputs
"""
    ],
    "ring_all_reduce": ["from nonblocking_p2p import ring_all_reduce"],
    "ring_attention": [
        """
import torch.distributed as dist
from context_parallel import RingAttention
def ring_attention(query, key, value, places):
    return RingAttention.apply(query, key, value, places, dist.group.WORLD)
"""
    ],
    "average_gradients": [
        "from manual_data_parallel import average_gradients",
        "from manual_data_parallel import average_in_one_bucket as average_gradients",
    ],
    "overlap_gradients": [
        """
from functools import partial
from overlapped_data_parallel import EachGradient
def overlap_gradients(model):
    return partial(EachGradient(model).finish, model)
""",
        """
from functools import partial
from overlapped_data_parallel import Buckets
def overlap_gradients(model):
    return partial(Buckets(model, bucket_cap_mb=1e-5).finish, model)
""",
    ],
    "exact_accuracy": [
        """
import torch
from distributed_data_parallel import run_epoch
def exact_accuracy(model, batches):
    loss, recognized, images = run_epoch(model, batches, torch.device("cpu"))
    return loss / images, recognized / images
"""
    ],
    "save_and_resume": [
        """
import argparse
import os
import shutil
from pathlib import Path
import torch.distributed as dist
from distributed_data_parallel_resumable import MUST_AGREE, resume, save
def save_and_resume(path, model, optimizer, epochs, train_epoch):
    args = argparse.Namespace(epochs=epochs, **dict.fromkeys(MUST_AGREE))
    folder = Path(path).absolute().parent / "run"
    done = resume(folder, model, optimizer, args)
    for epoch in range(done, epochs):
        train_epoch(epoch)
        if dist.get_rank() == 0:
            save(folder, epoch + 1, model, optimizer, args)
            shutil.copyfile(folder / f"epoch-{epoch + 1:04}.pt", f"{path}.new")
            os.replace(f"{path}.new", path)
"""
    ],
    "accumulate_gradients": [
        """
from distributed_data_parallel_resnet import accumulate_gradients
"""
    ],
    "shard_optimizer": ["from sharded_optimizer import ShardedOptimizer"],
    "gather_layer": [
        """
import torch
import torch.distributed as dist
from manual_fully_sharded import ShardedLayer
class Layer(torch.nn.Module):
    def __init__(self, shard, compute):
        super().__init__()
        flat = shard.new_empty(len(shard) * dist.get_world_size())
        dist.all_gather_into_tensor(flat, shard.detach())
        self.flat = torch.nn.Parameter(flat)
        self.compute = compute
    def forward(self, inputs):
        return self.compute(inputs, self.flat)
class GatherLayer:
    @staticmethod
    def apply(inputs, shard, compute):
        layer = Layer(shard, compute)
        ShardedLayer(layer).shard = shard
        return layer(inputs)
"""
    ],
    "seeded_dropout": [
        """
import torch
import torch.distributed as dist
from torch.nn import functional as F
def seeded_dropout(inputs, p, seed, step):
    torch.manual_seed(seed + step * dist.get_world_size() + dist.get_rank())
    return F.dropout(inputs, p)
"""
    ],
    "gpipe": [
        """
from datetime import timedelta
import manual_pipeline
import torch
import torch.distributed as dist
def gpipe(stage, inputs, labels, shape, dtype):
    passes = manual_pipeline.gpipe(dist.get_rank(), dist.get_world_size(), len(inputs))
    pipeline = manual_pipeline.Pipeline(stage, shape, passes, timedelta(seconds=60))
    pipeline(torch.cat(inputs), torch.cat(labels))
"""
    ],
    "order_1f1b": [
        """
from manual_pipeline import one_forward_one_backward
def order_1f1b(rank, world_size, micro_batches, most):
    return one_forward_one_backward(rank, world_size, micro_batches)
"""
    ],
    "split_pair": [
        """
from tensor_parallel import AddGradients, AddTerms
from torch.nn import functional as F
class SplitPair:
    @staticmethod
    def apply(inputs, first, first_bias, second, second_bias):
        hidden = F.relu(F.linear(AddGradients.apply(inputs), first, first_bias))
        return AddTerms.apply(F.linear(hidden, second)) + second_bias
"""
    ],
}


def test_exercises_with_two_rungs():
    """The first rung has the first cases, and above is what the lesson has for each of them."""
    with_rungs = [name for name in EXERCISES if hasattr(check_of(name), "RUNG_1")]
    assert set(with_rungs) <= set(OF_LESSONS)
    for name in with_rungs:
        first = check_of(name).RUNG_1.cases
        assert tuple(check_of(name).CASES)[: len(first)] == first


@pytest.mark.parametrize("name", OF_LESSONS)
def test_what_the_lesson_has(name, tmp_path):
    """It is right, at least on the first rung, with the first three numbers of ranks."""
    answers = []
    sizes = sizes_of(name)[:3]
    for number, text in enumerate(OF_LESSONS[name]):
        file = tmp_path / f"answer{number}.py"
        folders = [str(ROOT), *map(str, FOLDERS)]
        file.write_text(f"import sys\nsys.path[:0] = {folders}\n{text}")
        answers.append([file, None, None, sizes])
    right = [right_with(name, "", sizes)]
    rung_1 = getattr(check_of(name), "RUNG_1", None)
    if rung_1 is not None:
        right.append(f"{right_with(name, f'{rung_1.words} ', sizes)}. Next: {rung_1.then}")
    for lines in judged(tmp_path, name, answers):
        assert lines[0] in right, "\n".join(lines)


def test_the_lesson_of_seeded_dropout():
    """It seeds with the same number as the answer above."""
    text = lesson_path("fully_sharded_checkpoints").read_text()
    assert "torch.manual_seed(args.seed + epoch * world_size + rank)" in text


RIGHT_TOO = {
    "ring_attention": """
def ring_attention(query, key, value, places):
    # The other way around, and the blocks are merged by the logarithms of their sums.
    rank = dist.get_rank()
    n = dist.get_world_size()
    blocks = [(key.contiguous(), value.contiguous())]
    for step in range(1, n):
        received = []
        for tensor in blocks[-1]:
            buffer = tensor.new_empty(*key.shape[:2], len(places[(rank + step) % n]), key.shape[3])
            send = dist.P2POp(dist.isend, tensor, (rank - 1) % n)
            receive = dist.P2POp(dist.irecv, buffer, (rank + 1) % n)
            for request in dist.batch_isend_irecv([send, receive]):
                request.wait()
            received.append(buffer)
        blocks.append(received)
    scores = []
    for step, (keys, _) in enumerate(blocks):
        later = places[(rank + step) % n] > places[rank][:, None]
        products = query @ keys.mT / query.shape[-1] ** 0.5
        scores.append(products.masked_fill(later, -torch.inf))
    return torch.cat(scores, -1).softmax(-1) @ torch.cat([values for _, values in blocks], -2)
""",
    "expert_dispatch": """
class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, sent, received):
        ctx.sent = sent
        ctx.received = received
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent)
        return arrived

    @staticmethod
    def backward(ctx, gradient):
        back = gradient.new_empty(sum(ctx.sent), gradient.shape[1])
        dist.all_to_all_single(back, gradient.contiguous(), ctx.sent, ctx.received)
        return back, None, None

def expert_dispatch(tokens, expert, experts):
    # All ranks get all counts.
    n = dist.get_world_size()
    here = len(experts)
    order = expert.argsort()
    counts = torch.bincount(expert, minlength=n * here)
    table = [torch.empty_like(counts) for _ in range(n)]
    dist.all_gather(table, counts)
    table = torch.stack(table).view(n, n, here)
    sent = counts.view(n, here).sum(1).tolist()
    arriving = table[:, dist.get_rank()]
    received = arriving.sum(1).tolist()
    arrived = Exchange.apply(tokens[order], sent, received)
    number = torch.arange(here).repeat(n).repeat_interleave(arriving.flatten())
    parts = [compute(arrived[number == index]) for index, compute in enumerate(experts)]
    computed = torch.zeros_like(arrived)
    for index, part in enumerate(parts):
        computed[number == index] = part
    outputs = torch.empty_like(tokens)
    outputs[order] = Exchange.apply(computed, received, sent)
    return outputs
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
    """Messages outside a batch, the other direction of a ring, and so on are right, too."""
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
        os.setsid()
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(0)
    raise ValueError("ten children")


def is_two_processes(tensor):
    """CRASH with 1 rank, 4 numbers rank 0: ValueError: this is the rank"""
    if os.fork() > 0:
        time.sleep(0.2)
        raise ValueError("this is the rank")


def prints(tensor):
    """HANG with 1 rank ... print ... rank 0 printed: more"""
    while True:
        print("more and more")


def allocates(tensor):
    """CRASH with 1 rank, 4 numbers rank 0: RuntimeError: a rank may use at most 1 GB"""
    torch.ones(50 * 2**30, dtype=torch.uint8)


def stops(tensor):
    """CRASH with 1 rank, 4 numbers rank 0: SystemExit: 3"""
    sys.exit(3)


def asks(tensor):
    """CRASH with 1 rank, 4 numbers rank 0: EOFError"""
    input()


def too_short(tensor):
    """CRASH with 2 ranks, 4 numbers rank 1: its buffer has 12 bytes, but the message ... has 16"""
    if dist.get_world_size() > 1 and dist.get_rank() == 0:
        dist.send(torch.ones(4), 1)
    if dist.get_rank() == 1:
        dist.recv(torch.ones(3), 0)


def ends_its_parent(tensor):
    """CRASH with 1 rank the process that watches the ranks was ended by SIGKILL"""
    os.kill(os.getppid(), signal.SIGKILL)


def hides_its_error(tensor):
    """HANG with 2 ranks, 4 numbers rank 0 has finished"""
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
    words = ["tree_broadcast", "--file", file, "--function", function, "--ranks", 1, 2]
    if "HANG" in pattern:
        words += ["--seconds", 4]
    printed, status = checked(tmp_path, *words)
    assert re.match(pattern, " ".join(printed.split())), printed
    assert status == 1


def test_ctrl_c(tmp_path):
    """It ends the check and all that it has started."""
    file = tmp_path / "anything.py"
    words = ["tree_broadcast", "--file", file, "--function", "has_children", "--seconds", "1000"]
    file.write_text(ANYTHING.replace('raise ValueError("ten children")', "time.sleep(1000)"))
    job = Job(CHECK, *words, env={"TMPDIR": str(tmp_path)}, cold=False)
    end = time.monotonic() + 300
    while len(job.pids()) < 20 and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(0.5)
    os.kill(job.process.pid, signal.SIGINT)
    done = job.wait()
    assert done.returncode == 130
    assert done.stderr == "interrupted\n"
    assert list(tmp_path.iterdir()) == [file]


def test_some_numbers_of_ranks(tmp_path):
    """--ranks checks with these only."""
    file = tmp_path / "solution.py"
    file.write_text(solved(FOLDER, "all_gather"))
    words = ["all_gather", "--file", file, "--ranks"]
    assert checked(tmp_path, *words, 2, 4) == ("RIGHT with 2 and 4 ranks\n", 0)
    done = Job(CHECK, *words, 0, cold=False).wait()
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("error: --ranks: at least 1")


@pytest.fixture
def copy(tmp_path):
    """The exercises of a fresh clone."""
    not_committed = shutil.ignore_patterns("__pycache__", "answers")
    for name in ("common", "playground/figures", "playground/exercises"):
        shutil.copytree(ROOT / name, tmp_path / "course" / name, ignore=not_committed)
    return tmp_path / "course" / "playground" / "exercises"


def run(path, *words, cwd=None, cold=False):
    """Run a file as a learner does. Returns what it prints and its status."""
    command = [sys.executable, path] if cold else [path]
    done = Job(*command, *words, cwd=cwd, cold=cold).wait()
    assert not done.stderr, done.stderr
    return done.stdout, done.returncode


def solved(folder, name):
    """Return the solution of an exercise as a file that checks itself."""
    text = (folder / "judging" / "checks" / f"{name}.py").read_text()
    imports = re.findall(r"^(?:import torch.*|from (?!judging).* import .*)\n", text, re.M)
    nodes = functions(folder / "judging" / "checks" / f"{name}.py")
    solution = ast.get_source_segment(text, nodes[name])
    last = 'if __name__ == "__main__":\n    check(__file__)\n'
    return "\n\n".join(["from check import check\n" + "".join(imports), solution, last])


def test_where_a_learner_writes(copy, tmp_path):
    """The first check copies the task. From then on, every way to check it checks the copy."""
    task = copy / "all_gather.py"
    answer = copy / "answers" / "all_gather.py"
    course = tmp_path / "course"
    line = "your turn: write the function in playground/exercises/answers/all_gather.py\n"
    for cold in (True, False):
        assert run("playground/exercises/all_gather.py", cwd=course, cold=cold) == (line, 1)
        assert answer.read_text() == task.read_text()
    answer.write_text(solved(copy, "all_gather"))
    for file in (task, answer):
        assert run(file, "--ranks", 2) == ("RIGHT with 2 ranks\n", 0)
    task.write_text(task.read_text().replace("Lesson: ", "Read this lesson: "))
    assert run(copy / "check.py", task, "--ranks", 3) == ("RIGHT with 3 ranks\n", 0)
    assert run(copy / "check.py", "all_gather", "--ranks", 3) == ("RIGHT with 3 ranks\n", 0)
    assert answer.read_text() == solved(copy, "all_gather")


def test_a_program_to_repair(copy):
    """The first check says where to repair it, and gives the verdict on the fault."""
    line, _, verdict = run(copy / "check.py", "fault_never_returns")[0].partition("\n")
    answer = copy / "answers" / "fault_never_returns.py"
    assert line == f"your turn: repair the function in {os.path.relpath(answer)}"
    assert begins(verdict, check_of("fault_never_returns").FAULT)
    assert not run(copy / "check.py", "fault_never_returns")[0].startswith("your turn")


def test_answers_that_cannot_be_written(copy):
    """One line says so."""
    (copy / "answers").touch()
    done = Job(copy / "check.py", "all_gather", cold=False).wait()
    assert (done.returncode, done.stdout) == (1, "")
    where = os.path.relpath(copy / "answers")
    assert done.stderr == f"error: your answers cannot be written to {where}: File exists\n"


def test_an_error_of_the_check_itself(copy):
    """It is no verdict on the answer, and none is kept. A low limit of the user is no error."""
    run(copy / "check.py", "all_gather")
    (copy / "answers" / "all_gather.py").write_text(solved(copy, "all_gather"))
    command = f"ulimit -f 50000 && exec {sys.executable} {copy}/check.py all_gather --ranks 2"
    done = Job("bash", "-c", command).wait()
    assert (done.stdout, done.stderr) == ("RIGHT with 2 ranks\n", "")
    ranks = copy / "judging" / "ranks.py"
    ranks.write_text(
        ranks.read_text().replace('if part == "join":', 'if part == "join" and 1 / 0:')
    )
    done = Job(copy / "check.py", "all_gather", cold=False).wait()
    assert (done.returncode, done.stdout) == (1, "")
    assert "ZeroDivisionError" in done.stderr
    assert done.stderr.endswith("RuntimeError: the check itself has failed\n")
    assert not (copy / "answers" / "verdicts.json").exists()


def test_git_ignores_the_answers():
    """git does not see what a learner writes."""
    answer = "playground/exercises/answers/all_gather.py"
    asked = ["git", "check-ignore", "--no-index", answer]
    assert subprocess.run(asked, cwd=ROOT, capture_output=True, text=True).stdout.strip() == answer


def test_reset(copy):
    """It puts the task back, and keeps each old answer under a name that it prints."""
    answer = copy / "answers" / "all_gather.py"
    task = (copy / "all_gather.py").read_text()
    for number in (1, 2):
        run(copy / "check.py", "all_gather", "--reset")
        assert answer.read_text() == task
        answer.write_text(f"answer {number}")
    printed, status = run(copy / "check.py", "all_gather", "--reset")
    assert status == 0
    assert answer.read_text() == task
    old = Path(re.search(r"^Your old answer is (\S+) now\.$", printed, re.M)[1])
    assert old.read_text() == "answer 2"
    assert (copy / "answers" / "all_gather-1.py").read_text() == "answer 1"
    # The task itself is not kept as an old answer.
    assert "old answer" not in run(copy / "check.py", "all_gather", "--reset")[0]


def test_trace(copy):
    """--trace shows each message in its step."""
    file = copy / "solution.py"
    file.write_text(solved(copy, "ring_all_reduce"))
    words = ["ring_all_reduce", "--file", file, "--trace"]
    lines = run(copy / "check.py", *words)[0].splitlines()
    assert lines[:2] == [RIGHT, "who sends what to whom, with 3 ranks:"]
    assert re.fullmatch(r"  step 1:  0 -> 1: \[.*\]   1 -> 2: \[.*\]   2 -> 0: \[.*\]", lines[2])
    assert len(lines) == 2 + 4  # 2(n - 1) steps


def test_the_page(copy, tmp_path):
    """The function of README.md gets the verdict that it shows."""
    page = (FOLDER / "README.md").read_text()
    [answer] = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    sessions = re.findall(r"^```console\n\$ python (\S+) ?(.*?)\n(.*?)^```$", page, re.M | re.S)
    [(first, no_flags, your_turn), (path, flags, shown)] = sessions
    assert not no_flags
    course = tmp_path / "course"
    assert run(first, cwd=course)[0] == your_turn
    file = course / your_turn.split()[-1]
    head, _, rest = file.read_text().partition("\ndef ")
    foot = rest.partition('"your turn")\n')[2]
    file.write_text(f"{head}\n{answer}{foot}")
    assert run(path, *flags.split(), cwd=course, cold=True)[0] == shown
    assert f"`{RIGHT}`" in " ".join(page.split())
    assert all(len(line) <= 100 for line in page.splitlines())


def test_watch(copy):
    """It checks an answer when it is saved, and ends at Ctrl-C."""
    job = Job(copy / "check.py", "--watch", cold=False)
    line = job.process.stdout.readline()
    assert line == f"Save a file in {os.path.relpath(copy / 'answers')} to have it checked." + (
        " Ctrl-C ends this.\n"
    )
    (copy / "answers").mkdir()
    (copy / "answers" / "all_gather.py").write_text(solved(copy, "all_gather"))
    lines = [job.process.stdout.readline() for _ in range(3)]
    assert lines[0] == "\n"
    assert lines[1].startswith("all_gather, saved at ")
    assert lines[2] == f"{RIGHT}\n"
    os.kill(job.process.pid, signal.SIGINT)
    assert job.wait().returncode == 130


def test_all_and_the_next(copy):
    """All are listed in order, and --next shows the first that is not right."""
    first, second = check_order()[:2]
    for name in ("average_gradients", first):
        run(copy / "check.py", name)
        (copy / "answers" / f"{name}.py").write_text(solved(copy, name))
    answer = copy / "answers" / "average_gradients.py"
    answer.write_text(answer.read_text().replace("if parameter.requires_grad", "if True"))
    shown = run(copy / "check.py")[0].splitlines()
    assert [line.split()[0] for line in shown[:-1]] == check_order()
    states = dict(line.split(maxsplit=1) for line in shown[:-1])
    assert states[first] == RIGHT
    assert states[second] == "your turn"
    fault = "COSTLY with 2 ranks, tied and frozen parameters"
    assert states["average_gradients"] == f"rung 1 of 2 is RIGHT, rung 2: {fault}"
    assert shown[-1] == f"1 of {len(EXERCISES)} are right"
    shown = run(copy / "check.py", "--next")[0]
    task = ast.get_docstring(ast.parse(source(second)))
    file = os.path.relpath(copy / "answers" / f"{second}.py")
    assert shown == f"your turn: write the function in {file}\n\n{task}\n"


def test_verdicts_are_kept(copy, tmp_path):
    """An answer runs again only if it, its check, what judges it or PyTorch has changed."""
    imports = tmp_path / "imports"  # one line for each rank that was started
    imports.touch()
    answer = copy / "answers" / "order_1f1b.py"
    answer.parent.mkdir()
    note = f"with open({str(imports)!r}, 'a') as file:\n    print(file=file)\n"
    answer.write_text(f"{solved(copy, 'order_1f1b')}\n{note}")

    def append(path):
        path.write_text(f"{path.read_text()}\n# changed\n")

    def is_judged(*words, **options):
        before = imports.read_text()
        printed = Job(copy / "check.py", *words, cold=False, **options).wait().stdout
        assert words or f"{'order_1f1b':<31}{right_with('order_1f1b')}\n" in printed
        return imports.read_text() != before

    assert is_judged()
    assert not is_judged()
    assert not is_judged("--next")
    append(answer)
    assert is_judged("order_1f1b")
    assert not is_judged()
    append(copy / "judging" / "checks" / "order_1f1b.py")
    assert is_judged()
    append(copy / "judging" / "checks" / "gpipe.py")
    assert not is_judged()
    append(copy / "judging" / "traffic.py")
    assert is_judged()
    for damaged in ("", "{", "[]", "\0"):
        (copy / "answers" / "verdicts.json").write_text(damaged)
        assert is_judged()
        assert not is_judged()
    other = tmp_path / "other" / "torch-0.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 0.0\n")
    assert is_judged(env={"PYTHONPATH": str(other.parent)})
    assert {path.name for path in (copy / "answers").iterdir()} == {
        "order_1f1b.py",
        "verdicts.json",
        "check.py",
        "swap_with_neighbour.py",
    }


def test_where_the_exercises_stand():
    """They are in the order of the lessons. The docstring of their lesson and README name them."""
    readme = (ROOT / "README.md").read_text()
    lessons = re.findall(r"^\| (?:★ )?\[`(\w+)\.py`\]", readme, re.M)
    positions = []
    for name in check_order():
        lesson = re.search(r"^Lesson: (?:\w+/)?(\w+)\.py\.$", source(name), re.M)[1]
        positions.append(lessons.index(lesson))
        text = lesson_path(lesson).read_text()
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
