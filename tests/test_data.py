"""The data and the models.

Most tests are about fetch(): files that are missing or damaged, and several processes at once.
"""

import argparse
import functools
import os
import shutil
import socket
import threading
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from forked import in_ranks
from nodes import small_disk
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import BatchSampler, RandomSampler
from torchvision.datasets import MNIST
from torchvision.transforms import Compose, Normalize, ToTensor

from common.data import Images, fetch, load, loaders
from common.models import CNN, MLP, Attention, Block, Transformer

# Bytes of the unpacked files. They are not taken from common.data, to detect a wrong number there.
SIZES = {
    "train-images-idx3-ubyte": 47_040_016,
    "train-labels-idx1-ubyte": 60_008,
    "t10k-images-idx3-ubyte": 7_840_016,
    "t10k-labels-idx1-ubyte": 10_008,
}
ARCHIVES = [f"{name}.gz" for name in SIZES]


@pytest.fixture(autouse=True)
def no_mirror(monkeypatch):
    """Let torchvision download from a port that no program listens on.

    So no test needs or uses the Internet.
    """
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(MNIST, "mirrors", ["http://127.0.0.1:1/"])


@pytest.fixture
def mirror(mnist):
    """Serve the archives. Returns the address for torchvision."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *args):
            """Print nothing."""

    handler = functools.partial(Handler, directory=mnist / "MNIST" / "raw")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def copied(mnist, folder, names):
    """Copy some files of MNIST into a data folder. Returns the folder that they are in."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in names:
        shutil.copyfile(mnist / "MNIST" / "raw" / name, raw / name)
    return raw


def sizes(folder):
    """Return the names and sizes of the unpacked files in a data folder."""
    paths = (folder / "MNIST" / "raw").iterdir()
    return {path.name: path.stat().st_size for path in paths if path.suffix != ".gz"}


def error_line(*args):
    """Call fetch(), which must end the program with one line. Returns the line."""
    with pytest.raises(SystemExit) as stop:
        fetch(*args)
    assert str(stop.value).startswith("error: ")
    assert len(str(stop.value).splitlines()) == 1
    return str(stop.value)


def warning_line(err):
    """Return the one line of stderr that is a warning."""
    [line] = [line for line in err.splitlines() if line.startswith("WARNING: ")]
    return line


def fetch_as_rank(rank, world_size, port, results, folder):
    """Fetch as one of the ranks of a node, and tell the others' process what to train on."""
    torch.set_num_threads(1)  # a forked process cannot use the threads of the first one
    os.environ["LOCAL_RANK"] = str(rank)
    results[rank] = fetch(None, folder)


def test_digits_are_all_of_scikit_learns(tmp_path):
    """Both sets together have each of the 1,797 digits once, with its label, and normalised.

    The split does not depend on the user's seed.
    """
    train_set, test_set = load("digits", tmp_path)
    assert train_set.images.shape == (1500, 1, 28, 28)
    assert test_set.images.shape == (297, 1, 28, 28)
    assert train_set.images.mean().item() == pytest.approx(0, abs=0.01)
    assert train_set.images.std().item() == pytest.approx(1, abs=0.01)
    original = load_digits()
    # All originals differ, so find the one that each image was resized from.
    original_images = torch.tensor(original.images / 16).unsqueeze(1).float()
    resized = F.interpolate(original_images, (28, 28), mode="bilinear")
    pixels = torch.cat([train_set.images, test_set.images]).mul(0.3245).add(0.3051)
    distance, source = torch.cdist(pixels.flatten(1), resized.flatten(1)).min(dim=1)
    assert distance.max() < 0.1  # cdist is not exact; the two most similar digits are 0.85 apart
    assert sorted(source.tolist()) == list(range(1797))
    labels = torch.cat([train_set.labels, test_set.labels])
    assert labels.equal(torch.tensor(original.target)[source])
    # The test images come from all parts of the file, and from all classes.
    thirds = source[1500:].div(600, rounding_mode="floor")
    assert thirds.bincount(minlength=3).min() > 50
    assert test_set.labels.bincount(minlength=10).min() > 10
    torch.manual_seed(1)
    assert load("digits", tmp_path)[0].images.equal(train_set.images)


