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
    """Two nodes with one rank each, which detectron2 starts, print what one process prints.

    In this lesson, -r is -nr.
    """
    words = ("distributed_data_parallel2", *SHORT, *PATIENT, "-n", 2, "-g", 1, "-ip", ADDRESSES[0])
    zero, one = on_both(nodes, (*words, "-r", 0), (*words, "-r", 1))
    assert [row.split()[-1] for row in zero.stdout.splitlines()[1:3]] == HOSTS
    assert epochs(zero.stdout) == one_process(*SHORT)
    assert one.stdout == ""
