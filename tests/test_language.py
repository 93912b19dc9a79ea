"""The text that every Python has, and the language model that reads it."""

import sys
from pydoc_data.topics import topics

import pytest
import torch
from torch.nn import functional as F

from common.data import ROW, fetch, load
from common.language import RotaryAttention, rotate
from common.models import Language


def test_the_rows_are_the_documents():
    """Each byte has the next one as its label. The last tenth of the documents is the test set."""
    train_set, test_set = load("text", "no folder")
    texts = [topics[name] for name in sorted(topics)]
    last = len(texts) // 10
    for part, own in ((train_set, texts[:-last]), (test_set, texts[-last:])):
        rows, labels = part[:]
        assert rows.dtype == labels.dtype == torch.int64
        assert rows.shape == labels.shape == (len(part), ROW)
        read = bytes([*rows.flatten(), labels[-1, -1]])
        text = "\0".join(own).encode()
        assert text.startswith(read)
        assert len(text) - len(read) < ROW
        assert labels.flatten()[:-1].equal(rows.flatten()[1:])


def test_a_python_without_the_text(monkeypatch):
    """It ends in one line."""
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(
        SystemExit, match=r"^error: --model language needs .* which is missing here$"
    ):
        fetch("text", "no folder")


def test_scores_depend_on_the_distance():
    """A query at position 7 and a key at 4 have the score of those at 103 and 100."""
    query, key = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def score(first, second):
        """Return the product of the query and the key at these positions."""
        turned = rotate(query, torch.tensor([first])) * rotate(key, torch.tensor([second]))
        return turned.sum()

    torch.testing.assert_close(score(103, 100), score(7, 4))
    assert (score(7, 4) - score(7, 5)).abs() > 1e-3
    torch.testing.assert_close(rotate(query, torch.tensor([0])), query)


def test_attention_in_groups():
    """Heads 0 and 1 have the first key and value, heads 2 and 3 the second."""
    attention = RotaryAttention(16, heads=4, groups=2)
    tokens = torch.randn(3, 5, 16)
    positions = torch.arange(5)
    read = []
    for head in range(4):
        own = slice(4 * head, 4 * head + 4)
        shared = slice(4 * (head // 2), 4 * (head // 2) + 4)
        query = rotate(attention.query(tokens)[..., None, :, own], positions)
        key = rotate(attention.key(tokens)[..., None, :, shared], positions)
        value = attention.value(tokens)[..., None, :, shared]
        scores = query @ key.mT / 2  # the root of 4, the numbers of a head
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
        read.append((scores.softmax(-1) @ value).squeeze(1))
    torch.testing.assert_close(attention(tokens), attention.output(torch.cat(read, -1)))


def test_the_model():
    """Logits of the next byte at each position. They do not depend on later bytes."""
    model = Language()
    models = (model, Language(tied=True))
    numbers = [sum(each.numel() for each in one.parameters()) for one in models]
    assert numbers == [125_248, 108_864]
    rows = torch.randint(256, (2, 9))
    logits = model(rows)
    assert logits.shape == (2, 256, 9)
    torch.testing.assert_close(model(rows[:, :4]), logits[..., :4])
    # At the start, no byte is much likelier than the others, so the loss is log(256) = 5.5.
    assert F.cross_entropy(logits, rows).item() == pytest.approx(5.5, abs=1)
