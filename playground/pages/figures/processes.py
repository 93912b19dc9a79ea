"""Run a lesson as a process: what it prints and when, how much memory it takes, how it ends."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

PROC = Path("/proc")  # only Linux has it
GPU_MEMORY = Path(__file__).resolve().parent / "gpu_memory"
EPOCH = r"epoch \d+/\d+  loss (\S+)  train (\S+)%  test (\S+)%  (\S+) s  (\S+) \w+/s"
NAMES = ("loss", "train", "test", "seconds", "images_per_s")


def follow(
    words: list[str], variables: dict[str, str], folder: Path, seconds: float
) -> tuple[int, list[dict], float]:
    """Run a command to its end, and write what it prints to out.txt and err.txt.

    If it takes too long, it is ended, and so are the processes that it has started.

    Args:
        words: the command line.
        variables: of the environment, in addition to those of this process.
        folder: for the two files.
        seconds: that it may take.

    Returns:
        Its status. A dict for each epoch line: NAMES, and "at", the seconds after which the line
        appeared. The peak of the memory of its largest process in MiB.

    Raises:
        TimeoutError: if it takes longer.
    """
    epochs = []
    memory = 0.0
    start = time.monotonic()
    with (
        open(folder / "out.txt", "w") as out,
        open(folder / "err.txt", "w") as err,
        open(folder / "out.txt") as printed,
    ):
        process = subprocess.Popen(
            words,
            env=os.environ | variables,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )
        try:
            ended = False
            while not ended:
                time.sleep(0.02)
                at = time.monotonic() - start
                if at > seconds:
                    raise TimeoutError(f"took longer than {seconds} s: use a larger --timeout")
                memory = max(memory, _peak_memory(process.pid))
                # This comes before reading, so that nothing is missed that is printed at the end.
                pid, status, usage = os.wait4(process.pid, os.WNOHANG)
                ended = pid == process.pid
                if ended:
                    process.returncode = os.waitstatus_to_exitcode(status)
                for line in printed:
                    found = re.match(EPOCH, line)
                    if found:
                        numbers = [float(text.replace(",", "")) for text in found.groups()]
                        epochs.append(dict(zip(NAMES, numbers, strict=True)) | {"at": at})
        finally:
            _end(process)
    if not PROC.exists():
        unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB elsewhere
        memory = usage.ru_maxrss * unit / 2**20
    return process.returncode, epochs, memory


def gpu_variables(folder: Path) -> dict[str, str]:
    """Return the variables with which the processes of a run write their GPU memory to a folder."""
    path = [str(GPU_MEMORY)]
    if "PYTHONPATH" in os.environ:
        path.append(os.environ["PYTHONPATH"])
    return {"PYTHONPATH": os.pathsep.join(path), "GPU_MEMORY_FOLDER": str(folder)}


def gpu_memory(folder: Path) -> float | None:
    """Return the GPU memory, in MiB, of the process that took most. None: no GPU was used."""
    peaks = [float(path.read_text()) for path in folder.glob("gpu_memory_*.txt")]
    return max(peaks, default=None)


def last_words(folder: Path) -> str:
    """Return the line of err.txt that says best why a lesson failed, empty if there is none."""
    lines = [line.strip() for line in (folder / "err.txt").read_text().splitlines()]
    lines = [line for line in lines if line]
    # The last line is often a part of torchrun's report, so lines that name an error come first.
    for sign in (r"(\S+: )?error: ", r"(\[rank\d+\]: )?[\w.]+(Error|Exception)\b", ""):
        found = [line for line in lines if re.match(sign, line)]
        if found:
            return found[-1]
    return ""


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):  # only Linux has it
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _peak_memory(pid: int) -> float:
    """Return the largest peak of memory of a process and those that it has started, in MiB."""
    peaks = [0.0]
    with contextlib.suppress(OSError):  # it has just ended, or this is not Linux
        peak = re.search(r"VmHWM:\s+(\d+) kB", (PROC / str(pid) / "status").read_text())
        if peak:
            peaks.append(int(peak[1]) / 1024)
        children = (PROC / str(pid) / "task" / str(pid) / "children").read_text()
        for child in children.split():
            peaks.append(_peak_memory(int(child)))
    return max(peaks)


def _end(process: subprocess.Popen) -> None:
    """End a lesson that still runs, with all of its processes, and wait for it."""
    # torchrun ends its ranks after SIGTERM. After SIGKILL it could not.
    for number, seconds in ((signal.SIGTERM, 10), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(seconds)
