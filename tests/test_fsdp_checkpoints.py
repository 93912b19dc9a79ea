"""Checkpoints of a sharded model: for any number of ranks, damaged ones, dropout, and one file."""

import pickle
import re
import shutil

import pytest
import torch
from launch import DIGITS, Evil, epochs, losses, ranks, run, single_gpu
from nodes import small_disk
from torch.distributed.checkpoint import FileSystemReader

from common.models import MODELS

LESSON = "fully_sharded_checkpoints"
SHORT = (*DIGITS, "--batch_size", 120, "--double")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """Sharded checkpoints of the second epoch, by three ranks, and of the third one, by two.

    The losses are those of one process.
    """
    folder = tmp_path_factory.mktemp("fsdp") / "run"
    flags = (*SHORT, "--run_dir", folder)
    right = [line["loss"] for line in single_gpu(*SHORT, "--epochs", 3)]
    found = losses(run(LESSON, *flags, "--epochs", 1, processes=1).stdout)
    for count, processes in ((2, 3), (3, 2)):
        out = run(LESSON, *flags, "--epochs", count, processes=processes).stdout
        assert f"run/epoch-000{count - 1}: {count - 1} of {count} epochs are done" in out
        assert re.findall(r"^epoch (\d)", out, re.M) == [str(count)]
        found += losses(out)
        files = {path.name for path in (folder / f"epoch-000{count}").iterdir()}
        assert files == {".metadata", *(f"__{rank}_0.distcp" for rank in range(processes))}
    assert found == pytest.approx(right, abs=1e-10)
    return folder


def test_rank_0_chooses(change, tmp_path):
    """On another node, a new folder may appear later."""
    late = "    folders = [file.parent for"
    copy = change(LESSON, (late, f"    if dist.get_rank():\n        return []\n{late}"))
    flags = (*DIGITS, "--batch_size", 120, "--run_dir", tmp_path / "run", "--epochs")
    run(copy, *flags, 1, processes=2)
    assert "1 of 2 epochs are done" in run(copy, *flags, 2, processes=2).stdout


def test_an_unfinished_checkpoint_does_not_count(run_dir, tmp_path):
    """Without .metadata, which is written last, it is passed over (exercise 1)."""
    folder = shutil.copytree(run_dir, tmp_path / "run")
    (folder / "epoch-0003" / ".metadata").unlink()
    out = run(LESSON, *SHORT, "--epochs", 2, "--run_dir", folder, processes=1).stdout
    assert "epoch-0002: 2 of 2 epochs are done" in out
    assert not epochs(out)


def test_a_checkpoint_that_cannot_be_loaded(run_dir, tmp_path):
    """It is damaged, or of another model: the last lines name it, and say what to do."""
    folder = shutil.copytree(run_dir, tmp_path / "run")
    shard = folder / "epoch-0003" / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:3000])
    for flags, processes in ((("--run_dir", folder), 2), (("--run_dir", run_dir, "--width", 8), 1)):
        ends = [job.wait() for job in ranks(LESSON, *SHORT, *flags, processes=processes)]
        assert {end.returncode for end in ends} == {1}, ends
        *_, line, last = ends[0].stderr.strip().splitlines()
        assert line.endswith(
            "epoch-0003 cannot be loaded: use the flags with which it was written,"
        )
        assert last == "or move it away, and the run resumes from the checkpoint before."
    ends = [job.wait() for job in ranks(LESSON, *SHORT, "--run_dir", run_dir, "--seed", 7)]
    assert {end.returncode for end in ends} == {1}, ends
    assert "epoch-0003 was written with --seed 0: use the same flags, or" in ends[0].stderr


def test_a_folder_of_dcp_can_run_code(tmp_path):
    """As the docstring says. If this fails, PyTorch has mended it, and the docstring can, too."""
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil(str(tmp_path / "it_ran"))))
    with pytest.raises(AttributeError):  # what was called has returned None, which has no shards
        FileSystemReader(tmp_path).read_metadata()
    assert (tmp_path / "it_ran").is_dir()


def test_a_full_disk(tmp_path):
    """No room for the next checkpoint, which a thread writes: the run ends with its error."""
    with small_disk(tmp_path, "4m"):
        flags = (*SHORT, "--run_dir", tmp_path / "run", "--async_save", "--epochs", 5)
        done = run(LESSON, *flags, processes=2, status=1)
        # The words in troubleshooting.md. Only if a file cannot even be opened, Python's are shown.
        words = "unexpected pos [0-9]+ vs|No space left on device"
        assert re.search(f"CheckpointException.*({words})", done.stderr, re.S)
        saved = len(list((tmp_path / "run").glob("epoch-*/.metadata")))
        assert saved > 0
        assert len(epochs(done.stdout)) == saved + 2  # one is trained while the thread fails


