"""The resumable lesson: restarts that change nothing, checkpoints that survive, one log."""

import importlib
import os
import pickle
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from launch import (
    DIGITS,
    Job,
    each_epoch,
    epochs,
    losses,
    python_path,
    ranks,
    run,
    single_gpu,
    wait_for_epoch,
)
from nodes import small_disk
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common import flags

LESSON = "resumable"
FLAGS = (*DIGITS, "--batch_size", 120, "--epochs", 3, "--double")


def torchrun(path, *flags, restarts=0, env=None):
    """Start a copy of the lesson on two ranks by torchrun. Returns its Job."""
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    agent += ["--nproc-per-node", 2, "--max-restarts", restarts]
    return Job(*agent, path, *flags, env={"PYTHONPATH": python_path(path)} | (env or {}))


def assert_same_parameters(one, other):
    """Compare two checkpoints in float64: at most the order of sums changes in a restart."""
    one = torch.load(one, weights_only=True)["model"]
    other = torch.load(other, weights_only=True)["model"]
    torch.testing.assert_close(one, other, atol=1e-9, rtol=0)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """The folder of a run in float64 with three epochs, which was not disturbed."""
    folder = tmp_path_factory.mktemp("resumable") / "run"
    run(LESSON, *FLAGS, "--run_dir", folder, processes=1)
    return folder


def test_the_lesson_to_copy_resumes(tmp_path):
    """Two ranks save, and three resume, to the numbers of one process. A run that is done ends."""
    lesson, path = "distributed_data_parallel_torchrun", tmp_path / "run.pt"
    flags = (*DIGITS, "--batch_size", 120, "--double")
    shown = ""
    for count, processes, done in ((1, 2, None), (2, 3, 1), (2, 2, 2)):
        more = ("--epochs", count, "--savefile", path)
        stdout = run(lesson, *flags, *more, processes=processes).stdout
        assert (f"{path}: {done} of {count} epochs are done" in stdout) == (done is not None)
        shown += stdout
    right = [line["loss"] for line in single_gpu(*flags, "--epochs", 2)]
    assert losses(shown) == pytest.approx(right, abs=1e-10)


def test_a_killed_rank_under_torchrun(run_dir, tmp_path):
    """SIGKILL to rank 0 (exercise 1): torchrun restarts all, and the end has the same numbers."""
    restarting = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # as the lesson's docstring has it
    first = 'os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"'
    copy = each_epoch(LESSON, f"if (epoch, rank) == (2, 0) and {first}: time.sleep(999)", tmp_path)
    folder = tmp_path / "run"
    job = torchrun(copy, *FLAGS, "--run_dir", folder, restarts=1, env=restarting)
    line = next(line for line in job.process.stdout if line.startswith("rank 0 is process "))
    wait_for_epoch(folder, 2, job)
    os.kill(int(line.split()[-1]), signal.SIGKILL)
    done = job.wait()
    assert done.returncode == 0, done.stderr
    log = (folder / "log.txt").read_text()
    assert re.findall(r"(\d) of 3 epochs are done", log) == ["2"]
    assert epochs(log)[-1] == epochs((run_dir / "log.txt").read_text())[-1]
    assert_same_parameters(run_dir / "epoch-000003.pt", folder / "epoch-000003.pt")


@pytest.mark.parametrize(("rank", "process", "status"), [(1, "pid", 0), (0, "ppid", 1)])
def test_a_signal_asks_to_stop(rank, process, status, run_dir, tmp_path):
    """SIGTERM to one rank, or to torchrun: all stop after the same step, and are resumed there.

    torchrun ends with 1 if it got the signal itself. The numbers are those of an undisturbed run.
    """
    statement = f"""if (epoch, progress["step"], rank) == (1, 0, {rank}):
            os.kill(os.get{process}(), signal.SIGTERM)
            while not asked:
                time.sleep(0.1)"""
    copy, folder = each_epoch(LESSON, statement, tmp_path), tmp_path / "run"
    flags = (*FLAGS, "--run_dir", folder)
    done = torchrun(copy, *flags).wait()
    assert done.returncode == status, done.stderr
    assert done.stdout.endswith("\nstopped after step 10 of epoch 2\n")
    state = torch.load(folder / "epoch-000001.pt", weights_only=True)
    assert [state["epoch"], state["step"], state["sums"][2]] == [1, 10, 1200]
    run(copy, *flags, processes=1)
    log = (folder / "log.txt").read_text()
    assert "epoch-000001.pt: 1 of 3 epochs and 10 steps are done\n" in log
    assert epochs(log) == epochs((run_dir / "log.txt").read_text())
    assert_same_parameters(run_dir / "epoch-000003.pt", folder / "epoch-000003.pt")


