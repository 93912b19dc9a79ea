"""The resumable lesson: restarts that change nothing, checkpoints that survive, one log."""

import argparse
import os
import re
import signal

import pytest
import torch
from conftest import (
    DIGITS,
    LONG,
    each_epoch,
    epochs,
    one_process,
    ranks,
    torchrun,
    train,
    wait_for_epoch,
)
from nodes import sh, small_disk
from test_errors import wait_for_line

LESSON = "distributed_data_parallel_resumable"
MANY = (*DIGITS, "--batch_size", 120, "--epochs", 8, "--double")


def assert_same_parameters(one, other):
    """Compare two checkpoints in float64: at most the order of sums changes in a restart."""
    one = torch.load(one, weights_only=True)["model"]
    other = torch.load(other, weights_only=True)["model"]
    for name, parameter in one.items():
        torch.testing.assert_close(other[name], parameter, atol=1e-9, rtol=0)


def test_a_killed_rank_changes_nothing(tmp_path):
    """SIGKILL to a rank, twice: torchrun restarts all, and the end has the same parameters."""
    whole = train(LESSON, *MANY, "--run_dir", tmp_path / "whole", processes=1).stdout
    restarting = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # as the lesson's docstring has it
    copy = each_epoch(LESSON, "time.sleep(999 * ((epoch, done) in [(2, 0), (5, 2)]))", tmp_path)
    job = torchrun(copy, *MANY, "--run_dir", tmp_path / "killed", restarts=2, env=restarting)
    for victim, done in ((1, 2), (0, 5)):
        pids = job.ranks(2)
        wait_for_epoch(tmp_path / "killed", done, job)
        os.kill(pids[victim], signal.SIGKILL)
    done = job.wait()
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "killed" / "log.txt").read_text()
    assert re.findall(r"(\d) of 8 epochs are done", log) == ["2", "5"]
    assert epochs(log)[-1] == epochs(whole)[-1]
    assert_same_parameters(
        tmp_path / "whole" / "epoch-0008.pt", tmp_path / "killed" / "epoch-0008.pt"
    )


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

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    curves = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
    assert set(curves) == {"loss", "accuracy/train", "accuracy/test", "images per second"}
    for values in curves.values():
        assert [step for step, _ in values] == [1, 2, 3, 4, 5]
    for (_, value), line in zip(curves["loss"], epochs(log), strict=True):
        assert value == pytest.approx(line["loss"], abs=1e-4)

    again = train(LESSON, *DIGITS, "--epochs", 5, "--run_dir", tmp_path / "run", processes=1)
    assert "5 of 5 epochs are done" in again.stdout
    assert "epoch 5/" not in again.stdout


@pytest.mark.parametrize(
    ("flags", "differ"),
    [(("--lr", 1), "--lr 0.001, not 1.0"), (("--double",), "--double False, not True")],
)
def test_a_run_is_resumed_with_the_same_flags(flags, differ, tmp_path):
    """The error names the flag and what to do, and the checkpoint stays."""
    folder = tmp_path / "run"
    train(LESSON, *DIGITS, "--epochs", 1, "--run_dir", folder, processes=1)
    flags = (*DIGITS, "--epochs", 2, *flags, "--run_dir", folder)
    done = train(LESSON, *flags, processes=1, status=1)
    saved = folder / "epoch-0001.pt"
    expected = f"ValueError: {saved} was written with {differ}: use the same flags, or a different"
    assert expected in done.stderr
    assert saved.is_file()


def test_dropout_continues_when_a_run_is_resumed(change, tmp_path):
    """The ranks draw in the second epoch what they draw in a run that was not interrupted.

    With dropout the losses show it.
    """
    line = "    model = make_model(args).to(device)\n"
    path = change(LESSON, (line, f"{line}    model.stage2[3].p = 0.5  # the CNN's dropout\n"))
    model = ("--model", "cnn", "--batch_size", 120, "--double")

    def losses(folder, *counts):
        for count in counts:
            flags = (*model, "--epochs", count, "--run_dir", folder)
            train(path, *DIGITS, *flags, processes=2)
        return [line["loss"] for line in epochs((folder / "log.txt").read_text())]

    whole = losses(tmp_path / "whole", 3)
    resumed = losses(tmp_path / "resumed", 1, 3)
    assert resumed == pytest.approx(whole, abs=1e-9) and len(whole) == 3
    without_dropout = one_process(*DIGITS, *model, "--epochs", 3)
    assert whole[0] != without_dropout[0]["loss"]


def test_rank_0_chooses_and_each_rank_reads(change, tmp_path):
    """Only rank 0 lists the folder, only a path is sent, and the file stays as it is."""
    broadcast = "    dist.broadcast_object_list(chosen)\n"
    copy = change(
        LESSON,
        ("    found = {}\n", "    found = {}\n    print('lists', os.environ['RANK'])\n"),
        (broadcast, f"{broadcast}    print(f'received {{chosen}}')\n"),
        ("    return state\n", "    print('read', state['epoch'])\n    return state\n"),
    )
    folder = tmp_path / "run"
    train(LESSON, *DIGITS, "--epochs", 1, "--run_dir", folder, processes=1)
    saved = folder / "epoch-0001.pt"
    before = saved.read_bytes()
    jobs = ranks(copy, *DIGITS, "--epochs", 3, "--run_dir", folder)
    said = [job.wait().stdout for job in jobs]
    assert [out.count("lists") for out in said] == [3, 0]  # once to resume, twice to remove
    for out in said:
        assert f"received [PosixPath('{saved}')]" in out
        assert "read 1" in out
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


@pytest.mark.parametrize("damage", [cut, empty_blocks, something_else])
def test_a_damaged_checkpoint(damage, tmp_path):
    """The error says what the file should be. Once it is moved away, the one before it is used."""
    folder = tmp_path / "run"
    flags = (*DIGITS, "--epochs", 3, "--double", "--run_dir", folder)
    train(LESSON, *flags, processes=1)
    newest = folder / "epoch-0003.pt"
    newest.rename(tmp_path / "expected.pt")
    newest.write_bytes((tmp_path / "expected.pt").read_bytes())
    damage(newest)
    before = newest.read_bytes()
    done = train(LESSON, *flags, processes=1, status=1)
    assert f"{newest} must be a checkpoint that all nodes can read" in done.stderr
    assert "a dict with args, epoch, model, optimizer" in done.stderr
    assert "If it is damaged, move it away" in done.stderr
    assert newest.read_bytes() == before
    newest.rename(tmp_path / "damaged.pt")
    done = train(LESSON, *flags, processes=2)
    assert "epoch-0002.pt: 2 of 3 epochs are done" in done.stdout
    assert_same_parameters(tmp_path / "expected.pt", newest)


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


def test_ctrl_c(tmp_path):
    """No process is left, and the checkpoints are good."""
    job = torchrun(LESSON, *LONG, "--run_dir", tmp_path / "two")
    wait_for_line(job, "epoch 2/")
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.wait().returncode != 0
    saved = [*tmp_path.glob("two/epoch-*.pt")]
    assert saved
    for path in saved:
        torch.load(path, weights_only=True)
