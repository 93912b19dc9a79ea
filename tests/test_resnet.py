"""The ResNet lesson: real files in CIFAR-10's layout, weights on disk, pieces, and messages that no_sync saves.

That accumulation and batch norm compute what they should is in test_parity.py.
"""

import pickle
import sys

import numpy
import pytest
import torch
import torch.distributed as dist
from conftest import FEWER, ROOT, Job, epochs, free_port, python_path, run, train
from test_errors import one_line
from torch.nn.parallel import DistributedDataParallel
from torchvision.datasets import CIFAR10
from torchvision.models import resnet18

LESSON = "distributed_data_parallel_resnet"
PATH = ROOT / "playground" / f"{LESSON}.py"
FAKE = ("--dataset", "fake", "--device", "cpu", "--batch_size", 60, "--workers", 1, "--epochs", 1)

# Runs the lesson on small files of CIFAR-10's names, which are not the real ones: python FILE lesson flags...
WITHOUT_CHECKSUMS = """
import runpy, sys
from torchvision.datasets import CIFAR10
CIFAR10._check_integrity = lambda self: True
CIFAR10.meta = CIFAR10.meta | {"md5": None}
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def cifar10(tmp_path_factory):
    """A data folder with a few random images in CIFAR-10's layout; the real one is too large to come with the tests."""
    root = tmp_path_factory.mktemp("cifar10")
    folder = root / CIFAR10.base_folder
    folder.mkdir()
    numbers = numpy.random.default_rng(0)
    for name, _ in CIFAR10.train_list + CIFAR10.test_list:
        batch = {"data": numbers.integers(0, 256, (13, 3072), dtype="uint8"), "labels": [*range(10), 0, 1, 2]}
        (folder / name).write_bytes(pickle.dumps(batch))
    (folder / CIFAR10.meta["filename"]).write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    return root


@pytest.fixture
def small(tmp_path):
    """A copy of the lesson with a tenth of its random images."""
    copy = tmp_path / f"{LESSON}.py"
    assert PATH.read_text().count(FEWER[0]) == 1
    copy.write_text(PATH.read_text().replace(*FEWER))
    return copy


def test_pretrained_weights_and_colour_images(cifar10, tmp_path):
    """Two ranks, two pieces, weights from disk on rank 0 alone; so small a learning rate hardly changes them."""
    given = resnet18()
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    torch.save(given.state_dict(), tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth")
    script = tmp_path / "without_checksums.py"
    script.write_text(WITHOUT_CHECKSUMS)
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, script, PATH]
    flags = ["--device", "cpu", "--batch_size", 32, "--epochs", 1, "--workers", 1, "--pretrained", "--lr", 1e-9]
    flags += ["--accumulate", 2, "--data_dir", cifar10, "-s", tmp_path / "c.pt"]
    env = {"TORCH_HOME": str(tmp_path), "PYTHONPATH": python_path(script)}
    env["PYTHONPATH"] = f"{ROOT}:{ROOT / 'playground'}"
    done = Job(*agent, *flags, env=env).wait()
    assert done.returncode == 0, done.stderr
    assert "global batch 32 = 2 ranks x 16 images, in 2 pieces" in done.stdout
    assert len(epochs(done.stdout)) == 1
    state = torch.load(tmp_path / "c.pt", weights_only=True)["model"]
    assert state["fc.weight"].shape == (10, 512)
    torch.testing.assert_close(state["conv1.weight"], given.conv1.weight, atol=1e-6, rtol=0)
    assert state["bn1.num_batches_tracked"] == 2 * 2  # two steps in two pieces
    assert state["bn1.running_mean"].abs().sum() > 0


def test_random_images_and_float64(small):
    """--dataset fake needs no files; --double is heard."""
    done = run(small, *FAKE, "--double")
    assert len(epochs(done.stdout)) == 1
    assert "global batch 60 = 1 ranks x 60 images, in 1 pieces" in done.stdout


@pytest.mark.parametrize("flags", [(), ("--dataset", "fake", "--pretrained")])
def test_what_can_not_be_had(flags, tmp_path):
    """Status 1, one line: no data, no weights."""
    env = {"TORCH_HOME": str(tmp_path), "https_proxy": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"}
    done = run(LESSON, "--data_dir", tmp_path, *flags, status=1, timeout=60, env=env)
    one_line(done, "can't fetch", str(tmp_path), "--dataset fake", "leave --pretrained out")


def test_no_sync_saves_messages():
    """With 4 pieces, the gradients of 3 stay on the rank: one all-reduce a step instead of four."""
    import distributed_data_parallel_resnet as lesson

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10)))
        calls = []

        def hook(state, bucket):
            calls.append(bucket.index())
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        model.register_comm_hook(None, hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = [(torch.randn(8, 1, 28, 28), torch.arange(8))] * 3
        lesson.run_epoch(model, batches, torch.device("cpu"), optimizer, accumulate=4)
    finally:
        dist.destroy_process_group()
    assert calls == [0, 0, 0]


def test_two_ranks_begin_with_the_same_weights(small, tmp_path):
    """As many steps as ranks see, and one line of each epoch."""
    done = train(small, *FAKE, "-s", tmp_path / "c.pt", processes=2)
    assert len(epochs(done.stdout)) == 1
    assert torch.load(tmp_path / "c.pt", weights_only=True)["model"]["bn1.num_batches_tracked"] == 3
