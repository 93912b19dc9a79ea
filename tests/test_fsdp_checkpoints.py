"""Sharded checkpoints for any number of ranks, one file from them and back, dropout."""

import argparse
import re
import shutil
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import DIGITS, epochs, losses, one_line, ranks, train
from forked import in_ranks, join
from nodes import sh, small_disk
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from common.models import MODELS

LESSON = "fully_sharded_checkpoints"
SHORT = (*DIGITS, "--batch_size", 120, "--double")


def last_line(*flags, processes=1):
    """Run the lesson, whose ranks must fail. Returns the last line, which says what to do."""
    ends = [job.wait() for job in ranks(LESSON, *SHORT, *flags, processes=processes)]
    assert {end.returncode for end in ends} == {1}, ends
    return ends[0].stderr.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    """Checkpoints of the DDP lesson, which has the numbers of one process, by their epoch."""
    folder = tmp_path_factory.mktemp("ddp")
    paths = {}
    for count in (1, 2, 3):
        paths[count] = folder / f"ddp{count}.pt"
        flags = (*SHORT, "--epochs", count, "-s", paths[count])
        train("distributed_data_parallel", *flags, processes=1)
    return paths


def assert_same_state(path, right):
    """Check that a plain model and Adam can load a file, with the state of another one."""
    found = torch.load(path, weights_only=True)
    right = torch.load(right, weights_only=True)
    assert found.keys() == right.keys() == {"model", "optimizer", "epoch", "args"}
    assert (found["epoch"], found["args"]["batch_size"]) == (right["epoch"], 120)
    model = MODELS["mlp"]().double()
    model.load_state_dict(found["model"])
    torch.testing.assert_close(model.state_dict(), right["model"], atol=1e-12, rtol=0)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.load_state_dict(found["optimizer"])
    assert optimizer.param_groups[0]["eps"] == 1e-6
    state = right["optimizer"]["state"]
    assert len(state) == 8
    torch.testing.assert_close(optimizer.state_dict()["state"], state, atol=1e-12, rtol=0)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A folder with sharded checkpoints: an epoch by two ranks, and the next one by three."""
    folder = tmp_path_factory.mktemp("fsdp") / "run"
    for done, processes in enumerate((2, 3)):
        flags = ("--epochs", done + 1, "--run_dir", folder)
        out = train(LESSON, *SHORT, *flags, processes=processes).stdout
        assert re.findall(r"^epoch (\d)", out, re.M) == [str(done + 1)]
        assert (f"epoch-000{done}: {done} of {done + 1} epochs are done" in out) == (done > 0)
        files = {path.name for path in (folder / f"epoch-000{done + 1}").iterdir()}
        assert files == {".metadata", *(f"__{rank}_0.distcp" for rank in range(processes))}
    return folder


def test_one_file_of_any_number_of_ranks(run_dir, ddp, tmp_path):
    """Written without a step: the parameters and Adam's state of one process. It can be loaded."""
    path = tmp_path / "plain.pt"
    flags = (*SHORT, "--epochs", 2, "--run_dir", run_dir, "-s", path)
    assert not epochs(train(LESSON, *flags, processes=1).stdout)
    assert list(tmp_path.iterdir()) == [path]
    assert_same_state(path, ddp[2])
    own = ("--epochs", 3, "--load", path, "-s", path)
    out = train(LESSON, *SHORT, *own, processes=2).stdout
    assert "plain.pt: 2 of 3 epochs are done" in out
    assert_same_state(path, ddp[3])


class Peak(TorchDispatchMode):
    """Counts the bytes of all tensors that it has seen and that are in memory, at most."""

    def __init__(self):
        super().__init__()
        self.storages = []
        self.most = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        """Run an operation, and count what is in memory after it."""
        found = operation(*args, **(kwargs or {}))
        if type(found) is torch.Tensor:  # a DTensor has no memory but that of its shard
            self.storages.append(weakref.ref(found.untyped_storage()))
        alive = [each() for each in self.storages if each() is not None]
        sizes = {each.data_ptr(): each.nbytes() for each in alive}
        self.most = max(self.most, sum(sizes.values()))
        return found


def exporting_rank(rank, world_size, port, results, path):
    """Count the bytes of the export on each rank."""
    import fully_sharded_checkpoints as lesson

    join(rank, world_size, port)
    model = MODELS["mlp"](784, 12)
    args = argparse.Namespace(device="cpu", timeout=60, savefile=path)
    lesson.shard(model, args)
    optimizer = torch.optim.Adam(model.parameters())
    F.cross_entropy(model(torch.randn(2, 1, 28, 28)), torch.arange(2)).backward()
    optimizer.step()
    optimizer.zero_grad()
    with Peak() as peak:
        lesson.save_file(args, 1, model, optimizer)
    results[rank] = peak.most
    dist.destroy_process_group()


