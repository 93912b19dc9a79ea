"""The ResNet lesson: files in CIFAR-10's layout, micro-batches, no_sync, the DataLoader's workers.

That accumulation and batch norm compute what they should in several ranks is in test_parity.py.
"""

import copy
import functools
import pickle
import re
import sys

import numpy
import pytest
import torch
import torch.distributed as dist
from conftest import FEWER, ROOT, SIZES, Job, epochs, free_port, one_line, train
from torch.nn.parallel import DistributedDataParallel
from torchvision.datasets import CIFAR10
from torchvision.models import resnet18

LESSON = "distributed_data_parallel_resnet"
PATH = ROOT / "playground" / f"{LESSON}.py"
FAKE = ("--dataset", "fake", "--device", "cpu", "--batch_size", 60, "--workers", 1, "--epochs", 1)

# Runs the lesson on small files with CIFAR-10's names: python FILE lesson flags...
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
    """A data folder with a few random images in CIFAR-10's layout; the real one is too large."""
    root = tmp_path_factory.mktemp("cifar10")
    folder = root / CIFAR10.base_folder
    folder.mkdir()
    numbers = numpy.random.default_rng(0)
    for name, _ in CIFAR10.train_list + CIFAR10.test_list:
        images = numbers.integers(0, 256, (13, 3072), dtype="uint8")
        batch = {"data": images, "labels": [*range(10), 0, 1, 2]}
        (folder / name).write_bytes(pickle.dumps(batch))
    names = {"label_names": list("abcdefghij")}
    (folder / CIFAR10.meta["filename"]).write_bytes(pickle.dumps(names))
    return root


@pytest.fixture
def saving(tmp_path):
    """A copy of the lesson that writes its model to c.pt at the end, with fewer random images."""
    copy = tmp_path / f"{LESSON}.py"
    text = PATH.read_text()
    end = "    del model, step  # the function refers to DDP\n"
    for old in (FEWER[0], end):
        assert text.count(old) == 1
    save = f'    if rank == 0:\n        torch.save(model.module.state_dict(), "{tmp_path}/c.pt")\n'
    copy.write_text(text.replace(*FEWER).replace(end, save + end))
    return copy


def test_pretrained_parameters_and_colour_images(cifar10, saving, tmp_path):
    """Two ranks, two micro-batches; so small a learning rate hardly changes the parameters."""
    given = resnet18()
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    torch.save(given.state_dict(), tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth")
    script = tmp_path / "without_checksums.py"
    script.write_text(WITHOUT_CHECKSUMS)
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    flags = ["--device", "cpu", "--batch_size", 32, "--epochs", 1, "--workers", 1, "--pretrained"]
    flags += ["--lr", 1e-9, "--accumulate", 2, "--data_dir", cifar10]
    env = {"TORCH_HOME": str(tmp_path), "PYTHONPATH": f"{ROOT}:{ROOT / 'playground'}"}
    done = Job(*agent, script, saving, *flags, env=env).wait()
    assert done.returncode == 0, done.stderr
    assert "global batch 32 = 2 ranks x 16 images, on each rank in 2 micro-batches" in done.stdout
    assert len(epochs(done.stdout)) == 1
    state = torch.load(tmp_path / "c.pt", weights_only=True)
    assert state["fc.weight"].shape == (10, 512)
    torch.testing.assert_close(state["conv1.weight"], given.conv1.weight, atol=1e-6, rtol=0)
    assert state["bn1.num_batches_tracked"] == 2 * 2  # two steps, two micro-batches
    assert state["bn1.running_mean"].abs().sum() > 0


def test_random_images_and_float64(saving, tmp_path):
    """--dataset fake needs no files, and --double has an effect."""
    done = train(saving, *FAKE, "--double", processes=1)
    assert len(epochs(done.stdout)) == 1
    assert "global batch 60 = 1 ranks x 60 images, on each rank in 1 micro-batches" in done.stdout
    assert re.search(r"^epoch 1/1  loss \d\.\d{12}  ", done.stdout, re.M)
    state = torch.load(tmp_path / "c.pt", weights_only=True)
    assert {state[name].dtype for name in ("conv1.weight", "fc.bias")} == {torch.float64}


@pytest.mark.parametrize("flags", [(), ("--dataset", "fake", "--pretrained")])
def test_what_can_not_be_downloaded(flags, tmp_path):
    """Status 1, one line: no data, no parameters."""
    nowhere = "http://127.0.0.1:9"
    env = {"TORCH_HOME": str(tmp_path), "https_proxy": nowhere, "http_proxy": nowhere}
    where = ("--data_dir", tmp_path)
    done = train(LESSON, *where, *flags, processes=1, status=1, timeout=60, env=env)
    one_line(done, "cannot download", str(tmp_path), "--dataset fake", "omit --pretrained")


@pytest.fixture
def alone():
    """Be the only rank of a group, so that DDP works in this process."""
    address = f"tcp://127.0.0.1:{free_port()}"
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_no_sync_saves_messages(alone):
    """With 4 micro-batches, the gradients of 3 stay on the rank: one all-reduce in each step."""
    import distributed_data_parallel_resnet as lesson

    plain = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    model = DistributedDataParallel(plain)
    calls = []

    def hook(state, bucket):
        calls.append(bucket.index())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(torch.randn(8, 1, 28, 28), torch.arange(8))] * 3
    step = functools.partial(lesson.update, model, optimizer, 4)
    lesson.run_epoch(model, batches, torch.device("cpu"), step)
    assert calls == [0, 0, 0]


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


