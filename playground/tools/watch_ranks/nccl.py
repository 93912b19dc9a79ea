"""Replays the messages of all ranks by NCCL's rules, and tells where they may hang or go wrong.

With NCCL, a call goes into the queue of a communicator. It starts when all before it in this queue
are complete, and all that the rank had waited for before the call. A send is complete when it is
received. The messages of a batch progress together. With a device_id, each group has one queue.
Without one, each two of its ranks have another for send and recv outside of a batch, and Python
waits in the first call of a queue until all its ranks are in theirs. (Sources: NCCL's pages about
point-to-point, group calls and communicators; initNCCLComm and pointToPoint in PyTorch's
ProcessGroupNCCL.cpp.)
"""

import json
from collections import defaultdict
from itertools import combinations

from watch_ranks.report import code_of

OPPOSITE = {"send": "recv", "recv": "send"}
SEND = "Each waits for the call before it (a small send may not wait): use one batch_isend_irecv."
FIRST = "A group's first call waits for all its ranks. Let a collective, such as barrier, be first."
ORDER = "All ranks must make such calls in the same order."
MIXED = "A batch does not meet a call outside of one. Use a batch on both sides, or on none."
UNLIKE = "NCCL does not compare such calls: it hangs, or computes wrong numbers."
TAGS = "NCCL has no tags: what one rank sends to another arrives in the order of the calls."
ANY = "NCCL raises an error: it can only receive from a rank that is named."


class Step:
    """What a rank starts at once: a call, the calls of a batch, or the meeting of a queue's ranks.

    Attributes:
        lines: those of the queue, by rank. `ranks` are its ranks.
        after: what must be complete before: lines, and how many of their steps.
        parts: the messages that are not complete, one for each tensor, as calls.py has noted them.
    """

    def __init__(self, rank, lines, ranks, after):
        self.rank, self.lines, self.ranks, self.after, self.parts = rank, lines, ranks, after, []

    @property
    def blocker(self):
        """An earlier step of this rank for which this one has to wait, or None."""
        return next(filter(None, (line.first_open(count) for line, count in self.after)), None)


class Line(list):
    """Steps of a rank in order: those in a queue, or those for which it waits."""

    passed = 0  # how many are known to be complete

    def first_open(self, count=None):
        """Return the first of so many steps, or of all, that is not complete, or None."""
        count = len(self) if count is None else count
        while self.passed < count and not self[self.passed].parts:
            self.passed += 1
        return self[self.passed] if self.passed < count else None


class Replay:
    """The messages of all ranks by NCCL's rules.

    Args:
        rows_of: for each rank, what it has noted.
        eager: whether init_process_group gets a device_id.

    Attributes:
        found: what may hang or go wrong: the lines of some ranks, and why.
        is_open: whether a message is not complete.
    """

    def __init__(self, rows_of, eager):
        self.going = {rank for rank, rows in rows_of.items() if "end" not in rows[-1]}
        self.steps, self.waited, self.orders = (defaultdict(kind) for kind in (Line, Line, list))
        self.queues = defaultdict(lambda: defaultdict(Line))  # [queue][rank]
        self.found = []
        for rank, rows in rows_of.items():
            self.read(rank, rows, eager)
        self.matches, before = 0, -1
        while self.matches > before:
            before = self.matches
            for lines in self.queues.values():
                self.progress(lines)
        steps = [step for line in self.steps.values() if (step := line.first_open())]
        self.is_open = bool(steps)
        any(self.find_hang(step) for step in steps)
        if not steps and not self.found:
            self.compare_orders()

    def read(self, rank, rows, eager):
        """Make the steps of a rank, and those for which it waits."""
        steps, waited, met, numbered, batch = self.steps[rank], self.waited[rank], Line(), [], 0
        for row in rows:
            if "wait" in row:
                waited.append(numbered[row["wait"]])
            if "kind" not in row:
                continue
            pair = "peer" in row and not row["batch"] and not eager
            ranks = sorted({rank, row["peer"]}) if pair else row["ranks"]
            lines = self.queues[f"{row['group']} {ranks}" if pair else row["group"]]
            line = lines[rank]
            if not eager and not line:  # in the first call, Python waits for the others
                line.append(Step(rank, lines, ranks, [(met, len(met))]))
                line[0].parts.append({"kind": "meeting", "tensor": None, "rank": rank, "call": row})
                steps.append(line[0])
                met.append(line[0])
            if not row.get("batch") or row["batch"] != batch:
                after = [(met, len(met)), (waited, len(waited)), (line, len(line))]
                step = Step(rank, lines, ranks, after)
                for each in (line, steps, *[met] * (row["kind"] == "barrier")):  # Python waits, too
                    each.append(step)
            batch = row.get("batch")
            numbered.append(step)
            step.parts += [
                row | {"tensor": tensor, "at": len(numbered)} for tensor in row["tensors"]
            ]

    def progress(self, lines):
        """Complete the messages of a queue that can be complete."""
        heads = [line.first_open() for line in lines.values()]
        started = {step.rank: step for step in heads if step and not step.blocker}
        for step in started.values():
            for part in [part for part in step.parts if part["kind"] == "send"]:
                other, found = found_in([started.get(part["peer"])], part)
                if found:
                    self.match([step, other], [part, found])
        steps = [step for step in started.values() if step.parts and "peer" not in step.parts[0]]
        if steps and len(steps) == len(steps[0].ranks):
            self.match(steps, [step.parts[0] for step in steps])

    def match(self, steps, parts):
        """Complete a message, and compare what its ranks have called."""
        self.matches += 1
        for step, part in zip(steps, parts, strict=True):
            step.parts.remove(part)
            if "at" in part and "peer" not in part:
                self.orders[step.rank].append((part["at"], self.matches, part))
        one = parts[0]
        other = next((part for part in parts if compared(part) != compared(one)), None)
        if other:
            self.found.append((called(one), called(other), UNLIKE))
        elif one.get("tag") != parts[-1].get("tag"):
            self.found.append((*(f"{called(part)}, tag={part['tag']}" for part in parts), TAGS))

    def find_hang(self, step):
        """Find ranks that wait for each other, from a step on that is not complete."""
        seen = {}  # by steps: which rank waits for which, in which call
        while step not in seen:
            while step.blocker:
                step = step.blocker
            if step in seen:
                break
            part = step.parts[0]
            call = part.get("call", part)
            rank, other = needed(step, part)
            seen[step] = f"rank {step.rank} waits for rank {rank} in {in_words(call)}", part, call
            if not other and "peer" in call:
                _, apart = found_in(self.steps[rank], call)
                if apart:
                    self.found.append((called(call), called(apart), MIXED))
                    return True
            if not other and rank in self.going:
                # What this rank would call later comes after all that it has waited for.
                other = self.waited[rank].first_open()
            if not other:
                return False
            step = other
        waits, parts, calls = zip(*list(seen.values())[list(seen).index(step) :], strict=True)
        why = SEND if all("peer" in call for call in calls) else ORDER
        if any(part["kind"] == "meeting" and part["call"].get("batch") for part in parts):
            why = FIRST
        self.found.append((*waits, why))
        return True

    def compare_orders(self):
        """Find two ranks that call collectives of several groups in another order."""
        for pair in combinations(self.orders, 2):
            both = [sorted(self.orders[rank], key=lambda each: each[:2]) for rank in pair]
            both = [[each for each in one if {*pair} <= {*each[2]["ranks"]}] for one in both]
            for (_, one, part), (_, other, another) in zip(*both, strict=False):
                if one != other:
                    self.found.append((called(part), called(another), ORDER))
                    return


