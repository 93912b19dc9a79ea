"""Sharded checkpoints for any number of ranks, one file from them and back, dropout."""

import argparse
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import DIGITS, epochs, one_line, ranks, single_gpu, torchrun, train
from forked import in_ranks, join
from nodes import sh, small_disk
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler

from common.data import load, whole_batch
from common.models import MODELS

LESSON = "fully_sharded_checkpoints"
SHORT = (*DIGITS, "--batch_size", 120)


TWO_EPOCHS = (*SHORT, "--epochs", 2)


def failed(*flags, processes=1):
    """Run the lesson, whose ranks have to end with status 1. Returns what rank 0 has written."""
    jobs = ranks(LESSON, *flags, processes=processes)
    ends = [job.wait() for job in jobs]
    assert {end.returncode for end in ends} == {1}, ends
    return ends[0]


def last_line(done):
    """Return the last line of a traceback, in which an error says what to do."""
    return done.stderr.strip().splitlines()[-1]


def counted_rank(rank, world_size, port, results):
    """Count what the export keeps on each rank."""
    import weakref

    import fully_sharded_checkpoints as lesson
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torch.utils._python_dispatch import TorchDispatchMode

    class Peak(TorchDispatchMode):
        """Count the bytes of the new tensors, as long as they are in memory."""

        def __init__(self, shards):
            super().__init__()
            self.shards = {each.untyped_storage().data_ptr() for each in shards}
            self.storages = []
            self.peak = 0

        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            found = operation(*args, **(kwargs or {}))
            if type(found) is torch.Tensor:  # a DTensor has no memory but that of its shard
                self.storages.append(weakref.ref(found.untyped_storage()))
            alive = [each() for each in self.storages if each() is not None]
            sizes = {each.data_ptr(): each.nbytes() for each in alive}
            for shard in self.shards & sizes.keys():
                del sizes[shard]
            self.peak = max(self.peak, sum(sizes.values()))
            return found

    join(rank, world_size, port)
    torch.manual_seed(0)
    model = MODELS["mlp"](784, 12)
    size = sum(parameter.nbytes for parameter in model.parameters())
    flags = {"device": "cpu", "timeout": 60}
    lesson.shard(model, argparse.Namespace(**flags))
    optimizer = torch.optim.Adam(model.parameters())
    found = {"size": size}
    F.cross_entropy(model(torch.randn(2, 1, 28, 28)), torch.arange(2)).backward()
    parameters = list(model.parameters())
    optimizer.step()
    optimizer.zero_grad()
    shards = [each.to_local() for each in parameters]
    for state in optimizer.state.values():
        shards += [state["exp_avg"].to_local(), state["exp_avg_sq"].to_local()]
    with Peak(shards) as peak:
        on_rank_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
        states = get_state_dict(model, optimizer, options=on_rank_0)
    found["peak"] = peak.peak
    found["kept"] = [len(state) for state in states]
    results[rank] = found
    dist.destroy_process_group()


def test_bytes_of_the_export():
    """Only rank 0 keeps what is exported, and it is gathered tensor by tensor."""
    results = in_ranks(counted_rank, 2)
    size = results[0]["size"]
    largest = 4 * 784 * 784
    assert results[0]["kept"][0] == 26  # parameters
    assert results[1]["kept"] == [0, 0]
    assert results[1]["peak"] < 4 * largest < 3 * size / 4
    assert results[0]["peak"] > 3 * size - 1  # with Adam's two averages


