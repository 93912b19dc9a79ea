"""run/kubernetes.yaml: it is valid, and its command trains on two nodes."""

import sys

import yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob
from launch import Job, epochs, one_process
from lessons import ROOT

MANIFEST = yaml.safe_load((ROOT / "run" / "kubernetes.yaml").read_text())


def test_the_file_is_a_train_job():
    """Kubeflow Trainer's own model knows each field."""
    assert TrainerV1alpha1TrainJob.from_dict(MANIFEST).to_dict() == MANIFEST


FLAGS = ("--dataset", "digits", "--device", "cpu", "--epochs", 2)


def test_the_command_of_the_pods(nodes):
    """It is started with the variables that the operator sets for torchrun."""
    trainer = MANIFEST["spec"]["trainer"]
    torchrun, *words = [*trainer["command"], *trainer["args"]]
    assert torchrun == "torchrun"
    words = [word.replace("/course", str(ROOT)) for word in words]
    told = {"NNODES": trainer["numNodes"], "NPROC_PER_NODE": trainer["numProcPerNode"]}
    told |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": 29400}
    jobs = []
    for node in range(trainer["numNodes"]):
        env = {f"PET_{name}": str(each) for name, each in (told | {"NODE_RANK": node}).items()}
        command = (*nodes.enter(node), sys.executable, "-m", "torch.distributed.run", *words)
        jobs.append(Job(*command, env=env))
    check(jobs)


def check(jobs):
    """Wait for both nodes, and compare the numbers with those of one process."""
    ends = [job.wait() for job in jobs]
    assert [end.returncode for end in ends] == [0, 0], ends[0].stderr + ends[1].stderr
    [out] = [end.stdout for end in ends if "epoch" in end.stdout]
    assert "4 ranks" in out
    assert epochs(out) == one_process(*FLAGS)