@pytest.mark.parametrize(("world_size", "double"), [(1, False), (8, True)])
def test_the_loaders_of_all_ranks(world_size, double, monkeypatch):
    """Their training batches make up those of single_gpu.py, and each test image is there once.

    All ranks have equally many test batches.
    """

    def numbers(dataset, data_dir, dtype):
        parts = (torch.arange(1500), torch.arange(2500))
        return tuple(Images(part.to(dtype), part) for part in parts)

    monkeypatch.setattr("common.data.load", numbers)
    args = argparse.Namespace(dataset="digits", data_dir=None, batch_size=120, seed=3)
    args.device = "cpu"
    args.double = double
    pairs = [loaders(args, rank, world_size) for rank in range(world_size)]
    for epoch in (0, 1):
        for train_loader, _ in pairs:
            train_loader.sampler.set_epoch(epoch)
        order = RandomSampler(range(1500), generator=torch.Generator().manual_seed(3 + epoch))
        batches = BatchSampler(order, 120, drop_last=True)
        train_loaders = [train_loader for train_loader, _ in pairs]
        for batch, *parts in zip(batches, *train_loaders, strict=True):
            for rank, (images, labels) in enumerate(parts):
                assert labels.tolist() == batch[rank::world_size]
                assert images.equal(labels.to(torch.float64 if double else torch.float32))
    assert {len(test_loader) for _, test_loader in pairs} == {3}
    tested = []
    for _, test_loader in pairs:
        for _, labels in test_loader:
            tested += labels.tolist()
    assert sorted(tested) == list(range(2500))


def test_mnist_equals_torchvisions(mnist, capsys):
    """The archives are enough. The images equal those of torchvision's ToTensor and Normalize.

    When they are unpacked, fetch() prints nothing and writes nothing.
    """
    assert fetch(None, mnist) == "mnist"
    assert sizes(mnist) == SIZES
    train_set, test_set = load("mnist", mnist)
    assert (len(train_set), len(test_set)) == (60_000, 10_000)
    transform = Compose([ToTensor(), Normalize((0.1307,), (0.3081,))])
    for part, train in ((train_set, True), (test_set, False)):
        theirs = MNIST(mnist, train=train, transform=transform)
        for index in (0, 1, 4321, 9999, len(part) - 1):
            image, label = part[index]
            torch.testing.assert_close(image, theirs[index][0], atol=1e-6, rtol=0)
            assert label.dtype == torch.int64 and label == theirs[index][1]
    before = {path: path.stat().st_mtime_ns for path in mnist.rglob("*")}
    capsys.readouterr()
    assert fetch(None, mnist) == fetch("mnist", mnist) == "mnist"
    assert {path: path.stat().st_mtime_ns for path in mnist.rglob("*")} == before
    assert capsys.readouterr() == ("", "")


def test_four_processes_download_once(mirror, tmp_path, monkeypatch, capfd):
    """Four processes with an empty folder all get MNIST, and one of them downloads it."""
    download = MNIST.download

    def slowly(dataset):
        with open(tmp_path / "downloads", "a") as file:
            file.write("one\n")
        time.sleep(1)  # the other processes start in the meantime
        download(dataset)

    monkeypatch.setattr(MNIST, "mirrors", [mirror])
    monkeypatch.setattr(MNIST, "download", slowly)
    folder = tmp_path / "not" / "there yet"
    answers = in_ranks(fetch_as_rank, 4, folder)
    assert answers == dict.fromkeys(range(4), "mnist")
    out, err = capfd.readouterr()
    assert out == "" and "WARNING" not in err
    assert (tmp_path / "downloads").read_text() == "one\n"
    assert sizes(folder) == SIZES


