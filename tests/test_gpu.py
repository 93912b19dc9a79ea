"""The lessons on GPUs: the CPU's numbers, checkpoints that move, who waits, and failures.

Tests are skipped where torch finds too few GPUs. Ranks get a GPU each. If there is only one, they
share it, as run/one_gpu.sh does. Tests that need no GPU are in test_devices.py.
"""

import functools
import re
import shutil
import sys
from pathlib import Path

import pytest
from launch import (
    ALL_GPUS,
    FEWER,
    Job,
    Lesson,
    each_epoch,
    epochs,
    free_port,
    one_process,
    run,
    single_gpu,
)
from lessons import LESSONS, by_torchrun, own_flags, small_data, talks

CUDA = ("--device", "cuda")
CPU = ("--device", "cpu")
NAMES = ("cuda:0", "cuda:1")  # of the first two GPUs
SHARED = {  # ranks that share a GPU are nodes to NCCL, each with a name, and talk by sockets
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
}
DIGITS = ("--dataset", "digits", "--batch_size", 120)
ONE_EPOCH = (*DIGITS, "--epochs", 1)
TWO_EPOCHS = (*DIGITS, "--epochs", 2)
# The text is large, and float64 slow on a CPU.
SMALL_TEXT = ("--dataset", "text", "--batch_size", 120, "--epochs", 1, "--width", 16)
THREE_EPOCHS = (*DIGITS, *CPU, "--double", "--epochs", 3)
IN_ONE_PROCESS = ("single_gpu", "data_parallel", "model_parallel")  # on several GPUs
ROWS = {  # a lesson with its flags, and on how many GPUs it runs; those that take longest first
    "language_model --checkpoint": (1, 2),
    "vocabulary_parallel": (1, 2),
    "vocabulary_parallel --by dtensor": (1, 2),
    "token_mean --micro_batches 2": (1, 2),
    "token_mean --by fsdp --packed": (1, 2),
    "four_axes": (4,),
    "four_axes --mesh 1x1x1x1": (1,),
    "four_axes --mesh 1x2x1x1": (2,),
    "four_axes --mesh 1x1x2x1": (2,),
    "four_axes --mesh 1x1x1x2": (2,),
    "four_axes --mesh 2x1x1x1": (2,),
    "single_gpu --model cnn": (1,),
    "data_parallel": (2,),
    "data_parallel --by hand --model cnn": (1, 2),
    "model_parallel": (1, 2),
    "model_parallel --pipelined --model cnn": (1, 2),
    "collectives": (2,),
    "manual_data_parallel": (1, 2),
    "manual_data_parallel --bucket": (1, 2),
    "overlapped_data_parallel --model cnn": (1, 2),
    "distributed_data_parallel --model cnn": (1, 2),
    "distributed_data_parallel --backend gloo": (2,),
    "profile_steps --bucket_cap_mb 1000": (2,),
    "sending_less --by diloco --every 5": (2,),
    "manual_pipeline --schedule GPipe": (1, 2),
    "manual_pipeline --schedule 1F1B --model cnn": (2,),
    "pipeline_parallel --schedule GPipe --model cnn": (1, 2),
    "pipeline_parallel --schedule InterleavedZeroBubble": (2,),
    "manual_fully_sharded": (1, 2),
    "manual_fully_sharded --keep_weights": (1, 2),
    "fully_sharded_data_parallel --model cnn": (1, 2),
    "fully_sharded_data_parallel --meta": (1, 2),
    "fully_sharded_data_parallel --replicas 2": (2,),
    "tensor_parallel --by hand --model cnn": (1, 2),
    "tensor_parallel --by dtensor": (1, 2),
    "hybrid_parallel --mesh 1x2": (2,),
    "hybrid_parallel --mesh 2x2": (4,),
    "mixed_precision --precision full --sharded --clip 0.5": (1, 2),
    "activation_checkpointing --sharded": (1, 2),
    "sequence_parallel": (1, 2),
    "sequence_parallel --by dtensor": (1, 2),
    "ulysses": (2,),
    "context_parallel --by ring": (1, 2),
    "expert_parallel --balance 0.1": (1, 2),
}
# Any other lesson that trains has a row as it is. The ResNet lesson has a test of its own.
NAMED = {row.split()[0] for row in ROWS} | {"resnet"}
ROWS |= {lesson: (1, 2) for lesson in LESSONS if lesson not in NAMED and not talks(lesson)}
TABLES = (  # lessons that print what ranks hold and send: the same with NCCL
    "collectives",
    "sharded_optimizer",
    "manual_fully_sharded",
    "fully_sharded_data_parallel",
    "hybrid_parallel",
    "vocabulary_parallel",
    "four_axes",
)
ASK = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"


