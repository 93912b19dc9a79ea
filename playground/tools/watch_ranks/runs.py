"""The lines of a lesson's epochs, and the end of what a process has started."""

import contextlib
import re

import psutil

EPOCH = r"epoch \d+/\d+  loss (\S+)  train (\S+)%  test (\S+)%  (\S+) s  (\S+) \w+/s"
NAMES = ("loss", "train", "test", "seconds", "speed")


def epochs(text: str) -> list[dict[str, float]]:
    """Return a dict with the NAMES for each epoch line of a lesson."""
    found = []
    for texts in re.findall(rf"^{EPOCH}", text, re.M):
        numbers = [float(each.replace(",", "")) for each in texts]
        found.append(dict(zip(NAMES, numbers, strict=True)))
    return found


def end(pid: int) -> None:
    """End a process and all that it has started, also in other sessions, as torchrun does."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
