"""Run a lesson as a user would, on its data. Imported before PyTorch, it hides the GPUs."""

import contextlib
import functools
import hashlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid

import psutil
import pytest
from filelock import FileLock
from lessons import ROOT, by_torchrun, lesson_path
from nodes import HOSTS
from preloaded import Script

from watch_ranks import runs
from watch_ranks.ranks import free_port  # tests import it from here, too

# The folder in which the lessons look for MNIST. Tests that need it are skipped if it is not there.
DATA = ROOT / "data"
MNIST = any(DATA.glob("MNIST/raw/train-images-idx3-ubyte*"))
DIGITS = ("--dataset", "digits", "--device", "cpu")
SHORT = (*DIGITS, "--batch_size", 120, "--epochs", 1)
LONG = (*DIGITS, "--epochs", 100_000)
SIZES = "        train_size = {}\n        test_size = {}\n"  # random images of the ResNet lesson
FEWER = (SIZES.format(1800, 200), SIZES.format(180, 30))  # to replace in a copy
PROGRAMS = ROOT / "tests" / "programs"
STANDIN = PROGRAMS / "detectron2_standin"
# In the background, or under nohup, these signals are ignored, and processes inherit this.
for number, action in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, action)
# Only tests that are about GPUs see them. Workers inherit what was found.
found = os.environ.setdefault("TESTS_FOUND_GPUS", os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
ALL_GPUS = {"CUDA_VISIBLE_DEVICES": None if found == "all" else found}
os.environ["CUDA_VISIBLE_DEVICES"] = ""
imported = subprocess.run([sys.executable, "-c", "import detectron2.engine"], capture_output=True)
IS_REAL = imported.returncode == 0
DETECTRON2 = "the real detectron2" if IS_REAL else "a stand-in for detectron2"


class Evil:
    """Makes a folder when it is unpickled, as a file from elsewhere may run any code."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def launched(world_size=2, rank=0):
    """Return what a launcher tells a rank in its environment, where no other rank can be."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": 1}
    return {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}


LAUNCHER_VARIABLES = (*launched(), "LOCAL_WORLD_SIZE")


def alive(pid):
    """Whether a process runs. A zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Job:
    """A command in a session of its own, marked so that each of its processes can be found.

    `env` has what differs from this process's variables; None: not set. `cold=False`: it is a
    script of Python with its flags, to be forked rather than started (see preloaded.py).
    """

    running = set()  # those for which wait() has not waited

    def __init__(self, *command, env=None, cwd=None, cold=True):
        self.mark = uuid.uuid4().hex
        environment = dict(os.environ) | dict.fromkeys(LAUNCHER_VARIABLES)
        environment["OMP_NUM_THREADS"] = "1"  # several tests and processes share the cores
        if not IS_REAL:  # which causes such warnings itself
            environment["PYTHONWARNINGS"] = "error::FutureWarning"
        environment |= {"PLAYGROUND_TEST": self.mark} | (env or {})
        environment = {name: value for name, value in environment.items() if value is not None}
        if not cold:
            self.process = Script(command, environment, cwd)
        else:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                env=environment,
                cwd=cwd,
                start_new_session=True,
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        self.running.add(self)

    def pids(self):
        """Return the pids of its processes that are alive, the first one's first."""
        pids = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):  # it has just ended
                own = os.getsid(process.pid) == self.process.pid
                if own or process.environ().get("PLAYGROUND_TEST") == self.mark:
                    pids += [process.pid] if alive(process.pid) else []
        return sorted(pids)

    def ranks(self, count):
        """Wait until a lesson that starts its ranks has printed them. Returns their pids."""
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            rows = [row.split() for row in lines if re.match(r"\d+ +\d+ +\d+ ", row)]
            if len(rows) == count:
                return [int(row[4]) for row in rows]
            told = re.findall(r"^rank (\d+) of \d+: process (\d+) ", "".join(lines), re.M)
            if len(told) == count:
                return [int(pid) for _, pid in sorted(told)]
        raise AssertionError(f"no table of {count} ranks in {lines}: {self.process.stderr.read()}")

    def wait(self, timeout=300):
        """Wait for the end and return status, stdout and stderr.

        Fails if the command hangs or leaves a process behind.
        """
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        end = time.monotonic() + 300
        while (left := self.pids()) and time.monotonic() < end:
            time.sleep(0.1)
        if left:  # what starts later is not left behind, such as a job of Slurm
            self.kill()
        assert not left, f"left behind: {left}"
        self.running.discard(self)
        return subprocess.CompletedProcess(self.process.args, self.process.returncode, out, err)

    def kill(self):
        """End whatever is left of it."""
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)


