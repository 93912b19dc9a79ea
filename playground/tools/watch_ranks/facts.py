"""Compares results, and tells how they differ: where, and what is there instead.

A result is a tensor, a number, a text, None, or a list or dict of results. Each rank has one.
difference() shows the first difference. facts() puts into words what all of them have in common.
"""

import itertools
import math
import re
from dataclasses import dataclass

import torch

from watch_ranks.terminal import ranks_in_words

SHOWN = 8  # numbers of a tensor that are shown
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}  # by how much numbers may differ, unless told otherwise
MOST = 3  # facts that are told
MISSING = object()  # differs from every result


def difference(actual, expected, tolerance=TOLERANCE):
    """Return the first difference of a result from what is expected, or None.

    Tensors need the same shape and dtype. Lists and dicts are compared entry by entry.

    Returns:
        three texts: the place in the result (empty: all of it), what is there, what is expected.
    """
    for path, left, right in wrong_leaves(actual, expected, tolerance):
        place, left_text, right_text = difference_of_leaves(left, right, tolerance)
        return ", ".join([*path, place] if place else path), left_text, right_text
    return None


def first_wrong(results, expected, tolerance=TOLERANCE):
    """Return the rank at which something is wrong first, in the order of the results; or None.

    What follows from a wrong result may be wrong on other ranks, and that one right.
    """
    places = {}
    for rank in sorted(expected):
        found = leaves(results[rank], expected[rank])
        wrong = [not close(*each[1:], tolerance) for each in found]
        if any(wrong):
            places[rank] = wrong.index(True)
    return min(places, key=places.get, default=None)


def leaves(actual, expected, path=()):
    """Return (path, actual, expected) of each tensor, number or text of a result.

    A list or dict is one leaf if it has different entries than are expected.
    """
    pairs = entries(actual, expected)
    if pairs is None:
        return [(path, actual, expected)]
    found = []
    for name, left, right in pairs:
        found += leaves(left, right, (*path, name))
    return found


def entries(actual, expected):
    """Return (name, actual, expected) of each entry of a list or dict; None: they do not fit."""
    if isinstance(expected, (list, tuple)):
        if not isinstance(actual, (list, tuple)) or len(actual) != len(expected):
            return None
        names = [f"entry {number}" for number in range(len(expected))]
        return list(zip(names, actual, expected, strict=True))
    if isinstance(expected, dict):
        if not isinstance(actual, dict) or actual.keys() != expected.keys():
            return None
        return [(str(key), actual[key], expected[key]) for key in expected]
    return None


def wrong_leaves(actual, expected, tolerance):
    """Return the leaves of a result that differ. See leaves."""
    return [each for each in leaves(actual, expected) if not close(*each[1:], tolerance)]


def close(actual, expected, tolerance):
    """Return whether two leaves are equal. Floats may differ a little, dtypes may not."""
    if isinstance(expected, torch.Tensor):
        if not isinstance(actual, torch.Tensor):
            return False
        if actual.shape != expected.shape or actual.dtype != expected.dtype:
            return False
        return torch.allclose(actual, expected, equal_nan=True, **tolerance)
    if isinstance(expected, float) and isinstance(actual, (int, float)):
        relative, absolute = tolerance["rtol"], tolerance["atol"]
        return math.isclose(actual, expected, rel_tol=relative, abs_tol=absolute)
    if isinstance(actual, torch.Tensor) and actual.numel() != 1:
        return False
    if isinstance(expected, (list, tuple, dict)):  # entries() has found them different
        return False
    return bool(actual == expected)


def difference_of_leaves(actual, expected, tolerance):
    """Return the difference of two leaves as three texts. See difference."""
    if not isinstance(expected, torch.Tensor):
        return "", in_words(actual), in_words(expected)
    shape = f"a tensor of shape {tuple(expected.shape)}"
    if not isinstance(actual, torch.Tensor):
        return "", in_words(actual), shape
    if actual.shape != expected.shape:
        return "", f"a tensor of shape {tuple(actual.shape)}", shape
    if actual.dtype != expected.dtype:
        return "", f"numbers of {actual.dtype}", f"numbers of {expected.dtype}"
    same = torch.isclose(actual, expected, equal_nan=True, **tolerance).flatten()
    first = same.int().argmin().item()
    start = 0 if first < SHOWN else first
    place = f"from position {start}" if start else ""
    return place, numbers(actual, start), numbers(expected, start)


def in_words(value):
    """Return a result as short text."""
    if isinstance(value, torch.Tensor):
        return numbers(value)
    if isinstance(value, list):
        shown = ", ".join(in_words(each) for each in value[:SHOWN])
        return f"[{shown}]" if len(value) <= SHOWN else f"[{shown}, ...]"
    return str(value)[:100]


