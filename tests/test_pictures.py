"""The pictures are drawn from what a run counts, and drawing them again changes nothing."""

import json
import re
import sys
import time
from functools import partial

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import ROOT, Job
from matplotlib.testing.compare import compare_images
from PIL import Image

from figures import counts, pictures
from figures.counts import IN_RANKS, WIDE, count, in_ranks, time_overlap
from figures.pictures import DRAW, FIGURES, logical_time, stages_on_a_rank
from figures.timeline import Calls, bubble

COUNTS = json.loads((FIGURES / "pictures.json").read_text())
KEPT = ("parameters", "gradients", "Adam's averages")
LAYER = 4 * (784 * 784 + 784)  # bytes of a hidden layer of that model
COUNTED = ("holds", "data_parallel", "ring", "fsdp", "schedules", "tensor", "mesh")
COUNTED += ("split", "context", "experts", "axes")


@pytest.fixture(autouse=True)
def forked(monkeypatch):
    """Fork the ranks that count, so that they need not import PyTorch."""
    monkeypatch.setattr(mp, "spawn", partial(mp.start_processes, start_method="fork"))


def test_all_pictures_have_counts():
    """Each picture can be drawn, has its counts, and is counted or timed in a run."""
    counted = {name for functions in IN_RANKS.values() for name in functions}
    assert set(DRAW) == set(COUNTS) == counted | {"overlap"}


def test_the_counts_are_those_of_a_run():
    """Everything that is no time is counted again: bytes, messages and orders are equal.

    PyTorch 2.9 frees gradients that FSDP has sent at any time after their message, so its buffers
    are two or three layers.
    """
    again = json.loads(json.dumps(count(COUNTED)))
    for way in ("FSDP", "HSDP"):
        for held, before in zip(again["holds"][way], COUNTS["holds"][way], strict=True):
            assert 2 * LAYER <= held["buffers"] <= 3 * LAYER
            held["buffers"] = before["buffers"]
    for name in COUNTED:
        assert again[name] == COUNTS[name], name


def calls(rows):
    """Return the calls of each rank in their order, without the times."""
    by_rank = {0: [], 1: []}
    for rank, kind, _, _ in sorted(rows, key=lambda row: row[2:]):  # by start and end
        by_rank[rank].append(kind)
    return by_rank


def test_who_waits_in_which_call():
    """Both ranks make the calls of the picture in the same order."""
    again = count(["waits"])["waits"]
    assert again.keys() == COUNTS["waits"].keys()
    for exchange, rows in again.items():
        assert calls(rows) == calls(COUNTS["waits"][exchange])
    assert calls(again["rank 0 is late"]) == {0: ["asleep", "send"], 1: ["recv"]}
    assert calls(again["nonblocking"])[1] == ["computing", "wait", "wait"]


def test_the_waiting_of_the_picture():
    """A rank waits while the other one sleeps, but not with non-blocking calls."""
    long = {}
    for exchange, rows in COUNTS["waits"].items():
        long[exchange] = {(row[0], row[1]) for row in rows if row[3] - row[2] > 0.4}
    assert long["rank 0 is late"] == {(0, "asleep"), (1, "recv")}
    assert long["rank 1 is late"] == {(0, "send"), (1, "asleep")}
    both = {(0, "asleep"), (0, "computing"), (1, "computing")}
    assert long["blocking"] == both | {(1, "recv")}
    assert long["nonblocking"] == both


def test_the_messages_of_a_traced_step(monkeypatch):
    """As many messages as in the picture, and several of them start during backward()."""

    def forked(words, **_):
        return Job(*words[1:], cold=False).wait()

    monkeypatch.setattr(counts.subprocess, "run", forked)
    again = time_overlap((*WIDE, "--epochs", "1"))
    for steps in (COUNTS["overlap"], again):
        several, one = steps.values()
        assert (len(several["messages"]), len(one["messages"])) == (5, 1)
        early = [start for start, _ in several["messages"] if start < several["backward"][1]]
        assert len(early) >= (3 if steps is COUNTS["overlap"] else 1)  # other work may delay them
        # A single message starts with the last gradient, when backward() is about to end.
        start, _ = one["messages"][0]
        first, last = one["backward"]
        assert start > (first + last) / 2


