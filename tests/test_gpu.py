"""The lessons on GPUs: the CPU's numbers, checkpoints that move, who waits, and failures.

They are skipped where torch finds no GPU. Tests of two ranks run twice: with a GPU for each rank,
and with both on one GPU, where NCCL allows it. Tests that need no GPU are in test_devices.py.
"""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import (
    ALL_GPUS,
    ROOT,
    Job,
    Lesson,
    by_torchrun,
    each_epoch,
    epochs,
    free_port,
    lesson_path,
    one_process,
    ranks,
    run,
    single_gpu,
    torchrun,
    train,
)
from nodes import need as need_programs

CUDA = ("--device", "cuda")
NAMES = ("cuda:0", "cuda:1")  # of the first two GPUs
MESSAGE = "ncclDevKernel_"  # in the name of a message in a trace
SHARED = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
}  # two ranks on one GPU
DIGITS = ("--dataset", "digits", "--batch_size", 120)
ONE_EPOCH = (*DIGITS, "--epochs", 1)
TWO_EPOCHS = (*DIGITS, "--epochs", 2)
NUMBERS = [("--model", "mlp"), ("--model", "cnn", "--double")]
ONE_PROCESS = [
    ("single_gpu", ()),
    ("data_parallel", ("-g", 1)),
    ("data_parallel", ("--by", "hand", "-g", 1)),
    ("manual_data_parallel", ("-g", 1)),
    ("overlapped_data_parallel", ("-g", 1)),
    ("distributed_data_parallel", ("-g", 1)),
    ("distributed_data_parallel", ("-g", 1, "--backend", "gloo")),
    ("distributed_data_parallel2", ("-g", 1)),
    ("distributed_data_parallel_torchrun", ()),
    ("distributed_data_parallel_resumable", ()),
    ("model_parallel", ()),
    ("model_parallel", ("--pipelined",)),
    ("model_parallel", ("--devices", "cpu", NAMES[0])),
    ("manual_pipeline", ()),
    ("pipeline_parallel", ()),
    ("sharded_optimizer", ()),
    ("manual_fully_sharded", ()),
    ("fully_sharded_data_parallel", ()),
    ("fully_sharded_checkpoints", ()),
    ("tensor_parallel", ("--by", "hand")),
    ("tensor_parallel", ("--by", "dtensor")),
    ("hybrid_parallel", ()),
    ("profile_steps", ()),
]
TWO_RANKS = [
    ("manual_data_parallel", ()),
    ("manual_data_parallel", ("--bucket",)),
    ("overlapped_data_parallel", ("--by", "each")),
    ("overlapped_data_parallel", ("--by", "buckets")),
    ("distributed_data_parallel", ()),
    ("distributed_data_parallel", ("--backend", "gloo")),
    ("distributed_data_parallel2", ()),
    ("distributed_data_parallel_torchrun", ()),
    ("distributed_data_parallel_resumable", ()),
    ("manual_pipeline", ("--schedule", "GPipe")),
    ("manual_pipeline", ("--schedule", "1F1B")),
    ("pipeline_parallel", ("--schedule", "GPipe")),
    ("pipeline_parallel", ("--schedule", "1F1B")),
    ("pipeline_parallel", ("--schedule", "Interleaved1F1B")),
    ("pipeline_parallel", ("--schedule", "InterleavedZeroBubble")),
    ("sharded_optimizer", ()),
    ("manual_fully_sharded", ()),
    ("manual_fully_sharded", ("--keep_weights",)),
    ("fully_sharded_data_parallel", ()),
    ("fully_sharded_data_parallel", ("--keep_weights",)),
    ("fully_sharded_data_parallel", ("--meta",)),
    ("fully_sharded_checkpoints", ()),
    ("tensor_parallel", ("--by", "hand")),
    ("tensor_parallel", ("--by", "dtensor")),
    ("hybrid_parallel", ("--mesh", "2x1")),
    ("hybrid_parallel", ("--mesh", "1x2")),
    ("hybrid_parallel", ("--kind", "hsdp", "--mesh", "2x1")),
    ("hybrid_parallel", ("--kind", "hsdp", "--mesh", "1x2")),
    ("profile_steps", ("--average", "ddp")),
    ("profile_steps", ("--average", "each")),
    ("profile_steps", ("--average", "bucket")),
]
TRANSFORMER = ("--model", "transformer", "--double")
OF_TRANSFORMERS = [  # on any number of ranks
    ("mixed_precision", ("--precision", "full")),
    ("mixed_precision", ("--precision", "full", "--sharded")),
    ("activation_checkpointing", ()),
    ("activation_checkpointing", ("--sharded",)),
    ("sequence_parallel", ()),
    ("sequence_parallel", ("--sequence",)),
    ("sequence_parallel", ("--by", "dtensor", "--sequence")),
    ("context_parallel", ()),
    ("context_parallel", ("--by", "ulysses")),
]
ASK = """import json, torch
gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps([gpus, torch.cuda.nccl.version()[:2] if gpus else []]))
"""


