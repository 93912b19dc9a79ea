"""Sharded checkpoints for any number of ranks, one file from them and back, export, dropout."""

import json
import re
import shutil

import pytest
import torch
from conftest import DIGITS, epochs, lesson_path, losses, one_line, ranks, single_gpu, train
from nodes import small_disk
from safetensors.torch import load_file

from common.models import MODELS

LESSON = "fully_sharded_checkpoints"
SHORT = (*DIGITS, "--batch_size", 120, "--double")
ONLY_0 = "assert dist.get_rank() == 0"


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
def copy(tmp_path_factory):
    """A copy of the lesson in which only rank 0 may look for checkpoints, and read a file."""
    text = lesson_path(LESSON).read_text()
    for line in ("    found = {}", "        whole = torch.load("):
        assert text.count(line) == 1
        text = text.replace(line, line.replace(line.strip(), f"{ONLY_0}; {line.strip()}"))
    path = tmp_path_factory.mktemp("copy") / f"{LESSON}.py"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def run_dir(copy, ddp, tmp_path_factory):
    """Sharded checkpoints of the second epoch, by three ranks, and of the third one, by two.

    The run began with the file of the first epoch, and each start wrote a file of its last one.
    """
    folder = tmp_path_factory.mktemp("fsdp")
    flags = (*SHORT, "--load", ddp[1], "--run_dir", folder / "run", "-s", folder / "c.pt")
    for count, processes, begin in ((2, 3, "ddp1.pt: 1"), (3, 2, "run/epoch-0002: 2")):
        out = train(copy, *flags, "--epochs", count, processes=processes).stdout
        assert f"{begin} of {count} epochs are done" in out
        assert re.findall(r"^epoch (\d)", out, re.M) == [str(count)]
        assert_same_state(folder / "c.pt", ddp[count])
        files = {path.name for path in (folder / "run" / f"epoch-000{count}").iterdir()}
        assert files == {".metadata", *(f"__{rank}_0.distcp" for rank in range(processes))}
    assert sorted(path.name for path in folder.iterdir()) == ["c.pt", "run"]
    return folder / "run"


def test_an_unfinished_checkpoint_does_not_count(run_dir, ddp, tmp_path):
    """Without .metadata, which is written last, it is passed over (exercise 1).

    Without more epochs, the file is that of the checkpoint before, and nothing is trained.
    """
    folder = shutil.copytree(run_dir, tmp_path / "run")
    (folder / "epoch-0003" / ".metadata").unlink()
    flags = (*SHORT, "--epochs", 2, "--run_dir", folder, "-s", tmp_path / "c.pt")
    out = train(LESSON, *flags, processes=1).stdout
    assert "epoch-0002: 2 of 2 epochs are done" in out
    assert not epochs(out)
    assert_same_state(tmp_path / "c.pt", ddp[2])


def test_a_damaged_checkpoint(run_dir, tmp_path):
    """The last line names the folder, the one with the largest number, and says what to do."""
    folder = shutil.copytree(run_dir, tmp_path / "run")
    (folder / "epoch-0002").rename(folder / "epoch-9999")
    newest = (folder / "epoch-0003").rename(folder / "epoch-10000")
    shard = newest / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:3000])
    line = last_line("--epochs", 4, "--run_dir", folder, processes=2)
    assert re.search(r"^ValueError: .*epoch-10000 cannot be read \(.*\): move it away", line)


def test_other_flags(run_dir, ddp):
    """The last line says what differs, also where the other model has fewer parameters."""
    line = last_line("--model", "cnn", "--run_dir", run_dir)
    assert "epoch-0003 was written with --model mlp, not cnn: use the same flags" in line
    line = last_line("--layers", 4, "--load", ddp[1])
    assert "ddp1.pt was written with --layers None, not 4: use the same flags" in line


def test_a_file_that_cannot_be_loaded(ddp, tmp_path):
    """It is empty or cut short: the last line names it, and what it should have."""
    from fully_sharded_checkpoints import read

    path = tmp_path / "damaged.pt"
    note = f"{path} should be a checkpoint, a dict with args, epoch, model, optimizer."
    for content in (b"", ddp[1].read_bytes()[:30_000]):
        path.write_bytes(content)
        with pytest.raises(Exception) as error:
            read(path)
        assert error.value.__notes__ == [note]


def test_a_full_disk(tmp_path):
    """No room for the next checkpoint, which a thread writes: the run ends with its error."""
    with small_disk(tmp_path, "4m"):
        flags = (*SHORT, "--run_dir", tmp_path / "run", "--async_save", "--epochs", 5)
        done = train(LESSON, *flags, processes=2, status=1)
        # The words in troubleshooting.md. Only if a file cannot even be opened, Python's are shown.
        words = "unexpected pos [0-9]+ vs|No space left on device"
        assert re.search(f"CheckpointException.*({words})", done.stderr, re.S)
        saved = len(list((tmp_path / "run").glob("epoch-*/.metadata")))
        assert saved > 0
        assert len(epochs(done.stdout)) == saved + 2  # one is trained while the thread fails


