"""playground/watch.py in front of scripts: what it shows, and that it changes nothing."""

import os
import re
import shutil
import signal
import sys
import time

import pytest
from conftest import DIGITS, ROOT, Job, by_torchrun, epochs, lesson_path, one_process

WATCH = ROOT / "playground" / "watch.py"
HANGING = ROOT / "tests" / "hanging.py"
SLOW = ROOT / "tests" / "slow_rank.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
ALL_REDUCE = "dist.all_reduce(torch.ones(4))"
# For each fault: what stands below rank 1, and below the other ranks.
SHOWN = {
    "early": (("dist.barrier()", "#5 barrier () not done"), (ALL_REDUCE, "#5 all_reduce (4) not")),
    "root": (("dist.barrier()", "#2 barrier () not done"),) * 2,
    "test": (("dist.barrier()", "#9 barrier () not done"),) * 2,
    "peer": (("request.wait()",), ("dist.recv(torch.empty(4), left)", "now in recv, ")),
    "shape": (("#2 all_reduce (5) not done",), ("#2 all_reduce (4), #3 all_reduce (4) not done",)),
    "shard": ((ALL_REDUCE, "#8 all_reduce (4) not done"), ("#8 all_gather (10) not done",)),
    "loader": (("in loader: for ", "in __getitem__: time.sleep(60)"), ("all_reduce(batch)",)),
    "frozen": (('in frozen: re.match("(a+)+$"', "now in match, "), (ALL_REDUCE, "in all_reduce, ")),
}
# What stands below rank 0, if it is not what stands below rank 2.
RANK_0 = {
    "root": ("in root: dist.all_reduce(", "#2 all_reduce (4) not done"),
    "test": ("in test: model(torch.ones(8, 4))", "#9 broadcast (3) not done"),
}


def report_of(job, ranks=3):
    """Read stderr until watch.py has reported. Returns the reason, and what each rank shows.

    On a busy machine the ranks can need some seconds until they have joined each other in run().
    A report of that is passed over.
    """
    shown, heads, ready = {}, [], False
    for row in job.process.stderr:
        head = re.match(r"rank (\d) \(process \d+\) ", row)
        if row.startswith("watch: "):
            line, shown, heads = row, {}, []
        elif head:
            if heads and shown[heads[-1]]:
                heads = []
            heads.append(int(head[1]))
            shown[heads[-1]] = []
        elif row.startswith("    "):
            for rank in heads:
                shown[rank].append(row.rstrip())
        elif ready:
            break
        if not ready and len(shown) == ranks and all(shown.values()):
            ready = not any(" in run: dist." in rows[0] for rows in shown.values())
            if ready:
                time.sleep(0.5)  # it is written at once
                job.kill()
    return line, {rank: "\n".join(rows) for rank, rows in shown.items()}


