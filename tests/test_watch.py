"""playground/tools/watch.py in front of scripts: what it shows, and that it changes nothing."""

import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from unittest import mock

import psutil
import pytest
import stacks
import watch
from launch import DIGITS, Job, Lesson, epochs, free_port, one_process, ranks, run
from lessons import ROOT, lesson_path
from nodes import need, read_until

from watch_ranks import observer, report
from watch_ranks.advice import advice_on

PAGE = (ROOT / "playground/pages/watching.md").read_text()
WATCHED = ROOT / "tests" / "programs" / "watched.py"
ODD = ROOT / "tests" / "programs" / "odd.py"
STARTS = ROOT / "tests" / "programs" / "starts.py"
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
PARAMETERS = 4 * 59_210  # bytes of those of the MLP
HALF = PARAMETERS // 2
HIDDEN = 4 * 128 * 64  # bytes of a hidden layer of a batch
LANGUAGE = 158_336  # those of the language model's parameters
TOKENS = 4 * 12 * 64 * 32  # of the activations of half of the tokens
WITHOUT_A_FUNCTION = """# \xe9
import sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
for step in range(4 - int(sys.argv[1]) * dist.get_rank()):
    dist.all_reduce(torch.ones(4 * len("\xe9")))
dist.barrier()
"""
IN_A_NOTEBOOK = """
import runpy, signal, sys
import torch.multiprocessing as mp
def state():
    return mp.spawn, mp.start_processes, signal.getsignal(signal.SIGINT)
before = state()
runpy.run_path(sys.argv.pop(1), run_name="__main__")
assert state() == before
"""
# What each rank gives to its calls in a step, and in how many calls.
GIVEN = {
    "manual_data_parallel": [("all_reduce", 8, PARAMETERS)],
    "manual_fully_sharded": [("all_gather", 8, PARAMETERS), ("reduce_scatter", 4, PARAMETERS)],
    "fully_sharded_data_parallel": [
        ("all_gather", 4, HALF),  # in forward()
        ("all_gather", 4, HALF),  # in backward()
        ("reduce_scatter", 4, PARAMETERS),
    ],
    "pipeline_parallel": [("recv", 8, HIDDEN), ("send", 8, HIDDEN)],
    # The outputs of both pairs, and the gradient of the input of the second one.
    "tensor_parallel": [("all_reduce", 3, 4 * 128 * (64 + 10 + 64))],
    # The same for half of the batch, and FSDP's messages, which are halves of halves.
    "hybrid_parallel": [
        ("all_gather", 4, HALF // 2 + 74),  # what is not split: the biases of the second layers
        ("all_gather", 4, HALF // 2 + 74),
        ("all_reduce", 1, 4 * 64 * 64),
        ("all_reduce", 2, 4 * 64 * (64 + 10)),
        ("reduce_scatter", 4, HALF + 2 * 74),
    ],
    # In two blocks and both directions: queries, outputs, and half as many keys and values.
    "ulysses": [("all_to_all", 16, 12 * TOKENS), ("all_reduce", 1, LANGUAGE)],
    "context_parallel": [
        ("all_gather", 2, 2 * TOKENS),
        ("reduce_scatter", 2, 4 * TOKENS),
        ("all_reduce", 1, LANGUAGE),
    ],
}


@pytest.mark.parametrize("lesson", GIVEN)
def test_messages_of_a_lesson(lesson):
    """The table has each call of a step, its group and its bytes, and what a rank holds."""
    flags, settings = (*DIGITS, "--epochs", 1), {}
    if lesson in ("ulysses", "context_parallel"):
        flags, settings = ("--batch_size", 12, "--width", 32, "--epochs", 1), {"DOCUMENTS": "30"}
    processes = 4 if lesson == "hybrid_parallel" else 2
    done = run("watch", lesson_path(lesson), *flags, processes=processes, env=settings)
    row = r"^all    (\w+) +2(?: \w+)? +(\d+) +([\d,]+) +\S*\d+: \S"
    rows = re.findall(row, done.stdout, re.M)
    given = [(kind, int(count), int(size.replace(",", ""))) for kind, count, size in rows]
    assert sorted(given) == sorted(GIVEN[lesson])
    # Of parameters and of their gradients. A pipeline's ranks hold different parts.
    held = re.findall(r"^(?:all|[01]) +([\d,]+) +\1 +[\d,]+$", done.stdout, re.M)
    both = [int(size.replace(",", "")) for size in held]
    if lesson == "pipeline_parallel":
        assert len(both) == 2 and sum(both) == PARAMETERS
    elif "sharded" in lesson:
        assert both == [HALF]
    elif lesson == "manual_data_parallel":
        assert both == [PARAMETERS]


def test_who_waits_for_whom(tmp_path):
    """Rank 0 waits for rank 1, which is slow. Both lines are shown, also over time."""
    trace = tmp_path / "trace.json"
    done = Job(*TORCHRUN, 2, lesson_path("watch"), "--trace", trace, WATCHED, "slow").wait()
    assert done.returncode == 0, done.stderr
    assert "watch: watched.py, step " in done.stdout
    longest, meanwhile = done.stdout.partition("who waits for whom")[2].splitlines()[1:3]
    assert re.fullmatch(
        r"rank 0 waits [\d.]+ ms for rank 1 in all_reduce, \d+: loss\.backward\(\)", longest
    )
    assert re.fullmatch(r"    meanwhile rank 1 is [\d.]+ ms in \d+: time\.sleep\(0\.2\)", meanwhile)
    letters = dict(re.findall(r"^rank (\d)  \|(.*)\|$", done.stdout, re.M))
    assert letters["0"].count("1") > 35 > letters["1"].count("0")  # of 70
    events = [each for each in json.loads(trace.read_text())["traceEvents"] if each["ph"] == "X"]
    of_rank = [{each["name"] for each in events if each["pid"] == rank} for rank in range(2)]
    assert "for 1, all_reduce" in of_rank[0] and meanwhile.partition(" ms in ")[2] in of_rank[1]


@pytest.mark.parametrize("gpu", [False, True])
def test_no_line_of_the_script_comes_between(gpu, tmp_path, monkeypatch):
    """All tables are one text for the terminal, to which the ranks write, too. A GPU has no times.

    The CPU's times would say that no rank waits.
    """
    empty = {"calls": [], "noted": [], "lines": [], "borders": [], "held": {}, "part": "all of it"}
    records = []
    for rank in range(2):
        record = empty | {"script": str(WATCHED), "rank": rank, "computing": [[0, 5000]]}
        record["gpu"] = gpu
        records.append(tmp_path / f"{rank}.record")
        records[-1].write_text(json.dumps(record))
    terminal = mock.Mock()
    monkeypatch.setattr(sys, "stdout", terminal)
    report.show_records(records, "")
    [text] = filter(None, [call.args[0] for call in terminal.write.call_args_list])
    assert text.startswith("\nwatch: watched.py, all of it, 5.00 ms\n")
    if gpu:
        assert text.endswith("profile_steps.py shows them.\n") and "waits" not in text
    else:
        assert f"\nrank 1  |{'c' * 70}|\n" in text and text.endswith("long for another one.\n")


def waits(page, out):
    """Return the rows of who waits for whom in a page, and all rows of an output, without times."""
    shown = re.search(r"^    who waits for whom.*\n((?:    .*\n)+)", page, re.M)[1]
    without_times = [re.sub(r"[\d.]+ ms", "", text) for text in (shown, out)]
    return [{row.strip() for row in text.splitlines()} for text in without_times]


def test_the_waits_of_readme():
    """The page shows who waits for whom in a lesson without an optimizer, and at which lines."""
    done = run("watch", lesson_path("blocking_p2p"), "--device", "cpu")
    rows, printed = waits(PAGE, done.stdout)
    assert len(rows) == 4 and rows <= printed


def test_few_steps():
    """If there are too few steps to leave out the first ones, it shows what came before them."""
    done = run("watch", WATCHED, "few")
    assert "watch: watched.py, until its first step, because it has fewer than 8" in done.stdout
    assert re.search(r"^all    all_reduce +3 +1 +144 +\d+: loss\.backward\(\)$", done.stdout, re.M)


def test_a_script_ends_as_it_does_without():
    """Its flags, its output, its errors and its status are its own."""
    flags = (*DIGITS, "--epochs", 2)
    done = run("watch", "--hang", 9, lesson_path("single_gpu"), *flags)
    assert done.stderr == ""
    assert epochs(done.stdout) == one_process(*flags)
    done = run("watch", lesson_path("single_gpu"), "--lr", "x", status=2)
    assert done.stderr.splitlines()[-1].startswith("single_gpu.py: error: argument --lr: ")
    command = (IN_A_NOTEBOOK, lesson_path("watch"), "--hang", 9, WATCHED, "few")
    done = Job(sys.executable, "-c", *command).wait()
    assert done.returncode == 0, done.stderr
    done = run("watch", WATCHED, "fails", status=1)
    assert "ValueError: rank 1 fails" in done.stderr
    assert "observer.py" not in done.stderr and "troubleshooting" not in done.stderr
    assert "No rank waits long" not in done.stdout
    done = run("watch", WATCHED, "killed", status=1)  # no process is left
    assert "SIGKILL" in done.stderr


def test_advice_on_an_error(tmp_path):
    """The rows of troubleshooting.md whose messages stand in an error come last, in its note."""
    script = tmp_path / "script.py"
    error = "the server socket cannot listen (errno: 98 - Address already in use)"
    script.write_text(f"raise RuntimeError({error!r})\n")
    done = run("watch", script, status=1)
    *_, error_line, last = done.stderr.splitlines()
    assert error_line == f"RuntimeError: {error}"
    assert last.startswith("watch: troubleshooting.md on `Address already in use`: another program")
    assert not advice_on("TypeError: load_state_dict() has no argument fully_shard")
    [row] = advice_on("traceback : Signal 9 (SIGKILL) received by PID 4242")
    assert "memory" in row
    [row] = advice_on("SignalException: Process 4242 got signal: 15")
    assert "scancel" in row  # and not the row of signal 1
    several = "Too many open files, No space left on device, Connection refused, is damaged"
    assert ["`No space" in row or "`Bus" in row for row in advice_on(several)] == [True, 0, 0]


ROW = r"^all    all_reduce +2 +1 +144 +\d+: model\(torch"
ENDED = r"\(process \d+\) has ended"
EXIT = rf"rank 1 {ENDED} by SystemExit: 5\n(    line .*\n)*    line .*os\._exit\(5\)"


@pytest.mark.parametrize(
    ("what", "out", "err"),
    [
        ("thread", ROW, "^$"),
        ("execs", ROW, "^$"),
        ("goes_on", ROW, "^$"),
        ("compiled", f"(?s)graphs: 1.*{ROW}|{ROW}.*graphs: 1", "^$"),
        ("profiles", "(?s)adds: 2.*nothing is recorded: the script uses the profiler", "^$"),
        ("others", r"\n\(8 calls of other threads are not shown\.\)\n", "^$"),
        ("exits", "", f"1 did not end well(?s:.*){EXIT}"),
        ("exits_in_thread", "", EXIT),
        ("ended", "", rf"rank 0 {ENDED}\nrank 1 {ENDED} without a word"),
    ],
)
def test_what_few_scripts_do(what, out, err):
    """Threads that train or send, exec, profilers, compilers and exits: what it says is true."""
    jobs = ranks("watch", ODD, what, cold=what in ("execs", "goes_on"))
    done = [job.wait() for job in jobs]
    printed, errors = done[0].stdout, "".join(each.stderr for each in done)
    assert re.search(out, printed, re.M), printed + errors
    assert re.search(err, errors.strip()), errors
    assert any(each.returncode for each in done) == (err != "^$")


def test_a_thread_that_hangs(tmp_path):
    """The line of each thread is shown, and which of two groups with the same ranks it is."""
    first, second = ranks("watch", "--hang", 3, ODD, "two_groups", env={"TMPDIR": str(tmp_path)})
    shown = places(report_of(first, 2))
    second.kill()
    assert "of ranks [0, 1] (b) all_reduce (3) not done" in shown[0]
    assert "    another thread: line " in shown[1] and " in wait: time.sleep(9999)\n" in shown[1]


def test_a_link_is_run_as_python_runs_it(tmp_path):
    """Its own name is __file__, and argv has what was typed."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "script.py").write_text(
        "import sys\nprint(__file__, sys.argv, sys.path[0])"
    )
    (tmp_path / "link.py").symlink_to(tmp_path / "real" / "script.py")
    plain = Job(sys.executable, "link.py", "a", cwd=tmp_path).wait()
    for words in (["watch", "--hang", 9], ["first_difference", "note", tmp_path / "notes"]):
        tool = lesson_path(words.pop(0))
        done = Job(sys.executable, tool, *words, "link.py", "a", cwd=tmp_path).wait()
        assert done.stdout == plain.stdout


def test_what_pip_installs(tmp_path):
    """In the order of a wheel, the tools run, too, and a script may have modules with their names.

    The script finds nothing of them.
    """
    tools, site = ROOT / "playground" / "tools", tmp_path / "site"
    made = tomllib.loads((tools / "pyproject.toml").read_text())
    wheel = made["tool"]["hatch"]["build"]["targets"]["wheel"]
    [package] = wheel["packages"]
    shutil.copytree(tools / package, site / package)
    for source, target in wheel["force-include"].items():
        shutil.copy(tools / source, site / target)
    script = tmp_path / "own" / "script.py"
    script.parent.mkdir()
    for name in ("watching", "instruments", "messages", "record", "stacks"):
        (script.parent / f"{name}.py").write_text("raise SystemExit('not mine')\n")
    lines = ["import sys", "assert not any(each.endswith('watch_ranks') for each in sys.path)"]
    lines += [f"sys.path.append({str(STARTS.parent)!r})", "import starts", "starts.main()"]
    script.write_text("\n".join(lines))
    for words in (["watch_ranks"], ["watch_ranks.first_difference", "note", "notes"]):
        command = (sys.executable, "-m", *words, script, "fork", "right", free_port())
        done = Job(*command, cwd=tmp_path, env={"PYTHONPATH": str(site)}).wait()
        assert done.returncode == 0, done.stderr
        assert "who waits for whom" in done.stdout or len(words) > 1
    assert (tmp_path / "notes" / "rank1.jsonl").exists()


def test_which_processes_are_ranks(tmp_path):
    """Rank 0 is one even if it has started the others, as below Lightning."""
    noted = {"called": True, "joined": True, "end": "well", "since": 0}
    for rank, parent in enumerate((1, 2**30)):
        notes = noted | {"pid": 2**30 + rank, "rank": rank, "parent": parent}
        (tmp_path / f"{2**30 + rank}.json").write_text(json.dumps(notes))
        (tmp_path / f"{2**30 + rank}.stack").touch()
    assert [each["rank"] for each in observer.read_notes(tmp_path, Counter())] == [0, 1]


def test_the_rank_that_crashed_comes_first(monkeypatch, capsys):
    """The others have errors because of it."""
    noted = {"size": 2, "stack": "", "calls": [], "alive": False, "end": "", "gone": True}
    noted |= {"lost": False, "at": 0}
    both = [noted | {"rank": rank, "pid": rank} for rank in range(2)]
    monkeypatch.setattr(observer, "ask_stacks", lambda _: both[1].update(crash="Aborted"))
    observer.show_ranks(both)
    reason, first, _ = capsys.readouterr().err.splitlines()
    assert reason.startswith("watch: rank 1 did not end well.") and first.startswith("rank 1 ")


def test_a_shell_in_front_of_a_rank(monkeypatch):
    """It has the same variables, and is older. stacks.py asks Python."""
    both = []
    for pid, program in ((11, "/bin/bash"), (12, "/usr/bin/python3.11")):
        each = mock.Mock(spec=psutil.Process, pid=pid, info={"exe": program})
        each.environ.return_value, each.ppid.return_value = {"RANK": "0"}, pid - 1
        both.append(each)
    monkeypatch.setattr(psutil, "process_iter", lambda names: both)
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: process.pid)
    assert [each.pid for each in stacks.ranks().values()] == [12]


WAITS = """import time
import torch.distributed as dist
dist.init_process_group("gloo")
print("waits", flush=True)
time.sleep(3600)
"""


def test_the_ranks_that_stacks_finds(tmp_path):
    """They are neither torchrun, which has a RANK of its own here, nor the observer of watch.py."""
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    job = Job(*TORCHRUN, 2, ROOT / "playground/tools/watch.py", script, env={"RANK": "0"})
    read_until(job, "^waits$", 2)
    found = [(rank, each) for (rank, *_), each in stacks.ranks().items() if each.pid in job.pids()]
    assert sorted(rank for rank, _ in found) == ["0", "1"]
    for _, process in found:
        assert str(script) in process.cmdline()
        assert not {"torch.distributed.run", "detached"} & {*process.cmdline()}
    assert len(job.pids()) > 3  # there are others


def test_a_folder_that_others_can_write_to(tmp_path, monkeypatch):
    """Ranks of torchrun meet in a folder whose name can be guessed. Its own only is written to."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    own = watch.folder_of_node()
    assert watch.folder_of_node() == own  # the next rank finds it
    own.chmod(0o777)
    with pytest.raises(SystemExit, match="others can write to"):
        watch.folder_of_node()
    own.rename(tmp_path / "elsewhere")
    own.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SystemExit, match="others can write to"):
        watch.folder_of_node()


def test_what_cannot_be_shown():
    """A line says so, before anything starts."""
    for flags, reason in (
        (("nowhere.py",), "there is no script"),
        (("-m", "no.where"), "there is no script no.where"),
        (("--trace", "/nowhere/trace.json", WATCHED), "cannot write /nowhere/trace.json"),
        (("--hang", 5, "--trace", "trace.json", WATCHED), "with --hang or --nccl, nothing"),
    ):
        done = run("watch", *flags, status=2)
        assert f"watch.py: error: {reason}" in done.stderr.splitlines()[-1]
        assert not done.stdout


@pytest.mark.parametrize("how", ["fork", "forkserver", "os.fork", "subprocess", "mpirun"])
def test_ways_to_start(how):
    """Each process that joins a group is a rank. What has only started them is none."""
    command = (sys.executable, lesson_path("watch"), STARTS, how, "right", free_port())
    if how == "mpirun":
        need("mpirun.openmpi")
        mpirun = ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", 2)
        command = (*mpirun, *command)
    done = Job(*command, env={"NO_COLOR": "1"}).wait()
    assert done.returncode == 0, done.stderr
    row = r"^all    all_reduce +2 +1 +4,920 +\d+: loss\.backward\(\)$"
    assert re.search(row, done.stdout, re.M)
    assert re.search(r"^rank 1  \|", done.stdout, re.M) and "Nothing is recorded" not in done.stdout
    assert "watch: " not in done.stderr


def test_nothing_to_record(tmp_path):
    """A line says so. An error of the tool itself is shown, and does not reach the script."""
    script = tmp_path / "script.py"
    script.write_text("print('done')\n")
    done = run("watch", script)
    words = "watch: nothing is recorded: it takes a process that joins a group."
    assert {*done.stdout.splitlines()} == {"done", words}
    lines = ["import starts, sys, torch", "torch.profiler.profile.start = None"]
    lines.append(f"starts.be_a_rank(int(sys.argv[1]), 'right', {free_port()})")
    script.write_text("\n".join([*lines, "print('done')"]))
    path = {"PYTHONPATH": str(STARTS.parent)}
    for job in [Lesson("watch", script, rank, env=path) for rank in range(2)]:
        done = job.wait(60)
        assert done.returncode == 0 and "done" in done.stdout.splitlines()
        assert "notes nothing more, and continues: TypeError" in done.stderr


def test_a_module(tmp_path, monkeypatch):
    """A module is run as by python -m."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "other.py").write_text("NUMBER = 5\n")
    (tmp_path / "package" / "main.py").write_text("from .other import NUMBER\nprint(NUMBER)\n")
    command = (sys.executable, lesson_path("watch"), "--hang", 9, "-m", "package.main")
    done = Job(*command, env={"PYTHONPATH": str(tmp_path)}).wait()
    assert (done.stdout, done.stderr) == ("5\n", "")


@pytest.mark.parametrize("what", ["left out", "killed", "fewer"])
def test_a_crash(what):
    """It shows where each rank was when one of them has crashed, was killed, or has ended early."""
    done = run("watch", "--hang", 30, STARTS, "fork", what, free_port())
    report = done.stderr.partition("watch: rank ")[2]
    assert "\nrank 1 " in report, done.stderr
    rank_0, rank_1 = report.split("\nrank 1 ")
    if what == "left out":
        assert " has crashed: Aborted\n" in rank_0
        assert re.search(r"line \d+ in train: dist\.all_reduce\(torch\.ones\(2\)\)", rank_0)
    elif what == "killed":
        assert " has ended without a word" in rank_1
    else:
        assert " has ended by RuntimeError: " in rank_0 and " has ended\n" in rank_1
    if what != "left out":
        assert re.search(r"line \d+ in train: loss\.backward\(\)", rank_0)


def test_a_late_observer(tmp_path):
    """It shows the ranks even if all of them have ended before it sees that one has failed."""
    command = (sys.executable, lesson_path("watch"), "--hang", 30, STARTS, "fork", "left out")
    job = Job(*command, free_port(), env={"TMPDIR": str(tmp_path)})
    observers = []
    while not observers:
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if words[-1:] == ["detached"] and any(str(tmp_path) in word for word in words):
                observers.append(process)
    observers[0].suspend()
    while len(list(tmp_path.glob("*/*.stack"))) < 3 or len(job.pids()) > 2:
        time.sleep(0.1)
    observers[0].resume()
    done = job.wait()
    assert "watch: rank 0 did not end well." in done.stderr, done.stderr
    assert " has crashed: Aborted\n" in done.stderr and "\nrank 1 " in done.stderr


def places(report):
    """Return the lines that a report shows for each rank."""
    shown = {}
    for heads, rows in re.findall(r"((?:rank \d .*\n)+)((?:    .*\n)+)", report):
        shown |= dict.fromkeys(map(int, re.findall(r"^rank (\d)", heads, re.M)), rows)
    return shown


def report_of(job, count=3):
    """Read stderr until watch.py has reported, and end the job. Returns the report.

    On a busy machine the ranks can need some seconds until they have joined each other in run().
    A report of that is passed over.
    """
    report = ""
    for row in job.process.stderr:
        report = row if row.startswith("watch: ") else report + row
        shown = [rows for rows in places(report).values() if "    now in " in rows]
        joining = re.search(r" in run: dist\.|init_process_group", report)
        if len(shown) == count and not joining:
            break
    time.sleep(0.5)  # it is written at once
    job.kill()
    return report + job.process.stderr.read().partition("watch: ")[0]


def test_a_hang(tmp_path):
    """It shows at which line each rank is, and what it has called last, whatever holds it up."""
    env = {"TMPDIR": str(tmp_path)}  # it is killed, so it leaves its files
    report = report_of(Lesson("watch", "--hang", 5, WATCHED, "apart", env=env))
    assert re.match(r"watch: no progress of rank \d for \d+ s\. The ranks of this node:", report)
    shown = places(report)
    assert "in apart: dist.recv(torch.empty(4), 1)\n    now in recv, " in shown[0]
    assert "last calls: #1 barrier, #2 all_reduce (4)\n" in shown[0]
    assert 'in apart: re.match("(a+)+$"' in shown[1] and "now in match, " in shown[1]
    assert "    last calls" not in shown[1]  # they are old: Python runs no other thread of it
    assert "in apart: for _ in DataLoader(Slow()):\n" in shown[2]
    assert "in __getitem__: time.sleep(999)\n" in shown[2]


def test_a_script_without_a_function(tmp_path):
    """Its own lines are shown, also if its name and its text are not in ASCII, as the locale is.

    Under torchrun, too, one report shows each rank of the node.
    """
    script = tmp_path / "\xfc" / "script.py"
    script.parent.mkdir()
    script.write_text(WITHOUT_A_FUNCTION, encoding="utf-8")
    env = ASCII | {"TMPDIR": str(tmp_path)}
    done = Job(*TORCHRUN, 2, lesson_path("watch"), script, 0, env=env).wait()
    line = re.escape(r'dist.all_reduce(torch.ones(4 * len("\xe9")))')
    assert re.search(rf"^all +all_reduce +2 +4 +64 +7: {line}$", done.stdout, re.M), done.stderr
    command = (*TORCHRUN, 2, lesson_path("watch"), "--hang", 2, script, 1)
    shown = places(report_of(Job(*command, env=env), 2))
    assert re.search(f"^    line 7 in <module>: {line}\n    now in all_reduce", shown[0], re.M)
    assert shown[1].startswith("    line 8 in <module>: dist.barrier()\n    now in barrier")


@pytest.mark.parametrize("to_all", [True, False])
def test_ctrl_c(to_all):
    """At Ctrl-C it shows where the ranks are. The lesson ends as it does without it.

    The signal goes to all processes of a terminal, or only to the first one.
    """
    flags = (*DIGITS, "-g", 2, "--epochs", 10_000)
    job = Lesson("watch", lesson_path("distributed_data_parallel"), *flags)
    read_until(job, r"epoch \d\d+/")  # the tables may stand before it, in the same line
    end = os.killpg if to_all else os.kill
    end(job.process.pid, signal.SIGINT)
    done = job.wait()
    assert done.returncode == 130
    assert done.stderr.startswith("watch: interrupted. The ranks of this node:\n")
    assert len(re.findall(r"^rank [01] \(process \d+\) ", done.stderr, re.M)) == 2
    assert "in train: " in done.stderr


def test_the_hang_of_readme(change, tmp_path):
    """The page shows what a hang in an exercise of collectives.py looks like."""
    reason, rows = re.search(r"^    (watch: .*\n)((?:    .*\n)+)", PAGE, re.M).groups()
    skipping = ("    dist.all_reduce(mine)", "    if rank != 1:\n        dist.all_reduce(mine)")
    path = change("collectives", skipping)
    flags = ("-g", 2, "--timeout", 120, "--device", "cpu")
    job = Lesson("watch", "--hang", 3, path, *flags, env={"TMPDIR": str(tmp_path)})
    report = report_of(job, 2)
    # Which rank is noticed first, and after how long, varies.
    noticed = re.sub(r"rank \d for \d+ s", "rank 0 for 3 s", report)
    assert noticed.startswith(reason)
    # The first words depend on the version of PyTorch. A rank that is forked is still in main().
    plain = r"now in all_gather\w*|distributed_c10d\.py:\d+|all_gather \(\d+\)"
    plain = re.compile(rf"{plain}|    line \d+ in main: .*\n")
    expected = places(plain.sub("", re.sub("^    ", "", rows, flags=re.M)))
    assert places(plain.sub("", report)) == expected
