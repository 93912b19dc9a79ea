"""The data and the models.

Most tests are about fetch(): files that are missing or damaged, and several processes at once.
"""

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from conftest import ROOT, epochs, run
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from torchvision.datasets import MNIST
from torchvision.transforms import Compose, Normalize, ToTensor

from common.data import Images, fetch, load, loaders, whole_batch
from common.models import CNN, MLP, Attention, Block, Transformer

# Bytes of the unpacked files. They are not taken from common.data, to detect a wrong number there.
SIZES = {
    "train-images-idx3-ubyte": 47_040_016,
    "train-labels-idx1-ubyte": 60_008,
    "t10k-images-idx3-ubyte": 7_840_016,
    "t10k-labels-idx1-ubyte": 10_008,
}
ARCHIVES = [f"{name}.gz" for name in SIZES]

# Calls fetch() with a mirror and a folder, first without the name of a data set, then for MNIST.
FETCH_BOTH = """
import sys
from torchvision.datasets import MNIST
from common.data import fetch

MNIST.mirrors = [sys.argv[1]]
for dataset in (None, "mnist"):
    print(fetch(dataset, sys.argv[2]))
"""

# Calls fetch() in four processes at once, local ranks 0 to 3. They are forked after the imports.
FETCH_IN_FOUR = """
import os, sys
from torchvision.datasets import MNIST
from common.data import fetch

MNIST.mirrors = [sys.argv[1]]
for rank in range(4):
    if os.fork() == 0:
        os.environ["LOCAL_RANK"] = str(rank)
        sys.stdout.write(fetch(None, sys.argv[2]) + "\\n")  # one call, so that lines do not mix
        sys.exit()
sys.exit(any(os.wait()[1] for _ in range(4)))
"""

# Runs a lesson that downloads from another mirror: python FILE mirror flags...
LESSON = f"""
import runpy, sys
from torchvision.datasets import MNIST

MNIST.mirrors = [sys.argv.pop(1)]
runpy.run_path({str(ROOT / "playground" / "single_gpu.py")!r}, run_name="__main__")
"""


@pytest.fixture(autouse=True)
def no_mirror(monkeypatch):
    """Let torchvision download from a port that no program listens on.

    So no test needs or uses the Internet.
    """
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    # Threads that wait for each other are slow on a busy machine.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with socket.socket() as taken:  # bound but not listening, so no other program gets the port
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/"
        monkeypatch.setattr(MNIST, "mirrors", [url])
        yield url


