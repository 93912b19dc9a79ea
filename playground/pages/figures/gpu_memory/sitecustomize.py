"""At its end, a Python process writes how much memory its tensors took on a GPU at most, in MiB.

compare.py puts this folder on PYTHONPATH when its runs use GPUs. Python imports a module with this
name by itself, so each process of a lesson writes a file, and no lesson needs a line for that.
"""

import atexit
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path


def write_peak() -> None:
    """Write the peak of the GPU on which it is highest, if this process has used one."""
    torch = sys.modules.get("torch")
    folder = os.environ.get("GPU_MEMORY_FOLDER")
    if not folder or torch is None or not torch.cuda.is_initialized():
        return
    count = torch.accelerator.device_count()
    peak = max(torch.accelerator.max_memory_allocated(index) for index in range(count))
    Path(folder, f"gpu_memory_{os.getpid()}.txt").write_text(f"{peak / 2**20}\n")


atexit.register(write_peak)
# Some clusters have a module with this name, too. Python has not imported it, so it is run here.
here = os.path.dirname(os.path.abspath(__file__))
elsewhere = [folder for folder in sys.path if os.path.abspath(folder) != here]
spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
if spec:
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