@pytest.mark.parametrize("name", DRAW)
def test_drawing_again_changes_nothing(name, tmp_path):
    """The picture shows its counts, has no date in it, and is small."""
    committed = FIGURES / f"{name}.png"
    DRAW[name](COUNTS[name], tmp_path / "1.png")
    DRAW[name](COUNTS[name], tmp_path / "2.png")
    assert (tmp_path / "1.png").read_bytes() == (tmp_path / "2.png").read_bytes()
    # The letters may differ a little between versions of matplotlib.
    assert compare_images(committed, tmp_path / "1.png", tol=5) is None
    assert committed.stat().st_size < 120_000
    with Image.open(committed) as image:
        assert image.width == 1000 and not image.info.keys() & {"Software", "date"}


def test_a_picture_of_other_counts_differs(tmp_path):
    """The comparison above sees a chunk that has not been added."""
    other = json.loads(json.dumps(COUNTS["ring"]))
    other["held"][2][3][1] = "0"
    DRAW["ring"](other, tmp_path / "ring.png")
    assert compare_images(FIGURES / "ring.png", tmp_path / "ring.png", tol=1) is not None


def gpipe(ranks, micro_batches):
    """Return the order of GPipe with one stage on each rank."""
    orders = []
    for rank in range(ranks):
        words = [f"{rank}F{number}" for number in range(micro_batches)]
        words += [f"{rank}B{number}" for number in range(micro_batches)]
        orders.append(" ".join(words))
    return orders


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 2), (2, 8), (4, 8), (3, 12)])
def test_logical_time_has_the_bubble_of_the_formula(ranks, micro_batches):
    """(p-1)/(m+p-1), for GPipe. The counted order of GPipe is this order."""
    orders = gpipe(ranks, micro_batches)
    spans = logical_time(orders, 1)
    expected = (ranks - 1) / (micro_batches + ranks - 1)
    assert bubble(spans, ranks) == pytest.approx(expected)
    if (ranks, micro_batches) == (4, 8):
        assert orders == COUNTS["schedules"]["GPipe"]


def test_the_bubbles_of_the_picture():
    """1F1B has GPipe's bubble, two stages on a rank halve it, and split backward passes fill it."""
    stages = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "InterleavedZeroBubble": 2}
    bubbles = []
    for name, orders in COUNTS["schedules"].items():
        spans = logical_time(orders, stages[name])
        assert all(span.start >= 0 for span in spans)
        assert len(spans) == sum(len(order.split()) for order in orders)
        bubbles.append(bubble(spans, 4))
    assert bubbles[:3] == pytest.approx([3 / 11, 3 / 11, 1.5 / 9.5])
    assert bubbles[3] < bubbles[2]


def test_orders_that_wait_for_each_other():
    """A rank that waits for what comes later on another rank is an error, and no endless loop."""
    with pytest.raises(AssertionError, match="all ranks wait for each other"):
        logical_time(["0B0 0F0", "1F0 1B0"], 1)


def test_the_activations_of_1f1b():
    """As the page says, rank 0 keeps those of four micro-batches at most; with GPipe, of eight."""
    for name, most in (("GPipe", 8), ("1F1B", 4)):
        kept = [0]
        for word in COUNTS["schedules"][name][0].split():
            change = 1 if "F" in word else -1
            kept.append(kept[-1] + change)
        assert max(kept) == most