def test_without_mirror(tmp_path, capfd):
    """Four processes all choose the digits, and the node warns once. MNIST by name is refused.

    A batch is compared with the data set that is used, not with the one that is missing.
    """
    answers = in_ranks(fetch_as_rank, 4, tmp_path)
    assert answers == dict.fromkeys(range(4), "digits")
    out, err = capfd.readouterr()
    assert out == "" and str(tmp_path) in warning_line(err)
    line = error_line("mnist", tmp_path)
    assert str(tmp_path) in line and "--dataset digits" in line
    assert "--batch_size must be at most 1500" in error_line(None, tmp_path, 1501)


def test_silent_mirror_is_given_up(tmp_path, capsys, monkeypatch):
    """A mirror that accepts the connection and never answers does not stop fetch() for long.

    Afterwards sockets have the timeout that they had before.
    """
    set_timeout = socket.setdefaulttimeout
    before = socket.getdefaulttimeout()
    # Whatever timeout fetch() sets is 0.2 seconds here.
    monkeypatch.setattr(socket, "setdefaulttimeout", lambda seconds: set_timeout(seconds and 0.2))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        # If fetch() waited forever, this would end it, with a reason other than "timed out".
        guard = threading.Timer(20, silent.close)
        guard.start()
        monkeypatch.setattr(MNIST, "mirrors", [f"http://127.0.0.1:{silent.getsockname()[1]}/"])
        assert fetch(None, tmp_path) == "digits"
        guard.cancel()
    assert "timed out" in warning_line(capsys.readouterr().err)
    assert socket.getdefaulttimeout() == before


def test_damaged_files_are_named(mnist, tmp_path, capsys):
    """A file that is cut short, or has a hole as a download can leave, is never trained on.

    The digits need none of the files.
    """
    fetch("mnist", mnist)
    raw = copied(mnist, tmp_path, SIZES)
    holed = raw / "t10k-labels-idx1-ubyte"
    with open(holed, "r+b") as file:
        file.seek(5000)
        file.write(bytes(4000))
    for dataset in (None, "mnist"):
        assert f"{holed} is damaged: delete it" in error_line(dataset, tmp_path)
    short = raw / "train-images-idx3-ubyte"
    os.truncate(short, 23_520_008)
    for dataset in (None, "mnist"):
        line = error_line(dataset, tmp_path)
        assert f"{short} has 23,520,008 bytes, not 47,040,016: delete it" in line
    capsys.readouterr()
    assert fetch("digits", tmp_path) == "digits"
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("options", "reason"), [("5m", "No space left on device"), ("5m,ro", "Read-only file system")]
)
def test_a_folder_that_can_not_be_written(options, reason, mirror, tmp_path, monkeypatch, capsys):
    """The reason is named, and nothing unfinished is left: a full disk, and a read-only one."""
    monkeypatch.setattr(MNIST, "mirrors", [mirror])
    with small_disk(tmp_path, options):
        folder = tmp_path / "new"
        assert fetch(None, folder) == "digits"
        line = warning_line(capsys.readouterr().err)
        assert str(folder) in line and reason in line
        line = error_line("mnist", folder)
        assert str(folder) in line and reason in line and "--dataset digits" in line
        assert list(tmp_path.rglob("*ubyte*")) == []