@functools.cache
def found():
    """Return how many GPUs torch finds. It asks only where there is a driver: it takes long."""
    if not (Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi")):
        return 0
    done = Job(sys.executable, "-W", "ignore", "-c", ASK, env=ALL_GPUS).wait()
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def need(gpus):
    """Skip a test where torch finds fewer GPUs."""
    if found() < gpus:
        pytest.skip(f"needs {'a GPU' if gpus == 1 else f'{gpus} GPUs'}, torch finds {found()}")


def visible(*numbers):
    """Return the environment in which only these of the GPUs are visible."""
    hidden = ALL_GPUS["CUDA_VISIBLE_DEVICES"]
    names = hidden.split(",") if hidden else [str(number) for number in range(found())]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[number] for number in numbers)}


def start(lesson, *flags, gpus=2, nodes=1):
    """Start a lesson on so many GPUs. Returns its Jobs: one, or one for each rank or node.

    If there is only one GPU, the ranks share it. A lesson that starts its ranks itself then has two
    nodes.
    """
    shared = gpus > 1 and lesson not in IN_ONE_PROCESS and found() == 1
    need(1 if shared else gpus)
    flags = (*flags, *CUDA)
    if lesson in IN_ONE_PROCESS:
        count = ("-g", gpus) if lesson == "data_parallel" else ()
        return [Lesson(lesson, *flags, *count, env=visible(*range(gpus)), cold=True)]
    env = ALL_GPUS | (SHARED if shared else {})
    port = free_port()
    if by_torchrun(lesson):
        env |= {"WORLD_SIZE": str(gpus), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(gpus)]
        if shared:
            for rank, place in enumerate(places):
                place |= {"LOCAL_RANK": "0", "NCCL_HOSTID": f"rank{rank}"}
        return [Lesson(lesson, *flags, env=env | place, cold=True) for place in places]
    if nodes == 1 and not shared:
        return [Lesson(lesson, *flags, "-g", gpus, env=env, cold=True)]
    jobs = []
    for node in range(gpus):
        place = ("-n", gpus, "-g", 1, "-nr", node, "-ip", "127.0.0.1", "--port", port)
        own = {"NCCL_HOSTID": f"node{node}"} if shared else visible(node)
        jobs.append(Lesson(lesson, *flags, *place, env=env | own, cold=True))
    return jobs


def ends(jobs, of=slice(None)):
    """Wait for all jobs, or for those of a slice, and end the others. Returns how they ended."""
    try:
        return [job.wait() for job in jobs[of]]
    finally:
        for job in jobs:
            job.kill()


def output(jobs):
    """Wait for all, which must end well. Returns what they have printed, the first one first."""
    done = ends(jobs)
    assert not any(one.returncode for one in done), "\n".join(
        one.stdout + one.stderr for one in done
    )
    return "".join(one.stdout for one in done)


def shown(out):
    """Return what a lesson prints besides its ranks, epochs and timelines. Nodes have no order."""
    pattern = r"node |\d+ ranks, |\d+ +\d+ +\d+ |epoch |rank \d+ \||rank \d+ of "
    lines = [line for line in out.splitlines() if not re.match(pattern, line)]
    return sorted(re.sub(r"cuda:\d|cpu", "", line).split() for line in lines)


@pytest.mark.parametrize(
    ("row", "gpus"), [(row, gpus) for row, counts in ROWS.items() for gpus in counts]
)
def test_the_numbers_of_the_cpu(row, gpus, tmp_path):
    """The same losses in float64, to 1e-10, and the same tables. That of the ranks names GPUs."""
    lesson, *flags = row.split()
    if lesson != "collectives":
        flags += ["--double", *(SMALL_TEXT if small_data(lesson) == "text" else TWO_EPOCHS)]
    ranks = None if lesson in IN_ONE_PROCESS else gpus
    own = {device: [*flags, *own_flags(lesson, tmp_path / device)] for device in ("gpu", "cpu")}
    for each in own.values() if lesson == "sharded_data" else ():
        run(lesson, "--make", *each, *CPU)
    out = output(start(lesson, *own["gpu"], gpus=gpus))
    expected = run(lesson, *own["cpu"], *CPU, processes=ranks).stdout
    assert epochs(out) == [pytest.approx(line, abs=1e-10) for line in epochs(expected)]
    if lesson in TABLES:
        assert shown(out) == shown(expected) and len(shown(out)) >= gpus
    if lesson == "model_parallel" and gpus == 2:
        assert f"stage1 on {NAMES[0]}, stage2 on {NAMES[1]}\n" in out
    elif lesson not in IN_ONE_PROCESS and not by_torchrun(lesson):
        names = (NAMES[0],) * 2 if found() == 1 else NAMES
        assert tuple(sorted(re.findall(r"cuda:\d", out)[:gpus])) == names[:gpus]


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_float32(model):
    """What is printed: the CPU's digits, up to two in the last place.

    The same from a model that lies half on the CPU.
    """
    flags = (*TWO_EPOCHS, "--model", model)
    assert epochs(output(start("single_gpu", *flags, gpus=1))) == one_process(*flags, *CPU)
    out = output(start("model_parallel", *flags, "--devices", "cpu", NAMES[0], gpus=1))
    assert epochs(out) == one_process(*flags, *CPU)


