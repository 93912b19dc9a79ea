"""The resumable lesson: restarts that change nothing, checkpoints that survive, one log."""

import argparse
import os
import re
import shutil
import signal

import pytest
import torch
from conftest import (
    DIGITS,
    each_epoch,
    epochs,
    losses,
    one_process,
    ranks,
    single_gpu,
    torchrun,
    train,
    wait_for_epoch,
)
from nodes import sh, small_disk
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

LESSON = "distributed_data_parallel_resumable"


def assert_same_parameters(one, other):
    """Compare two checkpoints in float64: at most the order of sums changes in a restart."""
    one = torch.load(one, weights_only=True)["model"]
    other = torch.load(other, weights_only=True)["model"]
    torch.testing.assert_close(one, other, atol=1e-9, rtol=0)


def test_a_killed_rank_changes_nothing(tmp_path):
    """SIGKILL to rank 0 (exercise 1): torchrun restarts all, and the end has the same numbers."""
    flags = (*DIGITS, "--batch_size", 120, "--epochs", 5, "--double")
    whole = train(LESSON, *flags, "--run_dir", tmp_path / "whole", processes=1).stdout
    restarting = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # as the lesson's docstring has it
    copy = each_epoch(LESSON, "time.sleep(999 * ((epoch, done) == (3, 0)))", tmp_path)
    killed = tmp_path / "killed"
    job = torchrun(copy, *flags, "--run_dir", killed, restarts=1, env=restarting)
    line = next(line for line in job.process.stdout if line.startswith("rank 0 is process "))
    wait_for_epoch(killed, 3, job)
    os.kill(int(line.split()[-1]), signal.SIGKILL)
    done = job.wait()
    assert done.returncode == 0, done.stderr
    log = (killed / "log.txt").read_text()
    assert re.findall(r"(\d) of 5 epochs are done", log) == ["3"]
    assert epochs(log)[-1] == epochs(whole)[-1]
    assert_same_parameters(tmp_path / "whole" / "epoch-0005.pt", killed / "epoch-0005.pt")


def test_what_is_in_the_run_folder(tmp_path):
    """Only rank 0 writes: one log, one set of curves, the last three checkpoints; it is resumed."""
    for count in (2, 5):
        train(LESSON, *DIGITS, "--epochs", count, "--run_dir", tmp_path / "run", processes=2)
    names = sorted(os.listdir(tmp_path / "run"))
    checkpoints = [name for name in names if name.startswith("epoch")]
    assert checkpoints == ["epoch-0003.pt", "epoch-0004.pt", "epoch-0005.pt"]
    curves = [name for name in names if name.startswith("events")]
    assert len(curves) == 2  # one file for each start, and none of rank 1
    assert len(names) == 3 + 2 + 1
    log = (tmp_path / "run" / "log.txt").read_text()
    assert re.findall(r"^epoch (\d)", log, re.M) == list("12345")
    assert "2 of 5 epochs are done" in log

    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    curves = set(events.Tags()["scalars"])
    assert curves == {"loss", "accuracy/train", "accuracy/test", "images per second"}
    for curve in curves:
        assert [event.step for event in events.Scalars(curve)] == [1, 2, 3, 4, 5]
    drawn = [event.value for event in events.Scalars("loss")]
    assert drawn == pytest.approx(losses(log), abs=1e-4)
    again = train(LESSON, *DIGITS, "--epochs", 5, "--run_dir", tmp_path / "run", processes=1)
    assert "5 of 5 epochs are done" in again.stdout
    assert "epoch 5/" not in again.stdout


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """The folder of a run in float64 with three epochs."""
    folder = tmp_path_factory.mktemp("resumable") / "run"
    train(LESSON, *DIGITS, "--epochs", 3, "--double", "--run_dir", folder, processes=1)
    return folder


def test_a_run_is_resumed_with_the_same_flags(run_dir):
    """The error names the flag and what to do, and the checkpoint stays."""
    saved = run_dir / "epoch-0003.pt"
    for flags, differ in (
        (("--lr", 1, "--double"), "--lr 0.001, not 1.0"),
        ((), "--double True, not False"),
    ):
        flags = (*DIGITS, "--epochs", 4, *flags, "--run_dir", run_dir)
        done = train(LESSON, *flags, processes=1, status=1)
        words = f"{saved} was written with {differ}: use the same flags, or a different --run_dir"
        assert f"ValueError: {words}" in done.stderr
        assert saved.is_file()


def test_dropout_continues_when_a_run_is_resumed(change, tmp_path):
    """The ranks draw in the second epoch what they draw in a run that was not interrupted.

    With dropout the losses show it.
    """
    line = "    model = make_model(args).to(device)\n"
    copy = change(LESSON, (line, f"{line}    model.stage2[3].p = 0.5  # the CNN's dropout\n"))
    flags = (*DIGITS, "--model", "cnn", "--batch_size", 120, "--double")
    for name, count in (("whole", 2), ("resumed", 1), ("resumed", 2)):
        train(copy, *flags, "--epochs", count, "--run_dir", tmp_path / name, processes=2)
    whole = losses((tmp_path / "whole" / "log.txt").read_text())
    resumed = losses((tmp_path / "resumed" / "log.txt").read_text())
    assert resumed == pytest.approx(whole, abs=1e-9) and len(whole) == 2
    assert whole[0] != single_gpu(*flags, "--epochs", 1)[0]["loss"]  # without dropout


