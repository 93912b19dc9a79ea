"""What the scripts for launchers refuse: each mistake ends in one line, which has what to do."""

import socket
import sys

import pytest
from conftest import ROOT, Job, one_line

LESSON = "playground/distributed_data_parallel_torchrun.py"
SPAWNING = "playground/distributed_data_parallel.py"
SLURM = {"SLURM_JOB_ID": "1", "SLURM_SUBMIT_DIR": str(ROOT)}
PBS = {"PBS_NODEFILE": str(ROOT / ".gitignore"), "PBS_O_WORKDIR": str(ROOT)}
SCRIPTS = {  # the variables that the user or the launcher has set
    "mpirun.sh": {"HOSTS": "localhost", "MPIRUN": "true"},
    "torchrun_node.sh": {"NODE0": "localhost"},
    "slurm_srun.sbatch": SLURM,
    "slurm_torchrun.sbatch": SLURM,
    "pbs.sh": PBS,
}


def refused(script, *words, status, said, **env):
    """Check that a script ends with the status and a line that has all words of `said`."""
    env = SCRIPTS[script] | {"PYTHON": sys.executable} | env
    done = Job("bash", ROOT / "run" / script, *words, env=env, cwd="/").wait()
    assert done.returncode == status, done.stderr
    one_line(done, *said)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_same_of_all(script):
    """No lesson, flags in its place, a lesson for another launcher, no Python."""
    refused(script, status=2, said=("lesson", "playground/distributed_data_parallel"))
    refused(script, "--epochs", 1, status=2, said=("no lesson --epochs", "playground/*.py"))
    if script != "pbs.sh":  # it starts run/two_nodes_ssh.sh, which looks for the rest
        by_ssh = ("starts its own processes", 'HOSTS="a b" run/two_nodes_ssh.sh')
        refused(script, SPAWNING, status=2, said=by_ssh, HOSTS="a b")
        missing = ("/no/python is missing", "run/setup.sh")
        refused(script, LESSON, status=1, said=missing, PYTHON="/no/python")


@pytest.mark.parametrize(
    ("script", "env", "said"),
    [
        ("mpirun.sh", {"HOSTS": "node9"}, ("no host node9", "HOSTS", "/etc/hosts")),
        ("mpirun.sh", {"HOSTS": "127.0.0.1", "SSH": "ssh -p 2"}, ("try ssh -p 2 127.0.0.1",)),
        ("mpirun.sh", {"MPIRUN": "no-mpirun"}, ("is missing", "apt-get install openmpi-bin")),
        ("mpirun.sh", {"MPIRUN": "true"}, ("neither", "MPIRUN=mpirun.openmpi")),
        ("torchrun_node.sh", {"NODE0": "no-such-node"}, ("no-such-node", "NODE0=10.0.0.1")),
        ("slurm_srun.sbatch", {"SLURM_JOB_ID": ""}, ("not inside a Slurm job", "sbatch ")),
        ("slurm_srun.sbatch", {"SLURM_SUBMIT_DIR": "/"}, ("/ is not the checkout", "sbatch ")),
        ("slurm_torchrun.sbatch", {"SLURM_JOB_ID": ""}, ("not inside a Slurm job", "sbatch ")),
        ("slurm_torchrun.sbatch", {"SLURM_SUBMIT_DIR": "/"}, ("/ is not the checkout", "sbatch ")),
        ("pbs.sh", {"PBS_NODEFILE": ""}, ("not inside a PBS job", "qsub -V run/pbs.sh")),
        ("pbs.sh", {"PBS_O_WORKDIR": "/"}, ("/ is not the checkout", "cd <checkout>")),
        ("pbs.sh", {"PBS_NODEFILE": str(ROOT / "LICENSE")}, ("different numbers", "nodes=2:ppn=2")),
    ],
)
def test_what_one_of_them_needs(script, env, said):
    """A host, ssh, mpirun, the job of a scheduler, the checkout."""
    refused(script, LESSON, status=1, said=said, **env)


def test_what_torchrun_needs():
    """An address, a lesson of several processes, and a port that is free."""
    script, single = "torchrun_node.sh", "playground/single_gpu.py"
    refused(script, LESSON, status=2, said=("lesson and NODE0 are needed",), NODE0="")
    refused(script, single, status=2, said=("is a single process", f"python {single}"))
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        said = (f"port {port} is in use", f"PORT={port + 1}")
        refused(script, LESSON, status=1, said=said, PORT=str(port))
