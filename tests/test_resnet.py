"""The ResNet lesson: pretrained parameters, micro-batches, no_sync, the DataLoader's workers.

That accumulation and batch norm compute what they should in several ranks is in test_parity.py.
"""

import argparse
import copy
import functools
import re

import distributed_data_parallel_resnet as lesson
import pytest
import torch
from conftest import FEWER, train
from forked import in_group
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet18

LESSON = "distributed_data_parallel_resnet"


def test_two_ranks_with_everything(change, tmp_path):
    """Pretrained parameters, two micro-batches, float64, and Python 3.14's way to start workers.

    So small a learning rate hardly changes the parameters.
    """
    given = resnet18()
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    torch.save(given.state_dict(), tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth")
    end = "    del model, step  # the function refers to DDP\n"
    save = f'    if rank == 0:\n        torch.save(model.module.state_dict(), "{tmp_path}/c.pt")\n'
    main = "    main()\n"
    forkserver = '    torch.multiprocessing.set_start_method("forkserver", force=True)\n'
    copy = change(LESSON, FEWER, (end, save + end), (main, forkserver + main))
    flags = ["--dataset", "fake", "--device", "cpu", "--batch_size", 60, "--epochs", 1]
    flags += ["--pretrained", "--lr", 1e-9, "--accumulate", 2, "--double", "--workers", 1]
    done = train(copy, *flags, processes=2, env={"TORCH_HOME": str(tmp_path)})
    assert "global batch 60 = 2 ranks x 30 images, on each rank in 2 micro-batches" in done.stdout
    assert len(re.findall(r"^epoch 1/1  loss \d\.\d{12}  ", done.stdout, re.M)) == 1
    state = torch.load(tmp_path / "c.pt", weights_only=True)
    assert state["fc.weight"].shape == (10, 512) and state["fc.bias"].dtype == torch.float64
    first = given.conv1.weight.double()
    torch.testing.assert_close(state["conv1.weight"], first, atol=1e-6, rtol=0)
    assert state["bn1.num_batches_tracked"] == 3 * 2  # three steps, two micro-batches
    assert state["bn1.running_mean"].abs().sum() > 0


def test_the_two_sets_of_cifar10(monkeypatch):
    """The lesson trains on one and tests on the other. (They are too large for a test.)"""
    monkeypatch.setattr(lesson, "CIFAR10", lambda folder, train, transform: (folder, train))
    args = argparse.Namespace(dataset="cifar10", data_dir="here", double=False)
    assert lesson.load(args) == (("here", True), ("here", False))


def test_what_can_not_be_downloaded(tmp_path, monkeypatch):
    """One line: no data, no parameters."""
    for name in ("https_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    for dataset, pretrained in (("cifar10", False), ("fake", True)):
        args = argparse.Namespace(dataset=dataset, pretrained=pretrained, data_dir=tmp_path)
        with pytest.raises(SystemExit) as end:
            lesson.download(args)
        [line] = str(end.value).splitlines()
        assert line.startswith("error: cannot download")
        for word in (str(tmp_path), "--dataset fake", "omit --pretrained"):
            assert word in line


def test_a_worker_that_never_answers():
    """The rank waits for it as long as for another rank."""
    args = argparse.Namespace(dataset="fake", double=False, seed=0, batch_size=8, device="cpu")
    args.timeout = 7
    for workers, timeout in ((1, 7), (0, 0)):
        args.workers = workers
        assert [each.timeout for each in lesson.loaders(args, 0, 2)] == [timeout] * 2


class Odd(torch.nn.Module):
    """A model with a tied parameter and a frozen one."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(6, 6)
        self.second = torch.nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)

    def forward(self, images):
        """Turn (N, 6) into (N, 6)."""
        return self.second(self.first(images).relu())


def accumulating_rank(rank):
    """Train with 4 micro-batches of 3 images, and without any."""
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
