"""Judges answers to an exercise one after another, in one process that imports PyTorch once.

Its argument is JSON: the exercise, and for each answer its file, its function, the seconds for a
case, and the numbers of ranks; null is the default. Without a file, the answer is the exercise's
own solution, or that of its MISTAKES which `function` names. For each answer it prints the lines of
the verdict, as JSON.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "playground" / "exercises"))
from judging import judge  # noqa: E402, it is found there

name, answers = json.loads(sys.argv[1])
for answer in answers:
    print(json.dumps(judge.judge(name, *answer)[1]), flush=True)