def needed(step, part):
    """Return for which rank a started step waits, and for which of its steps, if it has such."""
    if "peer" in part:
        return part["peer"], found_in(step.lines[part["peer"]], part)[0]
    for rank in step.ranks:
        head = step.lines[rank].first_open()
        if not head or head.blocker or "peer" in head.parts[0]:
            return rank, head
    raise AssertionError("all ranks have called it")


def found_in(steps, part):
    """Return the first step that has a message which a send or recv meets, and this message."""
    for step in filter(None, steps):
        for other in step.parts:
            opposite = other["kind"] == OPPOSITE[part["kind"]]
            if opposite and other["group"] == part["group"] and other["peer"] == part["rank"]:
                return step, other
    return None, None


def compared(part):
    """Return what has to be equal in the calls of all ranks."""
    return "message" if "peer" in part else part["kind"], part["tensor"], part.get("root")


def called(part):
    """Return which rank has called what, as text."""
    return f"rank {part['rank']} calls {in_words(part)}"


def in_words(part):
    """Return a message and its line, as text."""
    size, dtype = part.get("tensor") or part["tensors"][0]
    sizes = "" if part["kind"] == "barrier" else f" ({size} {dtype})"
    words = f"{part['kind']}{sizes} {part['of']}".strip()
    return f"{words}, {code_of(part, part['line']) or 'no line of the script'}"


def show_findings(paths, hangs=False):
    """Print where the messages of the ranks may hang or go wrong with NCCL, or what is not seen."""
    rows_of, every, unseen = {}, [], []
    for path in paths:
        rows = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
        every += rows
        calls = [row for row in rows if "kind" in row]
        if calls:
            rows_of[calls[0]["rank"]] = rows
    rows_of = dict(sorted(rows_of.items()))
    noted = [row for row in every if "kind" in row]
    text = [f"watch: {len(noted):,} calls of {len(rows_of)} ranks, by NCCL's rules:"]
    of_any = [(called(row), ANY) for row in noted if row.get("peer", 0) is None][:1]
    replays = [] if of_any else [Replay(rows_of, eager) for eager in (False, True)]
    lazy, eager = (replay.found for replay in replays) if replays else (of_any, of_any)
    for lines in list(dict.fromkeys([*lazy, *eager]))[:5]:
        only = "" if lines in eager else " without device_id"
        only = only if lines in lazy else " with device_id"
        what = "may hang" if lines[-1] in (SEND, FIRST, ORDER, MIXED) else "may go wrong"
        text += [f"{what}{only}:", *(f"    {line}" for line in lines)]
    if any("others" in row for row in every):
        unseen.append("other threads have sent messages, too")
    if any("full" in row for row in every):
        unseen.append("a rank has sent more messages than are noted")
    elif hangs or any(x.is_open or x.going for x in replays):
        unseen.append("not every rank has ended well, or is on this node")
    if not lazy and not eager and noted and not hangs:
        text.append("no rank waits for ever, and what the ranks call fits together.")
    elif not lazy and not eager:
        text.append("nothing is found in what is noted.")
    text += [f"(This is not all: {why}.)" for why in unseen]
    print("\n".join(text), flush=True)
