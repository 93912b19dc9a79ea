r"""Finds where two training runs first differ: the step, the tensor, the ranks, and how.

Write it in front of a script, which needs no change, and name a folder for its notes. Then compare:
    python playground/tools/first_difference.py note one single.py --double
    torchrun --standalone --nproc-per-node 2 playground/tools/first_difference.py note two script.py
    python playground/tools/first_difference.py compare one two

Before each step of an optimizer, a rank notes a few sums over its own part of each parameter and
gradient. It sends no message, so nothing can hang. The sums of all shards, added up, are those of
the whole tensor. Tensors belong together if they start with the same numbers (as in the stages of
a pipeline), or have the same name. What is left, such as flat shards, is compared in one sum.

Compare in float64. In float32, a ReLU that flips changes a gradient by some percent. The status is
0 if only rounding differs, 1 if more does, and 3 if float32 cannot tell.
"""

import argparse
import json
import os
import runpy
import sys
from collections import ChainMap, Counter
from itertools import chain
from math import isfinite
from operator import mul
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Behind all other folders, so that nothing of the script's own is hidden.
sys.path[:] = [*(folder for folder in sys.path if folder != str(HERE)), str(HERE)]

import torch.multiprocessing as mp

from watching.facts import factor_in_words, ranks_in_words
from watching.steps import COUNT, NOTHING, PLACES, SQUARES, STRANGE, SUM, NotedSteps, Notes

REST = "what neither name nor start tells apart"
JUMP = 30  # rounding grows, but not by so much from one step to the next
INPUTS = "See the sampler (seed, rank, set_epoch), the batch size, and what makes the inputs."
OUTPUTS = "Inputs and parameters are equal, but not outputs: see precision, messages in forward()."
LABELS = "The outputs are equal, but not the loss's gradient there: see labels and loss."
RIGHT = "The loss's gradient at the outputs is right: see"


def note(folder, most, script, flags):
    """Run a script as `python script flags` would, and note its steps."""
    if os.environ.get("RANK", "0") == "0":
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("rank*.jsonl"):
            old.unlink()

    def noting(start):
        return lambda fn, *rest, **named: start(NotedSteps(fn, folder, most), *rest, **named)

    mp.spawn = noting(mp.spawn)
    mp.start_processes = noting(mp.start_processes)
    Notes(folder, most)
    sys.argv = [script, *flags]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


def read(folder):
    """Return the notes of each rank, a list of steps."""
    run = []
    while not run or len(run) < run[0][0]["ranks"]:
        path = folder / f"rank{len(run)}.jsonl"
        if not path.exists() or not path.stat().st_size:
            sys.exit(f"error: {folder} has no step of an optimizer of rank {len(run)}")
        run.append([json.loads(line) for line in path.read_text().splitlines()])
    return run


def add(several):
    """Add up the sums of several tensors."""
    return [sum(column) for column in zip(NOTHING, *several, strict=True)]


def far(one, two, all_squares=0.0):
    """Return how far apart two tensors are, relative to their norm, as their sums show it."""
    if one[STRANGE] != two[STRANGE]:
        return float("inf")
    # What is tiny beside all other tensors may be nothing but rounding.
    norm = max(one[SQUARES], two[SQUARES]) ** 0.5 + 1e-3 * all_squares**0.5
    of_norms = one[SQUARES] ** 0.5 - two[SQUARES] ** 0.5
    of_sums = (one[SUM] - two[SUM]) / max(1.0, one[COUNT]) ** 0.5
    return max(map(abs, (of_norms, of_sums, one[PLACES] - two[PLACES]))) / (norm or 1.0)


def counterparts(first, second):
    """Return for each rank of the second run {its name of a tensor: the name in the first run}."""
    starts = [ChainMap(*(row["value of"] for row in rows)) for rows in (*first, *second)]
    found = []
    for rank, own in enumerate(starts[len(first) :]):
        known = starts[rank if len(first) == len(second) else 0]
        names = {}
        for name, start in own.items():
            alike = [other for other, sums in known.items() if sums[COUNT] == start[COUNT]]
            equal = [other for other in alike if far(known[other], start) < 1e-9]
            names[name] = equal[0] if len(equal) == 1 else name
        found.append(names)
    return found


