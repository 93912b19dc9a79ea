"""The ResNet lesson: files in CIFAR-10's layout, micro-batches, no_sync, the DataLoader's workers.

That accumulation and batch norm compute what they should in several ranks is in test_parity.py.
"""

import copy
import functools
import pickle
import re

import numpy
import pytest
import torch
from conftest import FEWER, SIZES, epochs, one_line, train
from forked import in_group
from torch.nn.parallel import DistributedDataParallel
from torchvision.datasets import CIFAR10
from torchvision.models import resnet18

LESSON = "distributed_data_parallel_resnet"
FAKE = ("--dataset", "fake", "--device", "cpu", "--batch_size", 60, "--workers", 1, "--epochs", 1)

# Before a lesson's main(): small files with CIFAR-10's names are good enough.
WITHOUT_CHECKSUMS = """
CIFAR10._check_integrity = lambda self: True
CIFAR10.meta = CIFAR10.meta | {"md5": None}


"""


def make_cifar10(root):
    """Make a data folder with random images in CIFAR-10's layout; the real one is too large."""
    folder = root / CIFAR10.base_folder
    folder.mkdir()
    numbers = numpy.random.default_rng(0)
    for name, _ in CIFAR10.train_list + CIFAR10.test_list:
        images = numbers.integers(0, 256, (13, 3072), dtype="uint8")
        batch = {"data": images, "labels": [*range(10), 0, 1, 2]}
        (folder / name).write_bytes(pickle.dumps(batch))
    names = {"label_names": list("abcdefghij")}
    (folder / CIFAR10.meta["filename"]).write_bytes(pickle.dumps(names))


@pytest.fixture
def saving(change, tmp_path):
    """A copy of the lesson that writes its model to c.pt at the end, with fewer random images."""
    end = "    del model, step  # the function refers to DDP\n"
    save = f'    if rank == 0:\n        torch.save(model.module.state_dict(), "{tmp_path}/c.pt")\n'
    main = "@record\n"
    return change(LESSON, FEWER, (end, save + end), (main, WITHOUT_CHECKSUMS + main))


def test_pretrained_parameters_and_colour_images(saving, tmp_path):
    """Two ranks, two micro-batches; so small a learning rate hardly changes the parameters."""
    make_cifar10(tmp_path)
    given = resnet18()
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    torch.save(given.state_dict(), tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth")
    flags = ["--device", "cpu", "--batch_size", 32, "--epochs", 1, "--workers", 1, "--pretrained"]
    flags += ["--lr", 1e-9, "--accumulate", 2, "--data_dir", tmp_path]
    done = train(saving, *flags, processes=2, env={"TORCH_HOME": str(tmp_path)})
    assert "global batch 32 = 2 ranks x 16 images, on each rank in 2 micro-batches" in done.stdout
    assert len(epochs(done.stdout)) == 1
    state = torch.load(tmp_path / "c.pt", weights_only=True)
    assert state["fc.weight"].shape == (10, 512)
    torch.testing.assert_close(state["conv1.weight"], given.conv1.weight, atol=1e-6, rtol=0)
    assert state["bn1.num_batches_tracked"] == 2 * 2  # two steps, two micro-batches
    assert state["bn1.running_mean"].abs().sum() > 0


def test_random_images_and_float64(saving, tmp_path):
    """--dataset fake needs no files, --double has an effect, and each global batch is a step."""
    done = train(saving, *FAKE, "--double", processes=2)
    assert "global batch 60 = 2 ranks x 30 images, on each rank in 1 micro-batches" in done.stdout
    assert len(re.findall(r"^epoch 1/1  loss \d\.\d{12}  ", done.stdout, re.M)) == 1
    state = torch.load(tmp_path / "c.pt", weights_only=True)
    assert {state[name].dtype for name in ("conv1.weight", "fc.bias")} == {torch.float64}
    assert state["bn1.num_batches_tracked"] == 3


@pytest.mark.parametrize("flags", [(), ("--dataset", "fake", "--pretrained")])
def test_what_can_not_be_downloaded(flags, tmp_path):
    """Status 1, one line: no data, no parameters."""
    nowhere = "http://127.0.0.1:9"
    env = {"TORCH_HOME": str(tmp_path), "https_proxy": nowhere, "http_proxy": nowhere}
    where = ("--data_dir", tmp_path)
    done = train(LESSON, *where, *flags, processes=1, status=1, timeout=60, env=env)
    one_line(done, "cannot download", str(tmp_path), "--dataset fake", "omit --pretrained")


class Odd(torch.nn.Module):
    """A model with a tied parameter, a frozen one, and a buffer."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(6, 6)
        self.second = torch.nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, images):
        """Turn (N, 6) into (N, 6)."""
        return self.second(self.first(images).relu()) * self.scale


def accumulating_rank(rank):
    """Train with 4 micro-batches of 3 images, and without any."""
    import distributed_data_parallel_resnet as lesson

    torch.manual_seed(0)
    ours = Odd().double()
    whole = copy.deepcopy(ours)
    images, labels = torch.randn(3, 6).double(), torch.randint(6, (3,))
    model = DistributedDataParallel(ours)
    calls = []

    def hook(state, bucket):
        calls.append(bucket.index())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
    step = functools.partial(lesson.update, model, optimizer, 4)
    sums = lesson.run_epoch(model, [(images, labels)] * 2, torch.device("cpu"), step)
    assert calls == [0, 0]
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    losses = 0
    for _ in range(2):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(whole(images), labels)
        loss.backward()
        optimizer.step()
        losses += loss.item() * 3
    assert sums[0] == pytest.approx(losses, abs=1e-12)
    assert sums[2] == 2 * 3
    torch.testing.assert_close(ours.state_dict(), whole.state_dict(), atol=1e-12, rtol=0)
    assert ours.second.bias.grad is None


def test_accumulation_with_fewer_images_than_micro_batches():
    """The parameters of whole batches, for any model, and one message in each step (no_sync)."""
    in_group(accumulating_rank, 1)


def test_workers_live_with_the_start_method_of_python_3_14(change):
    """It starts workers by forkserver, earlier ones by fork: the numbers are the same."""
    main = "    main()\n"
    start = '    torch.multiprocessing.set_start_method("forkserver", force=True)\n'
    copy = change(LESSON, (FEWER[0], SIZES.format(12, 12)), (main, start + main))
    flags = (*FAKE, "--batch_size", 12, "--double")
    found = []
    for workers in (0, 1):
        found += epochs(train(copy, *flags, "--workers", workers, processes=1).stdout)
    assert found[0] == pytest.approx(found[1], abs=1e-9)


def test_workers_that_send_nothing(tmp_path):
    """Workers send batches through sockets in TMPDIR, whose path may be too long: no hang."""
    folder = tmp_path / ("t" * 90)
    folder.mkdir()
    flags = (*FAKE, "--timeout", 5)
    env = {"TMPDIR": str(folder)}
    done = train(LESSON, *flags, processes=1, status=1, timeout=100, env=env, cold=True)
    assert "OSError: AF_UNIX path too long" in done.stderr
    assert "RuntimeError: DataLoader timed out after 5 seconds" in done.stderr
