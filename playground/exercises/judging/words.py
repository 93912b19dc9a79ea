"""Says what is known about a verdict that is not RIGHT: see why()."""

import re

from judging.traffic import why_it_hangs, with_gaps
from watch_ranks.facts import difference, facts

LENGTH = 190  # characters of a line, at most
LATER = "It is right a moment later: wait() for every request before you return."
LOST = "Another rank has left the group, or its process has ended, so the connection is lost."


def in_ranks(sizes):
    """Return numbers of ranks as text, such as "1, 2 and 3 ranks"."""
    *others, last = map(str, sizes)
    first = f"{', '.join(others)} and " if others else ""
    return f"{first}{last} rank" if sizes == [1] else f"{first}{last} ranks"


def costs(rank, unit, number, limit):
    """Return what is used and what is enough, in words."""
    enough = f"{limit} {'is' if limit == 1 else 'are'} enough"
    if unit == "rounds":
        return f"right numbers, but in {number} rounds of messages; {enough}"
    text = f"right numbers, but rank {rank} sends {number} {unit[: len(unit) - (number == 1)]}"
    more = unit == "bytes" and limit and number / limit >= 1.5
    return f"{text}; {enough}" + (f": {number / limit:.3g} times the {unit}" if more else "")


def why(check, verdict):
    """Return lines: how the results differ, and the check's own words on it, or the likely cause.

    Args:
        check: what check_of() returns.
        verdict: a Verdict that is not RIGHT. On what is forbidden or lost, its lines say all.
    """
    text = "\n".join([f"{verdict.kind}, {verdict.case}", *verdict.lines])
    cause = found = None
    if verdict.kind == "HANG":
        cause = why_it_hangs(verdict.messages)
    elif verdict.kind == "CRASH":
        cause = LOST if "gloo/" in text else None
    elif verdict.rank is not None:
        pairs = ((verdict.later[rank], right) for rank, right in verdict.expected.items())
        if not any(difference(*pair, check.TOLERANCE) for pair in pairs):
            return [LATER]
        if gaps := with_gaps(verdict.messages):
            return [gaps]
        results = verdict.found, verdict.expected, check.TOLERANCE, verdict.start
        found = in_one_line(facts(*results))
        cause = check.explain(verdict)
    elif verdict.kind != "COSTLY":
        return []
    if verdict.case and (verdict.kind != "WRONG" or not cause):  # explain() knows more
        own = (words for pattern, words in check.WORDS.items() if re.search(pattern, text, re.S))
        cause = next(own, cause)
    return [line for line in (found, cause) if line]


def in_one_line(sentences):
    """Return as many sentences as one line has room for."""
    line = ""
    for sentence in sentences:
        if len(line) + len(sentence) < LENGTH:
            line += f" {sentence}" if line else sentence
    return line
