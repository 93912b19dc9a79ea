"""A trace of what each rank does: which operation ran when, on which thread, and what was sent meanwhile."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

STEPS = 10  # in a trace


def profiled(batches: tqdm, folder: str | None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pass the batches on to the training loop, and trace what it does with some of them.

    An epoch's first steps are left out: they also start threads and fill caches. Each epoch replaces the trace of the
    one before. Profiling takes time itself: compare the seconds of runs without it.

    Args:
        batches: of one epoch.
        folder: where to write rank<r>.json, in Chrome's trace format (times in µs); None: don't trace.

    Yields:
        The batches, unchanged.
    """
    if folder is None:
        yield from batches
        return
    rank = dist.get_rank() if dist.is_initialized() else 0
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler logs its own starts and stops
    schedule = torch.profiler.schedule(wait=0, warmup=min(5, len(batches) // 2), active=STEPS, repeat=1)

    def write(profiler):
        Path(folder).mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(f"{folder}/rank{rank}.json")

    with torch.profiler.profile(schedule=schedule, on_trace_ready=write) as profiler:
        for number, batch in enumerate(batches):
            if number:
                profiler.step()  # reading the next batch counts as the end of a step; after the last there is none
            yield batch
