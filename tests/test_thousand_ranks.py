"""One rank without the others: it counts what each of four real ranks holds, keeps and gives."""

from collections import Counter

import pytest
import thousand_ranks as lesson
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from common import flags
from watch_ranks.messages import Messages
from watch_ranks.ranks import call

# Four ranks cannot divide the 30 rows of a table equally, nor two ranks 15 of them.
SMALL = "--layers 2 --width 16 --heads 4 --words 30 --sequence 8 --rows 3"


def arguments(words):
    """Return the flags of the lesson."""
    parser = flags.Parser("")
    lesson.add_flags(parser)
    args = parser.parse_args(words.split())
    lesson.check_flags(parser, args)
    return args


def made(words):
    """Return the model, the mesh and the flags, in a group that there is already."""
    args = arguments(words)
    mesh = dist.init_device_mesh("cpu", (args.dp, args.tp), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        model = lesson.make_large(args)
    lesson.wrap(model, mesh, args)
    return model, mesh, args


def alone(rank, words):
    """Return what one rank counts without the others."""
    args = arguments(words)
    dist.init_process_group("fake", rank=rank, world_size=args.dp * args.tp)
    model, mesh, args = made(words)
    with FakeTensorMode(allow_non_fake_inputs=True):
        return lesson.run_step(model, mesh, args)


def note_rank(rank, words):
    """Return what one of four ranks counts. DTensor remembers a group, so each has a process."""
    held, kept, calls = alone(rank, words)
    return held, kept, dict(calls.times), dict(calls.given)


def together(rank, words, expected):
    """Make a real step with the other ranks. Messages is another counter."""
    model, mesh, args = made(words)
    with Messages() as messages:
        held, kept, calls = lesson.run_step(model, mesh, args)
    axes = {mesh.get_group(axis).group_name: axis for axis in ("dp", "tp")}
    times, given = Counter(), Counter()
    for message in messages.noted:
        times[message.kind, axes[message.group]] += 1
        given[message.kind, axes[message.group]] += message.nbytes
    assert (held, kept, dict(times), dict(given)) == expected[rank]
    dist.barrier()


@pytest.mark.parametrize("words", ["--mesh 4x1", "--mesh 2x2 --checkpoint"])
def test_four_real_ranks(words):
    """Bytes and calls of each, to the last one."""
    words = f"{SMALL} {words}"
    expected = call(note_rank, 4, words, group=False)
    call(together, 4, words, expected)
