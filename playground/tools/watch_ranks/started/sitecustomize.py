"""Python runs this by itself when it starts, because PYTHONPATH has this folder: see runs_with."""

import contextlib
import importlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [folder for folder in sys.path if folder != str(HERE)]
own = sys.modules.pop(__name__)
with contextlib.suppress(ImportError):  # the system may have one, which this one hides
    importlib.import_module(__name__)
sys.modules.setdefault(__name__, own)
sys.path.append(str(HERE.parents[1]))  # behind all other folders

from watch_ranks.anywhere import notice

sys.path.pop()
notice()
