"""Judges the answers to the exercises.

judge.py lets trial.py run an answer on each rank, and compares what comes of it; words.py says what
is known about a fault, with tools/watch_ranks/facts.py, and traffic.py counts what is sent. checks/
has a module for each exercise, of which solution.py makes the solution; single.py has what several
of them need.
"""

import os
import sys
from pathlib import Path

# These are read when torch is imported. Each rank computes in one thread, and none uses a GPU.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Find common/ and watch_ranks/.
PLAYGROUND = Path(__file__).resolve().parents[2]
sys.path += [str(PLAYGROUND.parent), str(PLAYGROUND / "tools")]