@pytest.fixture
def mirror(mnist, monkeypatch):
    """Serve the MNIST archives and count the downloads of each file.

    In this process torchvision downloads from this server.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            """Answer without the file."""
            self.send_response(200)
            self.end_headers()

        def do_GET(self):
            """Send the file, so slowly that other processes start in the meantime."""
            # torchvision looks for redirects by a GET with this header.
            if self.headers.get("Method") == "HEAD":
                return self.do_HEAD()
            server.downloads[self.path.strip("/")] += 1
            time.sleep(0.2)
            content = (mnist / "MNIST" / "raw" / self.path.strip("/")).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args):
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.url = f"http://127.0.0.1:{server.server_port}/"
        server.downloads = Counter()
        monkeypatch.setattr(MNIST, "mirrors", [server.url])
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def archives(mnist, tmp_path):
    """A data folder with a copy of the four archives, for tests that damage one of them."""
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in ARCHIVES:
        shutil.copyfile(mnist / "MNIST" / "raw" / name, raw / name)
    return tmp_path


def unpacked_files(mnist, folder):
    """Copy the unpacked files of MNIST into a data folder. Returns the folder that they are in."""
    fetch("mnist", mnist)
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in SIZES:
        shutil.copyfile(mnist / "MNIST" / "raw" / name, raw / name)
    return raw


def sizes(folder):
    """Return the names and sizes of the unpacked files in a data folder."""
    paths = (folder / "MNIST" / "raw").iterdir()
    return {path.name: path.stat().st_size for path in paths if path.suffix != ".gz"}


def cut(path):
    """Remove the second half of a file."""
    os.truncate(path, path.stat().st_size // 2)


def error_line(*args):
    """Call fetch(), which must end the program with one line. Returns the line."""
    with pytest.raises(SystemExit) as stop:
        fetch(*args)
    assert str(stop.value).startswith("error: ")
    assert len(str(stop.value).splitlines()) == 1
    return str(stop.value)


def fetch_in_four(mirror, folder):
    """Fetch in four processes at once. Returns their stderr, and the lines of their stdout."""
    four = subprocess.Popen(
        [sys.executable, "-c", FETCH_IN_FOUR, mirror, str(folder)],
        cwd=ROOT,
        start_new_session=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        out, err = four.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        os.killpg(four.pid, signal.SIGKILL)
        raise
    assert four.returncode == 0, err
    return err, out.splitlines()


def run_read_only(folder, *command):
    """Run a command for which a folder is read-only, even for root. Returns its result."""
    mount = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    namespace = "-m" if os.geteuid() == 0 else "-rm"
    prefix = ["unshare", namespace, "sh", "-c", mount, str(folder)]
    options = {"cwd": ROOT, "stdin": subprocess.DEVNULL, "timeout": 120}
    options |= {"capture_output": True, "text": True}
    if not shutil.which("unshare"):
        pytest.skip("no unshare on this machine, so no read-only folder")
    cannot_write = ["sh", "-c", '! touch "$0" 2>/dev/null', str(folder / "probe")]
    probe = subprocess.run([*prefix, *cannot_write], **options)
    if probe.returncode:
        reason = probe.stderr.strip() or "it can be written to"
        pytest.skip(f"no read-only folder on this machine: {reason}")
    return subprocess.run([*prefix, *command], **options)


def test_images_are_read_one_by_one_or_together():
    """A batch that is read at once equals its images, in the order of the indices."""
    images = Images(torch.randn(10, 1, 28, 28), torch.arange(10))
    assert len(images) == 10
    image, label = images[7]
    assert image.shape == (1, 28, 28) and label.shape == () and label == 7
    assert image.equal(images.images[7])
    indices = [3, 9, 0, 3]
    batch, labels = images.__getitems__(indices)
    assert batch.equal(torch.stack([images[index][0] for index in indices]))
    assert labels.tolist() == indices


def test_loader_gives_the_batches_of_the_default_collation():
    """With whole_batch a DataLoader returns the batches that it stacks from single images.

    The last batch, which is smaller, is one of them.
    """
    images = Images(torch.randn(10, 1, 28, 28), torch.arange(10))
    singles = [images[index] for index in range(10)]  # from a list, images are read one by one

    def batches(data, **options):
        sampler = RandomSampler(data, generator=torch.Generator().manual_seed(1))
        return list(DataLoader(data, 4, sampler=sampler, **options))

    whole = batches(images, collate_fn=whole_batch)
    stacked = batches(singles)
    assert [len(labels) for _, labels in whole] == [4, 4, 2]
    for (batch, labels), (expected, expected_labels) in zip(whole, stacked, strict=True):
        assert batch.shape == (len(labels), 1, 28, 28) and batch.dtype == torch.float32
        assert labels.shape == (len(labels),) and labels.dtype == torch.int64
        assert batch.equal(expected) and labels.equal(expected_labels)
    all_labels = torch.cat([labels for _, labels in whole])
    assert sorted(all_labels.tolist()) == list(range(10))


def test_digits_are_all_of_scikit_learns(tmp_path):
    """Training and test set together contain each of the 1,797 digits once, with its label."""
    train_set, test_set = load("digits", tmp_path)
    assert (len(train_set), len(test_set)) == (1500, 297)
    assert train_set.images.shape == (1500, 1, 28, 28)
    assert test_set.images.shape == (297, 1, 28, 28)
    original = load_digits()
    labels = torch.cat([train_set.labels, test_set.labels])
    assert labels.dtype == torch.int64
    assert labels.bincount().equal(torch.tensor(original.target).bincount())
    # All originals differ, so find the one that each image was resized from.
    original_images = torch.tensor(original.images / 16).unsqueeze(1).float()
    resized = F.interpolate(original_images, (28, 28), mode="bilinear")
    pixels = torch.cat([train_set.images, test_set.images]).mul(0.3245).add(0.3051)
    distance, source = torch.cdist(pixels.flatten(1), resized.flatten(1)).min(dim=1)
    assert distance.max() < 0.1  # cdist is not exact; the two most similar digits are 0.85 apart
    assert sorted(source.tolist()) == list(range(1797))
    assert labels.equal(torch.tensor(original.target)[source])
    # The test images come from all parts of the file.
    thirds = source[1500:].div(600, rounding_mode="floor")
    assert thirds.bincount(minlength=3).min() > 50


def test_digits_are_normalised_and_the_same_each_time(tmp_path):
    """The training set has mean 0 and standard deviation 1, and the test set has all classes.

    Each call returns the same images, whatever the seed.
    """
    train_set, test_set = load("digits", tmp_path)
    assert train_set.images.mean().item() == pytest.approx(0, abs=0.01)
    assert train_set.images.std().item() == pytest.approx(1, abs=0.01)
    assert test_set.labels.bincount(minlength=10).min() > 10
    torch.manual_seed(1)  # the user's seed does not change the split
    for part, again in zip((train_set, test_set), load("digits", tmp_path), strict=True):
        assert part.images.equal(again.images) and part.labels.equal(again.labels)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("double", [False, True])
def test_the_loaders_of_all_ranks(world_size, double):
    """Their training batches make up those of single_gpu.py, and each test image is there once."""
    args = argparse.Namespace(dataset="digits", data_dir=None, batch_size=120, seed=3)
    args.device = "cpu"
    args.double = double
    pairs = [loaders(args, rank, world_size) for rank in range(world_size)]
    for epoch in (0, 1):
        for train_loader, _ in pairs:
            train_loader.sampler.set_epoch(epoch)
        order = RandomSampler(range(1500), generator=torch.Generator().manual_seed(3 + epoch))
        batches = BatchSampler(order, 120, drop_last=True)
        train_set = pairs[0][0].dataset
        train_loaders = [train_loader for train_loader, _ in pairs]
        for batch, *parts in zip(batches, *train_loaders, strict=True):
            for rank, (images, labels) in enumerate(parts):
                part = batch[rank::world_size]
                assert images.equal(train_set.images[part])
                assert labels.equal(train_set.labels[part])
    found = Counter()
    for _, test_loader in pairs:
        for images, _ in test_loader:
            assert images.dtype == (torch.float64 if double else torch.float32)
            found.update(image.numpy().tobytes() for image in images)
    test_set = pairs[0][1].dataset
    assert found == Counter(image.numpy().tobytes() for image in test_set.images)


def test_mnist_equals_torchvisions(mnist):
    """The archives are enough. The images equal those of torchvision's ToTensor and Normalize."""
    assert fetch(None, mnist) == "mnist"
    assert sizes(mnist) == SIZES
    train_set, test_set = load("mnist", mnist)
    assert (len(train_set), len(test_set)) == (60_000, 10_000)
    assert train_set.images.mean().item() == pytest.approx(0, abs=0.01)
    assert train_set.images.std().item() == pytest.approx(1, abs=0.01)
    transform = Compose([ToTensor(), Normalize((0.1307,), (0.3081,))])
    for part, train in ((train_set, True), (test_set, False)):
        theirs = MNIST(mnist, train=train, transform=transform)
        for index in (0, 1, 4321, 9999, len(part) - 1):
            image, label = part[index]
            torch.testing.assert_close(image, theirs[index][0], atol=1e-6, rtol=0)
            assert label.dtype == torch.int64 and label == theirs[index][1]


