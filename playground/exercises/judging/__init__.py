"""Judges the answers to the exercises.

judge.py judges an answer with one number of ranks after another, and reports. exercise.py tells
what a module of checks/ may have, and solution.py makes its solution. attempt.py has an answer on
one number of ranks, and its verdict: trial.py runs it, traffic.py counts what it sends, and
words.py puts it into words, with the facts of tools/instruments/facts.py. single.py trains in one
process, and evidence.py reads what was found in the evidence of a run.
"""

import os
import sys
from pathlib import Path

# These are read when torch is imported. Each rank computes in one thread, and none uses a GPU.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Find common/ and instruments/.
PLAYGROUND = Path(__file__).resolve().parents[2]
sys.path += [str(PLAYGROUND.parent), str(PLAYGROUND / "tools")]
