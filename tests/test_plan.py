"""planning.md shows what plan.py prints, and bytes are those that lessons count.

Counted are those that FSDP sends and a block keeps. The other rows are compared with sharding.md.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
from argparse import Namespace

import plan
import pytest
from conftest import ROOT, lesson_path, ranks
from test_readme import docstring

PAGE = (ROOT / "playground" / "pages" / "planning.md").read_text()
VARIABLES = dict(re.findall(r'^    (\w+)="(.*)"$', PAGE, re.M))
CLUSTER = {"nodes": 8, "gpus": 8, "memory": 68e9, "within": 360e9, "between": 46e9}
CLUSTER |= {"flops": 989e12, "efficiency": 0.45}


def language(width=64, layers=2, **sizes):
    """Return the language model of the lessons, in float32."""
    block = width * (3 * width + 3 * 11 * width // 4)
    parameters = layers * block + 2 * 256 * width
    return plan.Model(parameters, layers, width, 4, 2, 256, 3, 128, half=4)._replace(**sizes)


def cluster(**changes):
    """Return the flags of a cluster of 8 nodes with 8 GPUs each."""
    return Namespace(**CLUSTER | changes)


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
    """Return the only line that plan.py prints about wrong flags."""
    with pytest.raises(SystemExit) as ended:
        plan.main(shlex.split(flags))
    out, line = capsys.readouterr()
    assert ended.value.code == 2 and line.count("\n") == 1
    return out, line


@pytest.mark.quick
def test_the_commands_of_the_page(capsys):
    """Each prints what is shown below it, or the error that is shown."""
    found = re.findall(r"^    python playground/tools/plan\.py ?(.*)\n((?:    .*\n)+)", PAGE, re.M)
    assert len(found) == PAGE.count("    python playground/tools/plan.py") >= 9
    for flags, shown in found:
        shown = re.sub("^    ", "", shown, flags=re.M)
        if "error" in shown:
            line = error(flags, capsys)[1]
            assert line.partition(": ")[2] == shown.partition(": ")[2]
        else:
            assert printed(flags, capsys) == shown


@pytest.mark.quick
def test_a_reader_that_has_ended():
    """As `| head` does. plan.py ends without a word."""
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, lesson_path("tools/plan"), "--nodes", "1"]
    done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")


@pytest.mark.quick
def test_the_published_runs_of_the_page(capsys):
    """The last columns of each row follow from what was published and what plan.py prints."""
    ratios = []
    memories = []
    for flags, *cells in re.findall(
        r"^\| `(.*)` \|(?: (\S+) \|)? (\S+) \| (.+) \| (\S+) \|$", PAGE, re.M
    ):
        row = printed(flags, capsys).splitlines()
        assert len(row) == 3, flags
        _, published, shown, ratio = cells
        if "+" in shown:
            state, kept = re.findall(r" ([\d.]+)G", row[2])[:2]
            assert shown == f"{state}G + {kept}G"
            memories.append((float(state) + float(kept)) / float(published))
            assert f"{memories[-1]:.2f}" == ratio
        else:
            found = re.search(rf" {shown} +([\d.]+)(k?)  ", row[2])
            speed = float(found[1]) * (1000 if found[2] else 1)
            sizes = dict(re.findall(r"--(batch_size|sequence|nodes) (\d+)", expand(flags)))
            batch, sequence, nodes = (int(sizes[x]) for x in ("batch_size", "sequence", "nodes"))
            ratios.append(speed / (batch * sequence / (8 * nodes) / float(published)))
            assert float(ratio) == pytest.approx(ratios[-1], abs=0.011)
    assert len(ratios) == 39 and len(memories) == 10


@pytest.mark.quick
def test_the_steps_on_slow_links(capsys):
    """The page has what plan.py prints for both bandwidths."""
    rows = re.findall(
        r"^\| .* \| `(--data .*)` \| \S+ \| \S+ \| (\S+) \| \S+ \| (\S+) \|$", PAGE, re.M
    )
    assert len(rows) == 4
    for flags, *steps in rows:
        for bandwidth, step in zip(("125e6", "12.5e6"), steps, strict=True):
            links = f"$links $links2 $links3 --within {bandwidth} --between {bandwidth} {flags}"
            assert f" {step} " in printed(links, capsys)


@pytest.mark.quick
def test_tokens_per_second_and_seconds():
    """The seconds of a published step follow from its tokens per second, its batch and its GPUs."""
    flags = r"\$mpt.*|\$llama70.*|--model.*"
    cells = rf"^\| `({flags})` \| ([\d,]+) \| ([\d.]+) \| \S+ \| \S+ \|$"
    rows = re.findall(cells, PAGE, re.M)
    assert len(rows) == 22
    for flags, speed, seconds in rows:
        sizes = [
            re.search(rf"--{name} (\d+)", flags)[1] for name in ("batch_size", "sequence", "nodes")
        ]
        batch, sequence, nodes = map(int, sizes)
        expected = batch * sequence / (8 * nodes) / float(speed.replace(",", ""))
        assert float(seconds) == pytest.approx(expected, rel=0.005)


@pytest.mark.quick
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


@pytest.mark.quick
def test_bytes_are_those_of_sharding():
    """The rows of sharding.md, in float32, where they are exact."""
    model = language(layers=4, width=256)
    size = 4 * model.parameters
    one = plan.Plan("ddp", 1, 4, 1, 1, 2, 1, 0)
    assert plan.state(model, cluster(), one) == 16 * model.parameters
    assert sent(model, one) == {"pp": 0, "dp": 2 * 3 / 4 * size, "cp": 0, "tp": 0}
    ends = 4 * 2 * 256 * 256  # the embedding and the output layer are gathered once
    assert sent(model, one._replace(data="fsdp"))["dp"] == 3 / 4 * (3 * size - ends)
    tokens = 4 * 256 * 2 * 128  # S
    split = sent(model, one._replace(dp=2, tp=2))["tp"]
    assert split == (8 * 4 + 4) * tokens / 2
    by_ring = sent(model, one._replace(dp=1, cp=4))["cp"]
    assert by_ring == 2 * 4 * (3 * 4 - 2) * (tokens / 4) / 2  # two heads share a key and a value
    staged = sent(model, one._replace(pp=2, dp=2, count=8))
    assert staged["pp"] == 8 * tokens
    replicas = sent(model, plan.Plan("hsdp", 1, 64, 1, 1, 1, 1, 0))["dp"]
    assert replicas == 7 / 8 * (3 * size - ends) + 2 * 7 / 8 * size / 8


def sent(model, one):
    """Return the bytes that a rank sends along each axis in a step of a plan."""
    return plan.judge(model, cluster(), one)["sent"]


def test_bytes_are_those_that_watch_counts():
    """In a step of language_model.py, which has two micro-batches on each of two ranks."""
    flags = ("--epochs", 1, "--precision", "full", "--clip", 0, "--device", "cpu")
    env = {"DOCUMENTS": "40"}
    jobs = ranks("watch", lesson_path("language_model"), *flags, processes=2, env=env)
    shown = "".join(job.wait().stdout for job in jobs)
    calls = re.findall(r"^all +(all_gather|reduce_scatter) +2 +\d+ +([\d,]+)", shown, re.M)
    given = [(call, int(nbytes.replace(",", ""))) for call, nbytes in calls]
    gathered = sum(nbytes for call, nbytes in given if call == "all_gather")
    scattered = sum(nbytes for call, nbytes in given if call == "reduce_scatter")
    model = plan.Model(125248, 2, 64, 4, 2, 256, 3, 128, half=4)
    planned = sent(model, plan.Plan("fsdp", 1, 2, 1, 1, 8, 2, 0))["dp"]
    # By a ring, a rank sends the chunk that it gives to an all_gather, and half of the other.
    assert planned == pytest.approx(gathered + scattered / 2, rel=1e-3)


@pytest.mark.quick
def test_slow_links_and_steps():
    """Messages take the bytes of a ring at the speed of the slowest link. A bubble is (pp-1)/m."""
    model = language()
    slow = cluster(nodes=4, gpus=1, between=12.5e6, flops=1e9, efficiency=1)
    row = plan.judge(model, slow, plan.Plan("ddp", 1, 4, 1, 1, 8, 1, 0))
    expected = 2 * 3 / 4 * 4 * model.parameters / 12.5e6
    assert row["messages"] == pytest.approx(expected, rel=0.01)
    split = plan.judge(model, slow, plan.Plan("ddp", 1, 1, 1, 4, 8, 1, 0))
    assert split["messages"] == pytest.approx(split["sent"]["tp"] / 12.5e6, rel=0.01)
    assert split["step"] == plan.judge(model, slow, split["plan"], hide=False)["step"]
    one = plan.Plan("ddp", 2, 32, 1, 1, 1, 8, 0)
    row = plan.judge(model._replace(vocabulary=1), cluster(), one)  # hardly an output layer
    busy = row["parts"]["computing"] + row["parts"]["pp"]
    assert row["parts"]["bubble"] == pytest.approx(busy / 8, rel=1e-2)
    assert row["step"] == sum(row["parts"].values())


@pytest.mark.quick
def test_all_wait_for_the_slowest_stage():
    """The last one has the output layer, unless it has a block less than others."""
    model = plan.Model(*plan.MODELS["llama3-8b"], 8192)
    one = plan.Plan("ddp", 4, 16, 1, 1, 1, 1000, 0)
    parts = plan.judge(model, cluster(within=1e18, between=1e18), one)["parts"]
    assert parts["bubble"] / parts["computing"] == pytest.approx(0.163 + 3 / 1000, abs=1e-3)
    large = plan.Model(*plan.MODELS["llama3-405b"], 8192)
    parts = plan.judge(large, cluster(within=1e18, between=1e18), one._replace(pp=16))["parts"]
    assert parts["bubble"] / parts["computing"] == pytest.approx(0.012 + 15 / 1000, abs=2e-3)


@pytest.mark.quick
def test_a_group_on_two_nodes():
    """With 6 GPUs on a node, ranks 4 to 7 split a layer, and two of them are on another node."""
    together, apart = (plan.ring(cluster(gpus=n, between=1e6), 1e9, 4, 1) for n in (8, 6))
    assert together < 0.01
    assert apart == pytest.approx(0.75 * 1e9 / 2e6, rel=1e-3)  # two GPUs send to the other node


@pytest.mark.quick
@pytest.mark.parametrize("flags", ["--between 1e5", "TINY", "TINY --tp 2", "TINY --cp 2 --pp 1"])
def test_columns(flags, capsys):
    """They stay apart with slow links, and on a small machine whose steps are short."""
    tiny = "--parameters 125248 --layers 2 --width 64 --heads 4 --kv_heads 2 --vocabulary 256"
    tiny += " --sequence 128 --half 4 --batch_size 32 --nodes 4 --gpus 1 --flops 2e10"
    tiny += " --memory 1e9 --within 1.25e7 --between 1.25e7"
    for row in printed(flags.replace("TINY", tiny), capsys).splitlines()[2:]:
        number = r" +[\d.]+[kMGT]?"
        columns = (
            rf"\w+ +\d+(x\d+){{3}} +\d+x\d+ +[01]({number}){{7}}{number}-{number[2:]}{number}  "
        )
        assert re.match(columns, row), row


@pytest.mark.quick
def test_plans_divide_what_they_must(capsys):
    """The ranks, the batch, the heads. tp stays inside a node, unless it is asked for by name."""
    model = plan.Model(*plan.MODELS["llama3-405b"], 8192)
    c = cluster(nodes=64, batch_size=512, **dict.fromkeys(plan.Plan._fields))
    plans = list(plan.sensible(model, c))
    assert len(plans) == len(set(plans)) > 500
    for each in plans:
        assert each.pp * each.dp * each.cp * each.tp == 512
        assert each.dp * each.micro * each.count == 512
        assert each.tp <= 8
    assert {1, 2, 8, 16} <= {
        each.pp for each in plans
    }  # of 126 blocks, two too few for equal stages
    assert " 1x32x1x2 " in printed("--nodes 64 --gpus 1 --tp 2 --pp 1 --cp 1", capsys)
    alone = printed("--nodes 64 --gpus 1 --pp 1 --cp 1", capsys)
    assert set(re.findall(r"\d+x\d+x\d+x\d+", alone)) == {"1x64x1x1"}
    one = printed("--nodes 1 --gpus 1 --batch_size 8", capsys)
    assert "ddp  1x1x1x1" in one and "fsdp" not in one  # one rank shards nothing


@pytest.mark.quick
@pytest.mark.parametrize(
    "flags, reason",
    [
        (
            "--nodes 3",
            "no plan of 24 ranks divides --batch_size and the model's layers and heads: try "
            "--batch_size 1008",
        ),
        ("--tp 5", "no plan of 64 ranks divides --batch_size and the model's layers and heads\n"),
        ("--batch_size 7 --pp 1 --cp 1", "no plan of 64 ranks"),
        ("--model llama3-8b --parameters 1e9", "1G parameters do not go with the model's other"),
        ("--parameters 2.5e9", "2.5G parameters do not go with the model's other sizes"),
        ("--nodes 0", "--nodes 0 must be between 1 and 1e+18"),
        ("--micro 128", "--micro 128 must be between 1 and 64"),
        ("--efficiency nan", "--efficiency nan must be between 0.001 and 1"),
        ("--efficiency 45", "--efficiency 45 must be between 0.001 and 1"),
        ("--memory 80", "--memory 80 must be between 1e+08 and 1e+18"),
        ("--flops 989", "--flops 989 must be between 1e+09 and 1e+18"),
        ("--between 400", "--between 400 must be between 100000 and 1e+18"),
        ("--data zero1", "argument --data: invalid choice: 'zero1'"),
        ("--again 0.3", "argument --again: invalid choice: 0.3"),
        ("--nodes two", "argument --nodes: invalid int value: 'two'"),
        ("--model gpt", "argument --model: invalid choice: 'gpt'"),
    ],
)
def test_wrong_flags(flags, reason, capsys):
    """They end it in one line."""
    out, line = error(flags, capsys)
    assert line.startswith(f"{plan.ArgumentParser().prog}: error: {reason}") and not out


def test_a_plot(tmp_path, capsys, monkeypatch):
    """It draws what is printed. Without matplotlib, or a folder, a line says so."""
    path = tmp_path / "plan.png"
    table = printed("--pp 2 --tp 2", capsys)
    assert printed(f"--pp 2 --tp 2 --plot {path}", capsys) == table
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "No such file" in error("--plot /nowhere/plan.png", capsys)[1]
    monkeypatch.setitem(sys.modules, "figures.charts", None)
    assert (
        "(it needs playground/pages/figures/requirements.txt)" in error(f"--plot {path}", capsys)[1]
    )


@pytest.mark.quick
def test_it_starts_at_once():
    """Neither PyTorch nor matplotlib is imported."""
    program = (
        "import sys, plan; plan.main([]); assert not {'torch', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT / "playground" / "tools", check=True)


def test_the_program_that_measures_bandwidth(tmp_path):
    """Two ranks print how fast one sends. (Between processes of a machine, this is fast.)"""
    program = re.search(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)[1]
    path = tmp_path / "bandwidth.py"
    path.write_text(program)
    outs = [job.wait() for job in ranks(path, processes=2)]
    assert [done.returncode for done in outs] == [0, 0]
    assert re.fullmatch(r"\d\.\d\de\+\d\d bytes/s\n", outs[0].stdout + outs[1].stdout)