def test_files_on_disk_need_no_network(mnist, capsys):
    """If all files are there, fetch() returns mnist, uses no mirror and writes nothing."""
    fetch("mnist", mnist)  # unpacks the archives
    before = {path: path.stat().st_mtime_ns for path in mnist.rglob("*")}
    capsys.readouterr()
    assert fetch(None, mnist) == fetch("mnist", mnist) == "mnist"
    assert {path: path.stat().st_mtime_ns for path in mnist.rglob("*")} == before
    assert capsys.readouterr() == ("", "")


def test_digits_need_no_files(mnist, tmp_path, capsys):
    """For the digits fetch() does not use the folder, even if MNIST's files in it are damaged."""
    assert fetch("digits", tmp_path / "new") == "digits"
    assert not (tmp_path / "new").exists()
    cut(unpacked_files(mnist, tmp_path) / "train-images-idx3-ubyte")
    assert fetch("digits", tmp_path) == "digits"
    assert capsys.readouterr() == ("", "")


def test_four_processes_download_once(mirror, tmp_path):
    """Four processes with an empty folder all get MNIST, and each file is downloaded once."""
    folder = tmp_path / "not" / "there yet"
    err, answers = fetch_in_four(mirror.url, folder)
    assert answers == ["mnist"] * 4
    assert "WARNING" not in err
    assert mirror.downloads == Counter(ARCHIVES)
    assert sizes(folder) == SIZES


