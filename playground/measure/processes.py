"""Run a lesson as a process of its own: what it reports and when, how much memory it takes, how it ends."""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

EPOCH = r"epoch \d+/\d+  loss (\S+)  train (\S+)%  test (\S+)%  (\S+) s  (\S+) images/s"
KINDS = "all_gather|reduce_scatter|all_reduce"
NAMES = ("loss", "train", "test", "seconds", "images_per_s")


def follow(words: list[str], variables: dict[str, str], folder: Path, seconds: float) -> tuple[int, list[dict], float]:
    """Run a command to its end, or end it with all of its processes, and write what it prints to out.txt and err.txt.

    Args:
        words: the command line.
        variables: of the environment, on top of ours.
        folder: for the two files.
        seconds: that it may take.

    Returns:
        Its status; a dict for each epoch line: NAMES, and "at", the seconds after which it appeared; the peak of
        memory of its largest process up to the first of these lines, in MiB.

    Raises:
        TimeoutError: if it takes longer.
    """
    epochs, memory, start, ended = [], 0.0, time.monotonic(), False
    with (
        open(folder / "out.txt", "w") as out,
        open(folder / "err.txt", "w") as err,
        open(folder / "out.txt") as printed,
    ):
        streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
        process = subprocess.Popen(words, env=os.environ | variables, start_new_session=True, **streams)
        try:
            while not ended:
                time.sleep(0.02)
                at = time.monotonic() - start
                if at > seconds:
                    raise TimeoutError(f"took longer than {seconds} s: give it more with --timeout")
                peak = memory if epochs else max(memory, _peak_memory(process.pid))
                ended = process.poll() is not None  # before reading: what it printed last is there then
                for line in printed:
                    if found := re.match(EPOCH, line):
                        numbers = [float(text.replace(",", "")) for text in found.groups()]
                        epochs.append(dict(zip(NAMES, numbers, strict=True)) | {"at": at})
                memory = memory if epochs else peak  # of before this line: now it may write a checkpoint
        finally:
            _end(process)
    return process.returncode, epochs, memory


def last_words(folder: Path) -> str:
    """Return the line of err.txt that says best why a lesson failed, empty if there is none."""
    lines = [line.strip() for line in (folder / "err.txt").read_text().splitlines() if line.strip()]
    for sign in (r"(\S+: )?error: ", r"(\[rank\d+\]: )?[\w.]+(Error|Exception)\b", ""):  # torchrun adds its report
        if said := [line for line in lines if re.match(sign, line)]:
            return said[-1]
    return ""


def messages(folder: Path) -> str:
    """Return the collectives of each rank in a step, as out.txt counts them, empty if it does not: "3 all_reduce"."""
    text = re.sub("DDP: .*", "", (folder / "out.txt").read_text())
    found = re.findall(rf"(\d+) ({KINDS})\b", text)  # 8 all_gather and 4 reduce_scatter
    found += [(count, kind) for kind, count in re.findall(rf"({KINDS}) +(\d+) ", text)]  # a table's row
    found += [(count, "all_reduce") for count in re.findall(r"(?:all_reduce in forward|, in backward): (\d+)", text)]
    counts = Counter()
    for count, kind in found:
        counts[kind] += int(count)
    return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)


def _peak_memory(pid: int) -> float:
    """Return the largest peak of memory of a process and those that it has started, in MiB."""
    with contextlib.suppress(OSError):  # it has just ended
        peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return max(int(peak[1]) / 1024 if peak else 0, *map(_peak_memory, children), 0)
    return 0


def _end(process: subprocess.Popen) -> None:
    """End a lesson that still runs, with all of its processes, and wait for it."""
    for sign, seconds in ((signal.SIGTERM, 10), (signal.SIGKILL, None)):  # torchrun ends its ranks only at the first
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, sign)
            process.wait(seconds)