PARAMETERS = 4 * 59_210  # bytes of those of the MLP
HALF = PARAMETERS // 2
HIDDEN = 4 * 128 * 64  # bytes of a hidden layer of a batch; the last layer has 10 numbers an image
# What each of two ranks gives to its calls in a step, and in how many calls.
GIVEN = {
    "manual_data_parallel": [("all_reduce", 8, PARAMETERS)],
    "sharded_optimizer": [("all_gather", 1, HALF), ("reduce_scatter", 1, PARAMETERS)],
    "fully_sharded_data_parallel": [
        ("all_gather", 4, HALF),  # in forward()
        ("all_gather", 4, HALF),  # in backward()
        ("reduce_scatter", 4, PARAMETERS),
    ],
    "tensor_parallel": [("all_reduce", 1, HIDDEN), ("all_reduce", 2, HIDDEN + HIDDEN * 10 // 64)],
    "pipeline_parallel": [("recv", 8, HIDDEN), ("send", 8, HIDDEN)],
}


@pytest.mark.parametrize("lesson", GIVEN)
def test_messages_of_a_lesson(lesson):
    """The table has each call of a step, its group and its bytes, and what a rank holds."""
    command = (WATCH, lesson_path(lesson), *DIGITS, "--epochs", 1)
    if by_torchrun(lesson):
        done = Job(*TORCHRUN, 2, *command).wait()
    else:
        done = Job(sys.executable, *command, "-g", 2).wait()
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^all    (\w+) +2 +(\d+) +([\d,]+) +\d+: \S", done.stdout, re.M)
    given = [(kind, int(count), int(size.replace(",", ""))) for kind, count, size in rows]
    assert sorted(given) == GIVEN[lesson]
    # Of parameters and of their gradients.
    held = re.findall(r"^(?:all|[01]) +([\d,]+) +\1 +[\d,]+$", done.stdout, re.M)
    both = [int(size.replace(",", "")) for size in held]
    # Below, tensor parallelism replicates 74 biases, and a pipeline's ranks hold different parts.
    whole = {"manual_data_parallel": PARAMETERS, "tensor_parallel": HALF + 4 * 37}
    if lesson == "pipeline_parallel":
        assert sum(both) == PARAMETERS
    else:
        assert both == [whole.get(lesson, HALF)]


@pytest.mark.parametrize("start", [(sys.executable,), (*TORCHRUN, 2)])
def test_who_waits_for_whom(start, tmp_path):
    """Rank 0 waits for rank 1, which is slow. Both lines are shown, also by the page."""
    page = tmp_path / "page.html"
    done = Job(*start, WATCH, "--html", page, SLOW, 12).wait()
    assert done.returncode == 0, done.stderr
    assert "watch: slow_rank.py, step " in done.stdout
    longest, meanwhile = done.stdout.partition("who waits for whom")[2].splitlines()[1:3]
    assert re.fullmatch(
        r"rank 0 waits [\d.]+ ms for rank 1 in all_reduce, \d+: loss\.backward\(\)", longest
    )
    assert re.fullmatch(r"    meanwhile rank 1 is [\d.]+ ms in \d+: time\.sleep\(0\.2\)", meanwhile)
    letters = dict(re.findall(r"^rank (\d)  \|(.*)\|$", done.stdout, re.M))
    assert letters["0"].count("1") > 44 > letters["1"].count("0")  # of 88
    shown = in_browser(page)
    assert f"<span>{longest}</span><span>{meanwhile.strip()}</span>" in shown
    for words in ("waits for rank 1", "rank 0", "rank 1", "27: time.sleep(0.2)"):
        assert re.search(f"<text [^>]*>{re.escape(words)}</text>", shown)


def in_browser(page):
    """Return the elements of a page after its script has run."""
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    if not browser:
        pytest.skip(f"needs one of {', '.join(names)}")
    flags = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={page.parent}/user")
    done = Job(browser, *flags, "--window-size=1300,900", "--dump-dom", page.as_uri()).wait()
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_page_that_cannot_be_written():
    """One line says so, before anything starts."""
    for flags, reason in (
        (("--html", "/nowhere/page.html"), "cannot write /nowhere/page.html"),
        (("--hang", 5, "--html", "page.html"), "with --hang nothing is recorded"),
    ):
        done = Job(sys.executable, WATCH, *flags, SLOW, 12).wait()
        assert (done.returncode, done.stdout) == (2, "")
        assert f"watch.py: error: {reason}" in done.stderr.splitlines()[-1]


def test_few_steps():
    """If there are too few steps to leave out the first ones, it shows what came before them."""
    done = Job(sys.executable, WATCH, SLOW, 3).wait()
    assert done.returncode == 0, done.stderr
    assert "watch: slow_rank.py, until its first step, because it has fewer than 8" in done.stdout
    assert re.search(r"^all    all_reduce +2 +1 +144 +\d+: loss\.backward\(\)$", done.stdout, re.M)


def test_a_rank_that_fails():
    """The error and the status are the script's own, and watch.py has none."""
    done = Job(sys.executable, WATCH, SLOW, 12, "fail").wait()
    assert done.returncode == 1
    assert "ValueError: rank 1 fails" in done.stderr
    assert "show.py" not in done.stderr


def test_a_script_with_a_profiler():
    """Two profilers cannot run at once, so nothing is recorded, and watch.py says so."""
    flags = (*DIGITS, "--epochs", 1, "--out", os.devnull)
    done = Job(*TORCHRUN, 1, WATCH, lesson_path("profile_steps"), *flags).wait()
    assert "only for hangs, because this script uses the profiler itself" in done.stdout
    assert "who waits for whom" not in done.stdout


@pytest.mark.parametrize("fault", SHOWN)
def test_a_hang(fault, tmp_path):
    """It shows at which line each rank is, and what it has called last."""
    command = (sys.executable, WATCH, "--hang", 2, HANGING, fault, 120)
    job = Job(*command, env={"TMPDIR": str(tmp_path)})  # it is killed, so it leaves its files
    line, shown = report_of(job)
    assert re.match(r"watch: no progress of rank \d for [2-9] s\. The ranks of this node:", line)
    one, others = SHOWN[fault]
    expected = {0: RANK_0.get(fault, others), 1: one, 2: others}
    for rank, words in expected.items():
        for word in words:
            assert word in shown[rank], f"rank {rank}: {shown}"


def test_a_hang_under_torchrun(tmp_path):
    """There, too, each rank of the node is shown, once for all of them."""
    command = (*TORCHRUN, 3, WATCH, "--hang", 2, HANGING, "early", 120)
    job = Job(*command, env={"TMPDIR": str(tmp_path)})
    _, shown = report_of(job)
    assert sorted(shown) == [0, 1, 2]
    assert "in early: dist.barrier()" in shown[1]
    assert f"in early: {ALL_REDUCE}" in shown[0] == shown[2]


def test_a_killed_rank_ends_the_script():
    """PyTorch names the signal, and nothing is left: no rank, and no process of watch.py."""
    done = Job(sys.executable, WATCH, HANGING, "killed", 120).wait()
    assert done.returncode == 1
    assert "SIGKILL" in done.stderr


@pytest.mark.parametrize("to_all", [True, False])
def test_ctrl_c(to_all):
    """At Ctrl-C it shows where the ranks are. The lesson ends as it does without it.

    The signal goes to all processes of a terminal, or only to the first one.
    """
    flags = (*DIGITS, "-g", 2, "--epochs", 10_000)
    job = Job(sys.executable, WATCH, lesson_path("distributed_data_parallel"), *flags)
    for line in job.process.stdout:
        if line.startswith("epoch 2/"):
            break
    end = os.killpg if to_all else os.kill
    end(job.process.pid, signal.SIGINT)
    done = job.wait()
    assert done.returncode == 130
    assert done.stderr.startswith("watch: interrupted. The ranks of this node:\n")
    assert len(re.findall(r"^rank [01] \(process \d+\) ", done.stderr, re.M)) == 2
    assert "in fit: " in done.stderr


def test_a_script_prints_what_it_prints_without():
    """Its flags, its output and its status are its own, also if it starts no other process."""
    flags = (*DIGITS, "--epochs", 2)
    done = Job(sys.executable, WATCH, "--hang", 9, lesson_path("single_gpu"), *flags).wait()
    assert (done.returncode, done.stderr) == (0, "")
    assert epochs(done.stdout) == one_process(*flags)
    done = Job(sys.executable, WATCH, lesson_path("single_gpu"), "--lr", "x").wait()
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("single_gpu.py: error: argument --lr: ")
    done = Job(sys.executable, WATCH, "nowhere.py").wait()
    assert done.returncode == 2
    assert "there is no script" in done.stderr.splitlines()[-1]


def test_the_example_of_readme(change, tmp_path):
    """README shows what a hang in an exercise of collectives.py looks like."""
    readme = (ROOT / "README.md").read_text()
    shown = re.search(r"^    (watch: .*\n)((?:    .*\n)+)", readme, re.M)
    skipping = ("    dist.all_reduce(mine)", "    if rank != 1:\n        dist.all_reduce(mine)")
    path = change("collectives", skipping)
    flags = ("-g", 2, "--timeout", 120, "--device", "cpu")
    command = (sys.executable, WATCH, "--hang", 3, path, *flags)
    job = Job(*command, env={"TMPDIR": str(tmp_path)})
    line, of_ranks = report_of(job, ranks=2)
    assert re.sub(r"rank \d", "rank 0", line) == shown[1]  # which rank is noticed first, varies
    rows = "".join(line.removeprefix("    ") for line in shown[2].splitlines(keepends=True))
    for rank, text in of_ranks.items():
        expected = rows.partition(f"rank {rank} ")[2].split("\n", 1)[1].partition("\nrank ")[0]
        # These depend on the version of PyTorch.
        plain = re.compile(r"now in all_gather\w*|distributed_c10d\.py:\d+|all_gather \(\d+\)")
        assert plain.sub("", text).strip() == plain.sub("", expected).strip()