def gather(rows, kind, names):
    """Return {name: {rank: sums}} of a kind of tensors in a step."""
    found = {}
    for rank, row in enumerate(rows):
        for name, sums in row[kind].items():
            found.setdefault(names[rank].get(name, name), {})[rank] = sums
    return found


def pairs_of(one, two):
    """Return {(name, rank): its sums in both runs}. Rank None: of the shards of all ranks."""
    chosen = {name: (one[name], two.get(name, {0: NOTHING})) for name in one}
    left = [[a[name].values() for name in a if name not in b] for a, b in ((one, two), (two, one))]
    if all(left):
        chosen = {name: chosen[name] for name in one if name in two}
        chosen[REST] = tuple({0: add(map(add, each))} for each in left)
    found = {}
    for name, (a, b) in chosen.items():
        if None in (*a.values(), *b.values()):
            continue
        both = {rank: (a.get(rank, a[min(a)]), sums) for rank, sums in b.items()}
        if name == REST or any(x[COUNT] != y[COUNT] for x, y in both.values()):
            whole, shards = add(a.values()), add(b.values())
            whole[PLACES] = shards[PLACES] = 0.0  # a shard has places of its own
            copies = (shards[COUNT] or 1) / (whole[COUNT] or 1)  # padding adds some numbers
            copies = max(1, round(copies)) / max(1, round(1 / copies))
            shards = [each / copies for each in shards]
            if name == REST and abs(shards[COUNT] - whole[COUNT]) > 0.05 * whole[COUNT]:
                continue  # some are whole on each rank, and some are not
            both = {None: (whole, shards)}
        found |= {(name, rank): pair for rank, pair in both.items()}
    return found


def another_model(pairs):
    """Return words on a tensor that has more or fewer numbers than in the first run, or None."""
    for (name, _), (a, b) in pairs.items():
        if abs(b[COUNT] - a[COUNT]) > 0.05 * a[COUNT]:  # padding adds a few
            return f"{name} has {b[COUNT]:.0f} numbers, in the first run {a[COUNT]:.0f}"
    return None if pairs else "no tensor has the name or the numbers of one of the first run"


def examples(row):
    """Return what a rank has noted of each example: its input, its output, the loss's gradient."""
    return list(chain(*row["calls"]))


def input_of(example):
    """Return what tells an input from others. Its last digits may differ by rounding."""
    count, places, _ = example[0]
    return count, f"{places:.9g}"


def finite(row):
    """Return whether all of that is finite."""
    return all(isfinite(norm) for each in examples(row) for _, _, norm in each)


def why_inputs(ones, twos):
    """Return words on the inputs of a step; None if they are equal, or cannot be compared."""
    calls = [len(row["calls"]) for row in twos]
    if len(set(calls)) > 1:
        return f"Since their last step, the ranks have called the model {calls} times."
    runs = []
    for rows in (ones, twos):
        runs.append([Counter(map(input_of, examples(row))) for row in rows])
    known, ranks = sum(runs[0], Counter()), runs[1]
    found = sum(ranks, Counter())
    if not {size for size, _ in known} & {size for size, _ in found}:
        return None  # a rank has a part of each input, or activations
    if known.keys() == found.keys() and len({found[x] / known[x] for x in known}) == 1:
        return None
    words = f"The first run has {known.total()} inputs, the ranks {[own.total() for own in ranks]}."
    strange = [sum(own[mark] for mark in own if mark not in known) for own in ranks]
    if any(strange):
        words += f" Of these, {strange} are not the first run's."
    if len(ranks) > 1 and all(own == ranks[0] for own in ranks):
        words += " All ranks have the same."
    return f"{words}\n  {INPUTS}"