def test_what_is_in_the_run_folder(change, tmp_path):
    """Only rank 0 writes: one log, one set of curves, the last three checkpoints; it is resumed.

    Only rank 0 lists the folder. Each rank and epoch has a seed of its own, also after that.
    """
    newest = "        newest = max("
    start = "        start = time.perf_counter()\n"
    copy = change(
        LESSON,
        (newest, f"        print('lists')\n{newest}"),
        (start, f"        print('seed', torch.initial_seed())\n{start}"),
    )
    folder = tmp_path / "run"
    seeds = []
    for count in (2, 5):
        jobs = ranks(copy, *DIGITS, "--epochs", count, "--run_dir", folder)
        ends = [job.wait() for job in jobs]
        assert [end.returncode for end in ends] == [0, 0], ends
        assert ["lists" in end.stdout for end in ends] == [True, False]
        for end in ends:
            seeds += re.findall(r"seed (\d+)", end.stdout)
    assert len(set(seeds)) == len(seeds) == 10
    names = sorted(os.listdir(folder))
    checkpoints = [name for name in names if name.startswith("epoch")]
    assert checkpoints == ["epoch-000003.pt", "epoch-000004.pt", "epoch-000005.pt"]
    curves = [name for name in names if name.startswith("events")]
    assert len(curves) == 2  # one file for each start, and none of rank 1
    assert len(names) == 3 + 2 + 1
    log = (folder / "log.txt").read_text()
    assert re.findall(r"^epoch (\d)", log, re.M) == list("12345")
    assert "2 of 5 epochs are done" in log

    events = EventAccumulator(str(folder))
    events.Reload()
    curves = set(events.Tags()["scalars"])
    assert curves == {"loss", "accuracy/train", "accuracy/test", "images per second"}
    for curve in curves:
        assert [event.step for event in events.Scalars(curve)] == [1, 2, 3, 4, 5]
    drawn = [event.value for event in events.Scalars("loss")]
    assert drawn == pytest.approx(losses(log), abs=1e-4)


def test_a_run_is_resumed_with_the_same_flags(run_dir):
    """The error names the flag and what to do, and the checkpoint stays.

    With the same flags and no epoch to do, nothing is trained.
    """
    saved = run_dir / "epoch-000003.pt"
    before = saved.read_bytes()
    done = run(LESSON, *FLAGS, "--lr", 1, "--run_dir", run_dir, processes=1, status=1)
    words = f"{saved} was written with --lr 0.001, not 1.0: use the same flags, or a different"
    assert f"ValueError: {words} --run_dir" in done.stderr
    done = run(LESSON, *FLAGS, "--run_dir", run_dir, processes=1)
    assert f"{saved}: 3 of 3 epochs are done" in done.stdout
    assert not epochs(done.stdout)
    assert saved.read_bytes() == before


OF_A_RUN = {"epochs", "data_dir", "device", "timeout", "help", "run_dir"}  # change no number
OWN = {"resumable": set()}
OWN["fully_sharded_checkpoints"] = {"async_save", "load", "savefile", "width", "layers"}
OWN["sharded_data"] = {"make", "files", "workers", "savefile", "every", "stop"}


@pytest.mark.parametrize("lesson", OWN)
def test_the_flags_that_must_agree(lesson):
    """They are all on which the numbers depend. (dcp itself refuses layers of other sizes.)"""
    module, parser = importlib.import_module(lesson), flags.ranks("")
    module.add_flags(parser)
    known = {action.dest for action in parser._actions}
    assert known - OF_A_RUN - OWN[lesson] == {*module.MUST_AGREE} - {"images"}


def test_each_rank_and_epoch_has_a_seed_of_its_own(change):
    """In the lesson to copy: for dropout, which a resumed run does not draw again."""
    epoch = "        fit_epoch(epoch,"
    note = "        print('seed', torch.initial_seed(), flush=True)\n"
    copy = change("distributed_data_parallel_torchrun", (epoch, note + epoch))
    ends = [job.wait() for job in ranks(copy, *DIGITS, "--batch_size", 120, "--epochs", 2)]
    seeds = [re.findall(r"^seed (\d+)", end.stdout, re.M) for end in ends]
    assert len({*seeds[0], *seeds[1]}) == 4, seeds


def test_a_damaged_checkpoint(run_dir, tmp_path):
    """The error says what the file should be. Once it is moved away, the one before it is used."""
    from resumable import read

    folder = shutil.copytree(run_dir, tmp_path / "run")
    newest = folder / "epoch-000003.pt"
    whole = newest.read_bytes()
    notes = [
        f"{newest} must be a checkpoint that all nodes can read.",
        "If it is damaged, move it away, and the run resumes from the one before.",
    ]
    # Empty blocks as after a loss of power, and the first part of a checkpoint.
    for content in (whole[:100] + bytes(5000), whole[: len(whole) // 2]):
        newest.write_bytes(content)
        with pytest.raises(Exception) as error:
            read(newest)
        assert error.value.__notes__ == notes
    done = run(LESSON, *FLAGS, "--run_dir", folder, processes=1, status=1)
    assert done.stderr.strip().splitlines()[-2:] == notes
    assert newest.read_bytes() == content
    torch.save({"best": Path("a")}, newest)  # a copier's own value, which weights_only refuses
    with pytest.raises(pickle.UnpicklingError) as error:
        read(newest)
    assert error.value.__notes__[1].startswith("It is not damaged: let save() write only")
    newest.unlink()
    done = run(LESSON, *FLAGS, "--run_dir", folder, processes=2)
    assert "epoch-000002.pt: 2 of 3 epochs are done" in done.stdout
    assert_same_parameters(run_dir / newest.name, newest)


def test_a_full_disk(tmp_path):
    """No room for the next checkpoint: the ones before are whole, and nothing else is left."""
    with small_disk(tmp_path, "1900k"):
        flags = (*DIGITS, "--epochs", 5, "--run_dir", tmp_path / "run")
        done = run(LESSON, *flags, processes=1, status=1)
        assert "No space left on device" in done.stderr
        saved = sorted((tmp_path / "run").glob("*.pt"))
        assert len(saved) == len(epochs(done.stdout)) - 1 > 0
        assert not (tmp_path / "run" / "unfinished").exists()
        for path in saved:
            torch.load(path, weights_only=True)
