"""planning.md shows what plan.py prints, and bytes are those that lessons count.

Counted are those that FSDP sends and a block keeps. The other rows are compared with sharding.md.
"""

import os
import re
import shlex
import signal
import subprocess
import sys

import plan
import pytest
from conftest import ROOT, lesson_path, ranks, run
from lessons import docstring

PAGE = (ROOT / "playground" / "pages" / "planning.md").read_text()
VARIABLES = dict(re.findall(r'^    (\w+)="(.*)"$', PAGE, re.M))
CLUSTER = plan.Cluster(8, 8, 68e9, 989e12, 0.45, within=360e9, between=46e9)
ONE = plan.Plan("ddp", pp=1, dp=4, cp=1, tp=1, micro=2, count=1, again=0)
quick = pytest.mark.quick


def language(width=64, layers=2):
    """Return the language model of the lessons, in float32."""
    block = width * (3 * width + 3 * 11 * width // 4)
    parameters = layers * block + 2 * 256 * width
    return plan.Model(parameters, layers, width, 4, 2, 256, 3, 128, half=4)


def expand(flags):
    """Return flags with the values of the page's variables."""
    while "$" in flags:
        flags = re.sub(r"\$(\w+)", lambda name: VARIABLES[name[1]], flags)
    return flags


def printed(flags, capsys):
    """Return what plan.py prints."""
    plan.main(shlex.split(expand(flags)))
    return capsys.readouterr().out


def error(flags, capsys):
    """Return the reason in the only line that plan.py prints about wrong flags."""
    with pytest.raises(SystemExit) as ended:
        plan.main(shlex.split(flags))
    out, line = capsys.readouterr()
    assert ended.value.code == 2 and line.count("\n") == 1 and not out
    return line.partition(": error: ")[2]


def rows(*heads):
    """Return the rows of the page's tables with such columns, without the signs of code."""
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", PAGE, re.M):
        lines = [re.split(r" *\| *", line.strip("| \n")) for line in table.splitlines()]
        if lines[0] == list(heads):
            found += [[cell.strip("`") for cell in line] for line in lines[2:]]
    return found


def tokens_of_gpu(flags):
    """Return how many tokens a GPU of 8 computes in a step."""
    sizes = dict(re.findall(r"--(batch_size|sequence|nodes) (\d+)", expand(flags)))
    return int(sizes["batch_size"]) * int(sizes["sequence"]) / (8 * int(sizes["nodes"]))


@quick
def test_the_commands_of_the_page(capsys):
    """Each prints what is shown below it, or the error that is shown."""
    found = re.findall(r"^    python playground/tools/plan\.py ?(.*)\n((?:    .*\n)+)", PAGE, re.M)
    assert len(found) == PAGE.count("    python playground/tools/plan.py") >= 9
    for flags, shown in found:
        shown = re.sub("^    ", "", shown, flags=re.M)
        if "error: " in shown:
            assert error(flags, capsys) == shown.partition("error: ")[2]
        else:
            assert printed(flags, capsys) == shown


@quick
def test_the_memory_of_published_runs(capsys):
    """The last column follows from what was published and what plan.py prints."""
    found = rows("flags", "published", "state + kept", "ratio")
    assert len(found) == 10
    for flags, published, shown, ratio in found:
        [row] = printed(flags, capsys).splitlines()[2:]
        state, kept = re.findall(r" ([\d.]+)G", row)[:2]
        assert shown == f"{state}G + {kept}G"
        assert ratio == f"{(float(state) + float(kept)) / float(published):.2f}"


@quick
def test_the_speed_of_published_runs(capsys):
    """The last column follows from what was published and what plan.py prints."""
    by_speed = rows("flags", "tokens/s", "step", "plan's step", "ratio")
    by_flops = rows("flags", "TFLOP/s", "step", "plan's step", "ratio")
    by_step = rows("flags", "step", "plan's step", "ratio")
    assert [len(found) for found in (by_speed, by_flops, by_step)] == [22, 9, 4]
    for flags, speed, step, *_ in by_speed:
        seconds = tokens_of_gpu(flags) / float(speed.replace(",", ""))
        assert float(step) == pytest.approx(seconds, rel=0.005)
    for flags, *_, step, shown, ratio in by_speed + by_flops + by_step:
        [row] = printed(flags, capsys).splitlines()[2:]
        number, thousand = re.search(rf" {shown} +([\d.]+)(k?) ", row).groups()
        speed = float(number) * (1000 if thousand else 1)
        published = tokens_of_gpu(flags) / float(step)
        assert float(ratio) == pytest.approx(speed / published, abs=0.011)


@quick
def test_the_steps_on_slow_links(capsys):
    """The page has what plan.py prints for both bandwidths."""
    found = rows("LESSON", "flags", "no limit", "1 Gbit/s", "plan", "100 Mbit/s", "plan")
    assert len(found) == 4
    for _, flags, _, _, first, _, second in found:
        for bandwidth, step in (("125e6", first), ("12.5e6", second)):
            links = f"$links $links2 $links3 --within {bandwidth} --between {bandwidth} {flags}"
            assert f" {step} " in printed(links, capsys)


@quick
def test_what_a_block_keeps_is_what_activation_checkpointing_counts():
    """Its docstring has the bytes of a transformer of two blocks, and those outside of them."""
    text = " ".join(docstring("activation_checkpointing").split())
    counted = [int(number.replace(",", "")) for number in re.findall(r" ([\d,]+) bytes kept", text)]
    outside = int(re.search(r"([\d,]+) are kept outside", text)[1].replace(",", ""))
    model = plan.Model(2 * 12 * 32**2, 2, 32, 4, 4, 0, 2, 28, half=4)
    images = 64 * 28  # of one of two ranks, and tokens of each
    block = images * plan.kept_by_block(model, 1)
    its_input = images * 4 * 32
    kept = [2 * block, block + its_input, 2 * its_input]
    assert [outside + each for each in kept] == counted


def sent(model, one):
    """Return the bytes that a rank sends along each axis in a step of a plan."""
    return plan.judge(model, CLUSTER, one)["sent"]


@quick
def test_bytes_are_those_of_sharding():
    """The rows of sharding.md, in float32, where they are exact."""
    model = language(layers=4, width=256)
    size = 4 * model.parameters
    assert plan.state(model, CLUSTER, ONE) == 16 * model.parameters
    assert sent(model, ONE) == {"pp": 0, "dp": 2 * 3 / 4 * size, "cp": 0, "tp": 0}
    ends = 4 * 2 * 256 * 256  # the embedding and the output layer are gathered once
    assert sent(model, ONE._replace(data="fsdp"))["dp"] == 3 / 4 * (3 * size - ends)
    tokens = 4 * 256 * 2 * 128  # S
    split = sent(model, ONE._replace(dp=2, tp=2))["tp"]
    assert split == (8 * 4 + 4) * tokens / 2
    by_ring = sent(model, ONE._replace(dp=1, cp=4))["cp"]
    assert by_ring == 2 * 4 * (3 * 4 - 2) * (tokens / 4) / 2  # two heads share a key and a value
    staged = sent(model, ONE._replace(pp=2, dp=2, count=8))
    assert staged["pp"] == 8 * tokens
    replicas = sent(model, ONE._replace(data="hsdp", dp=64, micro=1))["dp"]
    assert replicas == 7 / 8 * (3 * size - ends) + 2 * 7 / 8 * size / 8


def test_bytes_are_those_that_watch_counts():
    """In a step of language_model.py, which has two micro-batches on each of two ranks."""
    flags = ("--epochs", 1, "--precision", "full", "--clip", 0, "--device", "cpu")
    env = {"DOCUMENTS": "40"}
    shown = run("watch", lesson_path("language_model"), *flags, processes=2, env=env).stdout
    given = {"all_gather": 0, "reduce_scatter": 0}
    for call, nbytes in re.findall(rf"^all +({'|'.join(given)}) +2 +\d+ +([\d,]+)", shown, re.M):
        given[call] += int(nbytes.replace(",", ""))
    model = language()._replace(parameters=125248)  # with those of the norms
    planned = sent(model, ONE._replace(data="fsdp", dp=2, micro=8, count=2))["dp"]
    # By a ring, a rank sends the chunk that it gives to an all_gather, and half of the other.
    expected = given["all_gather"] + given["reduce_scatter"] / 2
    assert planned == pytest.approx(expected, rel=1e-3)


@quick
def test_all_wait_for_the_slowest_stage():
    """The last one has the output layer, unless it has a block less than others."""
    at_once = CLUSTER._replace(within=1e18, between=1e18)
    staged = ONE._replace(dp=16, micro=1, count=1000)
    for name, stages, waiting in (("llama3-8b", 4, 0.163), ("llama3-405b", 16, 0.012)):
        model = plan.MODELS[name]._replace(sequence=8192)
        parts = plan.judge(model, at_once, staged._replace(pp=stages))["parts"]
        expected = waiting + (stages - 1) / 1000
        assert parts["bubble"] / parts["computing"] == pytest.approx(expected, abs=2e-3)


@quick
def test_a_group_on_two_nodes():
    """With 6 GPUs on a node, ranks 4 to 7 split a layer, and two of them are on another node."""
    slow = CLUSTER._replace(between=1e6)
    assert plan.ring(slow, 1e9, 4, 1) < 0.01
    apart = plan.ring(slow._replace(gpus=6), 1e9, 4, 1)
    assert apart == pytest.approx(0.75 * 1e9 / 2e6, rel=1e-3)  # two GPUs send to the other node


@quick
def test_plans_divide_what_they_must(capsys):
    """The ranks, the batch, the heads. tp stays inside a node, unless it is asked for by name."""
    model = plan.MODELS["llama3-405b"]._replace(sequence=8192)
    plans = list(plan.plans(model, CLUSTER._replace(nodes=64), 512, {}))
    assert len(plans) == len(set(plans)) > 500
    for each in plans:
        assert each.pp * each.dp * each.cp * each.tp == 512
        assert each.dp * each.micro * each.count == 512
        assert each.tp <= 8
    # 16 stages of 126 blocks have two too few to be equal.
    assert {1, 2, 8, 16} <= {each.pp for each in plans}
    assert " 1x32x1x2 " in printed("--nodes 64 --gpus 1 --tp 2 --pp 1 --cp 1", capsys)
    alone = printed("--nodes 64 --gpus 1 --pp 1 --cp 1", capsys)
    assert set(re.findall(r"\d+x\d+x\d+x\d+", alone)) == {"1x64x1x1"}
    one = printed("--nodes 1 --gpus 1 --batch_size 8", capsys)
    assert "ddp  1x1x1x1" in one and "fsdp" not in one  # one rank shards nothing


@quick
@pytest.mark.parametrize(
    "flags, reason",
    [
        ("--tp 5", "no plan of 64 ranks divides --batch_size and the model's layers and heads\n"),
        ("--batch_size 7 --pp 1 --cp 1", "no plan of 64 ranks"),
        ("--model llama3-8b --parameters 1e9", "1G parameters do not go with the model's other"),
        ("--nodes 0", "--nodes 0 must be between 1 and 1e+18"),
        ("--micro 128", "--micro 128 must be between 1 and 64"),
        ("--efficiency nan", "--efficiency nan must be between 0.001 and 1"),
        ("--memory 80", "--memory 80 must be between 1e+08 and 1e+18"),
        ("--again 0.3", "argument --again: invalid choice: 0.3"),
    ],
)
def test_wrong_flags(flags, reason, capsys):
    """They end it in one line."""
    assert error(flags, capsys).startswith(reason)


@quick
def test_it_starts_at_once():
    """PyTorch is not imported. Without a reader, it ends without a word."""
    program = "import sys, plan; plan.main(['--nodes', '1'])\n"
    program += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT / "playground/tools", check=True)
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, lesson_path("tools/plan"), "--nodes", "1"]
    done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")


def test_the_program_that_measures_bandwidth(tmp_path):
    """Two ranks print how fast one sends. (Between processes of a machine, this is fast.)"""
    program = re.search(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)[1]
    path = tmp_path / "bandwidth.py"
    path.write_text(program)
    outs = [job.wait() for job in ranks(path, processes=2)]
    assert [done.returncode for done in outs] == [0, 0]
    assert re.fullmatch(r"\d\.\d\de\+\d\d bytes/s\n", outs[0].stdout + outs[1].stdout)