def test_lesson_downloads_and_trains_on_mnist(mirror, tmp_path):
    """A lesson without files downloads MNIST, learns it, and prints only its epoch on stdout."""
    script = tmp_path / "lesson.py"
    script.write_text(LESSON)
    done = run(script, mirror.url, "--epochs", 1, "--data_dir", tmp_path / "data")
    assert len(done.stdout.splitlines()) == 1
    assert epochs(done.stdout)[0]["test"] > 90  # an epoch of the digits has only 11 steps: less
    assert "WARNING" not in done.stderr
    assert mirror.downloads == Counter(ARCHIVES)
    assert sizes(tmp_path / "data") == SIZES


def test_without_mirror_digits_stand_in(tmp_path, capsys, monkeypatch):
    """If MNIST cannot be downloaded, fetch() returns digits.

    Local rank 0 warns in one line.
    """
    assert fetch(None, tmp_path) == "digits"
    out, err = capsys.readouterr()
    assert out == ""
    [line] = [line for line in err.splitlines() if line.startswith("WARNING: ")]
    assert str(tmp_path) in line and "digits" in line
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert fetch(None, tmp_path) == "digits"
    out, err = capsys.readouterr()
    assert out == "" and "WARNING" not in err


def test_without_mirror_mnist_is_refused(tmp_path, capsys):
    """MNIST is never replaced if it was asked for by name. One line says what to type instead."""
    line = error_line("mnist", tmp_path)
    assert str(tmp_path) in line and "--dataset digits" in line
    out, err = capsys.readouterr()
    assert out == "" and "WARNING" not in err


def test_four_processes_without_mirror(no_mirror, tmp_path):
    """Four processes with an empty folder all choose the digits, and the node warns once."""
    err, answers = fetch_in_four(no_mirror, tmp_path)
    assert answers == ["digits"] * 4
    [line] = [line for line in err.splitlines() if line.startswith("WARNING: ")]
    assert str(tmp_path) in line


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
    lines = capsys.readouterr().err.splitlines()
    [line] = [line for line in lines if line.startswith("WARNING: ")]
    assert "timed out" in line
    assert socket.getdefaulttimeout() == before


@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"])
def test_truncated_file_ends_the_lesson(mnist, tmp_path, name):
    """A file of the wrong size ends a lesson with one line, which has its path and both sizes."""
    damaged = unpacked_files(mnist, tmp_path) / name
    cut(damaged)
    done = run("single_gpu", "--data_dir", tmp_path, status=1)
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ") and "delete it" in line
    assert str(damaged) in line and f"{SIZES[name]:,}" in line and f"{SIZES[name] // 2:,}" in line


@pytest.mark.parametrize("name", SIZES)
def test_damaged_file_is_named(mnist, tmp_path, name):
    """A file of the right size that has a hole, as a download can leave, is never trained on."""
    raw = unpacked_files(mnist, tmp_path)
    with open(raw / name, "r+b") as file:
        file.seek(5000)
        file.write(bytes(4000))
    for dataset in (None, "mnist"):
        line = error_line(dataset, tmp_path)
        assert str(raw / name) in line and "damaged" in line and "delete it" in line


