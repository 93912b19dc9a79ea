"""Judges the answers to the exercises.

judge.py starts a process for each number of ranks, and reports. attempt.py has Attempt: an answer
on one number of ranks, and its verdict. ranks.py runs it, traffic.py counts what it sends, words.py
puts it into words, and imitate.py finds out which typical mistake does the same. single.py trains
in one process, and evidence.py reads what was found in the evidence of a run. checks/ has a module
for each exercise.
"""

import os
import sys
from pathlib import Path

# These are read when torch is imported. Each rank computes in one thread, and none uses a GPU.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Find common/ and watching/.
PLAYGROUND = Path(__file__).resolve().parents[2]
sys.path += [str(PLAYGROUND.parent), str(PLAYGROUND / "tools")]