def why_loss(ones, twos, limit):
    """Return words on outputs and loss, and how many times the loss is that of the first run.

    None: they are right, or cannot be compared. The inputs are equal.
    """
    known = {input_of(each): each for row in ones for each in examples(row) if len(each) == 3}
    total = sum(len(examples(row)) for row in ones)
    least = 1e-3 * max((slope[2] for *_, slope in known.values()), default=0)
    wrong = {OUTPUTS: set(), LABELS: set()}
    times = {}
    for rank, row in enumerate(twos):
        own = [each for each in examples(row) if len(each) == 3 and input_of(each) in known]
        for example in own:
            _, output, slope = example
            _, right, right_slope = known[input_of(example)]
            if output[0] != right[0] or right_slope[2] <= least:
                continue
            ratio = slope[2] / right_slope[2]
            if abs(output[1] - right[1]) > limit * right[2]:
                wrong[OUTPUTS].add(rank)
            elif abs(slope[1] - ratio * right_slope[1]) > limit * slope[2]:
                wrong[LABELS].add(rank)
            times.setdefault(rank, []).append(ratio * len(own) / total)
    for words, ranks in wrong.items():
        if ranks:
            return f"{words} It is so on {ranks_in_words(sorted(ranks))}.", None
    every = list(chain(*times.values()))
    if not every or max(every) - min(every) <= limit * max(every):
        return None, every[0] if every else None
    ranges = [f"{min(each):.3g} to {max(each):.3g} on rank {rank}" for rank, each in times.items()]
    words = f"The loss counts some inputs more than others: {', '.join(ranges)}, relative to"
    return f"{words} the first run.\n  See weights, and means of unequal parts.", None


def common_factor(pairs, limit):
    """Return the number that makes each second tensor of the first one; None: there is none."""
    a, b = pairs[0]
    size = (b[SQUARES] / a[SQUARES]) ** 0.5 if a[SQUARES] else 0.0
    for k in (size, -size):
        factors = (1, 1, k * k, k, k)
        if k and all(far([*map(mul, a, factors)], b) < limit for a, b in pairs):
            return k
    return None


def made(right, parts, divisor, limit):
    """Return whether some tensors, added up and divided, are the right one."""
    total = [each / divisor for each in add(parts)]
    return far(right, [*right[:SUM], *total[SUM:]]) < limit  # squares of a sum are no sum


def why_gradient(ones, twos, wrong, before, limit):
    """Return words on gradients that differ."""
    size = len(twos)
    if any(b[STRANGE] for _, b in wrong.values()):
        sick = [rank for rank, row in enumerate(twos) if not finite(row)]
        which = f", as are inputs, outputs or loss on {ranks_in_words(sick)}" if sick else ""
        return f"It is nan or infinite{which}."
    if not any(b[SQUARES] for _, b in wrong.values()):
        return "It is 0, or missing."
    why = why_inputs(ones, twos)
    if why:
        return why
    why, times = why_loss(ones, twos, limit)
    if why:
        return why
    right = times is not None and abs(times - 1) < limit
    factor = common_factor([*wrong.values()], limit)
    if factor is not None:
        words = f"It is {factor_in_words(factor, size) or f'{factor:.6g} times what is expected'}."
        calls = len(twos[0]["calls"]) / len(ones[0]["calls"])
        if right:
            return f"{words} {RIGHT} the average over the ranks, and clipping."
        if times is None or abs(times - factor) > limit * times:
            return f"{words} See the loss, the average over the ranks, and clipping."
        if abs(times - calls) < limit * times:
            return f"{words} So is the loss: is each micro-batch's divided by their number?"
        return f"{words} So is the loss: is it scaled, or a sum in place of a mean?"
    copies = {}
    for (name, _), (a, b) in wrong.items():
        copies.setdefault(name, (a, []))[1].append(b)
    for divisor, word in ((size, "mean"), (1, "sum")):
        if all(len(own) == size > 1 and made(a, own, divisor, limit) for a, own in copies.values()):
            return f"Each rank has its own, whose {word} would be right: a message is missing."
    if all(made(b, [a, before.get(key, NOTHING)], 1, limit) for key, (a, b) in wrong.items()):
        return "It is this step's and the last one's, added up: zero_grad() is missing."
    if right:
        return f"{RIGHT} backward(), messages, clipping, and losses on parameters."
    return "See the loss, the labels, and the messages."


def place(pairs, found, size):
    """Return which tensors differ, on which ranks, and how far the first one."""
    names = list(dict.fromkeys(name for name, _ in found))
    ranks = list(dict.fromkeys(rank for _, rank in found))
    copies = [b for (name, _), (_, b) in pairs.items() if name == names[0]]
    where = f"on {ranks_in_words(ranks)} of {size}"
    if None in ranks:
        where = "in the shards of all ranks together"
    elif len(ranks) == size > 1:
        alike = all(far(copies[0], each) < 1e-6 for each in copies)
        where = f"on all {size} ranks, {'alike' if alike else 'which differ'}"
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    (key, far_apart), *_ = found.items()
    one, two = (sums[SQUARES] ** 0.5 for sums in pairs[key])
    norms = f"by {far_apart:.2g} of its norm, {two:.6g} (in the first run {one:.6g})"
    return f"{names[0]}{more}, {where}\n  It differs {norms}."


