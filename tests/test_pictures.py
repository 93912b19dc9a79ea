"""The pictures are drawn from what a run counts, and drawing them again changes nothing."""

import json
import re

import pytest
from conftest import ROOT, run

from figures import overlap
from figures.pictures import FIGURES, PICTURES, count
from figures.schedules import bubble, logical_time, stages_on_a_rank

COUNTS = json.loads((FIGURES / "pictures.json").read_text())
LAYER = 4 * (784 * 784 + 784)  # bytes of a hidden layer of that model
COUNTED = ("holds", "data_parallel", "ring", "fsdp", "schedules", "tensor", "mesh")
COUNTED += ("split", "context", "experts", "parts")


def test_all_pictures_have_counts():
    """Each picture has its counts, and is counted again below, or timed (test_sending_less.py)."""
    assert set(PICTURES) == set(COUNTS) == {*COUNTED, "waits", "overlap", "sending_less"}


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
    """Both ranks make the calls of the picture, in which one waits while the other sleeps.

    In a new run, on a busy machine, other calls may take long, too.
    """
    again = count(["waits"])["waits"]
    both = {(0, "asleep"), (0, "computing"), (1, "computing")}
    expected = {
        "rank 0 is late": {(0, "asleep"), (1, "recv")},
        "rank 1 is late": {(0, "send"), (1, "asleep")},
        "blocking": both | {(1, "recv")},
        "nonblocking": both,
    }
    assert again.keys() == COUNTS["waits"].keys() == expected.keys()
    for exchange, rows in COUNTS["waits"].items():
        assert long_calls(rows) == expected[exchange]
        assert long_calls(again[exchange]) >= expected[exchange]
        assert calls(again[exchange]) == calls(rows)


def long_calls(rows):
    """Return the ranks and calls that took long."""
    return {(rank, call) for rank, call, start, end in rows if end - start > 0.1}


def test_the_messages_of_a_traced_step(monkeypatch):
    """As many messages as in the picture, where several of them start during backward()."""

    def forked(words, **_):  # torchrun's ranks, without torchrun
        return run(words[6], *words[7:], processes=2)

    monkeypatch.setattr(overlap.subprocess, "run", forked)
    again = overlap.count((*overlap.WIDE, "--epochs", "1"))
    for steps in (COUNTS["overlap"], again):
        assert [len(step["messages"]) for step in steps.values()] == [5, 1]
    several, one = COUNTS["overlap"].values()
    early = [start for start, _ in several["messages"] if start < several["backward"][1]]
    assert len(early) >= 3
    # A single message starts with the last gradient, when backward() is about to end.
    assert one["messages"][0][0] > sum(one["backward"]) / 2


@pytest.mark.parametrize("name", PICTURES)
def test_drawing_again_changes_nothing(name, tmp_path):
    """The picture shows its counts, has no date in it, and is small."""
    PICTURES[name].draw(COUNTS[name], tmp_path / "again.svg")
    again = (tmp_path / "again.svg").read_text()
    committed = (FIGURES / f"{name}.svg").read_text()
    # Versions of matplotlib name things differently, and may place them a little differently.
    assert re.findall(">(.+)</text>", again) == re.findall(">(.+)</text>", committed)
    assert places(again) == pytest.approx(places(committed), abs=6)
    assert len(committed) < 65_000
    assert "dc:date" not in committed


def places(picture):
    """Return the numbers in the paths of an SVG."""
    paths = " ".join(re.findall(' d="(.+?)"', picture, re.S))
    return [float(number) for number in re.findall(r"[\d.]+", paths)]


def test_what_the_titles_say():
    """Some say what is equal or least, without a number."""
    assert all(len(moment["whole"]) == 1 for moment in COUNTS["fsdp"]["freed"])
    sent = {way: count["sent"] for way, count in COUNTS["split"].items()}
    assert min(sent, key=sent.get) == "ulysses"
    work = set()
    for steps in COUNTS["context"]["zigzag"]["blocks"]:
        work.add(sum(len(queries) * len(keys) for queries, keys in steps))
    assert len(work) == 1


def test_the_schedules_of_the_picture():
    """1F1B has GPipe's bubble, two stages on a rank halve it, and split backward passes fill it.

    As the page says, rank 0 keeps the activations of 8 micro-batches, and with 1F1B of 4.
    """
    bubbles = []
    most_kept = []
    for name, orders in COUNTS["schedules"].items():
        stages = 2 if name.startswith("Interleaved") else 1
        assert stages_on_a_rank(orders) == stages
        spans = logical_time(orders, stages)
        assert all(span.start >= 0 for span in spans)
        assert len(spans) == sum(len(order.split()) for order in orders)
        bubbles.append(bubble(spans, 4))
        kept = [0]
        for word in orders[0].split():
            change = 1 if "F" in word else -1
            kept.append(kept[-1] + change)
        most_kept.append(max(kept))
    assert bubbles[:3] == pytest.approx([3 / 11, 3 / 11, 1.5 / 9.5])
    assert bubbles[3] < bubbles[2]
    assert most_kept[:2] == [8, 4]


def test_the_bytes_of_a_mesh():
    """sharding.md has those of a step with 120 images. The picture has 128."""
    page = " ".join((ROOT / "playground" / "pages" / "sharding.md").read_text().split())
    pattern = r"with 120 images takes ([\d,]+) bytes of each rank along tp and ([\d,]+) along dp"
    [said] = re.findall(pattern, page)
    tp, dp = [int(number.replace(",", "")) for number in said]
    sent = COUNTS["mesh"][0]["sent"]
    assert sent["tp"] == [tp * 128 // 120] * 4
    assert sent["dp"] == [dp] * 4
