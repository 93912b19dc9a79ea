"""A Python process notes at its end how much memory its tensors took on a GPU at most, in MiB.

Python imports a module of this name by itself if its folder is on PYTHONPATH, so no lesson needs a
line for it.
"""

import atexit
import os
import sys
from pathlib import Path


@atexit.register
def note_peak() -> None:
    """Write the peak of the GPU on which it is highest, if this process has used one."""
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_initialized():
        gpus = range(torch.cuda.device_count())
        peak = max(torch.cuda.max_memory_allocated(index) for index in gpus)
        path = Path(os.environ["GPU_MEMORY"], f"gpu_memory_{os.getpid()}")
        path.write_text(str(peak / 2**20))