def numbers(tensor, start=0):
    """Return the numbers of a tensor from a position on, as short text."""
    flat = tensor.flatten()[start:]
    shown = ", ".join(f"{number:.6g}" for number in flat[:SHOWN].tolist())
    return f"[{shown}]" if len(flat) <= SHOWN else f"[{shown}, ...]"


def where(actual, expected, tolerance, start=None):
    """Return where a tensor differs: "at [3:6]", as Python writes it; "" if in most places.

    What is 0, or has been right at the start, tells nothing.
    """
    if getattr(actual, "shape", None) != getattr(expected, "shape", ()) or not actual.ndim:
        return ""
    wrong = ~torch.isclose(actual.double(), expected.double(), equal_nan=True, **tolerance)
    if start is None or start.shape != expected.shape:
        start = torch.zeros_like(expected)
    if not wrong.any() or (wrong | (expected == start) | (expected == 0)).all():
        return ""
    found = {}
    for axis in range(wrong.ndim):
        rows = wrong.movedim(axis, 0).flatten(1) if wrong.ndim > 1 else wrong[:, None]
        places = rows.any(1).nonzero().flatten().tolist()
        text = slice_in_words(places, len(rows))
        if text:
            found[len(places) / len(rows)] = f"at [{':, ' * axis}{text}]"
    if not found and 2 * wrong.sum() < wrong.numel():
        return f"in {wrong.sum()} of {wrong.numel()} numbers"
    return found[min(found)] if found else ""


def slice_in_words(places, length):
    """Return places on an axis as Python's slice; "" if they are the whole axis, or no slice."""
    first, last = places[0], places[-1]
    if len(places) == 1 and length > 1:
        return "-1" if first == length - 1 else str(first)
    step = places[1] - first if len(places) > 2 else 1
    if len(places) == length or places != list(range(first, last + 1, step)):
        return ""
    end = "" if last + step >= length else last + 1
    return f"{first or ''}:{end}" + (f":{step}" if step > 1 else "")


@dataclass
class Leaf:
    """A wrong tensor or number of one rank, and what all ranks have in its place.

    Attributes:
        rank: the rank that is looked at.
        tolerance: by how much numbers may differ.
        actual: what each rank has, as float64; no entry for what is no number.
        expected: what it should have.
        start: what it had at first; no entry if that is not known.
        others: what this rank's other results are, by words.
    """

    rank: int
    tolerance: dict[str, float]
    actual: dict[int, torch.Tensor]
    expected: dict[int, torch.Tensor]
    start: dict[int, torch.Tensor]
    others: dict[str, torch.Tensor]

    @property
    def ranks(self):
        """The number of ranks that should have numbers here."""
        return len(self.expected)

    def near(self, left, right):
        """Return whether two tensors are equal."""
        both = left is not None and right is not None and left.shape == right.shape
        return both and torch.allclose(left, right, **self.tolerance)

    def own(self):
        """Return what this rank has, what it should have, and what it had at first, or None."""
        return [table.get(self.rank) for table in (self.actual, self.expected, self.start)]

    def factor(self, start):
        """Return by which factor all wrong ranks have changed too far since a start, or None.

        With the factor comes what it leaves unexplained, from 0 (nothing) to 1.
        """
        lefts = [torch.zeros(0)]
        rights = [torch.zeros(0)]
        for rank, right in self.expected.items():
            left = self.actual.get(rank)
            before = start.get(rank, torch.zeros_like(right))
            if left is None or not left.shape == right.shape == before.shape:
                return None
            if not self.near(left, right):
                lefts.append((left - before).flatten())
                rights.append((right - before).flatten())
        left, right = torch.cat(lefts), torch.cat(rights)
        if not left.isfinite().all() or not left.any() or self.near(right.min(), right.max()):
            return None  # constant numbers are so many times as large by chance
        factor = (left @ right / (right @ right)).item()
        if factor and torch.allclose(left, factor * right, rtol=1e-4, atol=1e-6):
            return factor, 0
        return factor, ((left - factor * right).norm() / left.norm()).item()

    def part(self, mask):
        """Return some of the numbers."""
        tables = []
        for table in (self.actual, self.expected, self.start):
            fits = {rank: each for rank, each in table.items() if each.shape == mask.shape}
            tables.append({rank: each[mask] for rank, each in fits.items()})
        return Leaf(self.rank, self.tolerance, *tables, {})


