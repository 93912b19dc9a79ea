"""facts.py tells how results differ. Each fact is true, and none is told that fits by chance."""

import pytest
import torch

from watch_ranks.facts import difference, facts

pytestmark = pytest.mark.quick
A = torch.arange(1.0, 13)  # 12 numbers, none of which is 0
M = A.view(3, 4)
OPPOSITE = "is what is expected, with the opposite sign"
TIMES = "It is about 7.1 times what is expected, give or take 0%."
NEARLY = torch.tensor([0.5, -0.5] * 6)
TWICE = "2 times what is expected, with 2 ranks"
MEAN = "The mean over the ranks is what is expected."
SAME = "All ranks have the same numbers, but should not."


def with_part(tensor, part, numbers):
    """Return a copy of a tensor with other numbers in a part."""
    copy = tensor.clone()
    copy[part] = numbers
    return copy


def of_ranks(*values):
    """Return what each rank has."""
    return dict(enumerate(values))


# What one rank has, what it should have, and the facts.
OF_ONE_RANK = [
    (A, A, []),
    (-A, A, [f"It {OPPOSITE}."]),
    (100 * A, A, ["It is 100 times what is expected."]),
    (A / 10, A, ["It is what is expected, divided by 10."]),
    (0.684 * A, A, ["It is about 0.68 times what is expected, give or take 0%."]),
    (2 * A, A, ["It is 2 times what is expected."]),
    (A + NEARLY, A, ["It differs by about 7% from what is expected."]),
    (3 * A + NEARLY, A, ["It is about 3 times what is expected, give or take 2%."]),
    (0 * A, A, ["It is 0."]),
    (M[[1, 0, 2]], M, ["It has the right numbers, in another order."]),
    (A.double(), A, ["It has the right numbers, in another dtype."]),
    (with_part(A, slice(3, 6), 0), A, ["It differs only at [3:6], and is 0 there."]),
    (with_part(A, slice(None, None, 2), A[::2] - 0.3), A, ["It differs only at [::2]."]),
    (with_part(A, slice(1, None), 5.1), A, ["It differs only at [1:]."]),
    (with_part(A, -1, 5.1), A, ["It differs only at [-1]."]),
    (with_part(M, 1, -M[1]), M, [f"It differs only at [1], and {OPPOSITE} there."]),
    (with_part(M, (slice(None), 2), 0.1), M, ["It differs only at [:, 2]."]),
    (with_part(A, [0, 5, 7], 0.1), A, ["It differs only in 3 of 12 numbers."]),
    (with_part(A, [0, 5], torch.nan), A, ["It differs only in 2 of 12 numbers."]),
    (None, A, []),
    ("text", "another", []),
    ([A], [A, A], []),
    ({"a": A, "b": 3}, {"a": A, "b": 4}, ["Only `b` is wrong."]),
    (
        {"step 1, a": A, "step 1, b": A, "step 2, a": A, "step 2, b": 7.1 * A},
        {"step 1, a": A, "step 1, b": A, "step 2, a": A, "step 2, b": A},
        [TIMES, "Only `step 2, b` is wrong."],
    ),
    (
        {"step 1: a": A, "step 1: b": A, "step 2: a": 7.1 * A, "step 2: b": 7.1 * A},
        {"step 1: a": A, "step 1: b": A, "step 2: a": A, "step 2: b": A},
        [TIMES, "Only `step 2` is wrong."],
    ),
    (
        {"step 1: a": A, "step 1: b": 7.1 * A, "step 2: a": 7.1 * A, "step 3: b": A},
        {"step 1: a": A, "step 1: b": A, "step 2: a": A, "step 3: b": A},
        [TIMES, "This is right: `step 1: a`, `step 3`."],
    ),
    (
        {"a": M[0], "b": M[0]},
        {"a": M[0], "b": M[1]},
        ["It is what `a` should be.", "Only `b` is wrong."],
    ),
    (
        {"a": -A, "b": -M, "c": 1},
        {"a": A, "b": M, "c": 1},
        [f"It {OPPOSITE}, like all that is wrong.", "This is right: `c`."],
    ),
]
# What several ranks have, what they should have, what they had at first (None: unknown).
OF_RANKS = [
    ((3 * A, 3 * A, 3 * A), (A, A, A), None, ["It is 3 times what is expected, with 3 ranks."]),
    ((A / 9,) * 3, (A, A, A), None, ["It is what is expected, divided by 9."]),
    ((3.0, 3.0, 3.0), (1.0, 1.0, 1.0), None, []),  # a single number may be so by chance
    # By chance, it is 2 times on one rank.
    ((2 * A, 5 * A), (A, A), None, ["The ranks should have the same numbers, but do not."]),
    ((A, 3 * A), (2 * A, 2 * A), None, [MEAN]),
    ((A, 3 * A), (4 * A, 4 * A), None, ["The sum over the ranks is what is expected."]),
    ((A, A), (A, 7 * A), None, ["It is what rank 0 should have.", SAME, "Rank 0 is right."]),
    ((7 * A, A, 7.3 * A), (A, 7 * A, 9 * A), None, ["It is what rank 1 should have."]),
    ((A, A, 7.1 * A, A), (A, A, A, A), None, [TIMES, "Ranks 0, 1 and 3 are right."]),
    # The second result follows from the first one, which is wrong on rank 1: nothing "only" here.
    (
        ({"out": A, "gradient": -A}, {"out": 7.1 * A, "gradient": A}),
        ({"out": A, "gradient": A},) * 2,
        None,
        [TIMES],
    ),
    (
        (torch.cat([A, A + 20]), torch.cat([A + 20, A])),
        (torch.cat([A, A + 20]),) * 2,
        None,
        ["It has the right chunks, in the order 1, 0.", "Rank 0 is right."],
    ),
    ((A, 3 * A), (2 * A, 2 * A), (A, 3 * A), ["It is unchanged.", MEAN]),
    ((3 * A, A), (2 * A, 2 * A), (A, 3 * A), ["It is what rank 1 had at first.", MEAN]),
    ((3 * A, 3 * A), (2 * A, 2 * A), (A, A), [f"It changes by {TWICE}."]),
    ((A + 4, A + 4), (A + 2, A + 2), (A, A), []),  # constant numbers may be so by chance
    (
        (2 * A + NEARLY, 2 * A + NEARLY),
        (2 * A, 2 * A),
        (A, A),
        ["Its change differs by about 7% from what is expected."],
    ),
    (
        (5 * A, 5 * A, 5 * A),
        (10 * A, 10 * A, 10 * A),
        (A, 4 * A, 5.5 * A),
        ["It is the sum over ranks 0 and 1 only."],
    ),
]


