"""The ResNet lesson: pretrained parameters, micro-batches, no_sync, the DataLoader's workers."""

import argparse
import copy
import functools
import pickle
import re

import pytest
import resnet as lesson
import torch
from launch import SIZES, Evil, run
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet18

from watch_ranks.messages import Messages
from watch_ranks.ranks import call

LESSON = "resnet"
FEW = (SIZES.format(1800, 200), SIZES.format(60, 12))


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
    copy = change(LESSON, FEW, (end, save + end), (main, forkserver + main))
    flags = ["--dataset", "fake", "--device", "cpu", "--batch_size", 20, "--epochs", 1]
    flags += ["--pretrained", "--lr", 1e-9, "--accumulate", 2, "--double", "--workers", 1]
    done = run(copy, *flags, processes=2, env={"TORCH_HOME": str(tmp_path)})
    assert "global batch 20 = 2 ranks x 10 images, on each rank in 2 micro-batches" in done.stdout
    assert len(re.findall(r"^epoch 1/1  loss \d\.\d{12}  ", done.stdout, re.M)) == 1
    state = torch.load(tmp_path / "c.pt", weights_only=True)
    assert state["fc.weight"].shape == (10, 512) and state["fc.bias"].dtype == torch.float64
    first = given.conv1.weight.double()
    torch.testing.assert_close(state["conv1.weight"], first, atol=1e-6, rtol=0)
    assert state["bn1.num_batches_tracked"] == 3 * 2  # three steps, two micro-batches
    assert state["bn1.running_mean"].abs().sum() > 0


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


def test_downloaded_parameters_run_no_code(tmp_path, monkeypatch):
    """A file in place of torchvision's, which would make a folder, is refused."""
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    torch.save({"fc.bias": Evil(f"{tmp_path}/it_ran")}, folder / "resnet18-f37072fd.pth")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        lesson.pretrained()
    assert not (tmp_path / "it_ran").exists()


def rank_of(rank, count):
    """Train with the lesson's own run_epoch, and as all ranks, one piece of a batch at a time."""
    torch.manual_seed(0)
    norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
    model = nn.Sequential(*norm, nn.Flatten(), nn.Linear(4 * 6 * 6, 10)).double()
    alone = copy.deepcopy(model)
    images = torch.randn(2, 3, 7, 3, 8, 8).double()  # two steps, three ranks, seven images each
    labels = torch.randint(10, (2, 3, 7))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-6)
    step = functools.partial(lesson.update, wrapped, optimizer, count)
    share = list(zip(images[:, rank], labels[:, rank], strict=True))
    with Messages() as messages:
        lesson.run_epoch(wrapped, share, torch.device("cpu"), step)
    assert len(messages.of("all_reduce")) == 2 + 1  # one in each step, and one for the sums
    optimizer = torch.optim.Adam(alone.parameters(), lr=1e-3, eps=1e-6)
    for ranks in zip(images, labels, strict=True):
        optimizer.zero_grad()
        for batch in zip(*ranks, strict=True):
            pieces = [part.tensor_split(min(count, 7)) for part in batch]
            for piece_images, piece_labels in zip(*pieces, strict=True):
                loss = F.cross_entropy(alone(piece_images), piece_labels, reduction="sum")
                (loss / (3 * 7)).backward()
        optimizer.step()
    for parameter, right in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(parameter, right, atol=1e-12, rtol=0)


@pytest.mark.parametrize("count", [2, 9])
def test_batch_norm_and_accumulation_as_in_one_process(count):
    """DDP, pieces of unequal length and no_sync change nothing but rounding: 1e-12 in float64.

    Nor do more micro-batches than images.
    """
    call(rank_of, 3, count)


def test_the_parts_of_cifar(monkeypatch):
    """It trains on one, and tests on the other."""
    monkeypatch.setattr(lesson, "CIFAR10", lambda folder, train=True, transform=None: train)
    args = argparse.Namespace(dataset="cifar10", data_dir="", double=False)
    assert lesson.load(args) == (True, False)
