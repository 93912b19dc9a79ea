"""How fault_labels_of_chunks is checked."""

import torch
from judging.single import named, seeded, step
from judging.texts import VOCABULARY, Bigram, places_of
from torch.nn import functional as F

NAME = "train"
FAULT = "WRONG with 2 ranks, tokens in their order ... It differs only at [4:]."
CASES = {"tokens in their order": {"order": "plain"}, "tokens in zigzag": {"order": "zigzag"}}
STEPS = 2
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}
STARTS = True
HINTS = """
How many labels does a row have with one rank, and how many with two, on both ranks together? Which
ones are missing?

The label of a rank's token may be a token of another rank. All ranks have whole rows, so shift the
labels first, and take those of this rank's places afterwards. F.pad(tensor, (0, 1), value=-100)
adds a column, and F.cross_entropy leaves out the label -100.

mine = this rank's places
following = the rows without their first tokens, and with -100 for the last ones
inputs = rows[:, mine], labels = following[:, mine]
"""


def whole(world_size, order):
    tokens = 4 * world_size + 1
    generator = torch.Generator().manual_seed(tokens)
    rows = torch.randint(VOCABULARY, (3, tokens), generator=generator)
    return rows, places_of(order, tokens, world_size)


def run(train, rank, world_size, order):
    model = seeded(Bigram)
    rows, places = whole(world_size, order)
    train(model, rows, places, STEPS)
    return named(model)


def expected(rank, world_size, order):
    model = seeded(Bigram)
    rows, _ = whole(world_size, order)
    for _ in range(STEPS):
        step(model, F.cross_entropy(model(rows[:, :-1]), rows[:, 1:]))
    return named(model)


REPAIR = (
    "own = rows[:, places[dist.get_rank()]]",
    "mine = places[dist.get_rank()]\n"
    "    following = F.pad(rows[:, 1:], (0, 1), value=-100)  # the last token has no label",
    "own[:, :-1]",
    "rows[:, mine]",
    "own[:, 1:]",
    "following[:, mine]",
)
WHY = "the label of a chunk's last token is on another rank, so shift before the split."
LABELS = "following[:, mine]"
WORDS = {
    "CRASH.*IndexError": "The last token of a row has no label.",
    "WRONG, tokens in zigzag": "In zigzag, a rank has two chunks. What follows the last token of "
    "each may be on another rank.",
}
NO_LABEL, ZIGZAG = WORDS.values()
MISTAKES = {
    "WRONG with 2 ranks, tokens in their order": (LABELS, "rows[:, mine]"),
    NO_LABEL: ("F.pad(rows[:, 1:], (0, 1), value=-100)", "rows[:, 1:]"),
    ZIGZAG: (LABELS, "following[:, mine[0] : mine[0] + len(mine)]"),
}