def plain_loop(count):
    """Train some epochs in one process, by hand, in float64. Returns model and optimizer."""
    torch.manual_seed(0)
    train_set, _ = load("digits", None, torch.float64)
    model = MODELS["mlp"]().double()
    generator = torch.Generator()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-6, fused=True)
    sampler = RandomSampler(train_set, generator=generator)
    loader = DataLoader(train_set, 120, sampler=sampler, drop_last=True, collate_fn=whole_batch)
    for epoch in range(count):
        generator.manual_seed(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A folder with sharded checkpoints of two ranks, after one epoch and after two."""
    folder = tmp_path_factory.mktemp("fsdp") / "run"
    train(LESSON, *SHORT, "--epochs", 2, "--double", "--run_dir", folder, processes=2)
    return folder


@pytest.fixture
def broken(run_dir, tmp_path):
    """A copy of it, to be damaged."""
    return shutil.copytree(run_dir, tmp_path / "run")


def test_a_checkpoint_is_loaded_by_a_different_number_of_ranks(tmp_path):
    """An epoch by 2 ranks, one by 3, one by 2: the parameters and Adam's state of one process."""
    for done, processes in enumerate((2, 3, 2)):
        flags = ("--epochs", done + 1, "--double", "--run_dir", tmp_path / "run")
        flags += ("-s", tmp_path / f"{done}.pt")
        out = train(LESSON, *SHORT, *flags, processes=processes).stdout
        assert re.findall(r"^epoch (\d)", out, re.M) == [str(done + 1)]
        assert (f"epoch-000{done}: {done} of {done + 1} epochs are done" in out) == (done > 0)
        files = {path.name for path in (tmp_path / "run" / f"epoch-000{done + 1}").iterdir()}
        assert files == {".metadata", *(f"__{rank}_0.distcp" for rank in range(processes))}
    found = torch.load(tmp_path / "2.pt", weights_only=True)
    model, optimizer = plain_loop(3)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(found["model"][name], tensor, atol=1e-12, rtol=0)
    states = found["optimizer"]["state"].values()
    for state, right in zip(states, optimizer.state.values(), strict=True):
        assert state.keys() == right.keys() == {"step", "exp_avg", "exp_avg_sq"}
        for name, value in right.items():
            torch.testing.assert_close(state[name], value, atol=1e-12, rtol=0)


def test_rank_0_chooses_the_checkpoint(change, broken):
    """Other ranks do not look into the folder, which may look different from another node."""
    first = "    # NEW: dcp writes the file .metadata last"
    copy = change(LESSON, (first, f"    assert dist.get_rank() == 0\n{first}"))
    flags = (*SHORT, "--epochs", 3, "--double", "--run_dir", broken)
    out = train(copy, *flags, processes=2).stdout
    assert "epoch-0002: 2 of 3 epochs are done" in out
    assert re.findall(r"^epoch (\d)", out, re.M) == ["3"]


def test_the_export_is_a_plain_checkpoint(run_dir, tmp_path):
    """Written by another number of ranks, without a step: a plain model and optimizer continue."""
    path = tmp_path / "plain.pt"
    flags = (*SHORT, "--epochs", 2, "--double", "--run_dir", run_dir, "-s", path)
    assert not epochs(train(LESSON, *flags, processes=3).stdout)
    checkpoint = torch.load(path, weights_only=True)
    assert set(checkpoint) == {"model", "optimizer", "epoch", "args"}
    assert (checkpoint["epoch"], checkpoint["args"]["batch_size"]) == (2, 120)
    assert {type(value) for value in checkpoint["model"].values()} == {torch.Tensor}
    assert [path.name for path in tmp_path.iterdir()] == ["plain.pt"]
    trained, trained_by = plain_loop(2)
    expected = {"model": trained.state_dict(), "optimizer": trained_by.state_dict()}
    assert list(checkpoint["model"]) == list(expected["model"])
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(9, 1, 28, 28, generator=generator, dtype=torch.float64)
    after = []
    for state in (checkpoint, expected):
        model = MODELS["mlp"]().double()
        model.load_state_dict(state["model"])
        optimizer = torch.optim.Adam(model.parameters())
        optimizer.load_state_dict(state["optimizer"])
        assert (optimizer.param_groups[0]["eps"], len(optimizer.state)) == (1e-6, 8)
        F.cross_entropy(model(images), torch.arange(9)).backward()
        optimizer.step()
        after.append(model.state_dict())
    for name, tensor in after[1].items():
        torch.testing.assert_close(after[0][name], tensor, atol=1e-12, rtol=0)


def cut_short(path):
    """Leave the first third of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])


def test_which_folder_is_the_newest_checkpoint(tmp_path):
    """Only epoch-<number> with .metadata counts, and 10000 is newer than 9999."""
    from fully_sharded_checkpoints import checkpoints

    assert checkpoints(tmp_path / "missing") == []
    names = ["epoch-9999", "epoch-10000", "epoch-0002"]
    for name in (*names, "epoch-old", "epoch-20000x", "my-epoch-20000", "epoch--1", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").touch()
    (tmp_path / "epoch-30000").mkdir()  # it was not finished
    (tmp_path / "epoch-40000").touch()
    found = [Path(path).name for path in checkpoints(tmp_path)]
    assert found == ["epoch-0002", "epoch-9999", "epoch-10000"]


def test_a_copy_beside_the_checkpoints(broken):
    """A folder with a name of its own is neither resumed nor changed."""
    mine = broken.with_name("epoch-0002-mine")
    shutil.copytree(broken / "epoch-0002", mine)
    mine = shutil.move(mine, broken / "epoch-0002-mine")
    shutil.rmtree(broken / "epoch-0002")
    before = {path.name: path.read_bytes() for path in Path(mine).iterdir()}
    flags = (*SHORT, "--epochs", 2, "--double", "--run_dir", broken)
    out = train(LESSON, *flags, processes=2).stdout
    assert "epoch-0001: 1 of 2 epochs are done" in out
    assert {path.name: path.read_bytes() for path in Path(mine).iterdir()} == before


@pytest.mark.parametrize(
    ("damage", "file", "words"),
    [
        (Path.unlink, "__1_0.distcp", ("No such file", "__1_0.distcp")),
        (cut_short, "__1_0.distcp", ()),
        (cut_short, ".metadata", ()),
        (lambda path: path.write_bytes(b""), "__0_0.distcp", ()),
    ],
)
def test_a_file_is_missing_or_damaged(damage, file, words, broken):
    """The last line names the folder. Without it, the checkpoint before it is resumed."""
    damage(broken / "epoch-0002" / file)
    flags = (*SHORT, "--epochs", 2, "--double", "--run_dir", broken)
    line = last_line(failed(*flags, processes=2))
    for word in ("ValueError: ", "epoch-0002 cannot be read (", "): move it away", *words):
        assert word in line
    shutil.rmtree(broken / "epoch-0002")
    assert epochs(train(LESSON, *flags, processes=2).stdout) == epochs_of_two()[1:]


@pytest.mark.parametrize("how", [(), ("--async_save",)])
def test_a_full_disk(how, tmp_path):
    """No room for the next checkpoint: the run ends. With more room it resumes."""
    folder = tmp_path / "small"
    folder.mkdir()
    with small_disk(folder, "4m"):
        flags = (*SHORT, "--double", "--run_dir", folder / "run")
        done = failed(*flags, *how, "--epochs", 5, processes=2)
        # The words in troubleshooting.md. Only if a file cannot even be opened, Python's are shown.
        words = "unexpected pos [0-9]+ vs|No space left on device"
        assert re.search(f"CheckpointException.*({words})", done.stderr, re.S)
        saved = len(list((folder / "run").glob("epoch-*/.metadata")))
        late = 1 if how else 0  # training continues while a thread fails to write
        assert saved > 0
        assert len(epochs(done.stdout)) == saved + 1 + late
        sh("mount", "-o", "remount,size=20m", folder)
        again = train(LESSON, *flags, *how, "--epochs", saved + 1, processes=3).stdout
        assert epochs(again) == epochs(done.stdout)[saved : saved + 1]


def test_no_room_for_the_file(tmp_path):
    """The file before stays as it is, and nothing is left of the one that did not fit."""
    folder = tmp_path / "small"
    folder.mkdir()
    with small_disk(folder, "64k"):
        (folder / "c.pt").write_bytes(b"the file before")
        done = failed(*SHORT, "--epochs", 1, "-s", folder / "c.pt")
        assert "No space left on device" in done.stderr or "file write failed" in done.stderr
        assert [path.name for path in folder.iterdir()] == ["c.pt"]
        assert (folder / "c.pt").read_bytes() == b"the file before"


def epochs_of_two():
    """Return the epoch lines of two epochs in float64."""
    return [
        {name: pytest.approx(value, abs=1e-3) for name, value in line.items()}
        for line in single_gpu(*TWO_EPOCHS, "--double")
    ]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--double", "--model", "cnn"), "--model mlp, not cnn"),
        (("--double", "--width", 32), "--width None, not 32"),
        (("--double", "--layers", 4), "--layers None, not 4"),
        (("--double", "--lr", 0.5), "--lr 0.001, not 0.5"),
        (("--double", "--seed", 1), "--seed 0, not 1"),
        ((), "--double True, not False"),
    ],
)
def test_a_checkpoint_of_other_flags(flags, words, run_dir):
    """The last line says what differs."""
    done = failed(*SHORT, "--epochs", 3, *flags, "--run_dir", run_dir, processes=2)
    assert f"epoch-0002 was written with {words}: use the same flags" in last_line(done)


@pytest.fixture(scope="module")
def ddp_file(tmp_path_factory):
    """A checkpoint of the DDP lesson, after two epochs in two processes."""
    path = tmp_path_factory.mktemp("ddp") / "ddp.pt"
    train("distributed_data_parallel", *TWO_EPOCHS, "--double", "-s", path, processes=2)
    return path


def assert_state_of(path, count):
    """Check that a plain model and Adam load a file, with the state after so many epochs."""
    found = torch.load(path, weights_only=True)
    expected, trained_by = plain_loop(count)
    model = MODELS["mlp"]().double()
    model.load_state_dict(found["model"])
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, atol=1e-12, rtol=0)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.load_state_dict(found["optimizer"])
    right = trained_by.state_dict()["state"]
    states = optimizer.state_dict()["state"]
    assert states.keys() == right.keys() and len(right) == 8
    for number, state in right.items():
        for name, value in state.items():
            torch.testing.assert_close(states[number][name], value, atol=1e-12, rtol=0)


@pytest.mark.parametrize("processes", [1, 3])
def test_a_checkpoint_of_ddp_becomes_shards(processes, ddp_file, tmp_path):
    """The third epoch of an unbroken run, with its parameters and Adam's state, and back again."""
    path = tmp_path / "shards.pt"
    flags = (*SHORT, "--double")
    own = ("--epochs", 3, "--load", ddp_file, "-s", path)
    out = train(LESSON, *flags, *own, processes=processes).stdout
    assert "ddp.pt: 2 of 3 epochs are done" in out
    assert epochs(out) == [
        {name: pytest.approx(value, abs=1e-9) for name, value in line.items()}
        for line in single_gpu(*flags, "--epochs", 3)[2:]
    ]
    assert_state_of(path, 3)
    own = ("--epochs", 4, "--load", path, "-s", tmp_path / "again.pt")
    out = train(LESSON, *flags, *own, processes=2).stdout
    assert "shards.pt: 3 of 4 epochs are done" in out
    assert_state_of(tmp_path / "again.pt", 4)


def test_only_rank_0_reads_the_file(change, ddp_file):
    """The others get their shards in messages, and know the flags and epochs from rank 0."""
    line = "        whole = torch.load("
    copy = change(LESSON, (line, f"        assert dist.get_rank() == 0\n{line}"))
    done = train(copy, *TWO_EPOCHS, "--double", "--load", ddp_file, processes=2)
    assert "2 of 2 epochs are done" in done.stdout


def test_a_run_that_began_with_a_file_resumes_from_its_own_checkpoint(ddp_file, tmp_path):
    """The same command again: --run_dir has newer shards than the file."""
    flags = (*SHORT, "--double", "--load", ddp_file, "--run_dir", tmp_path / "run")
    train(LESSON, *flags, "--epochs", 3, processes=2)
    out = train(LESSON, *flags, "--epochs", 4, processes=2).stdout
    assert "epoch-0003: 3 of 4 epochs are done" in out
    assert re.findall(r"^epoch (\d)", out, re.M) == ["4"]


def test_a_file_of_other_flags(ddp_file):
    """The last line says what differs, also where the other model has fewer parameters."""
    for flags in (("--model", "cnn"), ("--layers", 4)):
        done = failed(*SHORT, "--double", *flags, "--load", ddp_file, processes=2)
        line = last_line(done)
        assert f"ddp.pt was written with {flags[0]} " in line and "use the same flags" in line


@pytest.mark.parametrize("size", [None, 0, 30_000])
def test_a_file_that_cannot_be_loaded(size, ddp_file, tmp_path):
    """It is missing, empty or cut short: the last line names it, and what it should have."""
    path = tmp_path / "damaged.pt"
    if size is not None:
        path.write_bytes(ddp_file.read_bytes()[:size])
    line = last_line(failed(*SHORT, "--double", "--load", path))
    assert line == f"{path} should be a checkpoint, a dict with args, epoch, model, optimizer."


SAVE = "def save_shards("
SLOWLY = f"""write_data = dcp.FileSystemWriter.write_data


def slowly(*args):
    time.sleep(3)
    return write_data(*args)


dcp.FileSystemWriter.write_data = slowly


{SAVE}"""
THREADS = """    train(args)
    def left():
        names = [thread.name for thread in threading.enumerate()]
        return [name for name in names if "Checkpoint" in name]
    for _ in range(1000):
        time.sleep(0.01 * bool(left()))
    import contextlib, glob
    count = 0
    for path in glob.glob("/proc/self/task/*/comm"):
        with contextlib.suppress(OSError):  # the thread has just ended
            count += "gloo" in open(path).read()
    os.write(1, f"left: {left()}, gloo threads: {count}\\n".encode())
"""


def test_a_thread_writes_a_copy(change, tmp_path):
    """Training continues while it writes, and the checkpoint has the numbers of its own epoch."""
    copy = change(
        LESSON,
        (SAVE, SLOWLY),
        (
            "        if writing:\n",
            '        for each in sorted(Path(args.run_dir).glob("*")):\n'
            '            complete = (each / ".metadata").exists()\n'
            '            print("before the wait:", each.name, complete)\n'
            "        if writing:\n",
        ),
    )
    flags = (*SHORT, "--double", "--async_save")
    out = train(copy, *flags, "--epochs", 3, "--run_dir", tmp_path / "run", processes=2).stdout
    # The first checkpoint is being written while the second epoch trains.
    assert re.findall("before the wait: (.*)", out)[:1] == ["epoch-0001 False"]
    assert len(epochs(out)) == 3
    for number in (3, 2, 1):
        folder = tmp_path / "run" / f"epoch-000{number}"
        assert (folder / ".metadata").exists()
        own = ("--epochs", number, "--run_dir", tmp_path / "run", "-s", tmp_path / "c.pt")
        train(LESSON, *SHORT, "--double", *own, processes=3)
        assert_state_of(tmp_path / "c.pt", number)
        shutil.rmtree(folder)


def test_no_thread_is_left(change, tmp_path):
    """The executor of async_save has ended, and so have gloo's threads, but those of the mesh."""
    copy = change(
        LESSON, ("    train(args)\n", THREADS), ("import sys\n", "import sys\nimport threading\n")
    )
    jobs = ranks(copy, *TWO_EPOCHS, "--async_save", "--run_dir", tmp_path / "run", cold=True)
    outs = [job.wait().stdout for job in jobs]
    for out in outs:
        [(left, count)] = re.findall(r"left: (\[.*\]), gloo threads: (\d+)", out)
        assert left == "[]" and int(count) <= 3


def test_threads_without_a_group_of_their_own(change, tmp_path):
    """Exercise 2: a message of the thread is taken for one of training, and the run ends."""
    copy = change(LESSON, (", process_group=group)", ")"))
    flags = (*SHORT, "--double", "--epochs", 30, "--timeout", 10, "--async_save")
    jobs = ranks(copy, *flags, "--run_dir", tmp_path / "run", processes=2)
    done = [job.wait() for job in jobs]
    assert any(one.returncode for one in done), done


DROPOUT = ("--model", "cnn", "--dropout", 0.5, "--double")
SEED = "        torch.manual_seed(args.seed + epoch * world_size + rank)\n"
START = "\n        start = time.perf_counter()\n"
DRAWN = """
        drawn = [None] * world_size
        dist.all_gather_object(drawn, torch.rand(1).item())
        print("drawn:", *drawn)
        start = time.perf_counter()
"""


def draws_of(out):
    """Return the numbers that the ranks have drawn, epoch by epoch."""
    return re.findall(r"0\.\d+", " ".join(re.findall(r"^drawn: (.*)", out, re.M)))


def resumed(copy, folder, *flags):
    """Train two epochs without a break, and with one after the first. Returns draws and states."""
    draws = []
    states = []
    for name, counts in (("whole", (2,)), ("resumed", (1, 2))):
        drawn = []
        for count in counts:
            own = ("--epochs", count, "--run_dir", folder / name, "-s", folder / f"{name}.pt")
            drawn += draws_of(train(copy, *SHORT, *DROPOUT, *own, processes=2).stdout)
        draws.append(drawn)
        states.append(torch.load(folder / f"{name}.pt", weights_only=True)["model"])
    return draws, states


def test_ranks_drop_different_neurons(change, tmp_path):
    """Each rank and epoch draws different numbers, and a run that is resumed draws the same."""
    draws, states = resumed(change(LESSON, (START, DRAWN)), tmp_path)
    assert len(set(draws[0])) == 4  # two ranks, two epochs
    assert draws[0] == draws[1]
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, atol=1e-12, rtol=0)