def facts(results, expected, tolerance=TOLERANCE, start=None):
    """Return what is known about wrong results, in at most 3 sentences.

    "It" is the first difference of first_wrong(). "Only" and "right" are said of all ranks.

    Args:
        results: what each rank has: a dict from the rank to its result.
        expected: what it should have.
        tolerance: by how much numbers may differ.
        start: what it had at first, if that is known.
    """
    rank = first_wrong(results, expected, tolerance)
    if rank is None:
        return []
    wrong = {}
    for each in sorted(expected):
        found = wrong_leaves(results[each], expected[each], tolerance)
        wrong[each] = [path for path, _, _ in found]
    names = [", ".join(path) for paths in (wrong[rank], *wrong.values()) for path in paths]
    tables = [by_path(values, expected) for values in (results, expected, start or {})]
    found = [leaf_at(path, rank, tables, tolerance) for path in wrong[rank]]
    before = tables[2].get(rank, {})
    right = []
    for path, _, value in leaves(results[rank], expected[rank]):
        changed = value is not None and not close(before.get(path, MISSING), value, tolerance)
        if changed and ", ".join(path) not in names:
            right.append(", ".join(path))
    sentences = [
        what_it_is(found) or (not over_the_ranks(found[0]) and about(found[0])),
        over_the_ranks(found[0]),
        what_is_right(list(dict.fromkeys(names)), right),
        which_ranks([rank for rank, paths in wrong.items() if not paths]),
    ]
    return [each for each in sentences if each][:MOST]


def by_path(values, expected):
    """Return for each rank a dict from the path of each leaf to its value."""
    found = {}
    for rank, value in values.items():
        found[rank] = {path: left for path, left, _ in leaves(value, expected[rank])}
    return found


def leaf_at(path, rank, tables, tolerance):
    """Return the Leaf at a path. The tables have what is there, what should be, and what was."""
    across = []
    for table in tables:
        found = {each: as_numbers(values.get(path)) for each, values in table.items()}
        across.append({each: value for each, value in found.items() if value is not None})
    others = {}
    for words, table in (("should be", tables[1]), ("was at first", tables[2])):
        for other, value in table.get(rank, {}).items():
            if other != path:
                others[f"`{', '.join(other)}` {words}"] = as_numbers(value)
    return Leaf(rank, tolerance, *across, others)


