"""The lessons on two nodes with addresses of their own: network namespaces joined by a cable.

test_run_readme.py has distributed_data_parallel.py, as its command is in run/README.md.
"""

import pytest
from conftest import SHORT, Lesson, epochs, one_process
from nodes import ADDRESSES, PATIENT


def on_both(nodes, *words):
    """Run a lesson on each node, given by its name and its flags, to a good end. Returns what each has printed."""
    jobs = [Lesson(name, *flags, node=(nodes, index)) for index, (name, *flags) in enumerate(words)]
    done = [job.wait() for job in jobs]
    assert [one.returncode for one in done] == [0, 0], done
    return done


@pytest.mark.parametrize("lesson", ["manual_data_parallel", "distributed_data_parallel2"])
def test_training_on_two_nodes(lesson, nodes, tmp_path):
    """Two nodes with one rank each print what one process prints; that only node 0 saves is no difference."""
    words = (lesson, *SHORT, *PATIENT, "-n", 2, "-g", 1, "-ip", ADDRESSES[0])
    done, _ = on_both(nodes, (*words, "-nr", 0, "-s", tmp_path / "c.pt"), (*words, "-nr", 1))
    assert (tmp_path / "c.pt").exists()
    assert [row.split()[-1] for row in done.stdout.splitlines()[1:3]] == ["node0", "node1"]
    assert epochs(done.stdout) == one_process(*SHORT)


def test_messages_between_two_nodes(nodes):
    """blocking_p2p and nonblocking_p2p: what rank 0 sends arrives on the other node."""
    for lesson, line in (
        ("blocking_p2p", "rank 1: [0.0, 0.0, 0.0, 0.0] -> [0.0, 1.0, 2.0, 3.0], "),
        ("nonblocking_p2p", "[0.0, 2.0, 4.0, 6.0, 8.0] -> [0.0, 3.0, 6.0, 9.0, 12.0], as dist.all_reduce: True"),
    ):
        words = (lesson, "--device", "cpu", *PATIENT, "-n", 2, "-g", 1, "-ip", ADDRESSES[0])
        done, _ = on_both(nodes, (*words, "-nr", 0), (*words, "-nr", 1))
        assert line in done.stdout