def test_no_room_on_the_disk(mirror, tmp_path):
    """If the disk is full, the reason is named, and nothing unfinished is left there.

    A limit on the size of a file stands for the full disk.
    """
    limited = ["sh", "-c", 'ulimit -f 2000; exec "$@"', "sh"]
    command = [*limited, sys.executable, "-c", FETCH_BOTH, mirror.url, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, "digits\n"), done.stderr
    messages = [line for line in done.stderr.splitlines() if "File too large" in line]
    assert [message.split(":")[0] for message in messages] == ["WARNING", "error"]
    assert list((tmp_path / "MNIST" / "raw").iterdir()) == []


@pytest.mark.parametrize("dataset", [None, "mnist"])
def test_truncated_archive_without_mirror_is_named(archives, dataset):
    """A damaged archive that cannot be downloaded again is named. It is not replaced by digits."""
    damaged = archives / "MNIST" / "raw" / "train-labels-idx1-ubyte.gz"
    cut(damaged)
    line = error_line(dataset, archives)
    assert f"{damaged} " in line and "delete it" in line
    damaged.unlink()
    assert "--dataset digits" in error_line("mnist", archives)  # now it is missing


def test_truncated_archive_is_fetched_again(archives, mirror):
    """With a mirror, a damaged archive is downloaded again, and only this one."""
    cut(archives / "MNIST" / "raw" / "train-labels-idx1-ubyte.gz")
    assert fetch("mnist", archives) == "mnist"
    assert mirror.downloads == {"train-labels-idx1-ubyte.gz": 1}
    assert sizes(archives) == SIZES


def test_read_only_folder_with_all_files(mnist):
    """The files are read from a folder that cannot be written to."""
    fetch("mnist", mnist)
    code = "import sys; from common.data import fetch, load; folder = sys.argv[1]"
    code += "; print(fetch(None, folder), *map(len, load('mnist', folder)))"
    done = run_read_only(mnist, sys.executable, "-c", code, str(mnist))
    assert (done.returncode, done.stdout, done.stderr) == (0, "mnist 60000 10000\n", "")


@pytest.mark.parametrize("place", [".", "new"])
def test_read_only_folder_without_files(no_mirror, tmp_path, place):
    """If the folder cannot be written to, or not be made, fetch() chooses the digits.

    If MNIST was asked for by name, this is an error.
    """
    folder = tmp_path / place
    done = run_read_only(tmp_path, sys.executable, "-c", FETCH_BOTH, no_mirror, str(folder))
    assert (done.returncode, done.stdout) == (1, "digits\n"), done.stderr
    warning, error = done.stderr.splitlines()
    assert warning.startswith("WARNING: ") and str(folder) in warning and "Read-only" in warning
    assert error.startswith("error: ") and str(folder) in error and "--dataset digits" in error


@pytest.mark.parametrize("dataset, images", [("digits", 1500), ("mnist", 60_000), (None, 60_000)])
def test_batch_larger_than_the_training_set(mnist, dataset, images):
    """A batch may be the whole training set. One image more is refused, and the limit is named."""
    assert fetch(dataset, mnist, images) == (dataset or "mnist")
    line = error_line(dataset, mnist, images + 1)
    assert "--batch_size" in line and str(images) in line


def test_batch_too_large_for_the_stand_in(tmp_path, capsys):
    """The batch is compared with the data set that is used, not with the one that is missing."""
    assert "1500" in error_line(None, tmp_path, 1501)
    assert "WARNING: " in capsys.readouterr().err


MLP_SHAPES = {
    "stage1.1.weight": (64, 784),
    "stage1.1.bias": (64,),
    "stage1.3.weight": (64, 64),
    "stage1.3.bias": (64,),
    "stage2.0.weight": (64, 64),
    "stage2.0.bias": (64,),
    "stage2.2.weight": (10, 64),
    "stage2.2.bias": (10,),
}
CNN_SHAPES = {
    "stage1.0.weight": (6, 1, 5, 5),
    "stage1.0.bias": (6,),
    "stage1.3.weight": (16, 6, 5, 5),
    "stage1.3.bias": (16,),
    "stage2.1.weight": (120, 400),
    "stage2.1.bias": (120,),
    "stage2.4.weight": (10, 120),
    "stage2.4.bias": (10,),
}