@pytest.mark.parametrize(("actual", "expected", "start", "sentences"), OF_RANKS)
def test_facts_of_ranks(actual, expected, start, sentences):
    """Some facts are about the results of several ranks."""
    start = start and of_ranks(*start)
    found = facts(of_ranks(*actual), of_ranks(*expected), start=start)
    assert found == sentences


@pytest.mark.parametrize(("actual", "expected", "sentences"), OF_ONE_RANK)
def test_facts_of_one_rank(actual, expected, sentences):
    """The others are about a single result. They are told of a right one in no case."""
    found = facts({0: actual}, {0: expected})
    assert found == sentences


def test_difference():
    """It is the first one, from the row of 8 numbers on in which it is."""
    actual = {"a": [A, M], "b": with_part(A, 9, 0.5)}
    expected = {"a": [A, with_part(M, 2, 0)], "b": A}
    place = "a, entry 1, from position 8"
    assert difference(actual, expected) == (place, "[9, 10, 11, 12]", "[0, 0, 0, 0]")
    assert difference(expected, expected) is None


def test_tolerance():
    """What is within the tolerance is no difference, and neither is nan where nan is expected."""
    tensor = with_part(A, 0, torch.nan)
    assert facts({0: tensor + 1e-7}, {0: tensor}) == []
    assert facts({0: A + 0.1}, {0: A}, {"rtol": 0, "atol": 0.2}) == []
    assert difference(1, 1.0000001) is None
    assert difference(A.int(), A) == ("", "numbers of torch.int32", "numbers of torch.float32")
