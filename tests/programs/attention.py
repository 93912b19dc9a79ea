"""What a mask costs attention, forward and backward, and which kernel PyTorch chooses.

python tests/programs/attention.py         # on one core of the CPU, in float32
python tests/programs/attention.py cuda    # on a GPU, in three dtypes
"""

import os
import sys
import time

import torch
from torch.nn.functional import scaled_dot_product_attention as attend
from torch.utils.benchmark import Timer, timer

CPU = [(torch.float32, (16, 4, 256, 16)), (torch.float32, (1, 4, 4096, 16))]
GPU = [
    (dtype, shape)  # rows, heads, tokens, and what a head has of a token
    for dtype in (torch.bfloat16, torch.float32, torch.float64)
    for shape in ((128, 16, 128, 128), (8, 16, 2048, 128))
]


def kernel(step):
    """Return the name of the kernel of a step."""
    with torch.profiler.profile() as profiler:
        step()
    names = {event.key.removeprefix("aten::_scaled_dot_product_") for event in profiler.events()}
    known = {name for name in names if "attention" in name and "backward" not in name}
    return "/".join(sorted(known - {"aten::scaled_dot_product_attention"}))


def main():
    """Print a row of a table for each dtype and shape."""
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise the profiler logs when it starts
    clock = time.process_time if device == "cpu" else timer  # on a CPU, waiting does not count
    for dtype, shape in CPU if device == "cpu" else GPU:
        inputs = [torch.randn(shape, dtype=dtype, device=device).requires_grad_() for _ in range(3)]
        tokens = shape[2]
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()
        cells = []
        for options in {"is_causal": True}, {"attn_mask": mask}:

            def step(options=options, inputs=inputs):
                attend(*inputs, **options).sum().backward()

            measured = Timer("step()", globals={"step": step}, timer=clock).timeit(7)
            cells.append(f"{1000 * measured.mean:.2f} ms by {kernel(step)}")
        words = f"{dtype}, {shape[0]} rows of {tokens} tokens".removeprefix("torch.")
        print(f"| attention, {words} | {cells[0]}; with a mask {cells[1]} |", flush=True)


if __name__ == "__main__":
    main()