@pytest.mark.parametrize("flags", [(), ("--sharded",)])
def test_bfloat16(flags):
    """The losses are near those of float32, but differ."""
    out = output(start("mixed_precision", *TWO_EPOCHS, *flags))
    expected = single_gpu(*TWO_EPOCHS, *CPU, "--model", "transformer")
    for line, right in zip(epochs(out), expected, strict=True):
        assert 1e-5 < abs(line["loss"] - right["loss"]) < 0.03


def test_the_resnet_lesson(change):
    """Batch norm's buffers and no_sync over NCCL. One rank has the CPU's numbers in float64."""
    need(1)
    copy = change("resnet", FEWER)
    flags = ("--dataset", "fake", "--batch_size", 60, "--epochs", 1, "--accumulate", 2, "--double")
    [found] = epochs(output(start(copy, *flags, gpus=1)))
    [expected] = epochs(run(copy, *flags, *CPU, processes=1).stdout)
    assert found["loss"] == pytest.approx(expected["loss"], abs=2e-4)
    assert 2 < epochs(output(start(copy, *flags)))[0]["loss"] < 4


def test_weights_go_to_another_gpu():
    """The generator's text has the ratio 1, and its rewards rise."""
    out = output(start("trainer_and_generator"))
    rows = re.findall(r"^step \d+/40  reward (\d\.\d+)  ratio 1 \+- (\d\.\d+),", out, re.M)
    assert len(rows) == 4 and {ratio for _, ratio in rows} == {"0.000"}
    assert float(rows[0][0]) < 0.3 < 0.6 < float(rows[-1][0])


def test_checkpoints_move_between_gpu_and_cpu(tmp_path):
    """A run that goes from the GPU to the CPU and back ends like one that stays."""
    flags = ("resumable", *DIGITS, "--double", "--run_dir", tmp_path)
    output(start(*flags, "--epochs", 1, gpus=1))
    run(*flags, "--epochs", 2, *CPU, processes=1)
    out = output(start(*flags, "--epochs", 3, gpus=1))
    assert "2 of 3 epochs are done" in out
    assert epochs((tmp_path / "log.txt").read_text()) == one_process(*THREE_EPOCHS, apart=1e-10)


def test_sharded_checkpoints_move_between_gpus_and_cpus(tmp_path):
    """Three CPUs begin, two GPUs resume, three CPUs end it. From GPUs to CPUs in one file, too.

    On the GPUs a thread writes the shards, beside NCCL, in a group of gloo. An export has the
    numbers of the file.
    """
    need(1)
    flags = (*DIGITS, "--double", "--timeout", 300)
    shards = ("fully_sharded_checkpoints", *flags, "--run_dir", tmp_path / "run")
    out = run(*shards, *CPU, "--epochs", 1, processes=3).stdout
    out += output(start(*shards, "--epochs", 2, "--async_save"))
    out += run(*shards, *CPU, "--epochs", 3, processes=3).stdout
    path = tmp_path / "c.pt"
    file = ("fully_sharded_checkpoints", *flags)
    out += output(start(*file, "--epochs", 2, "-s", path))
    out += run(*file, *CPU, "--epochs", 3, "--load", path, processes=3).stdout
    right = one_process(*THREE_EPOCHS, apart=1e-10)
    assert epochs(out) == [*right, *right]


HELD = """        print("held:", torch.cuda.memory_allocated())
        show_bytes("""


def test_shards_leave_room(change):
    """The memory of a GPU after a step: 4 bytes a parameter less in stage 3 than in stage 2."""
    width, held = 4096, []
    for lesson in ("sharded_optimizer", "manual_fully_sharded"):
        path = change(lesson, ("        show_bytes(", HELD))
        out = output(start(path, *ONE_EPOCH, "--width", width, "--layers", 2))
        held.append(int(re.search(r"^held: (\d+)$", out, re.M)[1]) / (width * (784 + width + 10)))
    assert held[0] - held[1] == pytest.approx(4, abs=0.5)
    assert 7.5 < held[1] < 11


