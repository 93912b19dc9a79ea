"""The resumable lesson: restarts that change nothing, checkpoints that survive, one log."""

import os
import re
import signal

import pytest
import torch
from conftest import (
    DIGITS,
    LONG,
    Lesson,
    each_epoch,
    epochs,
    lesson_path,
    one_line,
    one_process,
    ranks,
    run,
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
    whole = run(LESSON, *MANY, "--run_dir", tmp_path / "whole").stdout
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

    again = run(LESSON, *DIGITS, "--epochs", 5, "--run_dir", tmp_path / "run")
    assert "5 of 5 epochs are done" in again.stdout
    assert "epoch 5" not in again.stdout
    for flags, told in (
        (("--lr", 1), "lr=0.001, not 1.0"),
        (("--double",), "double=False, not True"),
    ):
        other = run(LESSON, *DIGITS, "--epochs", 6, *flags, "--run_dir", tmp_path / "run", status=1)
        one_line(other, told, "--run_dir")


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


def test_rank_0_chooses_and_each_rank_reads(tmp_path):
    """Only rank 0 lists the folder, only a path is sent, and the file stays as it is."""
    text = lesson_path(LESSON).read_text()
    for old, new in (
        (
            '    paths = sorted(Path(args.run_dir).glob("epoch-*.pt"), reverse=True)',
            '    print("lists", os.environ["RANK"])\n',
        ),
        (
            "    path = chosen[0]\n",
            "    print(f\"sent {chosen}, loads={torch.load(chosen[0], mmap=True)['epoch']}\")\n",
        ),
    ):
        assert text.count(old) == 1
        at = text.index(old)
        text = text[:at] + new + text[at:]
    copy = tmp_path / f"{LESSON}.py"
    copy.write_text(text)
    folder = tmp_path / "run"
    run(LESSON, *DIGITS, "--epochs", 1, "--run_dir", folder)
    saved = folder / "epoch-0001.pt"
    before = saved.read_bytes()
    jobs = ranks(copy, *DIGITS, "--epochs", 3, "--run_dir", folder)
    said = [job.wait().stdout for job in jobs]
    assert [out.count("lists") for out in said] == [1, 0]
    for out in said:
        assert f"sent ['{saved}'], loads=1" in out
    assert saved.read_bytes() == before


def test_a_checkpoint_cut_short(tmp_path):
    """The one before it is used, the log says so, and the end is the same."""
    folder = tmp_path / "run"
    run(LESSON, *DIGITS, "--epochs", 3, "--double", "--run_dir", folder)
    (folder / "epoch-0003.pt").rename(tmp_path / "expected.pt")
    whole = (tmp_path / "expected.pt").read_bytes()
    (folder / "epoch-0003.pt").write_bytes(whole[: int(len(whole) * 0.6)])
    (folder / "epoch-0002.pt").write_bytes(whole[:100] + bytes(5000))  # as after a loss of power
    done = train(LESSON, *DIGITS, "--epochs", 3, "--double", "--run_dir", folder, processes=2)
    for number in (3, 2):
        warning = f"WARNING: .*epoch-000{number}.pt is damaged .*: trying the one before it"
        assert re.search(warning, done.stdout)
    assert "1 of 3 epochs are done" in done.stdout
    assert_same_parameters(tmp_path / "expected.pt", folder / "epoch-0003.pt")


def test_all_checkpoints_damaged(tmp_path):
    """It stops, because a new run would remove files that perhaps can be repaired."""
    folder = tmp_path / "run"
    run(LESSON, *DIGITS, "--epochs", 2, "--run_dir", folder)
    for path in folder.glob("epoch-*.pt"):
        path.write_bytes(path.read_bytes()[:1000])
    done = run(LESSON, *DIGITS, "--epochs", 2, "--run_dir", folder, status=1)
    one_line(done, f"all checkpoints in {folder} are damaged", "--run_dir")
    assert len(list(folder.glob("epoch-*.pt"))) == 2


def test_a_full_disk(tmp_path):
    """No room for the next checkpoint: one line, and the run can be resumed from the last one."""
    folder = tmp_path / "small"
    folder.mkdir()
    with small_disk(folder, "1900k"):
        done = run(LESSON, *DIGITS, "--epochs", 5, "--run_dir", folder / "run", status=1)
        one_line(done, "No space left on device", "make room", "--run_dir")
        saved = sorted((folder / "run").glob("epoch-*.pt"))
        assert saved
        for path in saved:
            torch.load(path, weights_only=True)
        sh("mount", "-o", "remount,size=20m", folder)
        done = run(LESSON, *DIGITS, "--epochs", 5, "--run_dir", folder / "run")
        assert f"{len(saved)} of 5 epochs are done" in done.stdout
        assert epochs(done.stdout)[-1] == one_process(*DIGITS, "--epochs", 5)[-1]


def test_a_folder_that_can_not_be_made(main):
    """Status 2, one line."""
    one_line(main(LESSON, *DIGITS, "--run_dir", "/proc/here"), "--run_dir /proc/here")


def test_ctrl_c(tmp_path):
    """As in single_gpu.py, and the checkpoints are good; under torchrun no process is left."""
    job = Lesson(LESSON, *LONG, "--run_dir", tmp_path / "alone")
    wait_for_line(job, "epoch 1/")
    os.killpg(job.process.pid, signal.SIGINT)
    done = job.wait()
    assert (done.returncode, done.stderr.strip()) == (130, "interrupted")
    job = torchrun(LESSON, *LONG, "--run_dir", tmp_path / "two")
    job.ranks(2)
    wait_for_line(job, "epoch 2/")
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.wait().returncode != 0
    for path in [*tmp_path.glob("*/epoch-*.pt")]:
        torch.load(path, weights_only=True)
