"""Whatever a learner does wrong ends in a bounded time, says what to do, and leaves no process."""

import contextlib
import os
import re
import signal
import socket
import time

import pytest
import torch
from launch import DIGITS, IS_REAL, LONG, SHORT, Lesson, alive, free_port, launched, one_line, run
from lessons import LESSONS, NEWER, by_torchrun, small_data, talks
from nodes import small_disk

pytestmark = pytest.mark.quick
DDP = "distributed_data_parallel"
SPAWNING = ["manual_data_parallel", "overlapped_data_parallel", DDP, f"{DDP}2"]
BY_TORCHRUN = [lesson for lesson in LESSONS if by_torchrun(lesson)]
TWO_NODES = ("-n", 2, "-g", 1, "-ip", "127.0.0.2")
# A lesson, and the ranks if torchrun has started it; its flags; what the line has.
WRONG = """
single_gpu; --tokens 14; --tokens & needs --model transformer
single_gpu; --model language --dataset digits; language cannot read --dataset digits
single_gpu; --dataset text; --model mlp cannot read --dataset text
single_gpu; --model transformer --tokens 30; --tokens: 30 & 784 pixels
single_gpu; --model transformer --heads 5; --heads 5 & --width 32
single_gpu; --model language --heads 3 --width 48; --heads & must be even
single_gpu; --model language --width 20; size of each & must be even
single_gpu; --epochs 0; --epochs: 0 & 1 or more
single_gpu; --speed 3; --speed
single_gpu; --lr nan; --lr: nan & 0 or more
overlapped_data_parallel; --bucket_cap_mb inf; inf & 0 or more
single_gpu; --seed 9223372036854775808; --seed: 9223372036854775808 & 2**63 - 1
model_parallel; --pipelined --micro_batches 129; 129 & 128
distributed_data_parallel; -g 3 --batch_size 100; 100 & 3 & 99
distributed_data_parallel2; -g 3 --batch_size 100; 100 & 3 & 99
resnet; --batch_size 100; --batch_size 100 & 3 & 99
resnet; --batch_size 90 --accumulate 30; --accumulate 30
distributed_data_parallel_torchrun; -g 2; -g
distributed_data_parallel_torchrun; --local-rank=0; use torchrun in place of
distributed_data_parallel; -n 2; -n 2 & -ip
distributed_data_parallel; -n 2 -g 1 -ip 127.0.0.2 -nr 2; -nr 2 & 0 to 1
blocking_p2p; -g 1; -g 2
blocking_p2p; -n 2 -ip 10.0.0.1:29500; 10.0.0.1:29500 is no address & --port
distributed_data_parallel; --port 65536; --port: 65536 & 65535
distributed_data_parallel; --backend smoke; no backend smoke
blocking_p2p; --backend nccl --device cpu; nccl & leave --backend out
thousand_ranks; --mesh 1024; --mesh 1024 & two numbers & as in 128x8
thousand_ranks; --mesh 0x8; --mesh 0x8 & 1 or more
thousand_ranks; --rank 1024; --rank 1024: the ranks are 0 to 1023
thousand_ranks; --sequence 1001; --sequence 1001: 8 ranks along tp
thousand_ranks; --heads 30; --heads 30 cannot divide --width 4096
pipeline_parallel 5; ; 5 stages, but only 4 layers & a larger --layers
pipeline_parallel 2; --micro_batches 7; divide --batch_size 120 & use & 119
pipeline_parallel 2; --micro_batches 1; 1F1B needs 2 & use --micro_batches 2
pipeline_parallel 4; --layers 7 --schedule Interleaved1F1B --micro_batches 7; a multiple of 4
pipeline_parallel 1; --schedule Interleaved1F1B; needs 2 ranks or more
pipeline_parallel 2; --schedule DualPipeV --micro_batches 3; use --micro_batches 4
tensor_parallel 3; ; 3 ranks cannot split --width 64: use 63
tensor_parallel 7; --model cnn; --width 120 & use 119
tensor_parallel 2; --model transformer; head_parallel.py & mlp or cnn
hybrid_parallel 4; --mesh 3x2; --mesh 3x2 needs 6 ranks, not 4
hybrid_parallel 4; --mesh 0x4; --mesh: 0 must be 1 or more
hybrid_parallel 3; --mesh 1x3; a tp group of 3 & --width 64: use 63
hybrid_parallel 7; ; 7 ranks cannot divide --batch_size 120: use --batch_size 119
hybrid_parallel 2; --model transformer; head_parallel.py & mlp or cnn
head_parallel 3; ; 3 ranks cannot split --heads 4: use 3
head_parallel 2; --model mlp; tensor_parallel.py & transformer
head_parallel 4; --model language --dataset text; split --heads 4: use 8
sequence_parallel 8; --heads 8; split 28 tokens
ulysses 2; --model mlp; reads images & use --model language
ulysses 4; ; --heads 4 & use 8
context_parallel 3; ; 3 ranks cannot split 128 tokens & use 2, 4 or 8
language_model 2; --model mlp; does not write & use --model language
vocabulary_parallel 3; ; 3 ranks cannot split 256 words: use 2
vocabulary_parallel 2; --model mlp; no vocabulary & use --model language
four_axes 8; --mesh 2x2x2; not have 4 axes & use --mesh 1x8x1x1
four_axes 5; --mesh 5x1x1x1; 5 stages, but only 4 & --layers
four_axes 2; --micro_batches 1; each stage: use --micro_batches 2
four_axes 14; ; 7 ranks along dp with 4 & --batch_size 120: use 112
four_axes 4; --mesh 1x1x1x4; along tp & --heads 4: use 8
four_axes 3; --mesh 1x1x1x3; along tp & 256 tokens: use 2, 4 or 8
four_axes 2; --model cnn; has no vocabulary & use --model language
expert_parallel 3; ; 3 ranks cannot divide --experts 4: use 3
expert_parallel 2; --experts 1; --experts 1: use 2
expert_parallel 2; --model mlp; has no tokens & use --model transformer
token_mean 7; ; 7 ranks cannot divide --batch_size 120: use --batch_size 119
token_mean 2; --model mlp; --model mlp reads images & use language
token_mean 30; --micro_batches 5; 4 paragraphs in a step & use --micro_batches 4
activation_checkpointing 2; --model mlp; has no blocks & transformer
mixed_precision 2; --double --precision bfloat16; leave out --precision
mixed_precision 2; --clip -1; --clip & 0 or more
sharded_data 7; ; 7 ranks cannot divide --batch_size 120: use --batch_size 119
sharded_data 2; --files /none; not all files are in /none/digits & python & --files /none --make
trainer_and_generator 1; ; two ranks: use --nproc-per-node 2
trainer_and_generator 4; --rows 32; 3 trainers cannot divide --rows 32: use --rows 33
fully_sharded_checkpoints 3; --async_save; --async_save & --run_dir
fully_sharded_checkpoints 3; --savefile /proc/c/c.pt; cannot write /proc/c/c.pt
manual_pipeline 2; --schedule F0,F1,B0,B1; 2 ranks need GPipe, 1F1B, or 2 lists
manual_pipeline 2; --schedule GPipe 1F1B; rank 0 needs F0 B0, each once
manual_pipeline 2; --schedule F0,B0 F0,B0,F1,B1; rank 1 needs F0 B0, each once
manual_pipeline 2; --schedule F0,F1,B0,B1 F1,F0,B0,B1; rank 1 needs F0 F1 B0 B1, each once
manual_pipeline 2; --schedule F0,B0 B0,F0; rank 1 needs F0 B0, each once
"""