def test_bytes_of_the_export(tmp_path):
    """Only rank 0 keeps what is exported, and it is gathered tensor by tensor."""
    most = in_ranks(exporting_rank, 2, tmp_path / "whole.pt")
    size = sum(parameter.nbytes for parameter in MODELS["mlp"](784, 12).parameters())
    assert most[1] < 2 * size  # 3/2 are the shards of the parameters and of Adam's two averages
    assert most[0] > 3 * size - 1


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


def test_a_damaged_and_an_unfinished_checkpoint(run_dir, ddp, change, tmp_path):
    """The last line names the folder. Moved away, it stays as it is, and the one before counts.

    So it is without .metadata, which is written last (exercise 1). Only rank 0 looks for folders.
    """
    broken = shutil.copytree(run_dir, tmp_path / "run")
    newest = broken / "epoch-0002"
    flags = ("--epochs", 2, "--run_dir", broken)
    for name, size in (("__1_0.distcp", 0), ("__1_0.distcp", 3000), (".metadata", 300)):
        whole = (newest / name).read_bytes()
        (newest / name).write_bytes(whole[:size])
        line = last_line(*flags, processes=2)
        assert re.search(r"^ValueError: .*epoch-0002 cannot be read \(.*\): move it away", line)
        (newest / name).write_bytes(whole)
    (newest / "__0_0.distcp").unlink()
    assert re.search("read .*No such file.*__0_0.distcp", last_line(*flags, processes=2))
    mine = shutil.copytree(newest, broken / "epoch-0002-mine")
    before = {path.name: path.read_bytes() for path in mine.iterdir()}
    (newest / ".metadata").unlink()
    first = "    # NEW: dcp writes the file .metadata last"
    copy = change(LESSON, (first, f"    assert dist.get_rank() == 0\n{first}"))
    path = tmp_path / "c.pt"
    out = train(copy, *SHORT, *flags, "-s", path, processes=2).stdout
    assert "epoch-0001: 1 of 2 epochs are done" in out
    assert_same_state(path, ddp[2])
    assert (newest / ".metadata").exists()
    assert {path.name: path.read_bytes() for path in mine.iterdir()} == before


@pytest.mark.parametrize("how", [(), ("--async_save",)])
def test_a_full_disk(how, tmp_path):
    """No room for the next checkpoint: the run ends. With more room it resumes."""
    folder = tmp_path / "small"
    folder.mkdir()
    with small_disk(folder, "4m"):
        flags = (*SHORT, "--run_dir", folder / "run", *how)
        done = train(LESSON, *flags, "--epochs", 5, processes=2, status=1)
        # The words in troubleshooting.md. Only if a file cannot even be opened, Python's are shown.
        words = "unexpected pos [0-9]+ vs|No space left on device"
        assert re.search(f"CheckpointException.*({words})", done.stderr, re.S)
        saved = len(list((folder / "run").glob("epoch-*/.metadata")))
        late = 1 if how else 0  # training continues while a thread fails to write
        assert saved > 0
        assert len(epochs(done.stdout)) == saved + 1 + late
        sh("mount", "-o", "remount,size=20m", folder)
        again = train(LESSON, *flags, "--epochs", saved + 1, processes=3).stdout
        assert epochs(again) == epochs(done.stdout)[saved : saved + 1]


def test_no_room_for_the_file(tmp_path):
    """The file before stays as it is, and nothing is left of the one that did not fit."""
    with small_disk(tmp_path, "64k"):
        (tmp_path / "c.pt").write_bytes(b"the file before")
        done = train(LESSON, *SHORT, "--epochs", 1, "-s", tmp_path / "c.pt", processes=1, status=1)
        assert "No space left on device" in done.stderr or "file write failed" in done.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["c.pt"]
        assert (tmp_path / "c.pt").read_bytes() == b"the file before"


def test_a_checkpoint_of_ddp_becomes_shards(ddp, change, tmp_path):
    """Only rank 0 reads it. The same command again resumes from --run_dir, which is newer."""
    line = "        whole = torch.load("
    copy = change(LESSON, (line, f"        assert dist.get_rank() == 0\n{line}"))
    path = tmp_path / "c.pt"
    flags = (*SHORT, "--load", ddp[1], "--run_dir", tmp_path / "run", "-s", path)
    out = train(copy, *flags, "--epochs", 2, processes=3).stdout
    assert "ddp1.pt: 1 of 2 epochs are done" in out
    assert_same_state(path, ddp[2])
    out = train(copy, *flags, "--epochs", 3, processes=2).stdout
    assert "epoch-0002: 2 of 3 epochs are done" in out
    assert re.findall(r"^epoch (\d)", out, re.M) == ["3"]
    assert_same_state(path, ddp[3])


def test_other_flags(run_dir, ddp):
    """The last line says what differs, also where the other model has fewer parameters."""
    for flag, value, before in (("--model", "cnn", "mlp"), ("--lr", 0.5, 0.001)):
        line = last_line(flag, value, "--run_dir", run_dir)
        words = f"{flag} {before}, not {value}: use the same flags"
        assert f"epoch-0002 was written with {words}" in line
    line = last_line("--layers", 4, "--load", ddp[1], processes=2)
    assert "ddp1.pt was written with --layers None, not 4: use the same flags" in line


