"""A lesson as a process: the lines of its epochs, its memory, its status and its last words."""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

EPOCH = r"epoch \d+/\d+  loss (\S+)  train (\S+)%  test (\S+)%  (\S+) s  (\S+) \w+/s"
NAMES = ("loss", "train", "test", "seconds", "speed")
GPU_MEMORY = Path(__file__).with_name("gpu_memory")


@dataclass
class Run:
    """What came of a run.

    Attributes:
        status: its exit status, or minus the number of the signal that ended it.
        out, err: what it printed.
        seconds: from its start to its end.
        memory: the peak of its largest process, in MiB.
        gpu_memory: the peak of the process whose tensors took most on a GPU; 0: none did.
    """

    status: int
    out: str
    err: str
    seconds: float
    memory: float
    gpu_memory: float

    @property
    def epochs(self) -> list[dict[str, float]]:
        """What the lines of the epochs say."""
        return epochs(self.out)

    @property
    def last_words(self) -> str:
        """The line of stderr that says best why it failed."""
        lines = [line.strip() for line in self.err.splitlines() if line.strip()]
        # The last line is often a part of torchrun's report, so the errors come first.
        for sign in (r"(\S+: )?error: ", r"(\[rank\d+\]: )?[\w.]+(Error|Exception)\b", ""):
            found = [line for line in lines if re.match(sign, line)]
            if found:
                return found[-1]
        return f"status {self.status} without a word"


def epochs(text: str) -> list[dict[str, float]]:
    """Return a dict with the NAMES for each epoch line of a lesson."""
    found = []
    for texts in re.findall(rf"^{EPOCH}", text, re.M):
        numbers = [float(each.replace(",", "")) for each in texts]
        found.append(dict(zip(NAMES, numbers, strict=True)))
    return found


def run(words: list[str], limit: float = 900) -> Run:
    """Run a command whose first word is python or torchrun. It has so many seconds at most.

    Linux counts the memory of the process that starts another as that one's, too. So call this in a
    small process, which has not imported PyTorch.
    """
    module = ["-m", "torch.distributed.run"] if words[0] == "torchrun" else []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        path = [str(GPU_MEMORY), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {"PYTHONPATH": os.pathsep.join(path), "GPU_MEMORY": made}
        start = time.monotonic()
        with open(folder / "out", "w") as out, open(folder / "err", "w") as err:
            process = subprocess.Popen(
                [sys.executable, *module, *words[1:]],  # this very Python
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
        too_long = threading.Timer(limit, end, [process.pid])
        too_long.start()
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except KeyboardInterrupt:
            end(process.pid)
            raise
        finally:
            too_long.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - start
        printed = [(folder / name).read_text() for name in ("out", "err")]
        if seconds > limit:
            printed[1] += f"\nerror: it took longer than {limit} s\n"
        unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB elsewhere
        memory = usage.ru_maxrss * unit / 2**20
        peaks = [float(path.read_text()) for path in folder.glob("gpu_memory_*")]
    return Run(process.returncode, *printed, seconds, memory, max(peaks, default=0))


def end(pid: int) -> None:
    """End a process and all that it has started, also in other sessions, as torchrun does."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