@pytest.mark.parametrize("row", WRONG.strip().splitlines())
def test_wrong_flags(row, main):
    """Status 2, and one line that says what to type."""
    words, flags, expected = row.split("; ")
    lesson, *ranks = words.split()
    if lesson in NEWER and torch.__version__.startswith("2.9."):
        pytest.skip("PyTorch 2.9 cannot run this lesson")
    env = launched(int(ranks[0])) if ranks else launched(3) if by_torchrun(lesson) else None
    dataset = "digits" if "--model" in flags else small_data(lesson)
    base = ("--dataset", dataset, "--device", "cpu", "--batch_size", 120)
    if not ranks or talks(lesson):
        base = ()
    one_line(main(lesson, *base, *flags.split(), env=env), *expected.split(" & "))


def test_a_wrong_flag_as_a_user_sees_it():
    """The same from the command line; a lesson that imports most of PyTorch says no more."""
    done = run("fully_sharded_checkpoints", "--device", "tpu", status=2, cold=True)
    one_line(done, "--device", "cpu")


def test_with_and_without_a_launcher(main):
    """A lesson that starts its ranks refuses a launcher; the others name what is missing."""
    for lesson in SPAWNING:
        words = ("RANK is set", "unset RANK", "distributed_data_parallel_torchrun.py")
        one_line(main(lesson, env=launched(3)), *words)
    for lesson in BY_TORCHRUN:
        command = f"torchrun --standalone --nproc-per-node 2 {lesson}.py"
        one_line(main(lesson), "RANK, LOCAL_RANK, WORLD_SIZE,", f"start it with {command}")
    by_hand = {"RANK": "0", "WORLD_SIZE": "2"}
    done = main(f"{DDP}_torchrun", env=by_hand)
    one_line(done, "LOCAL_RANK, MASTER_ADDR, MASTER_PORT not set: start it with torchrun")
    one_line(main("blocking_p2p", env=by_hand), "-n 2 needs -ip")
    one_line(main(f"{DDP}_torchrun", "--batch_size", 7, env=launched(3)), "use --batch_size 6")