@pytest.mark.parametrize("model, shapes", [(MLP, MLP_SHAPES), (CNN, CNN_SHAPES)])
def test_models_are_two_stages(model, shapes):
    """A model computes its first stage and then its second.

    Its parameters have the expected names and shapes, and all of them get a gradient.
    """
    network = model()
    images = torch.randn(5, 1, 28, 28)
    scores = network(images)
    assert scores.shape == (5, 10) and scores.dtype == torch.float32
    assert network.stage2(network.stage1(images)).equal(scores)
    named = network.named_parameters()
    assert {name: tuple(parameter.shape) for name, parameter in named} == shapes
    count = sum(parameter.numel() for parameter in network.parameters())
    if model is MLP:
        assert count == (784 * 64 + 64) + 2 * (64 * 64 + 64) + (64 * 10 + 10)
    else:
        assert 40_000 < count < 70_000  # LeNet-5 has about 60,000
    scores.sum().backward()
    for parameter in network.parameters():
        assert parameter.grad is not None and parameter.grad.any()


def test_layers_of_the_mlp():
    """Its scores are those of four linear layers with ReLU between them."""
    network = MLP()
    images = torch.randn(5, 1, 28, 28)
    parameters = list(network.parameters())
    hidden = images.flatten(1)
    for weight, bias in zip(parameters[:6:2], parameters[1:6:2], strict=True):
        hidden = F.linear(hidden, weight, bias).relu()
    torch.testing.assert_close(network(images), F.linear(hidden, *parameters[6:]))


def test_layers_of_the_cnn():
    """Its scores are those of two convolutions and two linear layers.

    Each convolution has ReLU and pooling behind it, and ReLU is between the linear layers.
    """
    network = CNN()
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
    torch.testing.assert_close(embed(images), tokens)
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


def test_no_token_sees_a_later_one():
    """A changed token changes itself and those after it."""
    block = Block(8, 2)
    tokens = torch.randn(1, 6, 8)
    changed = tokens.clone()
    changed[0, 3, 0] += 1  # LayerNorm would remove what is added to all of its numbers
    differ = (block(tokens) != block(changed)).any(-1)[0]
    assert differ.tolist() == [False] * 3 + [True] * 3


@pytest.mark.parametrize("tokens", [1, 7, 28, 784])
def test_tokens_of_an_image(tokens):
    """An image can be cut into any number of tokens that divides its pixels."""
    network = Transformer(tokens=tokens)
    assert network.stage1(torch.randn(2, 1, 28, 28)).shape == (2, tokens, 32)
    assert network.stage1[0].embed.in_features == 784 // tokens


def test_width_of_the_mlp():
    """All hidden layers have the width."""
    parameters = MLP(width=8).parameters()
    assert [len(each) for each in parameters if each.dim() == 2] == [8, 8, 8, 10]


@pytest.mark.parametrize("network", [MLP, CNN])
def test_depth(network):
    """Each additional layer is a linear layer, in one of the stages. All have the width."""
    without = len(list(network(8, 1).parameters()))
    for layers in (1, 2, 3, 6):
        model = network(8, layers)
        assert len(list(model.parameters())) == without + 2 * (layers - 1)
        assert model(torch.randn(5, 1, 28, 28)).shape == (5, 10)


def test_blocks_of_the_transformer():
    """The first stage has the larger half of the blocks."""
    for layers, halves in {1: (1, 0), 2: (1, 1), 3: (2, 1), 6: (3, 3)}.items():
        model = Transformer(8, layers)
        stages = (model.stage1, model.stage2)
        blocks = [sum(isinstance(layer, Block) for layer in stage) for stage in stages]
        assert tuple(blocks) == halves
        assert model(torch.randn(5, 1, 28, 28)).shape == (5, 10)


def test_dropout_is_off_by_default():
    """Without dropout, two forward passes in training mode are equal.

    With dropout they differ in training mode, and are equal in evaluation mode.
    """
    images = torch.randn(5, 1, 28, 28)
    network = CNN().train()
    assert network(images).equal(network(images))
    network = CNN(dropout=0.5).train()
    assert not network(images).equal(network(images))
    network.eval()
    assert network(images).equal(network(images))