def test_rank_0_chooses_and_each_rank_reads(run_dir, change, tmp_path):
    """Only rank 0 lists the folder, only a path is sent, and the file stays as it is."""
    broadcast = "    dist.broadcast_object_list(chosen)\n"
    copy = change(
        LESSON,
        ("    found = {}\n", "    found = {}\n    print('lists', os.environ['RANK'])\n"),
        (broadcast, f"{broadcast}    print(f'received {{chosen}}')\n"),
        ("    return state\n", "    print('read', state['epoch'])\n    return state\n"),
    )
    saved = shutil.copytree(run_dir, tmp_path / "run") / "epoch-0003.pt"
    before = saved.read_bytes()
    jobs = ranks(copy, *DIGITS, "--epochs", 4, "--double", "--run_dir", saved.parent)
    said = [job.wait().stdout for job in jobs]
    assert [out.count("lists") for out in said] == [2, 0]  # to resume, and to remove
    for out in said:
        assert f"received [PosixPath('{saved}')]" in out
        assert "read 3" in out
    assert saved.read_bytes() == before


def test_only_numbered_checkpoints_count(tmp_path):
    """They are sorted by number. No other file is loaded, and none is removed."""
    import distributed_data_parallel_resumable as lesson

    folder = tmp_path / "run"
    folder.mkdir()
    others = ["epoch-latest.pt", "epoch-0099.pt.bak", "epoch-9.5.pt", "old-epoch-0099.pt", "notes"]
    for name in others:
        (folder / name).write_text("mine")
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in (9998, 9999, 10000, 10001):
        lesson.save(folder, epoch, model, optimizer, argparse.Namespace())
    names = [path.name for path in lesson.checkpoints(folder)]
    assert names == ["epoch-9999.pt", "epoch-10000.pt", "epoch-10001.pt"]
    assert sorted(os.listdir(folder)) == sorted([*names, *others])


def cut(path):
    """Keep the first part of a file."""
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * 0.6)])


def empty_blocks(path):
    """Write zeros, as a file may have them after a loss of power."""
    path.write_bytes(path.read_bytes()[:100] + bytes(5000))


def something_else(path):
    """Write a file of PyTorch that is no checkpoint."""
    torch.save(torch.nn.Linear(1, 1).state_dict(), path)


def test_a_damaged_checkpoint(run_dir, tmp_path):
    """The error says what the file should be. Once it is moved away, the one before it is used."""
    from distributed_data_parallel_resumable import read

    folder = shutil.copytree(run_dir, tmp_path / "run")
    newest = folder / "epoch-0003.pt"
    keys = "a dict with args, epoch, model, optimizer."
    notes = [
        f"{newest} must be a checkpoint that all nodes can read, {keys}",
        "If it is damaged, move it away, and the run resumes from the one before.",
    ]
    for damage in (something_else, empty_blocks, cut):
        shutil.copyfile(run_dir / newest.name, newest)
        damage(newest)
        with pytest.raises(Exception) as error:
            read(newest)
        assert error.value.__notes__ == notes
    before = newest.read_bytes()
    flags = (*DIGITS, "--epochs", 3, "--double", "--run_dir", folder)
    done = train(LESSON, *flags, processes=1, status=1)
    assert done.stderr.strip().splitlines()[-2:] == notes
    assert newest.read_bytes() == before
    newest.rename(tmp_path / "damaged.pt")
    done = train(LESSON, *flags, processes=2)
    assert "epoch-0002.pt: 2 of 3 epochs are done" in done.stdout
    assert_same_parameters(run_dir / newest.name, newest)


def test_a_full_disk(tmp_path):
    """No room for the next checkpoint: nothing unfinished is left, and the run can be resumed."""
    folder = tmp_path / "small"
    folder.mkdir()
    flags = (*DIGITS, "--epochs", 5, "--run_dir", folder / "run")
    with small_disk(folder, "1900k"):
        done = train(LESSON, *flags, processes=1, status=1)
        assert "No space left on device" in done.stderr
        saved = sorted((folder / "run").glob("*.pt"))
        assert saved and not (folder / "run" / "unfinished").exists()
        for path in saved:
            torch.load(path, weights_only=True)
        sh("mount", "-o", "remount,size=20m", folder)
        done = train(LESSON, *flags, processes=1)
        assert f"{len(saved)} of 5 epochs are done" in done.stdout
        assert epochs(done.stdout)[-1] == one_process(*DIGITS, "--epochs", 5)[-1]
