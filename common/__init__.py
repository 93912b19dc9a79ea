"""What the lessons share, and what must be settled before a rank joins a process group."""

import contextlib
import warnings

# DDP and the optimizers import this module when they are made. Its functions have the process group
# as a default argument. If it is imported after init_process_group(), it keeps the group and gloo's
# threads until Python shuts down, and Python may then abort
# (https://github.com/pytorch/pytorch/issues/190489). So it is imported here, before there is a
# group.
with contextlib.suppress(ImportError):  # PyTorch will remove it
    import torch.distributed.nn.functional  # noqa: F401

# PyTorch 2.13 and 2.14 recommend new names for these two functions. Version 2.9 lacks the new
# names, and version 2.15 no longer warns.
for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
    warnings.filterwarnings("ignore", f".*torch.distributed.{name}. is deprecated", FutureWarning)
