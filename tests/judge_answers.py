"""Judges answers to an exercise one after another, in one process that imports PyTorch once.

Its argument is JSON: the exercise, and for each answer its file, its function, the seconds for a
case, and the numbers of ranks; null is the default. Without a file, the answer is the exercise's
own solution, or that of its MISTAKES which `function` names. For each answer it prints the lines of
the verdict, as JSON.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "playground" / "exercises"))
from judging import imitate, judge  # noqa: E402, it is found there

name, answers = json.loads(sys.argv[1])
for file, function, *rest in answers:
    answer = file
    if file is None:
        exercise = judge.check_of(name)
        answer = getattr(exercise, imitate.name_of(exercise))
        if function:
            answer = imitate.mistakes_of(exercise)[function]
    lines = judge.report(name, judge.verdicts_on(name, answer, function, *rest))
    print(json.dumps(lines or ["your turn"]), flush=True)