def test_a_file_that_cannot_be_loaded(ddp, tmp_path):
    """It is missing, empty or cut short: the last line names it, and what it should have."""
    from fully_sharded_checkpoints import read

    path = tmp_path / "damaged.pt"
    note = f"{path} should be a checkpoint, a dict with args, epoch, model, optimizer."
    assert last_line("--load", path) == note
    for size in (0, 30_000):
        path.write_bytes(ddp[1].read_bytes()[:size])
        with pytest.raises(Exception) as error:
            read(path)
        assert error.value.__notes__ == [note]


SAVE = "def save_shards("
SLOWLY = f"""write_data = dcp.FileSystemWriter.write_data
def slowly(*args):
    time.sleep(3)
    return write_data(*args)
dcp.FileSystemWriter.write_data = slowly
{SAVE}"""
WAIT = "        if writing:\n"
SHOW = f"""        for each in Path(args.run_dir).glob("*1"):
            print("before the wait:", each.name, (each / ".metadata").exists())
{WAIT}"""


def test_a_thread_writes_a_copy(ddp, change, tmp_path):
    """Training continues while it writes, and the checkpoint has the numbers of its own epoch."""
    copy = change(LESSON, (SAVE, SLOWLY), (WAIT, SHOW))
    folder = tmp_path / "run"
    flags = (*SHORT, "--async_save", "--run_dir", folder)
    out = train(copy, *flags, "--epochs", 2, processes=2).stdout
    # The first checkpoint is being written while the second epoch trains.
    assert re.findall("before the wait: (.*)", out) == ["epoch-0001 False"]
    for number in (2, 1):
        own = ("--epochs", number, "--run_dir", folder, "-s", tmp_path / "c.pt")
        assert not epochs(train(LESSON, *SHORT, *own, processes=3).stdout)
        assert_same_state(tmp_path / "c.pt", ddp[number])
        shutil.rmtree(folder / f"epoch-000{number}")


def test_threads_without_a_group_of_their_own(change, tmp_path):
    """Exercise 2: a message of the thread is taken for one of training, and the run ends."""
    copy = change(LESSON, (", process_group=group)", ")"))
    flags = (*SHORT, "--epochs", 30, "--timeout", 5, "--async_save")
    jobs = ranks(copy, *flags, "--run_dir", tmp_path / "run", processes=2)
    done = [job.wait() for job in jobs]
    assert any(one.returncode for one in done), done


START = "\n        start = time.perf_counter()\n"
DRAWN = f"""
        drawn = [None] * world_size
        dist.all_gather_object(drawn, torch.rand(1).item())
        print("drawn:", *drawn)
{START[1:]}"""
SEED = "        torch.manual_seed(args.seed + epoch * world_size + rank)\n"


def test_dropout_and_a_break(change, tmp_path):
    """Each rank and epoch draws different numbers, and a run that is resumed draws the same.

    Without the seeds, the ranks draw the same, and after a break those of the start (exercise 3).
    """

    def train_to(copy, count, folder):
        flags = ("--model", "cnn", "--dropout", 0.5, "--epochs", count, "--run_dir", folder)
        out = train(copy, *SHORT, *flags, processes=2).stdout
        return re.findall(r"0\.\d+", " ".join(re.findall(r"^drawn: .*", out, re.M))), losses(out)

    copy = change(LESSON, (START, DRAWN))
    drawn, right = train_to(copy, 2, tmp_path / "whole")
    assert len(set(drawn)) == 4  # two ranks, two epochs
    before = train_to(copy, 1, tmp_path / "run")
    after = train_to(copy, 2, tmp_path / "run")
    assert before[0] + after[0] == drawn
    assert before[1] + after[1] == pytest.approx(right, abs=1e-9)
    copy = change(LESSON, (START, DRAWN), (SEED, ""))
    drawn, right = train_to(copy, 2, tmp_path / "seedless")
    before = train_to(copy, 1, tmp_path / "broken")
    after = train_to(copy, 2, tmp_path / "broken")
    assert len(set(drawn)) == 2 and len(set(before[0] + after[0])) == 1
    assert abs(after[1][0] - right[1]) > 1e-6


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--dropout", 0.5), ("--dropout 0.5", "--model cnn")),
        (("--dropout", 1, "--model", "cnn"), ("--dropout 1", "below 1")),
        (("--dropout", "nan", "--model", "cnn"), ("--dropout nan", "below 1")),
        (("--savefile", "/proc/here/c.pt"), ("cannot write /proc/here/c.pt",)),
        (("--async_save",), ("--async_save", "--run_dir")),
    ],
)
def test_wrong_flags(flags, words, main):
    """Status 2, one line."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    one_line(main(LESSON, "--batch_size", 120, *flags, env=env), *words)