def python_path(path):
    """Return the PYTHONPATH with which a lesson, or a changed copy, finds what it imports."""
    finds = any((folder / "common").is_dir() for folder in path.parents)
    folders = [] if finds else [str(ROOT), str(ROOT / "playground")]
    if "detectron2" in path.read_text() and not IS_REAL:
        folders.append(str(STANDIN))
    return os.pathsep.join(folders)


class Lesson(Job):
    """A lesson, named by its file in playground/ or by a path.

    `node` is one of `Nodes` and the index of a node: it runs there.
    """

    def __init__(self, name, *flags, env=None, cwd=None, node=None, cold=False):
        path = lesson_path(name)
        env = {"PYTHONPATH": python_path(path)} | (env or {})
        command = [sys.executable] if cold else []
        if node:
            nodes, index = node
            on_node = [PROGRAMS / "on_node.py", nodes.names[index], HOSTS[index]]
            command = [*nodes.enter(index), *command] if cold else on_node
        super().__init__(*command, path, *flags, env=env, cwd=cwd, cold=cold)


def each_epoch(name, statement, folder):
    """Copy a lesson, with a statement at the start of each epoch. Returns the copy's path."""
    copy, loop = folder / f"{name}.py", r"^    for epoch in range\(.*\):\n"
    text, count = re.subn(
        loop, rf"\g<0>        {statement}\n", lesson_path(name).read_text(), flags=re.M
    )
    assert count == 1
    copy.write_text(text)
    return copy


def wait_for_epoch(folder, number, job):
    """Wait until the resumable lesson has written this checkpoint, or a later one."""
    end = time.monotonic() + 300
    while time.monotonic() < end and alive(job.process.pid):
        if any(int(path.stem[6:]) >= number for path in folder.glob("epoch-*.pt")):
            return
        time.sleep(0.05)
    job.kill()
    raise AssertionError(job.process.stderr.read())


def ranks(name, *flags, processes=2, env=None, **options):
    """Start the ranks of a lesson as a launcher does, without one. Returns their Jobs."""
    meet = {"MASTER_PORT": str(free_port())} | (env or {})
    places = [launched(processes, rank) | meet for rank in range(processes)]
    return [Lesson(name, *flags, env=place, **options) for place in places]


def run(name, *flags, processes=None, status=0, timeout=300, **options):
    """Run a lesson to its end, in so many processes; None: it takes no such flag.

    It may stand behind watch.py, as the first of the flags. Checks the largest status of a process
    that was started; "error": any but 0. Returns it with the stdout of the first and the stderr of
    all.
    """
    if processes and by_torchrun(flags[0] if name == "watch" else name):
        jobs = ranks(name, *flags, processes=processes, **options)
    else:
        jobs = [Lesson(name, *flags, *(("-g", processes) if processes else ()), **options)]
    ends = [job.wait(timeout) for job in jobs]
    largest = max((end.returncode for end in ends), key=abs)
    errors = "".join(end.stderr for end in ends)
    words = f"status {largest}, not {status}\n{ends[0].stdout}\n{errors}"
    assert largest == status or (status == "error" and largest), words
    return subprocess.CompletedProcess(ends[0].args, largest, ends[0].stdout, errors)


def epochs(text):
    """Return the epoch lines of a lesson as dicts of floats: loss, and accuracies in %."""
    return [{name: line[name] for name in ("loss", "train", "test")} for line in runs.epochs(text)]


def once(key, make):
    """Return a folder that make(folder) has filled. It is called once, for all workers."""
    folder = once.folder / hashlib.sha256(repr(key).encode()).hexdigest()
    with FileLock(f"{folder}.lock"):
        if not (folder / "made").exists():
            folder.mkdir(exist_ok=True)
            make(folder)
            (folder / "made").touch()
    return folder


@functools.cache
def single_gpu(*flags):
    """Return the epoch lines of single_gpu.py, which runs only once with these flags."""

    def make(folder):
        (folder / "out").write_text(run("single_gpu", *flags).stdout)

    return epochs((once(("single_gpu", *flags), make) / "out").read_text())


def one_process(*flags, apart=2.01e-4):
    """Return what the epoch lines of other lessons must equal on any CPU.

    Rounding moves the loss, which may be so far `apart`, and up to three images.
    """
    images = {"train": 300 / 1440 + 0.01, "test": 300 / 297 + 0.01}  # of the digits, in %
    return [
        {name: pytest.approx(value, abs=images.get(name, apart)) for name, value in line.items()}
        for line in single_gpu(*flags)
    ]


def losses(out):
    """Return the losses of all epochs that a lesson has printed."""
    return [line["loss"] for line in epochs(out)]


def one_line(done, *words):
    """Check that stderr is a single line about an error that has all words, and return it."""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert "error: " in lines[0]
    for word in words:
        assert word in lines[0], lines[0]
    return lines[0]