@pytest.mark.parametrize(("images", "accumulate"), [(7, 3), (3, 4), (1, 2), (8, 8), (5, 1)])
def test_accumulation_with_any_model_and_batch(images, accumulate, alone):
    """One step changes the parameters as one step with the whole batch, with fewer images, too."""
    import distributed_data_parallel_resnet as lesson

    torch.manual_seed(0)
    ours = Odd().double()
    whole = copy.deepcopy(ours)
    batch = torch.randn(images, 6).double(), torch.randint(6, (images,))
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
    model = DistributedDataParallel(ours)
    step = functools.partial(lesson.update, model, optimizer, accumulate)
    sums = lesson.run_epoch(model, [batch] * 2, torch.device("cpu"), step)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    losses = 0
    for _ in range(2):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(whole(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        losses += loss.item() * images
    assert sums[0] == pytest.approx(losses, abs=1e-12)
    assert sums[2] == 2 * images
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name), parameter, atol=1e-12, rtol=0)
    assert ours.second.bias.grad is None


@pytest.fixture
def step(tmp_path):
    """Return a function that trains a copy of the lesson for a step and returns its epoch line."""
    copy = tmp_path / f"{LESSON}.py"
    text = PATH.read_text()
    last = "    main()\n"
    assert text.endswith(last)
    assert text.count(FEWER[0]) == 1

    def called(*flags, method):
        start = f'    torch.multiprocessing.set_start_method("{method}")\n'
        copy.write_text(
            text.replace(FEWER[0], SIZES.format(12, 12)).removesuffix(last) + start + last
        )
        flags = ("--dataset", "fake", "--device", "cpu", "--batch_size", 12, "--epochs", 1, *flags)
        (line,) = epochs(train(copy, *flags, processes=1).stdout)
        return line

    return called


@pytest.mark.parametrize(
    ("method", "flags"), [("fork", ()), ("spawn", ()), ("forkserver", ("--double",))]
)
def test_workers_live_with_each_start_method(method, flags, step):
    """Python 3.14 starts workers by forkserver, earlier ones by fork: the numbers are the same."""
    line = step("--workers", 1, *flags, method=method)
    assert line == pytest.approx(step("--workers", 0, *flags, method=method), abs=2e-4)


def test_steps_of_two_ranks(saving, tmp_path):
    """One line for each epoch, and as many steps as there are global batches."""
    done = train(saving, *FAKE, processes=2)
    assert len(epochs(done.stdout)) == 1
    assert torch.load(tmp_path / "c.pt", weights_only=True)["bn1.num_batches_tracked"] == 3


def test_workers_that_send_nothing(tmp_path):
    """Workers send batches through sockets in TMPDIR, whose path may be too long: no hang."""
    folder = tmp_path / ("t" * 90)
    folder.mkdir()
    flags = (*FAKE, "--timeout", 5)
    env = {"TMPDIR": str(folder)}
    done = train(LESSON, *flags, processes=1, status=1, timeout=100, env=env, cold=True)
    assert "OSError: AF_UNIX path too long" in done.stderr
    assert "RuntimeError: DataLoader timed out after 5 seconds" in done.stderr