def compare(first, second):
    """Compare two runs. Returns the status, and words that tell where they differ, and why."""
    names = counterparts(first, second)
    eps = max(row["eps"] for row in chain(*first, *second))
    # A ReLU that flips changes a gradient more than rounding does.
    limits = {"value of": min(1e3 * eps, 0.1), "gradient of": min(1e6 * eps, 0.1)}
    largest = 0.0
    unclear = ""
    before = {}
    ignored = set()
    for number, rows in enumerate(zip(*first, *second, strict=False), 1):
        ones, twos = rows[: len(first)], rows[len(first) :]
        known = largest
        for kind, limit in limits.items():
            pairs = pairs_of(gather(ones, kind, [{}] * len(ones)), gather(twos, kind, names))
            other = another_model(pairs) if number == 1 else None
            if other:
                return 1, f"error: another model: {other}"
            squares = {name: a[SQUARES] for (name, _), (a, _) in pairs.items()}
            sizes = {key: far(*pair, sum(squares.values())) for key, pair in pairs.items()}
            if kind == "value of":
                sizes = {key: size for key, size in sizes.items() if key[0] not in ignored}
            found = {k: size for k, size in sizes.items() if size > max(limit, JUMP * known)}
            if found:
                why = "The gradients were equal. See the optimizer's step, and what follows it."
                if kind == "gradient of":
                    wrong = {key: pairs[key] for key in found}
                    tolerance = max(1e4 * eps, JUMP * known, 1e-6)
                    why = why_gradient(ones, twos, wrong, before, tolerance)
                elif number == 1:
                    why = "The models start differently: seed all alike, or send those of rank 0."
                designed = sorted({name for row in rows for name in row["designed"]})
                if designed and (kind == "gradient of" or number > 1):
                    why += f"\n  By design, {' and '.join(designed)} may differ. Try without."
                line = f"first difference: step {number}, {kind} {place(pairs, found, len(twos))}"
                return 1, f"{line}\n  {why}\n  Before, the runs agreed to {known:.1e}."
            largest = max(largest, *sizes.values(), 0.0)
            if largest > 1e3 * eps and not unclear:
                unclear = f"step {number}, {kind} {max(sizes, key=sizes.get)[0]}"
        before = {key: b for key, (_, b) in pairs.items()}
        # Adam makes a full step even of a gradient that is only rounding.
        ignored = {x for x in squares if squares[x] < (100 * eps) ** 2 * sum(squares.values())}
        for rank, row in enumerate(twos):
            right = ones[rank if len(ones) == len(twos) else 0]["settings"]
            for key, value in row["settings"].items():
                if right.get(key, value) != value:
                    values = f"{value}, in the first run {right[key]}"
                    return 1, f"first difference: step {number}, {key}, on rank {rank}: {values}"
    lengths = [len(rows) for rows in second]
    if set(lengths) != {len(first[0])}:
        return 1, f"error: a run ended early: {len(first[0])} steps, and the ranks' {lengths}"
    if unclear:
        grown = f"no sudden difference, but it has grown to {largest:.1e}, since {unclear}"
        return 3, f"{grown}\n  Rounding grows so, and a small fault may. Compare in float64."
    return 0, f"equal up to rounding: {number} steps, the largest difference is {largest:.1e}"


def main():
    """Read the command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    commands = parser.add_subparsers(dest="command", required=True)
    noting = commands.add_parser("note", help="run a script, and note its steps")
    noting.add_argument("--steps", type=int, default=100, help="how many are noted; default: 100")
    noting.add_argument("folder", type=lambda path: Path(path).resolve())
    noting.add_argument("script")
    noting.add_argument("flags", nargs=argparse.REMAINDER, help="flags of the script")
    comparing = commands.add_parser("compare", help="compare the notes of two runs")
    comparing.add_argument("one", type=Path)
    comparing.add_argument("two", type=Path)
    args = parser.parse_args()
    if args.command == "note":
        note(args.folder, args.steps, args.script, args.flags)
    else:
        status, words = compare(read(args.one), read(args.two))
        print(words)
        sys.exit(status)


if __name__ == "__main__":
    main()