def as_numbers(value):
    """Return a tensor or number as a float64 tensor; None: it is neither."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = torch.tensor(value)
    return value.detach().double() if isinstance(value, torch.Tensor) else None


def what_it_is(wrong):
    """Return a sentence: what the first of some Leafs is like, or else where it differs."""
    first = wrong[0]
    found, *others = [phrases(leaf) for leaf in wrong]
    for phrase in found if others else ():
        if all(phrase in other for other in others):
            return f"It {phrase}, like all that is wrong."
    actual, expected, start = first.own()
    if found and (expected.numel() > 1 or found[0] == "is unchanged"):  # not one number's chance
        return f"It {found[0]}."
    part = where(actual, expected, first.tolerance, start)
    if not part:
        return None
    wrong_part = first.part(~torch.isclose(actual, expected, equal_nan=True, **first.tolerance))
    there = phrases(wrong_part) if wrong_part.expected[first.rank].numel() > 1 else []
    return f"It differs only {part}, and {there[0]} there." if there else f"It differs only {part}."


def phrases(leaf):
    """Return what a Leaf is like, the most telling first. Each phrase holds for all its numbers."""
    actual, expected, start = leaf.own()
    if actual is None or expected is None or actual.shape != expected.shape:
        return []
    found = ["is unchanged"] if leaf.near(actual, start) else []
    if leaf.near(actual, expected):
        found.append("has the right numbers, in another dtype")
    if not actual.any():
        found.append("is 0")
    others = {f"rank {rank} should have": value for rank, value in leaf.expected.items()}
    others |= {f"rank {rank} had at first": value for rank, value in leaf.start.items()}
    for words, value in (others | leaf.others).items():
        if leaf.near(actual, value) and not words.startswith(f"rank {leaf.rank} "):
            found.append(f"is what {words}")
    found += order_phrases(leaf, actual, expected) + sum_phrases(leaf, actual)
    starts = {"changes by": leaf.start, "is": {}} if leaf.start else {"is": {}}
    for verb, start in starts.items():
        factor, rest = leaf.factor(start) or (0, 1)
        words = factor_in_words(factor, leaf.ranks) if rest == 0 else None
        found += [f"{verb} {words}"] if words else []
    return found


def factor_in_words(factor, ranks):
    """Return a factor in words, if it is -1, or a whole number up to 100, or one divided by it."""
    if math.isclose(factor, -1, rel_tol=1e-4):
        return "what is expected, with the opposite sign"
    for number, words in (
        (factor, "{} times what is expected{}"),
        (1 / factor, "what is expected, divided by {}{}"),
    ):
        whole = round(number)
        if 1 < whole <= 100 and math.isclose(number, whole, rel_tol=1e-4):
            return words.format(whole, f", with {ranks} ranks" if whole == ranks else "")
    return None


def about(leaf):
    """Return a sentence: how far a Leaf is from what is expected, or by which factor; or None."""
    factor, rest = leaf.factor(leaf.start) or (0, 1)
    if rest > 0.6 or leaf.expected[leaf.rank].numel() < 4:
        return None
    if 0.9 < factor < 1.1:
        subject = "Its change" if leaf.start else "It"
        return (
            f"{subject} differs by about {math.hypot(factor - 1, rest):.0%} from what is expected."
        )
    verb = "changes by" if leaf.start else "is"
    return f"It {verb} about {factor:.2g} times what is expected, give or take {rest:.0%}."


def order_phrases(leaf, actual, expected):
    """Return in which other order a tensor has the right numbers."""
    flat, right = actual.flatten(), expected.flatten()
    if len(flat) < 2 or leaf.near(right.min(), right.max()):
        return []
    if not leaf.near(flat.sort().values, right.sort().values):
        return []
    if leaf.ranks > 1 and len(actual) % leaf.ranks == 0:
        order = []
        chunks = expected.chunk(leaf.ranks)
        for mine in actual.chunk(leaf.ranks):
            order += [place for place, chunk in enumerate(chunks) if leaf.near(mine, chunk)][:1]
        if sorted(order) == list(range(leaf.ranks)):
            return [f"has the right chunks, in the order {', '.join(map(str, order))}"]
    return ["has the right numbers, in another order"]


def sum_phrases(leaf, actual):
    """Return over which ranks only a tensor is the sum of what they had at first."""
    start = leaf.start
    shapes = {each.shape for each in [actual, *start.values()]}
    if len(start) < leaf.ranks or not 1 < leaf.ranks <= 8 or len(shapes) > 1:
        return []
    if leaf.near(*list(start.values())[:2]):  # all ranks had the same
        return []
    found = []
    for size in range(1, leaf.ranks):
        for chosen in itertools.combinations(start, size):
            if leaf.near(actual, sum(start[rank] for rank in chosen)):
                found.append(f"is the sum over {ranks_in_words(chosen)} only")
    return found


def over_the_ranks(leaf):
    """Return a sentence on whether the ranks agree in a Leaf, and whether they should."""
    values = list(leaf.actual.values())
    right = leaf.expected.get(leaf.rank)
    if right is None or leaf.ranks == 1 or len(values) < leaf.ranks:
        return None
    if any(value.shape != right.shape for value in values):
        return None
    agree = all(leaf.near(value, values[0]) for value in values)
    should_agree = all(leaf.near(value, right) for value in leaf.expected.values())
    if agree and not should_agree:
        return "All ranks have the same numbers, but should not."
    if agree or not should_agree:
        return None
    for name, number in (("mean", sum(values) / leaf.ranks), ("sum", sum(values))):
        if leaf.near(number, right):
            return f"The {name} over the ranks is what is expected."
    if any(leaf.near(value, right) for value in values):
        return None
    return "The ranks should have the same numbers, but do not."


def what_is_right(wrong, right):
    """Return a sentence on which results are right, by the names of both kinds.

    A name has several words if there are commas or colons in it. One word may be enough.
    """
    if len(wrong) == 1 and right:
        return f"Only `{wrong[0]}` is wrong."
    words_of = {name: re.split(", |: ", name) for name in [*wrong, *right]}
    of_right = set(itertools.chain(*[words_of[name] for name in right]))
    of_wrong = set(itertools.chain(*[words_of[name] for name in wrong]))
    for word in words_of[wrong[0]]:
        if right and word not in of_right and all(word in words_of[name] for name in wrong):
            return f"Only `{word}` is wrong."
    shown = {}
    for name in right:
        if name not in of_wrong:
            word = next((word for word in words_of[name] if word not in of_wrong), name)
            shown[f"`{word}`"] = None
    if not shown:
        return None
    more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
    return f"This is right: {', '.join(list(shown)[:3])}{more}."


def which_ranks(right):
    """Return a sentence on which ranks are right."""
    if not right:
        return None
    return f"{ranks_in_words(right).capitalize()} {'are' if len(right) > 1 else 'is'} right."
