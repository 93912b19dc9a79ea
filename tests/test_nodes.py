"""Lessons on two nodes, which are network namespaces with an address each.

test_run_readme.py tests distributed_data_parallel.py on two nodes, because run/README.md has its
command.
"""

from conftest import SHORT, Lesson, epochs, one_process
from nodes import ADDRESSES, HOSTS, PATIENT


def on_both(nodes, *words):
    """Run a lesson on each node and check that it succeeds. Returns each node's result.

    `words` are each node's lesson and its flags.
    """
    jobs = [Lesson(*command, node=(nodes, index)) for index, command in enumerate(words)]
    done = [job.wait() for job in jobs]
    assert [node.returncode for node in done] == [0, 0], done
    return done


def test_training_on_two_nodes(nodes):
    """Two nodes with one rank each, which detectron2 starts, print what one process prints."""
    words = ("distributed_data_parallel2", *SHORT, *PATIENT, "-n", 2, "-g", 1, "-ip", ADDRESSES[0])
    done, _ = on_both(nodes, (*words, "-nr", 0), (*words, "-nr", 1))
    assert [row.split()[-1] for row in done.stdout.splitlines()[1:3]] == HOSTS
    assert epochs(done.stdout) == one_process(*SHORT)


def test_messages_between_two_nodes(nodes):
    """What a rank sends arrives on the other node."""
    words = ("nonblocking_p2p", *PATIENT, "-n", 2, "-g", 1, "-ip", ADDRESSES[0])
    done, _ = on_both(nodes, (*words, "-nr", 0), (*words, "-nr", 1))
    ring = "[0.0, 2.0, 4.0, 6.0, 8.0] -> [0.0, 3.0, 6.0, 9.0, 12.0], all_reduce agrees: True"
    assert f"ring, rank 1: {ring}" in done.stdout