def test_files_and_folders_that_can_not_be_written(tmp_path, main):
    """It is said before anything starts, and nothing is left there."""
    (tmp_path / "file").write_text("")
    for lesson, flag in [
        ("distributed_data_parallel", "--savefile"),
        ("resumable", "--run_dir"),
        ("fully_sharded_checkpoints", "--run_dir"),
        ("profile_steps", "--out"),
        ("sharded_data", "--savefile"),
        ("finding_hangs", "--out"),
    ]:
        path = tmp_path / "file" / "new"
        flags = (flag, path) if talks(lesson) else (*DIGITS, flag, path)
        done = main(lesson, *flags, env=launched() if by_torchrun(lesson) else None)
        one_line(done, flag, f"cannot write {path}")
    for path in (tmp_path, tmp_path / "missing" / "c.pt"):
        done = main("distributed_data_parallel", *DIGITS, "--savefile", path)
        one_line(done, "--savefile", f"cannot write {path}")
    assert os.listdir(tmp_path) == ["file"]


def told(done, *words):
    """A node of a lesson that starts its ranks: the traceback of one rank, and a last line."""
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.count("-- Process ") == 1, done.stderr  # PyTorch's warnings may come first
    assert done.stderr.count("Traceback (most recent call last)") == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    for word in words:
        assert word in last, done.stderr


COME = "All {} ranks must connect to tcp://{}:{}: start every node, with the same -n, -g"


def test_batch_larger_than_the_data(main):
    """The line gives the largest batch."""
    line = "error: --batch_size must be at most 1500, the size of the training set"
    main(DDP, "--dataset", "digits", "--batch_size", 2000, status=line)


def test_port_in_use():
    """Node 0 of two cannot serve the rendezvous; a single node picks another port."""
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        flags = (*DIGITS, *TWO_NODES, "-nr", 0, "--port", port)
        done = run("distributed_data_parallel", *flags, status=1)
        told(done, COME.format(2, "127.0.0.2", port), "free --port")
        assert "EADDRINUSE" in done.stderr
        run("collectives", "--port", port)  # a single node takes any port that is free


