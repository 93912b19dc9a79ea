"""What the lessons share: models, data, flags, what turns a failure into one line, traces, timelines and figures.

Importing it also keeps libraries from burying the one line that explains a failure: torch tells which processes it
ends, and tqdm's default lock is a semaphore, for which Python prints a warning when a process is killed.
"""

import logging
import threading

from tqdm import tqdm

logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
tqdm.set_lock(threading.RLock())
