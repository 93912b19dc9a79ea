"""How fault_missing_file is checked."""

import contextlib
import io
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from judging.checks.fault_too_many_images import RIGHT, words_on
from judging.single import named, of_all_ranks, step
from torch.nn import functional as F

NAME = "train"
FAULT = "CRASH with 3 ranks, 2 ranks on each node ... rank 2: FileNotFoundError"
CASES = {"2 ranks on each node": {"ranks": 2}, "3 ranks on each node": {"ranks": 3}}
IMAGES = 60  # a multiple of every number of ranks, so all parts are equal
SECONDS_HALF_THERE = 0.2  # a rank that looks for the file every 0.1 s finds the first half
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}
HINTS = """
On which nodes is the file downloaded, and which rank does it there?

os.environ["LOCAL_RANK"] is the number of a process on its own node, as text. dist.get_rank() is its
number over all nodes.

local_rank = the number of this process on its node
if it is the first process of its node: download the file
wait for all ranks
"""


def make_data():
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(IMAGES, 3, generator=generator)
    images[:, 0] = torch.arange(IMAGES) / IMAGES  # its first number tells which image it is
    return images, torch.arange(IMAGES) % 2


def make_model():
    torch.manual_seed(6)
    return torch.nn.Linear(3, 2)


def download(path):
    """Fetch the file in two parts, and note it in the folder of this node."""
    time.sleep(0.1)
    Path(f"downloaded-by-{dist.get_rank()}").touch()
    file = io.BytesIO()
    torch.save(make_data(), file)
    data = file.getvalue()
    half = len(data) // 2
    with open(path, "wb", buffering=0) as file:
        file.write(data[:half])
        time.sleep(SECONDS_HALF_THERE)
        file.write(data[half:])


def nodes(world_size, ranks):
    return -(-world_size // ranks)


def run(train, rank, world_size, ranks):
    """Call the learner's function on this rank of a node, in the folder of the node."""
    node = rank // ranks
    variables = {
        "LOCAL_RANK": rank % ranks,
        "LOCAL_WORLD_SIZE": min(ranks, world_size - node * ranks),
        "GROUP_RANK": node,
    }
    for name, value in variables.items():
        os.environ[name] = str(value)
    top = Path.cwd()
    with contextlib.suppress(FileExistsError):
        Path(f"node{node}").mkdir()
    os.chdir(f"node{node}")
    model = make_model()
    used = []
    model.register_forward_pre_hook(lambda module, inputs: used.append(inputs[0][:, 0] * IMAGES))
    train(model, download)
    all_used = of_all_ranks(torch.cat([*used, torch.zeros(0)]).round().int().tolist())
    result = {}
    for number in range(nodes(world_size, ranks)):
        result[f"downloads on node {number}"] = len(list(top.glob(f"node{number}/downloaded*")))
    result["the images"] = words_on(all_used, IMAGES)
    return result | named(model)


def expected(rank, world_size, ranks):
    result = {f"downloads on node {node}": 1 for node in range(nodes(world_size, ranks))}
    images, labels = make_data()
    model = make_model()
    step(model, F.cross_entropy(model(images), labels))
    return {**result, "the images": RIGHT, **named(model)}


REPAIR = (
    "    if rank == 0:",
    '    local_rank = int(os.environ["LOCAL_RANK"])\n    if local_rank == 0:',
)
WHY = "the first rank of each node has local rank 0, and only node 0 has rank 0."


HALF = "CRASH.*(PytorchStreamReader|EOFError)"
WORDS = {
    HALF: "The file is there, but download() has not returned, so a part of it is missing.",
    "CRASH.*images.pt": "The file is not in the folder of this rank's node at this moment.",
}
FIRST = "if local_rank == 0:"
BARRIER = "    dist.barrier()\n"
MISTAKES = {
    "rank 1: FileNotFoundError": (BARRIER, ""),
    WORDS[HALF]: (BARRIER, '    while not os.path.exists("images.pt"):\n        pass\n'),
    "downloads on node 0: 2": (FIRST, "if True:"),
    "image 0 is read on ranks 0 and 2": (
        *("images[rank::", "images[local_rank::", "labels[rank::", "labels[local_rank::"),
    ),
}