@functools.cache
def machine():
    """Return how many GPUs torch finds, and NCCL's version.

    It asks only where there is a driver, because it takes long.
    """
    if not (Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi")):
        return 0, []
    done = Job(sys.executable, "-W", "ignore", "-c", ASK, env=ALL_GPUS).wait()
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def need(gpus):
    """Skip a test where torch finds fewer GPUs."""
    if machine()[0] < gpus:
        pytest.skip(f"needs {'a GPU' if gpus == 1 else f'{gpus} GPUs'}, torch finds {machine()[0]}")


@pytest.fixture
def gpu():
    """Skip a test where there is no GPU."""
    need(1)


@pytest.fixture
def two_gpus():
    """Skip a test where there are fewer than two GPUs."""
    need(2)


@pytest.fixture
def on_one_gpu():
    """Return a function that starts a lesson in two ranks that share a GPU, as two nodes.

    It skips the test where NCCL cannot do that.
    """
    need(1)
    if machine()[1] < [2, 30]:
        pytest.skip("needs NCCL 2.30, which can have two ranks on one GPU")

    def start(name, *flags):
        env, port = ALL_GPUS | SHARED, free_port()
        if by_torchrun(name):
            env |= {
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            return [
                Lesson(name, *flags, env=env | {"RANK": str(rank)}, cold=True) for rank in range(2)
            ]
        nodes = ("-n", 2, "-g", 1, "-ip", "127.0.0.1", "--port", port)
        return [Lesson(name, *flags, *nodes, "-nr", node, env=env, cold=True) for node in range(2)]

    start.devices = (NAMES[0],) * 2
    return start


@pytest.fixture(params=["a GPU each", "on one GPU"])
def two_ranks(request):
    """Return a function that starts a lesson in two ranks. Its Jobs are those of the ranks."""
    if request.param == "on one GPU":
        return request.getfixturevalue("on_one_gpu")
    need(2)

    def start(name, *flags):
        if by_torchrun(name):
            return ranks(name, *flags, env=ALL_GPUS, cold=True)
        return [Lesson(name, *flags, "-g", 2, env=ALL_GPUS, cold=True)]

    start.devices = NAMES
    return start


def output(jobs):
    """Wait for all, which must end well. Returns what the first has printed."""
    try:
        done = [job.wait() for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert not any(one.returncode for one in done), "\n".join(
        one.stdout + one.stderr for one in done
    )
    return done[0].stdout


def kept(lesson, folder):
    """Return the flags of a lesson that always writes to a folder."""
    return {
        "distributed_data_parallel_resumable": ("--run_dir", folder),
        "profile_steps": ("--out", folder),
    }.get(lesson, ())


def assert_as_on_the_cpu(out, flags):
    """Compare printed numbers with those of single_gpu.py on the CPU: in float64, to 1e-10."""
    apart = 1e-10 if "--double" in flags else 2.01e-4
    assert epochs(out) == one_process(*TWO_EPOCHS, "--device", "cpu", *flags, apart=apart)


def changed(lesson, folder, old, new):
    """Return the path of a copy of a lesson in which a line has been replaced."""
    text = lesson_path(lesson).read_text()
    assert text.count(old) == 1
    path = folder / "changed.py"
    path.write_text(text.replace(old, new))
    return path


@pytest.mark.parametrize("network", NUMBERS)
@pytest.mark.parametrize(("lesson", "flags"), ONE_PROCESS)
def test_one_process(lesson, flags, network, gpu, tmp_path):
    """The CPU's numbers: to the last digits but one in float32, to 1e-10 in float64."""
    job = Lesson(
        lesson,
        *TWO_EPOCHS,
        *CUDA,
        *network,
        *flags,
        *kept(lesson, tmp_path),
        env=ALL_GPUS,
        cold=True,
    )
    assert_as_on_the_cpu(output([job]), network)


@pytest.mark.parametrize(
    ("lesson", "flags"),
    [*OF_TRANSFORMERS, ("expert_parallel", ("--experts", 1)), ("three_axes", ())],
)
def test_a_transformer_in_one_process(lesson, flags, gpu):
    """The CPU's losses, to 1e-10."""
    job = Lesson(lesson, *TWO_EPOCHS, *CUDA, *TRANSFORMER, *flags, env=ALL_GPUS, cold=True)
    assert_as_on_the_cpu(output([job]), TRANSFORMER)


@pytest.mark.parametrize("network", [("--model", "cnn"), ("--model", "mlp", "--double")])
def test_the_other_numbers(network, gpu):
    """The CNN in float32, and the figures of the MLP in float64."""
    job = Lesson("single_gpu", *TWO_EPOCHS, *CUDA, *network, env=ALL_GPUS, cold=True)
    out = output([job])
    assert_as_on_the_cpu(out, network)
    if "mlp" in network:
        assert epochs(out)[-1]["loss"] == pytest.approx(1.406419734911, abs=1e-10)


EXACT = """import sys, torch
from common.models import CNN
torch.manual_seed(0)
model, images = CNN(), torch.randn(64, 1, 28, 28)
exact = model.double()(images.double())
found = model.float().to(sys.argv[1])(images.to(sys.argv[1])).cpu().double()
print((found - exact).abs().max().item())
"""


def test_convolutions_without_tf32(gpu):
    """As exact as float32 is: TF32 would be off by a thousandth."""
    env = ALL_GPUS | {"PYTHONPATH": str(ROOT)}
    assert float(output([Job(sys.executable, "-c", EXACT, CUDA[1], env=env)])) < 1e-5


@pytest.mark.parametrize("network", NUMBERS)
@pytest.mark.parametrize(("lesson", "flags"), TWO_RANKS)
def test_two_ranks(lesson, flags, network, two_ranks, tmp_path):
    """The same numbers from two ranks over NCCL, and over gloo; the table names the GPUs."""
    out = output(two_ranks(lesson, *TWO_EPOCHS, *CUDA, *network, *flags, *kept(lesson, tmp_path)))
    assert tuple(re.findall(r"^\d +\d +\d +(\S+)  ", out, re.M)) == two_ranks.devices
    assert_as_on_the_cpu(out, network)


@pytest.mark.parametrize(
    ("lesson", "flags"),
    [
        *OF_TRANSFORMERS,
        ("three_axes", ("--mesh", "2x1x1", "--fsdp")),
        ("three_axes", ("--mesh", "1x2x1")),
        ("three_axes", ("--mesh", "1x1x2")),
    ],
)
def test_a_transformer_on_two_ranks(lesson, flags, two_ranks):
    """The CPU's losses over NCCL, to 1e-10."""
    out = output(two_ranks(lesson, *TWO_EPOCHS, *CUDA, *TRANSFORMER, *flags))
    assert_as_on_the_cpu(out, TRANSFORMER)


@pytest.mark.parametrize("balance", [0.0, 0.1])
def test_experts_on_two_ranks(balance, two_ranks):
    """One rank and two print the same losses."""
    flags = (*TWO_EPOCHS, "--double", "--balance", balance)
    found = epochs(output(two_ranks("expert_parallel", *flags, *CUDA)))
    right = epochs(train("expert_parallel", *flags, "--device", "cpu", processes=1).stdout)
    for line, expected in zip(found, right, strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], abs=1e-10)


@pytest.mark.parametrize("network", NUMBERS)
@pytest.mark.parametrize(
    ("lesson", "flags"),
    [
        ("data_parallel", ("-g", 2)),
        ("data_parallel", ("--by", "hand", "-g", 2)),
        ("model_parallel", ()),
        ("model_parallel", ("--pipelined",)),
    ],
)
def test_two_gpus_in_one_process(lesson, flags, network, two_gpus, tmp_path):
    """Copies of the model, and a half of it on each."""
    job = Lesson(
        lesson,
        *TWO_EPOCHS,
        *CUDA,
        *network,
        *flags,
        *kept(lesson, tmp_path),
        env=ALL_GPUS,
        cold=True,
    )
    out = output([job])
    assert_as_on_the_cpu(out, network)
    if lesson == "model_parallel":
        assert f"stage1 on {NAMES[0]}, stage2 on {NAMES[1]}" in out


def test_the_resnet_lesson(gpu):
    """The CPU's numbers in float64, from one process."""
    lesson = "distributed_data_parallel_resnet"
    flags = ("--dataset", "fake", "--batch_size", 120, "--epochs", 1, "--accumulate", 2, "--double")
    jobs = ranks(lesson, *flags, *CUDA, processes=1, env=ALL_GPUS, cold=True)
    found = epochs(output(jobs))
    expected = epochs(train(lesson, *flags, "--device", "cpu", processes=1, timeout=900).stdout)
    assert len(found) == len(expected) == 1
    assert found[0]["loss"] == pytest.approx(expected[0]["loss"], abs=2e-4)
    assert found[0]["train"] == pytest.approx(expected[0]["train"], abs=300 / 1800 + 0.01)


def test_the_resnet_lesson_in_two_ranks(two_ranks, tmp_path):
    """Batch norm's buffers and no_sync over NCCL; with two GPUs the ranks may swap them."""
    join = "    rank, device = join(args)\n"
    shown = f"{join}    print(f'rank {{rank}} on {{device}}', flush=True)\n"
    copy = changed("distributed_data_parallel_resnet", tmp_path, join, shown)
    flags = ("--dataset", "fake", "--batch_size", 120, "--epochs", 1, "--accumulate", 2)
    swapped = two_ranks.devices[0] != two_ranks.devices[1]
    out = output(two_ranks(copy, *flags, *CUDA, *(("--gpu_ids", "1,0") * swapped)))
    assert f"rank 0 on {two_ranks.devices[1]}\n" in out
    assert 2 < epochs(out)[0]["loss"] < 4


def test_checkpoints_move_between_gpu_and_cpu(gpu, tmp_path):
    """A run that changes its device ends like one that stays; and the other way round."""
    lesson, flags = "distributed_data_parallel_resumable", ("--model", "mlp", "--double")
    for first, second in (("cuda", "cpu"), ("cpu", "cuda")):
        folder = tmp_path / first
        own = (*DIGITS, *flags, *kept(lesson, folder))
        devices = {"cuda": CUDA[1], "cpu": "cpu"}
        for number, device in enumerate((first, second), start=1):
            own += ("--device", devices[device], "--epochs", number)
            out = output(ranks(lesson, *own, processes=1, env=ALL_GPUS, cold=True))
        assert "1 of 2 epochs are done" in out
        assert_as_on_the_cpu((folder / "log.txt").read_text(), flags)


def test_sharded_checkpoints_move_between_gpus_and_cpus(two_ranks, tmp_path):
    """Two ranks on GPUs begin and three on the CPU resume, and the other way round."""
    lesson, flags = "fully_sharded_checkpoints", ("--model", "mlp", "--double")
    for on_gpus in ((1, 2), (2, 1)):
        folder, out = tmp_path / str(on_gpus[0]), ""
        for number in (1, 2):
            own = (*DIGITS, *flags, "--epochs", number, "--run_dir", folder)
            if number == on_gpus[0]:
                out += output(two_ranks(lesson, *own, *CUDA))
            else:
                out += train(lesson, *own, "--device", "cpu", processes=3).stdout
        assert re.findall(r"^epoch (\d)", out, re.M) == ["1", "2"]
        assert_as_on_the_cpu(out, flags)


def test_a_thread_writes_shards_of_gpus(two_ranks, tmp_path):
    """Beside NCCL, in a group of gloo. The file that begins the run is the CPU's."""
    lesson, flags = "fully_sharded_checkpoints", ("--model", "mlp", "--double")
    path = tmp_path / "c.pt"
    out = train(lesson, *DIGITS, *flags, "--device", "cpu", "--epochs", 1, "-s", path).stdout
    own = (*DIGITS, *flags, "--epochs", 2, "--load", path, "--run_dir", tmp_path / "run")
    out += output(two_ranks(lesson, *own, "--async_save", *CUDA))
    assert_as_on_the_cpu(out, flags)
    again = train(lesson, *own, "--device", "cpu", processes=3).stdout
    assert "epoch-0002: 2 of 2 epochs are done" in again


def test_a_sharded_checkpoint_of_another_run(two_ranks, tmp_path):
    """Both ranks end at once, and say which flag differs."""
    own = ("fully_sharded_checkpoints", *TWO_EPOCHS, *CUDA, "--timeout", 900, "--run_dir", tmp_path)
    output(two_ranks(*own))
    jobs = two_ranks(*own, "--lr", 0.5)
    try:
        done = [job.wait(300) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert [one.returncode for one in done] == [1, 1]
    for one in done:
        last = one.stderr.strip().splitlines()[-1]
        assert "epoch-0002 was written with lr=0.001, not 0.5: use the same flags" in last


def shown(out):
    """Return what a lesson prints besides its ranks, epochs, timelines and names of devices."""
    pattern = r"node |\d+ ranks, |\d+ +\d+ +\d+ |epoch |rank \d+ \|"
    lines = [line for line in out.splitlines() if not re.match(pattern, line)]
    return [re.sub(r"cuda:\d|cpu", "", line).split() for line in lines]


@pytest.mark.parametrize(
    ("lesson", "flags"),
    [
        ("collectives", ()),
        ("sharded_optimizer", ONE_EPOCH),
        ("manual_fully_sharded", ONE_EPOCH),
        ("fully_sharded_data_parallel", ONE_EPOCH),
        ("fully_sharded_data_parallel", (*ONE_EPOCH, "--model", "cnn")),
        ("fully_sharded_data_parallel", (*ONE_EPOCH, "--keep_weights")),
        ("hybrid_parallel", (*ONE_EPOCH, "--mesh", "2x1")),
        ("hybrid_parallel", (*ONE_EPOCH, "--mesh", "1x2")),
        ("hybrid_parallel", (*ONE_EPOCH, "--kind", "hsdp", "--mesh", "2x1")),
        ("hybrid_parallel", (*ONE_EPOCH, "--kind", "hsdp", "--mesh", "1x2")),
    ],
)
def test_what_ranks_hold_and_send(lesson, flags, two_ranks):
    """The tables are the CPU's: numbers, bytes, and messages, which NCCL names alike."""
    found = shown(output(two_ranks(lesson, *flags, *CUDA)))
    assert found == shown(train(lesson, *flags, "--device", "cpu", processes=2).stdout)
    assert len(found) > 1


@pytest.mark.parametrize("kind", ["tp", "hsdp"])
def test_a_mesh_of_four_gpus(kind):
    """2x2: communicators along both axes, the CPU's numbers and tables."""
    need(4)
    lesson, flags = "hybrid_parallel", ("--model", "mlp", "--double")
    own = (*TWO_EPOCHS, *flags, "--mesh", "2x2", "--kind", kind)
    out = output(ranks(lesson, *own, *CUDA, processes=4, env=ALL_GPUS, cold=True))
    assert_as_on_the_cpu(out, flags)
    assert shown(out) == shown(train(lesson, *own, "--device", "cpu", processes=4).stdout)


@pytest.mark.parametrize("flags", [("--mesh", "1x2x2", "--fsdp"), ("--mesh", "2x2x1")])
def test_a_ring_in_a_part_of_four_gpus(flags):
    """Each cp group has its own ring: the CPU's losses."""
    need(4)
    own = (*TWO_EPOCHS, *TRANSFORMER, *flags)
    out = output(ranks("three_axes", *own, *CUDA, processes=4, env=ALL_GPUS, cold=True))
    assert_as_on_the_cpu(out, TRANSFORMER)


HELD = """        print("held:", torch.cuda.memory_allocated())
        show_bytes("""


def test_shards_leave_room(two_ranks, tmp_path):
    """The memory of a GPU after a step: 4 bytes a parameter less in stage 3 than in stage 1."""
    width, held = 4096, []
    for lesson in ("sharded_optimizer", "manual_fully_sharded"):
        path = changed(lesson, tmp_path, "        show_bytes(", HELD)
        flags = (*ONE_EPOCH, "--width", width, "--layers", 2)
        out = output(two_ranks(path, *flags, *CUDA))
        held.append(int(re.search(r"^held: (\d+)$", out, re.M)[1]) / (width * (784 + width + 10)))
    assert held[0] - held[1] == pytest.approx(4, abs=0.5)
    assert 7.5 < held[1] < 11


def test_clipping(two_ranks):
    """By the norm over both ranks' shards: the CPU's losses."""
    flags = (*TWO_EPOCHS, "--double", "--sharded", "--clip", 0.5)
    found = epochs(output(two_ranks("mixed_precision", *flags, *CUDA)))
    done = train("mixed_precision", *flags, "--device", "cpu", processes=2)
    for line, right in zip(found, epochs(done.stdout), strict=True):
        assert line["loss"] == pytest.approx(right["loss"], abs=1e-10)


@pytest.mark.parametrize("flags", [(), ("--sharded",)])
def test_bfloat16(flags, two_ranks):
    """The losses are near those of float32, but differ."""
    out = output(two_ranks("mixed_precision", *TWO_EPOCHS, *CUDA, *flags))
    expected = single_gpu(*TWO_EPOCHS, "--device", "cpu", "--model", "transformer")
    for line, right in zip(epochs(out), expected, strict=True):
        assert 1e-5 < abs(line["loss"] - right["loss"]) < 0.03


DRAWN = """        drawn = [None] * world_size
        dist.all_gather_object(drawn, torch.rand(1, device=device).item())
        print("drawn:", *drawn)
        start = time.perf_counter()
"""


def test_dropout(two_ranks, tmp_path):
    """Each rank draws different numbers in each epoch, on its GPU, and it trains."""
    path = changed(
        "fully_sharded_checkpoints", tmp_path, "        start = time.perf_counter()\n", DRAWN
    )
    out = output(two_ranks(path, *TWO_EPOCHS, *CUDA, "--model", "cnn", "--dropout", 0.5))
    assert len(set(re.findall(r"0\.\d+", " ".join(re.findall(r"^drawn: (.*)", out, re.M))))) == 4
    first, second = epochs(out)
    assert second["loss"] < first["loss"]


def test_who_waits_for_whom(two_ranks):
    """recv waits for a late sender. send does not wait, because it only fills a queue."""
    out = output(two_ranks("blocking_p2p", *CUDA))
    numbers = r"\[0.0, 1.0, 2.0, 3.0\]"
    sent = re.findall(rf"rank 0: {numbers}, ([\d.]+) s in send", out)
    received = re.findall(rf"rank 1: \[0.0, 0.0, 0.0, 0.0\] -> {numbers}, ([\d.]+) s in recv", out)
    assert len(sent) == len(received) == 2
    assert float(received[0]) > 0.5 > float(sent[1])


def test_deadlock_ends_and_is_cured(two_ranks):
    """It is shown on the CPU, in a group of its own; the cures work on GPUs."""
    out = output(two_ranks("blocking_p2p", *CUDA, "--deadlock"))
    said = re.findall(r"rank \d: DEADLOCK: rank \d did not receive, because it was in send", out)
    assert len(said) == 2
    out += output(two_ranks("nonblocking_p2p", *CUDA, "--deadlock"))
    for order in ("even ranks send first", "batch_isend_irecv"):
        assert re.findall(rf"rank (\d): {order}: received (\d)", out) == [("0", "1"), ("1", "0")]


def test_the_ring(two_ranks):
    """Messages arrive, and the ring's sum is that of NCCL."""
    out = output(two_ranks("nonblocking_p2p", *CUDA))
    for kind in ("blocking", "nonblocking"):
        assert re.findall(rf"^{kind}, rank (\d): \[-1.0, -1.0\] -> \[(\d).0, ", out, re.M) == [
            ("0", "1"),
            ("1", "0"),
        ]
    assert len(re.findall(r"^ring, rank .*all_reduce agrees: True$", out, re.M)) == 2


FAIL = 'if rank == 1 and epoch == 1: raise ValueError("on purpose")'


@pytest.mark.parametrize(
    "lesson",
    [
        "distributed_data_parallel",
        "distributed_data_parallel_torchrun",
        "fully_sharded_data_parallel",
    ],
)
def test_a_rank_that_fails_while_others_wait(lesson, two_ranks, tmp_path):
    """Its node ends at once, long before --timeout, with the rank's own error."""
    path = each_epoch(lesson, FAIL, tmp_path)
    jobs = two_ranks(path, *TWO_EPOCHS, *CUDA, "--timeout", 900)
    try:
        done = jobs[-1].wait(300)  # where each rank has a job, rank 0's would wait for 900 s
    finally:
        for job in jobs:
            job.kill()
    assert done.returncode == 1
    assert len(re.findall(r"^ValueError: on purpose$", done.stderr, re.M)) == 1, done.stderr
    assert re.search(rf"{lesson}.py.*, line \d+, in train", done.stderr)


def test_a_rank_that_fails_under_torchrun(two_gpus, tmp_path):
    """torchrun ends the other rank, which waits for NCCL, and reports the one that failed."""
    lesson = "distributed_data_parallel_torchrun"
    path = each_epoch(lesson, FAIL, tmp_path)
    done = torchrun(path, *TWO_EPOCHS, *CUDA, "--timeout", 900, env=ALL_GPUS).wait(300)
    assert done.returncode == 1 and "epoch 1/2" in done.stdout
    assert (
        "ValueError: on purpose" in done.stderr and "rank      : 1 (local_rank: 1)" in done.stderr
    )


def test_the_other_node_of_a_rank_that_fails(on_one_gpu, tmp_path):
    """It notices after --timeout, or before, and ends."""
    path = each_epoch("distributed_data_parallel", FAIL, tmp_path)
    jobs = on_one_gpu(path, *TWO_EPOCHS, *CUDA, "--timeout", 10)
    try:
        zero, one = [job.wait(300) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert (zero.returncode, one.returncode) == (1, 1)
    assert "on purpose" in one.stderr and "on purpose" not in zero.stderr


def test_a_full_disk(two_ranks, tmp_path):
    """Only rank 0 writes, and the other one waits: rank 0's node ends and says why."""
    opened = 'open(unfinished, "wb")'
    path = changed("distributed_data_parallel", tmp_path, opened, 'open("/dev/full", "wb")')
    jobs = two_ranks(path, *TWO_EPOCHS, *CUDA, "--timeout", 900, "-s", tmp_path / "c.pt")
    try:
        done = jobs[0].wait(300)
    finally:
        for job in jobs:
            job.kill()
    assert done.returncode == 1
    assert "No space left on device" in done.stderr


@pytest.mark.parametrize(
    "lesson",
    [
        "manual_data_parallel",
        "distributed_data_parallel",
        "distributed_data_parallel2",
        "data_parallel",
        "blocking_p2p",
    ],
)
def test_more_processes_than_gpus(lesson, gpu):
    """One line that says how many there are."""
    have = machine()[0]
    done = run(lesson, *CUDA, "-g", have + 1, status=2, env=ALL_GPUS, cold=True)
    assert f"this machine has {have} GPUs: use -g {have} or --device cpu" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_more_processes_of_torchrun_than_gpus(gpu):
    """The first rank prints the line, before the ranks wait for each other."""
    have = machine()[0]
    job = torchrun(
        "distributed_data_parallel_torchrun", *TWO_EPOCHS, *CUDA, processes=have + 1, env=ALL_GPUS
    )
    done = job.wait()
    assert done.returncode == 1
    assert f"this machine has {have} GPUs: use --nproc-per-node {have}" in done.stderr


def test_all_gpus_by_default(gpu):
    """DDP without -g has a process on each."""
    have = machine()[0]
    flags = ("--dataset", "digits", "--batch_size", 24 * have, "--epochs", 1)
    out = output([Lesson("distributed_data_parallel", *flags, env=ALL_GPUS, cold=True)])
    assert len(re.findall(r"^\d +\d +\d +cuda:\d+ ", out, re.M)) == have


def test_hidden_gpus(two_gpus):
    """Of two visible GPUs show the second one: it is the only one now, and the lesson's first."""
    second = (ALL_GPUS["CUDA_VISIBLE_DEVICES"] or "0,1").split(",")[1]
    flags = ("--dataset", "digits", "--batch_size", 120, "--epochs", 1)
    out = output(
        [
            Lesson(
                "distributed_data_parallel", *flags, env={"CUDA_VISIBLE_DEVICES": second}, cold=True
            )
        ]
    )
    assert re.findall(r"^\d +\d +\d +(cuda:\d+) ", out, re.M) == ["cuda:0"]


@pytest.mark.parametrize("average", ["ddp", "bucket"])
def test_a_trace_has_nccls_kernels(average, two_ranks, tmp_path):
    """The table's messages are theirs."""
    flags = (*DIGITS, "--epochs", 1, "--width", 512, "--average", average, "--out", tmp_path)
    out = output(two_ranks("profile_steps", *flags, *CUDA))
    rows = re.findall(r"^([01]) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) *$", out, re.M)
    assert [rank for rank, *_ in rows] == ["0", "1"]
    for rank, _, _, computing, waited, hidden in rows:
        names = {
            event.get("name", "")
            for event in json.loads((tmp_path / f"rank{rank}.json").read_text())["traceEvents"]
        }
        assert any(name.startswith(MESSAGE) for name in names)
        assert float(computing) > 0 and float(waited) + float(hidden) > 0


def test_break_it_with_activations_on_the_wrong_gpu(two_gpus, tmp_path):
    """model_parallel.py's first: stage2's first layer has its weights elsewhere."""
    old = ".stage1(micro_batch).to(self.devices[1])"
    path = changed("model_parallel", tmp_path, old, ".stage1(micro_batch)")
    done = Lesson(path, *TWO_EPOCHS, *CUDA, env=ALL_GPUS, cold=True).wait()
    assert done.returncode == 1
    assert "Expected all tensors to be on the same device" in done.stderr


def test_compare(gpu, tmp_path):
    """It runs the lessons on all GPUs, and says which ones these are."""
    lessons = ("--only", "parity", "steps", "--lessons", "distributed_data_parallel_torchrun")
    flags = ("--dataset", "digits", "--epochs", 1, "--out", tmp_path, *CUDA)
    done = Lesson("figures/compare", *flags, *lessons, env=ALL_GPUS, cold=True).wait(900)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results["machine"]["gpus"]) == machine()[0]
    assert not any(one["failed"] for one in results["runs"]) and len(results["runs"]) == 7
    assert results["runs"][1]["difference"] < 1e-10
    assert all(0 < one["gpu_memory_mib"] < one["memory_mib"] for one in results["runs"])


def test_check_node(gpu):
    """run/check_node.sh finds them, and that they work."""
    need_programs("ip")
    environment = {
        key: value for key, value in (dict(os.environ) | ALL_GPUS).items() if value is not None
    }
    script = [ROOT / "run" / "check_node.sh"]
    done = subprocess.run(
        script, env=environment | {"PYTHON": sys.executable}, capture_output=True, text=True
    )
    (line,) = [line for line in done.stdout.splitlines() if "GPUs" in line]
    assert "does not work" not in line and re.search(
        rf"(GPUs: |torch finds ){machine()[0]}\b", line
    ), done.stdout