def test_the_bytes_of_a_mesh():
    """sharding.md has those of a step with 120 images. The picture has 128."""
    page = " ".join((ROOT / "playground" / "pages" / "sharding.md").read_text().split())
    pattern = r"with 120 images takes ([\d,]+) bytes of each rank along tp and ([\d,]+) along dp"
    [said] = re.findall(pattern, page)
    tp, dp = [int(number.replace(",", "")) for number in said]
    sent = COUNTS["mesh"][0]["sent"]
    assert sent["tp"] == [tp * 128 // 120] * 4
    assert sent["dp"] == [dp] * 4


@pytest.mark.parametrize(
    ("way", "ranks"), [("DDP", 1), ("HSDP", 2), ("FSDP", 4), ("tensor", 4), ("pipeline", 4)]
)
def test_what_is_split_among_so_many_ranks(way, ranks):
    """Parameters, gradients and Adam's averages."""
    whole = sum(COUNTS["holds"]["one process"][0][kind] for kind in KEPT)
    for held in COUNTS["holds"][way]:
        assert sum(held[kind] for kind in KEPT) == pytest.approx(whole / ranks, rel=0.02)


def test_the_buffers_of_the_page():
    """DDP's are as large as all parameters. ZeRO 1 adds a shard, and FSDP needs three layers."""
    held = COUNTS["holds"]
    model = held["one process"][0]["parameters"]
    assert held["one process"][0]["buffers"] == 0
    for rank in range(4):
        assert held["DDP"][rank]["buffers"] == model
        assert held["ZeRO 1"][rank]["buffers"] == pytest.approx(1.25 * model, rel=1e-5)
        assert held["FSDP"][rank]["buffers"] == held["HSDP"][rank]["buffers"] == 3 * LAYER


def test_the_step_of_the_picture():
    """Both ranks have other images and another gradient, and the same w, before and after."""
    step = COUNTS["data_parallel"]
    assert len({*step["images"][0], *step["images"][1]}) == 8
    for name in ("drawn", "own gradient"):
        assert step[name][0] != step[name][1]
    for name in ("sent", "gradient", "updated"):
        assert step[name][0] == step[name][1]
    assert step["sent"][0] == step["drawn"][0]
    assert step["gradient"][0] == pytest.approx(sum(step["own gradient"]) / 2, abs=1e-4)
    assert abs(step["updated"][0] - step["sent"][0]) == pytest.approx(1e-3, abs=1e-4)


def test_which_layers_are_whole():
    """The one that computes; with --keep_weights those from the forward to the backward pass."""
    moments = [("forward", layer) for layer in range(1, 9)]
    moments += [("backward", layer) for layer in range(8, 0, -1)]
    for name in ("freed", "kept"):
        rows = COUNTS["fsdp"][name]
        assert [(row["direction"], row["computes"]) for row in rows] == moments
        for row in rows:
            layer = row["computes"]
            assert row["whole"] == ([layer] if name == "freed" else list(range(1, layer + 1)))
    assert not any(row["buffer"] for row in COUNTS["fsdp"]["kept"][8:])


def test_the_bytes_of_the_pair():
    """Forward it is y that is added, and backward the gradient of x: four bytes a number."""
    tensor = COUNTS["tensor"]
    for direction, name in (("forward", "y"), ("backward", "x")):
        images, features = tensor[name]
        assert tensor[direction] == [1, 4 * images * features]


def test_the_stages_on_a_rank():
    """They are read from the orders."""
    for name, orders in COUNTS["schedules"].items():
        assert stages_on_a_rank(orders) == (2 if name.startswith("Interleaved") else 1)


def sleep_and_meet():
    """Sleep, compute and wait, once while it is noted and once afterwards."""
    sleep = time.sleep
    with Calls(computing=rest) as noted:
        time.sleep(0.01)
        rest()
        dist.barrier()
        with pytest.raises(ZeroDivisionError):
            rest(0)
    assert time.sleep is sleep
    rest()
    return [[span.rank, span.kind] for span in noted.of_all_ranks()]


def rest(number=1):
    """Sleep, which is not noted inside another call."""
    time.sleep(0.01 / number)


def test_noting_calls():
    """Only the outer call is noted, an error as well, and afterwards nothing is."""
    found = in_ranks({"calls": sleep_and_meet}, 2)["calls"]
    for rank in (0, 1):
        kinds = [kind for each, kind in found if each == rank]
        assert [kind for kind in kinds if kind != "wait"] == ["asleep", "computing", "computing"]


def test_the_command(tmp_path, monkeypatch, capsys):
    """It draws the pictures that are named, and refuses a name that it does not know."""
    monkeypatch.setattr(pictures, "FIGURES", tmp_path)
    monkeypatch.setattr(sys, "argv", ["pictures.py", "--keep", "tensor", "mesh"])
    pictures.main()
    assert {path.name for path in tmp_path.iterdir()} == {"tensor.png", "mesh.png"}
    monkeypatch.setattr(sys, "argv", ["pictures.py", "nothing"])
    with pytest.raises(SystemExit) as end:
        pictures.main()
    assert end.value.code == 2
    assert "there is no picture nothing: choose from holds" in capsys.readouterr().err


def test_counts_are_kept_beside_the_pictures(tmp_path, monkeypatch):
    """Counting one picture leaves the counts of the others as they are."""
    path = tmp_path / "pictures.json"
    path.write_text(json.dumps(COUNTS))
    monkeypatch.setattr(pictures, "FIGURES", tmp_path)
    monkeypatch.setattr(pictures, "COUNTS", path)
    again = {"tensor": COUNTS["tensor"] | {"forward": [1, 4]}}
    monkeypatch.setattr(sys, "argv", ["pictures.py", "tensor"])
    monkeypatch.setattr(pictures, "count", lambda names: again)
    pictures.main()
    assert json.loads(path.read_text()) == COUNTS | again
