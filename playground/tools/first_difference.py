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
from functools import partial
from itertools import chain
from operator import mul
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Behind all other folders, so that nothing of the script's own is hidden.
sys.path[:] = [*(folder for folder in sys.path if folder != str(HERE)), str(HERE)]

import torch.multiprocessing as mp

from watching.facts import factor_in_words, ranks_in_words
from watching.steps import COUNT, NOTHING, PLACES, SQUARES, STRANGE, SUM, Notes, noted

REST = "what neither name nor start tells apart"
JUMP = 30  # rounding grows, but not by so much from one step to the next
DESIGNED = ("Dropout", "BatchNorm")
STARTS = "The models start differently. See the seed, what rank 0 sends, and slices of parameters."
STEP = """As far as noted, the gradients were equal.
  See the last step of the optimizer, and what changes parameters between it and this one."""
STUCK = "It has not changed in the last step. See the optimizer's step, and what follows it."
INPUTS = """The first run has {} inputs, of which {} are on no rank.
  The ranks have {}, of which {} are not in the first run.
  See the sampler (seed, rank, set_epoch), batch size, skipped steps, and what makes the inputs."""
OUTPUTS = """equal inputs have other outputs.
  See buffers, further inputs, precision, messages in forward(), slices of parameters, changes of
  parameters before the step, and whether ranks that split a layer have the same inputs."""
LABELS = """the outputs are equal, but not the loss's gradient there.
  See labels, loss, weights, and means of unequal parts."""
SCALED = """the loss's gradient at the outputs has another scale, if the ranks take a mean.
  See the loss (a sum, unequal parts, the number of micro-batches, another factor), clipping, and
  whether a GradScaler takes the factor back in the step."""
RIGHT = """the loss's gradient at the outputs is right.
  See the average over the ranks, other messages, clipping, zero_grad(), losses on parameters."""
MISSING = """The optimizer's parameters have no gradient, or one of zeros.
  See requires_grad, detach(), zero_grad(), and whether the optimizer was made before sharding."""
OWN = "Each rank has its own, whose {} would be right: a message is missing, or is sent in step()."
UNKNOWN = "See the loss, the labels, and the messages."


def note(folder, most, script, flags):
    """Run a script as `python script flags` would, and note its steps."""
    if os.environ.get("RANK", "0") == "0":
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("rank*.jsonl"):
            old.unlink(missing_ok=True)  # another rank may have done it

    def noting(start):
        return lambda fn, *rest, **named: start(partial(noted, fn, folder, most), *rest, **named)

    mp.spawn = noting(mp.spawn)
    mp.start_processes = noting(mp.start_processes)
    Notes(folder, most)
    sys.argv = [script, *flags]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


def read(folder):
    """Return the notes of each rank, a list of steps."""
    if not folder.is_dir():
        sys.exit(f"error: there is no folder {folder}")
    run = []
    while not run or len(run) < run[0][0]["ranks"]:
        path = folder / f"rank{len(run)}.jsonl"
        # The last line may be cut off.
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        if not lines:
            sys.exit(f"error: {folder} has no step of an optimizer of rank {len(run)}")
        run.append(list(map(json.loads, lines)))
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


def mark(sums):
    """Return what tells a tensor from others. Its last digits may differ by rounding."""
    return sums[COUNT], f"{sums[PLACES]:.9g}"


def splits(name):
    """Return the ways to split a tensor's name into those of a module and of its tensor."""
    parts = ("", *name.split("."))
    return [(parts[:place], parts[place:]) for place in range(len(parts) - 1, 0, -1)]


def names_of(first, second):
    """Return for each rank of the second run {its name of a tensor: the name in the first run}."""
    starts = ChainMap(*(rows[0]["value of"] for rows in first))
    marks = {name: mark(sums) for name, sums in starts.items()}
    alike = Counter(marks.values())
    known = {each: name for name, each in marks.items() if alike[each] == 1}
    owns = [rows[0]["value of"] for rows in second]
    return [names_on({name: mark(own[name]) for name in own}, known, marks) for own in owns]


def names_on(own, known, marks):
    """Return {a rank's name of a tensor: the name in the first run}, by how the tensors start."""
    found = {name: known[each] for name, each in own.items() if each in known}
    modules = {}  # the names of modules that have such tensors
    for name, there in found.items():
        for (module, rest), (other, same) in zip(splits(name), splits(there), strict=False):
            if rest == same:
                modules[module] = other
    for name in own.keys() - found.keys():  # tensors of ones or zeros, such as those of norms
        for module, rest in splits(name):
            there = ".".join(modules.get(module, ("",)) + rest)[1:]
            if marks.get(there) == own[name]:
                found[name] = there
                break
    return found


def gather(rows, kind, names):
    """Return {name: {rank: sums}} of a kind of tensors in a step."""
    found = {}
    for rank, row in enumerate(rows):
        for name, sums in row[kind].items():
            found.setdefault(names[rank].get(name, name), {})[rank] = sums
    return found


