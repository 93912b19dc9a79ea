r"""Finds where two training runs first differ: the step, the tensor, the ranks, and how.

Write it in front of a script, which needs no change, and name a folder for its notes. Then compare:
    python playground/tools/first_difference.py note one single.py --double
    torchrun --standalone --nproc-per-node 2 playground/tools/first_difference.py note two script.py
    python playground/tools/first_difference.py compare one two
Or look in one run whether its ranks stay equal, read different examples, and make equal steps:
    python playground/tools/first_difference.py ranks two

Before each step of an optimizer, a rank notes a few sums over its own part of each parameter and
gradient. It sends no message, so nothing can hang. The sums of all shards, added up, are those of
the whole tensor. Tensors belong together if they start with the same numbers (as in the stages of
a pipeline), or have the same name. What is left, such as flat shards, is compared in one sum.

Compare in float64. In float32, a ReLU that flips changes a gradient by some percent. The status is
0 if only rounding differs, 1 if more does, and 3 if that cannot be told: in float32, and if ranks
have different parts, which may be right.
"""

import argparse
import json
import os
import sys
from collections import ChainMap, Counter
from itertools import chain, pairwise
from operator import mul
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Behind all other folders, so that nothing of the script's own is hidden.
sys.path[:] = [*(folder for folder in sys.path if folder != str(HERE)), str(HERE)]

# PyTorch reads this when a group is made: its recorder keeps the last 200 calls.
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "200")

from instruments.anywhere import add_script, launched, path_of, run_with
from instruments.facts import factor_in_words
from instruments.steps import COUNT, NOTHING, PLACES, SQUARES, STRANGE, SUM, Notes
from instruments.terminal import ranks_in_words

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
  See dropout, buffers, further inputs, precision, messages in forward(), slices of parameters, what
  changes parameters before the step, and whether ranks that split a layer have the same inputs."""
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
CLOSURE = """
  step(closure) computes gradients later than they are noted, and a search for a good step enlarges
  rounding. So this may be no fault: compare the losses."""
NO_STEP = "first_difference: {} is empty, because no optimizer of torch.optim has made a step."
UNLIKE = "the ranks start with different tensors: {}\n  "
PARTS = "Right for shards, stages and experts. Otherwise see the seed, and what rank 0 sends."
AFTER_DDP = "DDP has made them equal. See what loads or changes parameters after DDP()."
LEAVES = """step {} leaves the ranks with different tensors: {}
  {}"""
EACH_ITS_OWN = """Their gradients differed before this step, so each rank has used its own.
  Collectives that each rank has called in this step: {}.
  See the average over the ranks, and what goes past DDP: model.module(x) in place of model(x),
  no_sync(), two forward passes before two backward(), parameters put in after DDP()."""
IN_THE_STEP = """step(closure) has computed their gradients, which are not noted.
  See the average over the ranks, also of the loss that the closure returns."""
EQUAL_GRADIENTS = """Their gradients were equal before this step.
  See the optimizer's state (did each rank load it?), and what changes parameters after a step."""
AGAIN = "\n  Before step {} they are equal again: right if the ranks average them there."
BUFFERS = """from step {} on, modules begin with different buffers: {}
  A rank saves and tests its own. See model.module(x) in place of model(x), broadcast_buffers, and
  SyncBatchNorm."""
ALIKE = "the ranks read the same examples in {} of {} steps.\n  "
SPLIT = "Right if they share the work of a model (tensor, pipeline). Otherwise see the sampler."
ALL_THE_WORK = "So all of them do the same work. See the sampler."
REPEATED = """steps {} to {} read what step 1 and after have read, in this order.
  Right without shuffling. Otherwise see set_epoch()."""
BEGAN = "the ranks began {} steps, and ended {}."
JOIN = "the ranks made {} steps. Right inside DDP's join(), or if the run was interrupted."


def note(folder, most, script, is_module, flags):
    """Run a script as `python script flags` would, and note its steps."""
    path_of(script, is_module)
    is_first = launched() is None or launched()[0] == 0
    if is_first:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("rank*.jsonl"):
            old.unlink(missing_ok=True)  # another rank may have done it
    Notes(folder, most)
    try:
        run_with("instruments.steps", (str(folder), most), script, is_module, flags)
    finally:
        if is_first and not any(folder.glob("rank*.jsonl")):
            print(NO_STEP.format(folder), file=sys.stderr)


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
    if factor and abs(factor - 1) > 1e-3:  # clipping may hide a factor
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
                words = f"{line}\n  {why}\n  Before, the runs agreed to {known:.1e}."
                return (3, words + CLOSURE) if ones[0]["closure"] else (1, words)
            if kind == "value of":
                last = {key: b for key, (_, b) in pairs.items()}
            known = max([known, *sizes.values()])
            if known > min(1e3 * eps, 0.01) and not unclear:
                unclear = f"step {number}, {kind} {max(sizes, key=sizes.get)[0]}"
        # Adam makes a full step even of a gradient that is only rounding.
        ignored = {x for x in squares if squares[x] < (100 * eps) ** 2 * total}
        line, right = other_setting(number, ones[0], twos)
        if line:
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


def other_setting(number, first, rows):
    """Return words on a setting of an optimizer that one rank does not have, and its values."""
    for key, right in first["settings"].items():
        settings = [row["settings"].get(key, []) for row in rows]
        others = [[value for value in values if value not in right] for values in settings]
        ranks = [rank for rank, values in enumerate(others) if values]
        if ranks:
            return f"step {number}, {key}, on {ranks_in_words(ranks)}: {others[ranks[0]]}", right
    return "", []