def test_no_room_for_the_file(tmp_path):
    """The file before stays as it is, and nothing is left of the one that did not fit."""
    with small_disk(tmp_path, "64k"):
        (tmp_path / "c.pt").write_bytes(b"the file before")
        done = train(LESSON, *SHORT, "--epochs", 1, "-s", tmp_path / "c.pt", processes=1, status=1)
        assert "No space left on device" in done.stderr or "file write failed" in done.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["c.pt"]
        assert (tmp_path / "c.pt").read_bytes() == b"the file before"


# What transformers calls the layers of a Llama model, in their order.
OF_A_BLOCK = """input_layernorm self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj
    post_attention_layernorm mlp.gate_proj mlp.up_proj mlp.down_proj"""
BLOCKS = [f"model.layers.{block}.{name}" for block in (0, 1) for name in OF_A_BLOCK.split()]
LLAMA = ["model.embed_tokens", *BLOCKS, "model.norm", "lm_head"]


def test_an_export(tmp_path):
    """safetensors alone reads what three ranks have written, and two ranks resume from it.

    Without a learning rate, these end with the same parameters.
    """
    text = ("--model", "language", "--batch_size", 120, "--epochs", 1)
    few = {"DOCUMENTS": "40"}
    folder, file = tmp_path / "exported", tmp_path / "c.pt"
    train(LESSON, *text, "--export", folder, "-s", file, processes=3, env=few)
    right = torch.load(file, weights_only=True)["model"]
    found = load_file(folder / "model-00001-of-00001.safetensors")
    assert set(found) == {f"{name}.weight" for name in LLAMA}
    tensors = [found[f"{name}.weight"] for name in LLAMA]
    torch.testing.assert_close(tensors, [*right.values()], atol=0, rtol=0)

    config = json.loads((folder / "config.json").read_text())
    assert found["model.embed_tokens.weight"].shape == (config["vocab_size"], config["hidden_size"])
    assert found[f"{BLOCKS[-2]}.weight"].shape[0] == config["intermediate_size"]
    heads = (config["num_attention_heads"], config["num_key_value_heads"])
    assert (*heads, config["num_hidden_layers"]) == (4, 2, 2)

    line = last_line("--load", folder)  # by the MLP
    assert re.search(r"^ValueError: .*exported cannot be read \(.*\): use an export of the", line)
    out = train(LESSON, *text, "--lr", 0, "--load", folder, "-s", file, processes=2, env=few).stdout
    assert "exported: 0 of 1 epochs are done" in out
    again = torch.load(file, weights_only=True)["model"]
    torch.testing.assert_close(again, right, atol=0, rtol=0)


def test_an_export_that_cannot_work(tmp_path, main, monkeypatch):
    """Status 2 and one line: what to install, or that the folder may have the shards of others."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with monkeypatch.context() as without:
        without.setattr("fully_sharded_checkpoints.find_spec", lambda name: None)
        for flag in ("--export", "--load"):
            one_line(main(LESSON, *SHORT, flag, tmp_path, env=env), "pip install safetensors")
    (tmp_path / "sharded").mkdir()
    done = main(LESSON, *SHORT, "--export", tmp_path, env=env)
    one_line(done, f"--export {tmp_path}", "not empty")


SAVE = "def save_shards("
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
START = "        start = time.perf_counter()\n"
DRAWN = f"""
        drawn = [None] * world_size
        dist.all_gather_object(drawn, torch.rand(1).item())
        print("drawn:", *drawn)
{START}"""


def test_a_thread_writes_while_dropout_draws(change, tmp_path):
    """The next epoch is trained before the thread writes, and the checkpoint is not of that one.

    A run that resumes from it has the same losses, because each rank and epoch has a seed of its
    own for dropout.
    """
    copy = change(LESSON, (SAVE, SLOWLY), (WAIT, SHOW), (START, DRAWN))
    cnn = (*SHORT, "--model", "cnn")
    flags = (*cnn, "--dropout", 0.5, "--async_save", "--run_dir", tmp_path / "run", "--epochs", 2)
    outs = []
    for _ in range(2):
        outs.append(train(copy, *flags, processes=2).stdout)
        shutil.rmtree(tmp_path / "run" / "epoch-0002")
    whole, resumed = outs
    assert re.findall("^written:(.*)", whole, re.M) == [""]
    assert "epoch-0001: 1 of 2 epochs are done" in resumed
    drawn = re.findall(r"0\.\d+", " ".join(re.findall("^drawn: .*", whole, re.M)))
    assert len(set(drawn)) == 4  # two ranks, two epochs
    assert f"drawn: {drawn[2]} {drawn[3]}\n" in resumed
    assert losses(resumed) == pytest.approx(losses(whole)[1:], abs=1e-9)
    assert losses(whole)[0] != single_gpu(*cnn, "--epochs", 1)[0]["loss"]  # without dropout