def pairs_of(one, two, ranks):
    """Return {(name, rank): its sums in both runs}. Rank None: of the shards of all ranks."""
    left = one.keys() - two.keys(), two.keys() - one.keys()
    most = sum(len(two[name]) for name in left[1])  # flat shards have at most so much padding
    if all(left):
        for run, names in zip((one, two), left, strict=True):
            run[REST] = {0: add(chain(*(run.pop(name).values() for name in names)))}
    found = {}
    for name, a in one.items():
        if name not in two:
            sys.exit(f"error: another model, or other optimizers: the second run has no {name}")
        b = two[name]
        if None in (*a.values(), *b.values()):
            continue
        both = {rank: (a.get(rank, a[min(a)]), sums) for rank, sums in b.items()}
        if name == REST or any(x[COUNT] != y[COUNT] for x, y in both.values()):
            whole, shards = add(a.values()), add(b.values())
            whole[PLACES] = shards[PLACES] = 0.0  # a shard has places of its own
            copies = (shards[COUNT] or 1) / (whole[COUNT] or 1)
            copies, parts = (min(max(1, round(each)), ranks) for each in (copies, 1 / copies))
            shards = [each / copies * parts for each in shards]
            both = {None: (whole, shards)}
            if abs(shards[COUNT] - whole[COUNT]) > (most if name == REST else 0.05 * whole[COUNT]):
                if name == REST and found:
                    continue  # some are whole on each rank, and some are not
                counts = f"{shards[COUNT]:.0f} numbers, in the first run {whole[COUNT]:.0f}"
                sys.exit(f"error: another model: {name} has {counts}")
        found |= {(name, rank): pair for rank, pair in both.items()}
    return found


def common_factor(pairs, limit):
    """Return the number that makes each second tensor of the first one; None: there is none."""
    a, b = pairs[0]
    k = (b[SQUARES] / (a[SQUARES] or 1.0)) ** 0.5
    factors = (1, 1, k * k, k, k)
    total = sum(b[SQUARES] for _, b in pairs)
    right = all(far([*map(mul, a, factors)], b, total) < limit for a, b in pairs)
    return k if right else None


def why_loss(ones, twos, limit):
    """Return words on inputs, outputs and loss: the first of these that differs."""
    known = Counter(mark(each[0]) for row in ones for each in row["examples"])
    ranks = [Counter(mark(each[0]) for each in row["examples"]) for row in twos]
    found = sum(ranks, Counter())
    if {size for size, _ in known}.isdisjoint(size for size, _ in found):
        return UNKNOWN  # a rank has a part of each input, or activations
    if known.keys() != found.keys() or len({found[x] / known[x] for x in known}) > 1:
        others = [own - known for own in ranks]
        counts = (", ".join(str(own.total()) for own in each) for each in (ranks, others))
        return INPUTS.format(known.total(), (known - found).total(), *counts)
    if not all(row["examples"] for row in twos):
        return UNKNOWN  # a stage of a pipeline gets activations, and returns some
    # Those with a backward pass have three parts.
    learned = [[x for x in row["examples"] if len(x) == 3] for row in (*ones, *twos)]
    right, owns = learned[: len(ones)], learned[len(ones) :]
    complete = {mark(each[0]): each for each in chain(*right)}
    more = sum(map(len, owns)) / len(owns) / (sum(map(len, right)) / len(right) or 1)
    where = {OUTPUTS: [], LABELS: [], SCALED: [], RIGHT: []}
    for rank, own in enumerate(owns):
        both = [(complete[mark(each[0])], each) for each in own if mark(each[0]) in complete]
        outputs, slopes = ([(x[part], y[part]) for x, y in both] for part in (1, 2))
        if not both or outputs[0][0][COUNT] != outputs[0][1][COUNT]:
            continue  # it has only a part of each output
        totals = tuple(map(add, zip(*slopes, strict=True)))
        factor = common_factor([totals, *slopes], limit)
        if any(far(*pair) > limit for pair in outputs):
            words = OUTPUTS
        elif factor is None:
            words = LABELS
        elif abs(factor * more - 1) > limit:
            words = SCALED
        else:
            words = RIGHT
        where[words].append(rank)
    for words, ranks in where.items():
        if ranks:
            return f"On {ranks_in_words(ranks)}, {words}"
    return UNKNOWN


def why_gradient(ones, twos, wrong, pairs, limit):
    """Return words on gradients that differ."""
    size = len(twos)
    means = {}
    for (name, _), (_, b) in pairs.items():
        means[name] = add([means.get(name, NOTHING), [each / size for each in b]])
    whole = all(rank is not None for _, rank in wrong)
    differ = any(far(means[name], b) > 1e-6 for (name, _), (_, b) in wrong.items())
    for word, times in (("mean", 1), ("sum", size)):
        both = [(a, [times * each for each in means[name]]) for (name, _), (a, _) in wrong.items()]
        # The squares of a sum are not the sum of the squares, so they are left out.
        apart = [far(a, [*a[:SUM], *b[SUM:]]) for a, b in both]
        if whole and differ and max(apart) < limit:
            return OWN.format(word)
    if not any(b[SQUARES] or b[STRANGE] for _, b in wrong.values()):
        return MISSING
    words = why_loss(ones, twos, limit)
    factor = common_factor([*wrong.values()], limit)
    if factor:
        in_words = factor_in_words(factor, size) or f"{factor:.6g} times what is expected"
        words = f"It is {in_words}. {words}"
    return words