def compare_ranks(folder):
    """Compare the ranks of one run. Returns the status, and words."""
    run = read(folder)
    if len(run) == 1:
        sys.exit(f"error: {folder} has the notes of one rank, which cannot differ from others")
    ended = [len(rows) for rows in run]
    texts = [(folder / f"rank{rank}.jsonl").read_text() for rank in range(len(run))]
    begun = [len(rows) + (text[-1] != "\n") for rows, text in zip(run, texts, strict=True)]
    rows = [*zip(*run, strict=False)]
    faults, unclear = [], []  # what is unclear may be right
    if len({*ended}) > 1:
        unclear.append(JOIN.format(numbers(ended)))
    elif len({*begun}) > 1:
        faults.append(BEGAN.format(numbers(begun), numbers(ended)))
    settings = (other_setting(number, row[0], row) for number, row in enumerate(rows, 1))
    faults += [f"{line}, on rank 0 {right}." for line, right in settings if line][:1]
    # Before a first step(closure), no model has been called, so the names are not known yet.
    shards = {name for own in rows[-1] for name in own["shards"]}
    names = [name for name in rows[-1][0]["value of"] if name not in shards]
    ddp = all(own["ddp"] for own in rows[0])
    parts = differ(rows[0], "value of", names)
    if parts:
        words = UNLIKE.format(some(parts, names)) + (AFTER_DDP if ddp else PARTS)
        (faults if ddp else unclear).append(words)
    drift, again = drift_of(rows, [name for name in names if name not in parts])
    (unclear if parts and not ddp or again else faults).extend(drift)
    for number, row in enumerate(rows, 1):
        found = differ(row, "buffer", row[0]["buffer"])
        if found:
            (faults if ddp else unclear).append(
                BUFFERS.format(number, some(found, row[0]["buffer"]))
            )
            break
    read_by = [[{mark(x[0]) for x in own["examples"]} for own in row] for row in rows]
    again = [number for number, step in enumerate(read_by) if number and step == read_by[0]]
    period = again[0] if again else 1  # who reads the same examples in each step means to do it
    if period > 1 and all(read_by[0]) and read_by[period:] == read_by[:-period]:
        unclear.append(REPEATED.format(period + 1, len(rows)))
    alike = sum(step == step[:1] * len(step) for step in read_by if step[0])
    if alike > len(rows) / 2:
        split = parts or shards or len({frozenset(own["value of"]) for own in rows[0]}) > 1
        words = ALIKE.format(alike, len(rows)) + (SPLIT if split else ALL_THE_WORK)
        (unclear if split else faults).append(words)
    if faults or unclear:
        return 1 if faults else 3, "\n".join(faults + unclear)
    return 0, f"the ranks agree: {len(rows)} steps, {len(names)} tensors"


def differ(row, kind, names):
    """Return by how much tensors differ that are as large on all ranks, but not the same."""
    found = {}
    for name in names:
        first, *others = (own[kind].get(name) for own in row)
        if first and all(other and other[COUNT] == first[COUNT] for other in others):
            size = max(far(first, each) for each in others)
            if size > 1e-12:
                found[name] = size
    return found


def drift_of(rows, names):
    """Return words on the first step that makes tensors differ, and whether that is mended."""
    for number, (before, row) in enumerate(pairwise(rows), 1):
        found = differ(row, "value of", names)
        if not found:
            continue
        counts = [own["calls"][0] for own in before]
        called = numbers(dict.fromkeys(counts)) if any(counts) else "none"
        called += f", on rank 0 {before[0]['calls'][1]} last" if counts[0] else ""
        why = EACH_ITS_OWN if differ(before, "gradient of", found) else EQUAL_GRADIENTS
        why = IN_THE_STEP if before[0]["closure"] else why
        words = LEAVES.format(number, some(found, names), why.format(called))
        later = enumerate(rows[number + 1 :], number + 2)
        again = [step for step, row in later if not differ(row, "value of", found)]
        return [words + AGAIN.format(again[0]) if again else words], bool(again)
    return [], False


def some(found, names):
    """Return which of all tensors these are, and how far the first one differs."""
    (name, size), *more = found.items()
    which = f"{name} and {len(more)} more" if more else name
    return f"{which} of {len(names)}, by {size:.2g} of its norm."


def numbers(several):
    """Return numbers of the ranks as text."""
    return ", ".join(map(str, several))


def main():
    """Read the command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    commands = parser.add_subparsers(dest="command", required=True)
    noting = commands.add_parser("note", help="run a script, and note its steps in a folder")
    noting.add_argument("--steps", type=int, default=100, help="how many at most; default: 100")
    noting.add_argument("folder", type=Path)
    add_script(noting)
    comparing = commands.add_parser(
        "compare", help="compare two folders: first that of a right run"
    )
    comparing.add_argument("folders", nargs=2, type=Path)
    among = commands.add_parser("ranks", help="compare the ranks of one folder with each other")
    among.add_argument("folders", nargs=1, type=Path)
    args = parser.parse_args()
    if args.command == "note":
        note(args.folder.resolve(), args.steps, args.script, args.is_module, args.flags)
        return
    if args.command == "ranks":
        status, words = compare_ranks(*args.folders)
    else:
        status, words = compare(*map(read, args.folders))
    print(words)
    sys.exit(status)


if __name__ == "__main__":
    main()
