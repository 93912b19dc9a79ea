"""Wrong answers to tree_broadcast. See test_exercises.py for the docstrings."""

import torch.distributed as dist


def rank_0_sends_all(tensor):
    """COSTLY with 4 ranks ... 3 rounds of messages; 2 are enough Only rank 0 sends."""
    if dist.get_rank() > 0:
        dist.recv(tensor, 0)
        return
    for other in range(1, dist.get_world_size()):
        dist.send(tensor, other)


def chain(tensor):
    """COSTLY with 4 ranks ... 3 rounds of messages; 2 are enough Each rank sends once only."""
    rank = dist.get_rank()
    if rank > 0:
        dist.recv(tensor, rank - 1)
    if rank + 1 < dist.get_world_size():
        dist.send(tensor, rank + 1)


def two_branches(tensor):
    """COSTLY with 8 ranks ... 4 rounds of messages; 3 are enough Rank 2 sends to rank 6 in round 4.
    Which rank has the tensor, and could send in an earlier round?
    """
    rank = dist.get_rank()
    if rank > 0:
        dist.recv(tensor, (rank - 1) // 2)
    for other in (2 * rank + 1, 2 * rank + 2):
        if other < dist.get_world_size():
            dist.send(tensor, other)


def five_ranks_at_most(tensor):
    """WRONG with 8 ranks ... No message has reached rank 5. Is the number of rounds rounded up?"""
    rank = dist.get_rank()
    for sender, receiver in ((0, 1), (0, 2), (1, 3), (0, 4)):
        if receiver < dist.get_world_size() and rank == sender:
            dist.send(tensor, receiver)
        if receiver < dist.get_world_size() and rank == receiver:
            dist.recv(tensor, sender)


def rounded_down(tensor):
    """WRONG with 3 ranks ... No message has reached rank 2. Is the number of rounds rounded up?"""
    rank = dist.get_rank()
    n = dist.get_world_size()
    have = 1
    while 2 * have <= n:
        if rank < have and rank + have < n:
            dist.send(tensor, rank + have)
        elif have <= rank < 2 * have:
            dist.recv(tensor, rank - have)
        have *= 2


def powers_of_two_only(tensor):
    """CRASH with 3 ranks ... there is no rank 3: the last one is 2 ... dist.send ...
    right for powers of two only
    """
    rank = dist.get_rank()
    have = 1
    while have < dist.get_world_size():
        if rank < have:
            dist.send(tensor, rank + have)
        elif rank < 2 * have:
            dist.recv(tensor, rank - have)
        have *= 2


def in_the_wrong_order(tensor):
    """WRONG with 4 ranks ... This is rank 1's tensor. Has rank 1 sent before it received?"""
    rank = dist.get_rank()
    n = dist.get_world_size()
    have = 1 << (n - 1).bit_length() >> 1
    while have >= 1:
        if rank < have and rank + have < n:
            dist.send(tensor, rank + have)
        elif have <= rank < 2 * have:
            dist.recv(tensor, rank - have)
        have //= 2


def built_in(tensor):
    """WRONG with 1 rank ... dist.broadcast is what this exercise builds: use send and recv"""
    dist.broadcast(tensor, 0)


def is_not_received(tensor):
    """HANG with 2 ranks ... rank 0 waits at your line ... rank 1 has finished"""
    if dist.get_rank() == 0:
        for other in range(1, dist.get_world_size()):
            dist.send(tensor, other)
