"""Tensor parallelism of others' layers. test_parity.py has the numbers of the lesson.

test_watch.py has the messages of a step, and test_message_gradients.py their gradients.
"""

import pytest
import torch
import torch.distributed.checkpoint as dcp

from watch_ranks.ranks import call


def split_others(rank):
    """Compare pairs of layers with whole ones, also a frozen one, and one without biases."""
    import tensor_parallel as lesson

    frozen = torch.nn.Linear(4, 6).requires_grad_(False)
    for layer, shape in ((lesson.ColumnLinear, (3, 4)), (lesson.RowLinear, (6, 2))):
        shard = layer(frozen).weight
        assert shard.shape == shape and not shard.requires_grad
    torch.manual_seed(0)  # the same layers on all ranks, without biases, as a Llama has them
    first, second = (torch.nn.Linear(4, 4, bias=False) for _ in range(2))
    pair = torch.nn.Sequential(lesson.ColumnLinear(first), lesson.RowLinear(second))
    torch.testing.assert_close(pair(torch.eye(4)), second(first(torch.eye(4))))


def shard_with_a_place(rank, folder):
    """Save a layer that was split by hand, as troubleshooting.md says, and load it whole."""
    import tensor_parallel as lesson

    torch.manual_seed(0)
    whole = torch.nn.Linear(4, 6)
    weight = lesson.ColumnLinear(whole).weight
    weight.global_shape, weight.global_offsets = (6, 4), ((3 * rank, 0),)
    weight.local_offsets, weight.local_sizes = ((0, 0),), ((3, 4),)
    dcp.save({"weight": weight}, checkpoint_id=folder)
    loaded = torch.zeros(6, 4)
    dcp.load({"weight": loaded}, checkpoint_id=folder)
    assert torch.equal(loaded, whole.weight)


@pytest.mark.skipif(not hasattr(dcp, "CheckpointableTensor"), reason="torch 2.14 has it")
def test_a_plain_shard_in_a_checkpoint(tmp_path):
    """From torch 2.14 on, dcp knows its place in the whole by four attributes."""
    call(shard_with_a_place, 2, tmp_path)


def test_other_layers():
    """Frozen layers stay frozen. A bias is not needed."""
    call(split_others, 2)