def test_dropout_without_seeds_of_its_own(change, tmp_path):
    """Exercise 3: all ranks drop the same neurons, and a break changes which."""
    draws, states = resumed(change(LESSON, (START, DRAWN), (SEED, "")), tmp_path)
    for drawn in draws:
        assert drawn[0] == drawn[1] and drawn[2] == drawn[3]
    assert draws[0][:2] == draws[1][:2]
    assert draws[0][2] != draws[1][2]
    assert max((states[0][name] - states[1][name]).abs().max() for name in states[0]) > 1e-4


def test_a_checkpoint_that_was_not_finished(broken):
    """Exercise 1: .metadata is written last, so without it the checkpoint before is resumed."""
    (broken / "epoch-0002" / ".metadata").unlink()
    out = train(LESSON, *SHORT, "--epochs", 2, "--double", "--run_dir", broken, processes=1).stdout
    assert "epoch-0001: 1 of 2 epochs are done" in out
    assert epochs(out) == epochs_of_two()[1:]
    assert (broken / "epoch-0002" / ".metadata").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--dropout", 0.5), ("--dropout 0.5", "--model cnn")),
        (("--dropout", 1, "--model", "cnn"), ("--dropout 1", "below 1")),
        (("--dropout", "nan", "--model", "cnn"), ("--dropout nan", "below 1")),
        (("--batch_size", 100), ("--batch_size 100", "3", "99")),
        (("--run_dir", "/proc/here"), ("--run_dir", "cannot write /proc/here")),
        (("--savefile", "/proc/here/c.pt"), ("cannot write /proc/here/c.pt",)),
        (("--async_save",), ("--async_save", "--run_dir")),
    ],
)
def test_wrong_flags(flags, words, main):
    """Status 2, one line."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    one_line(main(LESSON, "--batch_size", 120, *flags, env=env), *words)


def test_a_missing_file_as_a_user_sees_it(broken):
    """Under torchrun: its report ends with the line."""
    (broken / "epoch-0002" / "__0_0.distcp").unlink()
    done = torchrun(LESSON, *SHORT, "--double", "--run_dir", broken).wait()
    assert done.returncode == 1
    report = done.stderr.partition("Root Cause")[2]
    assert re.search("ValueError: .*epoch-0002 cannot be read .*__0_0.distcp.*move it away", report)