def place(pairs, found, size):
    """Return which tensors differ, on which ranks, and how far the first one."""
    names, ranks = (list(dict.fromkeys(each)) for each in zip(*found, strict=True))
    where = f"on {ranks_in_words(ranks)} of {size}"
    if None in ranks:
        where = "in the shards of all ranks together"
    elif len(ranks) == size > 1:
        copies = [b for (name, _), (_, b) in pairs.items() if name == names[0]]
        alike = all(far(copies[0], each) < 1e-6 for each in copies)
        where = f"on all {size} ranks"
        if len(copies) == size:
            where += ", alike" if alike else ", which differ"
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    (key, far_apart), *_ = found.items()
    one, two = (sums[SQUARES] ** 0.5 for sums in pairs[key])
    norms = f"by {far_apart:.2g} of its norm, {two:.6g} (in the first run {one:.6g})"
    return f"{names[0]}{more}, {where}\n  It differs {norms}."


def compare(first, second):
    """Compare two runs. Returns the status, and words that tell where they differ, and why."""
    names = names_of(first, second)
    eps = max(row["eps"] for row in chain(*first, *second))
    # A ReLU that flips changes a gradient more than rounding does.
    limits = {"value of": min(1e3 * eps, 0.1), "gradient of": min(1e6 * eps, 0.1)}
    known = 0.0
    unclear = ""
    ignored = set()
    last = {}  # the second run's values one step before
    for number, rows in enumerate(zip(*first, *second, strict=False), 1):
        ones, twos = rows[: len(first)], rows[len(first) :]
        for kind, limit in limits.items():
            both = gather(ones, kind, [{}] * len(ones)), gather(twos, kind, names)
            pairs = pairs_of(*both, max(len(ones), len(twos)))
            squares = {name: a[SQUARES] for (name, _), (a, _) in pairs.items()}
            total = sum(squares.values())
            left_out = ignored if kind == "value of" else ()
            sizes = {x: far(*pair, total) for x, pair in pairs.items() if x[0] not in left_out}
            found = {x: size for x, size in sizes.items() if size > max(limit, JUMP * known)}
            if found:
                why = STARTS if number == 1 else STEP
                if all(pairs[key][1] == last.get(key) for key in found):
                    why = STUCK
                if kind == "gradient of":
                    wrong = {key: pairs[key] for key in found}
                    tolerance = min(max(1e4 * eps, JUMP * known, 1e-6), 0.05)
                    why = why_gradient(ones, twos, wrong, pairs, tolerance)
                kinds = sorted({each for row in rows for each in row["kinds"]})
                designed = [each for each in kinds if each.startswith(DESIGNED)]
                if designed and why != STARTS:
                    why += f"\n  By design, {' and '.join(designed)} may differ. Try without."
                line = f"first difference: step {number}, {kind} {place(pairs, found, len(twos))}"
                return 1, f"{line}\n  {why}\n  Before, the runs agreed to {known:.1e}."
            if kind == "value of":
                last = {key: b for key, (_, b) in pairs.items()}
            known = max([known, *sizes.values()])
            if known > min(1e3 * eps, 0.01) and not unclear:
                unclear = f"step {number}, {kind} {max(sizes, key=sizes.get)[0]}"
        # Adam makes a full step even of a gradient that is only rounding.
        ignored = {x for x in squares if squares[x] < (100 * eps) ** 2 * total}
        for key, right in ones[0]["settings"].items():
            settings = [row["settings"].get(key, []) for row in twos]
            others = [[value for value in values if value not in right] for values in settings]
            ranks = [rank for rank, values in enumerate(others) if values]
            if ranks:
                line = f"step {number}, {key}, on {ranks_in_words(ranks)}: {others[ranks[0]]}"
                return 1, f"first difference: {line}, in the first run {right}"
    steps = len(first[0])
    of_ranks = [len(rows) for rows in second]
    if set(of_ranks) != {steps}:
        sys.exit(f"error: the first run has {steps} steps, the ranks of the other one {of_ranks}")
    if unclear:
        grown = f"no sudden difference, but it has grown to {known:.1e}, since {unclear}"
        then = "Compare in float64." if eps > 1e-15 else "Look for a small epsilon."
        return 3, f"{grown}\n  Rounding grows so, and a small fault may. {then}"
    return 0, f"equal up to rounding: {number} steps, the largest difference is {known:.1e}"


def main():
    """Read the command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("command", choices=("note", "compare"))
    parser.add_argument("--steps", type=int, default=100, help="how many are noted; default: 100")
    parser.add_argument("folder", type=Path, help="of the notes")
    parser.add_argument("other", help="note: the script; compare: the folder of another run")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="flags of the script")
    args = parser.parse_args()
    if args.command == "note":
        note(args.folder.resolve(), args.steps, args.other, args.flags)
    else:
        status, words = compare(read(args.folder), read(Path(args.other)))
        print(words)
        sys.exit(status)


if __name__ == "__main__":
    main()