def test_a_truncated_archive(mnist, mirror, tmp_path, monkeypatch):
    """It is named if it cannot be downloaded again. With a mirror, only this one is fetched."""
    damaged = copied(mnist, tmp_path, ARCHIVES) / "train-labels-idx1-ubyte.gz"
    whole = damaged.stat().st_size
    for dataset in (None, "mnist"):
        os.truncate(damaged, whole // 2)
        assert f"{damaged} is damaged: delete it" in error_line(dataset, tmp_path)
    others = [path for path in damaged.parent.iterdir() if path != damaged]
    before = [path.stat().st_mtime_ns for path in others]
    monkeypatch.setattr(MNIST, "mirrors", [mirror])
    assert fetch("mnist", tmp_path) == "mnist"
    assert [path.stat().st_mtime_ns for path in others] == before
    assert sizes(tmp_path) == SIZES


def test_batch_larger_than_the_training_set(mnist):
    """A batch may be the whole training set. One image more is refused, and the limit is named."""
    for dataset, images in (("digits", 1500), (None, 60_000)):
        assert fetch(dataset, mnist, images) == (dataset or "mnist")
        line = error_line(dataset, mnist, images + 1)
        assert f"--batch_size must be at most {images}" in line


def test_layers_of_the_mlp():
    """Its scores are those of four linear layers with ReLU between them."""
    network = MLP()
    assert sum(parameter.numel() for parameter in network.parameters()) == 59_210
    images = torch.randn(5, 1, 28, 28)
    parameters = list(network.parameters())
    hidden = images.flatten(1)
    for weight, bias in zip(parameters[:6:2], parameters[1:6:2], strict=True):
        hidden = F.linear(hidden, weight, bias).relu()
    torch.testing.assert_close(network(images), F.linear(hidden, *parameters[6:]))
    assert network.stage2(network.stage1(images)).equal(network(images))


def test_layers_of_the_cnn():
    """Its scores are those of two convolutions and two linear layers.

    Each convolution has ReLU and pooling behind it, and ReLU is between the linear layers.
    """
    network = CNN()
    assert sum(parameter.numel() for parameter in network.parameters()) == 51_902
    images = torch.randn(5, 1, 28, 28)
    parameters = list(network.parameters())
    hidden = F.max_pool2d(F.conv2d(images, *parameters[:2], padding=2).relu(), 2)
    hidden = F.max_pool2d(F.conv2d(hidden, *parameters[2:4]).relu(), 2)
    hidden = F.linear(hidden.flatten(1), *parameters[4:6]).relu()
    torch.testing.assert_close(network(images), F.linear(hidden, *parameters[6:]))


def test_layers_of_the_transformer():
    """A row of pixels is a token; blocks add to them; the last one gives the class."""
    network = Transformer()
    assert sum(parameter.numel() for parameter in network.parameters()) == 27_626
    images = torch.randn(5, 1, 28, 28)
    embed = network.stage1[0]
    tokens = F.linear(images[:, 0], embed.embed.weight, embed.embed.bias) + embed.position
    for block in (network.stage1[1], network.stage2[0]):
        tokens = tokens + block.attention(F.layer_norm(tokens, (32,)))  # its weights are still 1
        tokens = tokens + block.mlp(F.layer_norm(tokens, (32,)))
    scores = network.stage2[1].linear(F.layer_norm(tokens[:, -1], (32,)))
    torch.testing.assert_close(network(images), scores)


def test_attention():
    """Each head weighs the values of this token and of those before it, by their keys."""
    attention = Attention(12, 3)
    tokens = torch.randn(2, 5, 12)
    read = []
    for head in range(3):
        part = slice(4 * head, 4 * head + 4)
        query = attention.query(tokens)[..., part]
        key = attention.key(tokens)[..., part]
        value = attention.value(tokens)[..., part]
        scores = query @ key.mT / 2  # the root of 4, the numbers of a head
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
        read.append(scores.softmax(-1) @ value)
    torch.testing.assert_close(attention(tokens), attention.output(torch.cat(read, -1)))


@pytest.mark.parametrize("network", [MLP, CNN])
def test_depth(network):
    """Each additional layer is a linear layer. All have the width."""
    without = len(list(network(8, 1).parameters()))
    for layers in (1, 2, 6):
        model = network(8, layers)
        assert len(list(model.parameters())) == without + 2 * (layers - 1)
        widths = [len(each) for each in model.parameters() if each.dim() == 2]
        assert widths == [8] * layers + [10]
        assert model(torch.randn(5, 1, 28, 28)).shape == (5, 10)


def test_blocks_of_the_transformer():
    """The first stage has the larger half of the blocks, and any number of tokens."""
    for layers, halves in {1: (1, 0), 2: (1, 1), 3: (2, 1)}.items():
        model = Transformer(8, layers, tokens=7)
        stages = (model.stage1, model.stage2)
        blocks = [sum(isinstance(layer, Block) for layer in stage) for stage in stages]
        assert tuple(blocks) == halves
        assert model(torch.randn(5, 1, 28, 28)).shape == (5, 10)