@pytest.mark.parametrize(
    ("lesson", "flag", "zero", "one"),
    [
        ("distributed_data_parallel2", "--lr", 0.001, 0.002),
        ("manual_data_parallel", "--batch_size", 100, 120),
        (DDP, "--seed", 1, 2),
    ],
)
def test_nodes_with_different_flags(lesson, flag, zero, one):
    """It is noticed before the first step, by name, on both nodes."""
    both = (*DIGITS, *TWO_NODES, "--port", free_port())
    other = Lesson(lesson, *both, flag, one, "-nr", 1)
    for done in (run(lesson, *both, flag, zero, "-nr", 0, status=1), other.wait()):
        told(done, "ValueError: the nodes differ in " + flag, str(zero), str(one))
        assert "epoch" not in done.stdout


def test_ranks_of_a_launcher_with_different_flags():
    """Each rank was started by hand, one of them with another flag: said before the first step."""
    meet = launched() | {"MASTER_PORT": str(free_port())}
    one = Lesson(f"{DDP}_torchrun", *DIGITS, "--lr", 0.5, env=meet | {"RANK": "1"})
    zero = run(f"{DDP}_torchrun", *DIGITS, env=meet, status=1)
    other = one.wait()
    assert other.returncode == 1
    for node in (zero, other):
        assert node.stderr.endswith("ValueError: the nodes differ in --lr: 0.001, 0.5\n")
        assert "epoch" not in node.stdout


@pytest.mark.parametrize("lesson", [DDP, "blocking_p2p"])
def test_ctrl_c(lesson):
    """Ctrl-C goes to every process of the terminal's group: status 130, and no word."""
    job = Lesson(lesson, *(() if talks(lesson) else LONG))
    job.ranks(2)
    end = time.monotonic() + 300
    while alive(job.process.pid) and time.monotonic() < end:
        # Again after a while: Python ignores a KeyboardInterrupt in a destructor.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.process.pid, signal.SIGINT)
        again = time.monotonic() + 30
        while alive(job.process.pid) and time.monotonic() < again:
            time.sleep(0.05)
    done = job.wait()
    said = re.sub(r"(?s)Exception ignored in.*?\nKeyboardInterrupt:? *\n", "", done.stderr)
    assert (done.returncode, said.strip()) == (130, "")


def test_no_orphans_when_the_starter_dies():
    """The end of the process that started the ranks ends them."""
    job = Lesson(DDP, *LONG, "-g", 2)
    job.ranks(2)
    os.kill(job.process.pid, signal.SIGKILL)
    assert job.wait().returncode == -signal.SIGKILL


def test_the_cause_is_told_and_not_what_follows_from_it(change):
    """Rank 1 of a learner's copy has a bug, which is shown once, with its place.

    Rank 0 loses its connection by it, and waits for rank 1 to say so.
    """
    line = "            logits = model(images)\n"
    bug = "            if dist.get_rank() == 1:\n                raise KeyError('mine')\n"
    copy = change(DDP, (line, bug + line))
    done = run(copy, *DIGITS, status=1)
    told(done, "KeyError: 'mine'")
    assert "-- Process 1 terminated with the following error:" in done.stderr
    assert re.search(rf"{DDP}.py.*, line \d+, in run_epoch", done.stderr)
    assert "error: " not in done.stderr


def test_without_detectron2():
    """One line with the command that installs it."""
    if IS_REAL:
        pytest.skip("detectron2 is installed")
    done = run("distributed_data_parallel2", status=1, env={"PYTHONPATH": ""})
    install = "pip install --no-build-isolation 'git+https://github.com/facebookresearch/detectron2"
    one_line(done, f"{install}.git@")


def test_a_full_disk(tmp_path):
    """No room for the next checkpoint: the error says so, and the last checkpoint is whole."""
    path = tmp_path / "c.pt"
    with small_disk(tmp_path, "1100k"):
        run(DDP, *SHORT, "-s", path)
        (tmp_path / "filler").write_bytes(bytes(300_000))
        done = run(DDP, *SHORT, "-s", path, status=1)
        assert "OSError: [Errno 28] No space left on device" in done.stderr
        assert sorted(os.listdir(tmp_path)) == ["c.pt", "filler"]
        torch.load(path, weights_only=True)