SAVE = "def save("
SLOWLY = f"""import threading
trained = threading.Event()
write_data = dcp.FileSystemWriter.write_data
def slowly(*args):
    trained.wait()
    return write_data(*args)
dcp.FileSystemWriter.write_data = slowly
{SAVE}"""
WAIT = "        if writing:\n"
SHOW = f"""        if epoch + 1 == args.epochs:
            print("written:", *Path(args.run_dir).glob("*/.metadata"))
            trained.set()
{WAIT}"""
START = "    start = time.perf_counter()\n"
DRAWN = f"""
    drawn = [None] * world_size
    dist.all_gather_object(drawn, torch.rand(1).item())
    print("drawn:", *drawn)
{START}"""
MODEL = "    model = make_model(args)\n"
OWN_MODEL = f"""{MODEL}    model.extra = torch.nn.Parameter(torch.ones(6, dtype=torch.float64))
    model.layers[0].requires_grad_(False)
"""
OPTIMIZER = "torch.optim.Adam(model.parameters(), lr"
GROUPS = """torch.optim.Adam([
    {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.1},
    {"params": [p for p in model.parameters() if p.ndim == 1]}], lr"""
DROPOUT = f"{MODEL}    model.stage1.append(torch.nn.Dropout())\n"  # exercise 3


def test_a_thread_writes_while_dropout_draws(change, tmp_path):
    """The next epoch is trained before the thread writes, and the checkpoint is not of that one.

    A run that resumes from it has the same losses, because each rank and epoch has a seed of its
    own for dropout.
    """
    copy = change(LESSON, (SAVE, SLOWLY), (WAIT, SHOW), (START, DRAWN), (MODEL, DROPOUT))
    flags = (*SHORT, "--async_save", "--run_dir", tmp_path / "run", "--epochs", 2)
    outs = []
    for _ in range(2):
        outs.append(run(copy, *flags, processes=2).stdout)
        shutil.rmtree(tmp_path / "run" / "epoch-0002")
    whole, resumed = outs
    assert re.findall("^written:(.*)", whole, re.M) == [""]
    assert "epoch-0001: 1 of 2 epochs are done" in resumed
    drawn = re.findall(r"0\.\d+", " ".join(re.findall("^drawn: .*", whole, re.M)))
    assert len(set(drawn)) == 4  # two ranks, two epochs
    assert f"drawn: {drawn[2]} {drawn[3]}\n" in resumed
    assert losses(resumed) == pytest.approx(losses(whole)[1:], abs=1e-9)
    assert losses(whole)[0] != single_gpu(*SHORT, "--epochs", 1)[0]["loss"]  # without dropout


def test_a_model_of_ones_own(change, tmp_path):
    """A frozen layer, a parameter that gets no gradient, and two groups of the optimizer.

    Whether sharded or in one file, two ranks save it and three resume, with the losses of a run
    that was not interrupted.
    """
    folders = ("--run_dir", tmp_path / "run")
    file = tmp_path / "c.pt"
    copy = change(LESSON, (MODEL, OWN_MODEL), (OPTIMIZER, GROUPS))
    whole = losses(run(copy, *SHORT, "--epochs", 2, processes=2).stdout)
    for first, second in ((folders, folders), (("-s", file), ("--load", file))):
        run(copy, *SHORT, *first, "--epochs", 1, processes=2)
        out = run(copy, *SHORT, *second, "--epochs", 2, processes=3).stdout
        assert "1 of 2 epochs are done" in out
        assert losses(out) == pytest.approx(whole[1:], abs=1e-10)


def test_only_the_last_three_stay(tmp_path):
    """Of five."""
    run(LESSON, *SHORT, "--run_dir", tmp_path / "run", "--epochs", 5, processes=2)
    names = [path.name for path in sorted((tmp_path / "run").iterdir())]
    assert names == ["epoch-0003", "epoch-0004", "epoch-0005"]


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    """Checkpoints of the DDP lesson, which has the numbers of one process, by their epoch."""
    folder = tmp_path_factory.mktemp("ddp")
    paths = {}
    for count in (1, 2, 3):
        paths[count] = folder / f"ddp{count}.pt"
        flags = (*SHORT, "--epochs", count, "-s", paths[count])
        run("distributed_data_parallel", *flags, processes=1)
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


def test_from_one_file_to_another(change, ddp, tmp_path):
    """Three ranks begin with DDP's file, and two with theirs. Only rank 0 reads and writes it."""
    read = "        state = torch.load("
    copy = change(LESSON, (read, f"        assert dist.get_rank() == 0\n{read}"))
    begin = ddp[1]
    for count, processes in ((2, 3), (3, 2)):
        file = tmp_path / f"c{count}.pt"
        flags = (*SHORT, "--load", begin, "-s", file, "--epochs", count)
        out = run(copy, *flags, processes=processes).stdout
        assert f"{begin}: {count - 1} of {count} epochs are done" in out
        assert re.findall(r"^epoch (\d)", out, re.M) == [str(count)]
        assert_same_state(file, ddp[count])
        begin = file
    assert sorted(path.name for path in tmp_path.glob("c?.pt*")) == ["c2.pt", "c3.pt"]