def test_messages():
    """All arrive, and the ring's sum is that of NCCL."""
    out = output(start("blocking_p2p"))
    assert len(re.findall(r"rank 1 has \[0.0, 1.0, 2.0, 3.0\] and waited ", out)) == 2
    out = output(start("nonblocking_p2p"))
    for kind in ("blocking", "batched"):
        found = re.findall(rf"^{kind}, rank (\d): \[-1.0, -1.0\] -> \[(\d).0, ", out, re.M)
        assert found == [("0", "1"), ("1", "0")]
    assert len(re.findall(r"^ring, rank .*all_reduce agrees: True$", out, re.M)) == 2


def test_deadlock_ends_and_is_cured():
    """It is shown on the CPU, in a group of its own; the cures work on GPUs."""
    out = output(start("blocking_p2p", "--deadlock"))
    assert len(re.findall(r"rank \d: DEADLOCK: rank \d did not receive, because", out)) == 2
    out += output(start("nonblocking_p2p", "--deadlock"))
    for order in ("even ranks send first", "batched"):
        assert re.findall(rf"rank (\d): {order}: received (\d)", out) == [("0", "1"), ("1", "0")]


FAIL = 'if rank == 1 and epoch == 1: raise ValueError("on purpose")'
KILL = "if rank == 1 and epoch == 1: os.kill(os.getpid(), 9)"


@pytest.mark.parametrize(
    ("fault", "said"), [(FAIL, "ValueError: on purpose"), (KILL, "terminated with signal SIGKILL")]
)
def test_a_rank_that_fails_while_others_wait(fault, said, tmp_path):
    """Its node ends at once, long before --timeout, and says why."""
    path = each_epoch("distributed_data_parallel", fault, tmp_path)
    jobs = start(path, *TWO_EPOCHS, "--timeout", 900)
    [done] = ends(jobs, of=slice(-1, None))  # another node would wait for 900 s
    assert done.returncode == 1
    assert len(re.findall(said, done.stderr)) == 1, done.stderr


def test_the_other_node_of_a_rank_that_fails(tmp_path):
    """It notices after --timeout, or before, and ends."""
    path = each_epoch("distributed_data_parallel", FAIL, tmp_path)
    zero, one = ends(start(path, *TWO_EPOCHS, "--timeout", 10, nodes=2))
    assert (zero.returncode, one.returncode) == (1, 1)
    assert "on purpose" in one.stderr and "on purpose" not in zero.stderr


def test_which_gpus():
    """DDP has a process on each GPU. Too many processes are refused in one line."""
    need(1)
    lesson, have = "distributed_data_parallel", found()
    flags = ("--dataset", "digits", "--batch_size", 24 * have, "--epochs", 1, *CUDA)
    table = r"^\d +\d +\d +(cuda:\d+) "
    done = run(lesson, *flags, env=ALL_GPUS, cold=True)
    assert re.findall(table, done.stdout, re.M) == [f"cuda:{number}" for number in range(have)]
    done = run(lesson, *flags, env=visible(have - 1), cold=True)  # the last one is the first then
    assert re.findall(table, done.stdout, re.M) == ["cuda:0"]
    done = run(lesson, *flags, "-g", have + 1, status=2, env=ALL_GPUS, cold=True)
    assert f"this machine has {have} GPUs: use -g {have} or --device cpu" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_trace_has_nccls_kernels(tmp_path):
    """The table's messages are theirs."""
    flags = (*ONE_EPOCH, "--width", 512, "--out", tmp_path)
    out = output(start("profile_steps", *flags))
    rows = re.findall(r"^([01]) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) *$", out, re.M)
    assert [rank for rank, *_ in rows] == ["0", "1"]
    for rank, _, _, computing, waited, hidden in rows:
        assert '"ncclDevKernel_' in (tmp_path / f"rank{rank}.json").read_text()
        assert float(computing) > 0 and float(waited) + float(hidden) > 0


def test_what_nccl_writes_at_a_timeout(tmp_path):
    """Each rank writes its recorder to a file, and torchfrtrace reads all of them."""
    need(1)
    env = ALL_GPUS | {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/nccl_",
    }
    flags = ("--fault", "loader", "--timeout", 20, "--out", tmp_path, *CUDA)
    out = run("finding_hangs", *flags, env=env, cold=True).stdout
    assert re.search(r"^  rank 0  .*all_reduce \[4\] not done$", out, re.M)
    assert len(list(tmp_path.glob("nccl_*"))) == 3
    tool = (sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace")
    assert Job(*tool, "--prefix", "nccl_", tmp_path).wait().returncode == 0
