r"""Finds where two training runs first differ: the step, the tensor, the ranks, and how.

Write it in front of a script, which needs no change, and name a folder for its notes. Then compare:
    python playground/tools/first_difference.py note one single.py --double
    torchrun --standalone --nproc-per-node 2 playground/tools/first_difference.py note two script.py
    python playground/tools/first_difference.py compare one two
Or look in one run whether its ranks stay equal, read different examples, and make equal steps, and
whether all that is trained has gradients, which are reset, and moves:
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

from watch_ranks.anywhere import add_script, given_up, launched, path_of, run_with
from watch_ranks.facts import factor_in_words
from watch_ranks.steps import COUNT, NOTHING, PLACES, SQUARES, STRANGE, SUM, Notes
from watch_ranks.terminal import ranks_in_words

REST = "what neither name nor start tells apart"
JUMP = 30  # rounding grows, but not by so much from one step to the next
DESIGNED = ("Dropout", "BatchNorm")
STARTS = """The models start differently, or forward() changes them (max_norm).
  See the seed, what rank 0 sends, and slices of parameters."""
STEP = """As far as noted, the gradients were equal.
  See the last step of the optimizer, and what changes parameters between it and this one."""
LAST_STEP = "See the last step of the optimizer, and what changes parameters after it."
STUCK = "It has not changed in the last step. See the optimizer's step, and what follows it."
INPUTS = """The first run has {} inputs, of which {} are on no rank.
  The ranks have {}, of which {} are not in the first run.
  See the sampler (seed, rank, set_epoch), batch size, skipped steps, and what makes the inputs."""
OUTPUTS = """equal inputs have other outputs.
  See dropout, buffers, further inputs, precision, messages in forward(), slices of parameters, what
  changes parameters before the step, and whether ranks that split a layer have the same inputs."""
LABELS = """the outputs are equal, but not the loss's gradient there.
  See labels, loss, weights, and means of unequal parts."""
SHIFTED = """equal inputs have other outputs, and all of them differ by the same numbers.
  See biases: one that is added on each rank, before a sum over the ranks, counts several times."""
SCALED = """the loss's gradient at the outputs has another scale, if the ranks take a mean.
  See the loss (a sum, unequal parts, the number of micro-batches, another factor, a message without
  a backward pass), clipping, and whether a GradScaler takes the factor back in the step."""
RIGHT = """the loss's gradient at the outputs is right.
  See the average over the ranks, other messages, clipping, zero_grad(), losses on parameters."""
MISSING = """The optimizer's parameters have no gradient, or one of zeros.
  See requires_grad, detach(), zero_grad(), and whether the optimizer was made before sharding."""
OWN = "Each rank has its own, whose {} would be right: a message is missing, or comes later."
RIGHT_ALIKE = """the loss's gradient at the outputs is right, and all gradients are scaled alike.
  See the average over the ranks, and clipping (which gradients its norm counts, and how often)."""
PARTLY = """the loss's gradient at the outputs is right, and so are other gradients.
  See further losses (of a router, on parameters) and what they are divided by, and messages that
  only these tensors need."""
ONLY = """Other gradients are right, so the loss is.
  See whether it is sent or divided once more (a tensor of two modules, a hook)."""
SCALED_ALIKE = """All gradients are scaled alike.
  See clipping (which gradients its norm counts, and how often), the average over the ranks, and by
  what the loss is divided."""
ONE_EACH = """Each rank scales all of its gradients by a factor of its own: {}.
  See clipping (whose gradients its norm counts), and the scale of the loss on each rank."""
ABOUT = """It is about {:.2g} times what is expected, and so are all gradients.
  See by what the loss is divided: which tokens or examples are counted, and over which ranks."""
UNKNOWN = "See the loss, the labels, and the messages."
ALSO_BUFFERS = "\n  Buffers differ, too, when the next step begins: {}."
ALSO_RANDOM = """
  The ranks have drawn equal random numbers in this step. In dropout, each rank's examples then lose
  the same places."""
CLOSURE = """
  step(closure) computes gradients later than they are noted, and a search for a good step enlarges
  rounding. So this may be no fault: compare the losses."""
NO_STEP = "first_difference: {} is empty, because {}."
NONE_MADE = "no optimizer of torch.optim has made a step"
FAILED = "the tool has failed (the script has not)"
UNLIKE = "the ranks start with different tensors: {}\n  "
PARTS = "Right for shards, stages and experts. Otherwise see the seed, and what rank 0 sends."
AFTER_DDP = "DDP has made them equal. See what changes parameters after DDP(), or in forward()."
ONE_FACTOR = """Their gradients differ by a factor only: those of rank {} are {:.6g} times rank 0's.
  See clipping by a norm that has only this rank's gradients, and the scale of the loss."""
LEAVES = """step {} leaves the ranks with different tensors: {}
  {}"""
EACH_ITS_OWN = """Their gradients differed before this step, so each rank has used its own.
  Collectives that each rank has called in this step: {}.
  See the average over the ranks, and what goes past DDP: model.module(x) in place of model(x),
  no_sync(), two forward passes before two backward(), parameters put in after DDP()."""
OTHER_CALLS = """The ranks have called unequal numbers of collectives since their last step: {}.
  See what lets a rank skip a step or a message: a GradScaler, a test for NaN, its own loss."""
IN_THE_STEP = """step(closure) has computed their gradients, which are not noted.
  See the average over the ranks, also of the loss that the closure returns."""
EQUAL_GRADIENTS = """Their gradients were equal before this step.
  See the optimizer's state (did each rank load it?), and what changes parameters after a step."""
AT_THE_END = """Their gradients were equal before this step, the last one.
  Right if a rank changes its model after training, as for a test. Otherwise see the optimizer's
  state, and what changes parameters after a step."""
AGAIN = "\n  Before step {} they are equal again: right if the ranks average them there."
BUFFERS = """from step {} on, modules begin with different buffers: {}
  A rank saves and tests its own. See model.module(x) in place of model(x), broadcast_buffers, and
  SyncBatchNorm."""
ALIKE = "the ranks read the same examples in {} of {} steps.\n  "
SPLIT = "Right if they share the work of a model (tensor, pipeline). Otherwise see the sampler."
ALL_THE_WORK = "So all of them do the same work. See the sampler."
REPEATED = """steps {} to {} read what step 1 and after have read, in this order.
  Right without shuffling. Otherwise see set_epoch()."""
UNEVEN = """by step {}, {} of {} examples are read {} times or more ({} by several ranks), {} {}.
  Right if they are drawn with replacement, changed at random, or made while training. Otherwise
  see the sampler (its seed must be the same on all ranks, set_epoch), what else divides by the
  ranks, and how the run was resumed."""
SELDOM = ("not once", "once at most", "twice at most")
RANDOM = """all ranks draw equal random numbers in each step, so dropout drops the same places.
  Right if they share the work of a model, or take different parts of what is drawn. Otherwise seed
  by rank, after the model is made."""
UNLIKE_GRADIENTS = """in {} of {} steps, the ranks have different gradients, first in step {}: {}
  In the next step, their parameters are equal all the same. Right if the optimizer averages
  gradients in its step, or if parameters are averaged after each step of SGD. Otherwise see
  no_sync(), model.module(x), and what makes the parameters equal again."""
ALL_IDLE = """no tensor of the optimizer has a gradient in any step.
  See requires_grad, detach(), zero_grad(), and whether the optimizer was made before sharding."""
IDLE = """{} of {} trained tensors have no gradient in any step: {}.
  Right if the model does not use them. Otherwise see detach(), and messages without a backward
  pass."""
STILL = """{} of {} trained tensors have gradients, and do not change: {}.
  Right with a learning rate of 0. Otherwise see what converts or moves the model, and a GradScaler
  that skips steps."""
KEPT = """in {} of {} steps, backward() begins with the gradients of the step before: {}.
  Right if they are to be added up. Otherwise see zero_grad()."""
SOUND = (
    "one rank: {} steps, {} tensors. All that is trained has gradients, which are reset, and moves."
)
ONLY_SHARDS = "the ranks make equal steps: {}. Their tensors are shards, which cannot be compared."
BEGAN = "the ranks began {} steps, and ended {}."
JOIN = """the ranks made {} steps. Right inside DDP's join(), or if the run was interrupted.
  Otherwise see what lets a rank skip a step, and whether all have equally many batches."""


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
        run_with("watch_ranks.steps", (str(folder), most), script, is_module, flags)
    finally:
        if is_first and not any(folder.glob("rank*.jsonl")):
            why = FAILED if given_up else NONE_MADE
            print(NO_STEP.format(folder, why), file=sys.stderr)


def read(folder):
    """Return the notes of each rank, a list of steps. The last one may have what it has left."""
    if not folder.is_dir():
        sys.exit(f"error: there is no folder {folder}")
    run = []
    while not run or len(run) < run[0][0]["ranks"]:
        path = folder / f"rank{len(run)}.jsonl"
        # The last line may be cut off.
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        if not lines:
            sys.exit(f"error: {folder} has no step of an optimizer of rank {len(run)}")
        rows = list(map(json.loads, lines))
        if "end" in rows[-1]:
            end = rows.pop()
            rows[-1] |= end
        run.append(rows)
    return run


def with_end(rows):
    """Return rows, each with a step of all ranks, and one more for what the last step has left."""
    rows = [*rows]
    if not all("end" in own for own in rows[-1]):
        return rows
    nothing = {"gradient of": {}, "examples": [], "buffer": {}}
    return [*rows, [{**own, **nothing, "value of": own["end"]} for own in rows[-1]]]


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


def near_factor(pairs):
    """Return about how many times as large the second tensors are as the first ones, or None."""
    one, two = (sum(pair[index][SQUARES] for pair in pairs) for index in (0, 1))
    k = (two / (one or 1.0)) ** 0.5
    factors = (1, 1, k * k, k, k)
    near = all(far([*map(mul, a, factors)], b, two) < 0.25 for a, b in pairs)
    return k if near and abs(k - 1) > 0.25 else None


def shifted(pairs, limit):
    """Return whether all second tensors are the first ones plus the same numbers."""
    shifts = [(b[SUM] - a[SUM], b[PLACES] - a[PLACES]) for a, b in pairs]
    most = max(map(abs, chain(*shifts)))
    spread = max(max(column) - min(column) for column in zip(*shifts, strict=True))
    return len(pairs) > 2 and spread < limit * most


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
    where = {OUTPUTS: [], SHIFTED: [], LABELS: [], SCALED: [], RIGHT: []}
    for rank, own in enumerate(owns):
        both = [(complete[mark(each[0])], each) for each in own if mark(each[0]) in complete]
        outputs, slopes = ([(x[part], y[part]) for x, y in both] for part in (1, 2))
        if not both or outputs[0][0][COUNT] != outputs[0][1][COUNT]:
            continue  # it has only a part of each output
        totals = tuple(map(add, zip(*slopes, strict=True)))
        factor = common_factor([totals, *slopes], limit)
        if any(far(*pair) > limit for pair in outputs):
            words = SHIFTED if shifted(outputs, limit) else OUTPUTS
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
    total = sum(a[SQUARES] for a, _ in pairs.values())
    right = {key for key, (a, _) in pairs.items() if a[SQUARES] > 1e-6 * total} - wrong.keys()
    own = [common_factor(each, limit) for each in by_rank(wrong)]
    if whole and not right and all(own) and max(own) > (1 + 1e-6) * min(own):
        return ONE_EACH.format(", ".join(f"{each:.6g}" for each in own))
    factor = common_factor([*wrong.values()], limit)
    if factor and abs(factor - 1) > 1e-3:  # clipping may hide a factor
        in_words = factor_in_words(factor, size) or f"{factor:.6g} times what is expected"
        if not right:
            words = words.replace(RIGHT, RIGHT_ALIKE)
        if right and words.endswith(SCALED):
            words = ONLY
        if not right and (words == UNKNOWN or words.endswith(LABELS)):
            words = SCALED_ALIKE
        words = f"It is {in_words}. {words}"
    elif right and words.endswith(RIGHT):
        words = words.replace(RIGHT, PARTLY)
    elif not right and words == UNKNOWN and near_factor([*wrong.values()]):
        words = ABOUT.format(near_factor([*wrong.values()]))
    return words


def by_rank(pairs):
    """Return the pairs of each rank."""
    found = {}
    for (_, rank), pair in pairs.items():
        found.setdefault(rank, []).append(pair)
    return [found[rank] for rank in sorted(found)] if None not in found else [[*pairs.values()]]


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
    norms = f"by {far_apart:.2g} of its norm, which is {two:.6g} (in the first run {one:.6g})"
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
    steps = len(first[0])
    of_ranks = [len(rows) for rows in second]
    all_rows = [*zip(*first, *second, strict=False)]
    if set(of_ranks) == {steps}:
        all_rows = with_end(all_rows)
    for number, rows in enumerate(all_rows, 1):
        ones, twos = rows[: len(first)], rows[len(first) :]
        step = f"step {number}" if number <= steps else "after the last step"
        for kind, limit in limits.items():
            both = gather(ones, kind, [{}] * len(ones)), gather(twos, kind, names)
            pairs = pairs_of(*both, max(len(ones), len(twos)))
            squares = {name: a[SQUARES] for (name, _), (a, _) in pairs.items()}
            total = sum(squares.values())
            left_out = ignored if kind == "value of" else ()
            sizes = {x: far(*pair, total) for x, pair in pairs.items() if x[0] not in left_out}
            found = {x: size for x, size in sizes.items() if size > max(limit, JUMP * known)}
            if found:
                why = STARTS if number == 1 else STEP if number <= steps else LAST_STEP
                if all(pairs[key][1] == last.get(key) for key in found):
                    why = STUCK
                if kind == "gradient of":
                    wrong = {key: pairs[key] for key in found}
                    tolerance = min(max(1e4 * eps, JUMP * known, 1e-6), 0.05)
                    why = why_gradient(ones, twos, wrong, pairs, tolerance)
                if OUTPUTS in why:
                    why += also(all_rows[number : number + 1], len(first), twos)
                kinds = sorted({each for row in rows for each in row["kinds"]})
                designed = [each for each in kinds if each.startswith(DESIGNED)]
                if designed and why != STARTS:
                    why += f"\n  By design, {' and '.join(designed)} may differ. Try without."
                line = f"first difference: {step}, {kind} {place(pairs, found, len(twos))}"
                words = f"{line}\n  {why}\n  Before, the runs agreed to {known:.1e}."
                return (3, words + CLOSURE) if ones[0]["closure"] else (1, words)
            if kind == "value of":
                last = {key: b for key, (_, b) in pairs.items()}
            known = max([known, *sizes.values()])
            if known > min(1e3 * eps, 0.01) and not unclear:
                unclear = f"{step}, {kind} {max(sizes, key=sizes.get)[0]}"
        # Adam makes a full step even of a gradient that is only rounding.
        ignored = {x for x in squares if squares[x] < (100 * eps) ** 2 * total}
        line, right = other_setting(number, ones[0], twos)
        if line:
            return 1, f"first difference: {line}, in the first run {right}"
    if set(of_ranks) != {steps}:
        words = (
            f"error: the first run has {steps} steps, the ranks of the other one {of_ranks}. Before"
        )
        sys.exit(f"{words}, the largest difference is {known:.1e}.")
    if unclear:
        grown = f"no sudden difference, but it has grown to {known:.1e}, since {unclear}"
        then = "Compare in float64." if eps > 1e-15 else "Look for a small epsilon."
        return 3, f"{grown}\n  Rounding grows so, and a small fault may. {then}"
    return 0, f"equal up to rounding: {steps} steps, the largest difference is {known:.1e}"


def also(later, size, twos):
    """Return words on what differs beside outputs: buffers in the next step, random numbers."""
    words = ""
    for row in later:
        right = {name: sums for own in row[:size] for name, sums in own["buffer"].items()}
        found = set()
        for name, sums in right.items():
            others = [own["buffer"].get(name, sums) for own in row[size:]]
            if any(far(sums, other) > 1e-6 for other in others):
                found.add(name)
        names = sorted(found)
        if names:
            which = f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
            words += ALSO_BUFFERS.format(which)
        if draw_alike([twos, row[size:]]):
            words += ALSO_RANDOM
    return words


def draw_alike(rows):
    """Return whether all ranks have drawn the same random numbers in each step."""
    states = [{own.get("random") for own in row} for row in rows]
    return len(rows[0]) > 1 and all(len(each) == 1 and None not in each for each in states)


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
        faults, unclear = alone([*zip(*run, strict=True)])
        sound = SOUND.format(len(run[0]), len(run[0][0]["value of"]))
        return 1 if faults else 3 if unclear else 0, "\n".join(faults + unclear) or sound
    ended = [len(rows) for rows in run]
    texts = [(folder / f"rank{rank}.jsonl").read_text() for rank in range(len(run))]
    begun = [len(rows) + (text[-1] != "\n") for rows, text in zip(run, texts, strict=True)]
    rows = [*zip(*run, strict=False)]
    faults, unclear = alone(rows)  # what is unclear may be right
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
    copies = [name for name in names if name not in parts]
    drift, again = drift_of(rows, copies)
    (unclear if parts and not ddp or again else faults).extend(drift)
    if not drift:
        unclear += unlike_gradients(rows, copies)
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
    unclear += uneven(read_by)
    if draw_alike(rows) and not alike and not parts and not shards:
        unclear.append(RANDOM)
    if alike > len(rows) / 2:
        split = parts or shards or len({frozenset(own["value of"]) for own in rows[0]}) > 1
        words = ALIKE.format(alike, len(rows)) + (SPLIT if split else ALL_THE_WORK)
        (unclear if split else faults).append(words)
    if faults or unclear:
        return 1 if faults else 3, "\n".join(faults + unclear)
    if not names:
        return 0, ONLY_SHARDS.format(len(rows))
    return 0, f"the ranks agree: {len(rows)} steps, {len(names)} tensors"


def alone(rows):
    """Return words on faults, and on what may be right, that need no other run or rank."""
    every = [own for row in rows for own in row]
    trained = set.union(*(set(own["trained"]) for own in every))
    idle = set.intersection(*(set(own["idle"]) for own in every))
    if trained and idle == trained:
        return [ALL_IDLE], []
    still = trained - idle
    for row in rows[1:]:
        for own, start in zip(row, rows[0], strict=True):
            first = start["value of"]
            still = {name for name in still if own["value of"].get(name) == first.get(name)}
    unclear = []
    for words, names in ((IDLE, idle), (STILL, still if len(rows) > 1 else ())):
        if names:
            unclear.append(words.format(len(names), len(trained), listed(names)))
    kept = [{name for own in row for name in own["kept"]} for row in rows]
    if any(kept):
        unclear.append(KEPT.format(sum(map(bool, kept)), len(rows), listed(set().union(*kept))))
    return [], unclear


def listed(names):
    """Return the first name, and how many more there are."""
    first, *more = sorted(names)
    return f"{first} and {len(more)} more" if more else first


def unlike_gradients(rows, names):
    """Return words on gradients that differ between ranks whose parameters are equal."""
    found = [differ(row, "gradient of", names) for row in rows]
    steps = [number for number, each in enumerate(found, 1) if each]
    if not steps:
        return []
    first = some(found[steps[0] - 1], names)
    return [UNLIKE_GRADIENTS.format(len(steps), len(rows), steps[0], first)]


def uneven(read_by):
    """Return words on examples that are read too often while others are left out, if there are any.

    In a sound run, any two examples of an epoch have been read equally often, or once more. Padding
    and an incomplete last batch may change this for less than a batch.
    """
    steps = [set(map(frozenset, step)) for step in read_by]  # ranks with equal examples count once
    batch = max(sum(map(len, step)) for step in steps)
    known = len(set().union(*chain(*steps)))
    times = Counter()
    reached = Counter()  # how many examples have been read so often, or more
    worst = (0,)
    for number, step in enumerate(steps, 1):
        for each in chain(*step):
            times[each] += 1
            reached[times[each]] += 1
        for level in range(len(SELDOM)):
            often = reached[level + 2]
            seldom = known - reached[level + 1]
            worst = max(worst, (min(often, seldom), -number, level, often, seldom))
    if worst[0] <= batch:
        return []
    _, before, level, often, seldom = worst
    times = Counter(chain(*chain(*steps[:-before])))
    by_ranks = [set().union(*own) for own in zip(*read_by[:-before], strict=True)]
    several = sum(n > level + 1 and sum(x in own for own in by_ranks) > 1 for x, n in times.items())
    return [UNEVEN.format(-before, often, known, level + 2, several, seldom, SELDOM[level])]


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
    steps = len(rows)
    for number, (before, row) in enumerate(pairwise(with_end(rows)), 1):
        found = differ(row, "value of", names)
        if not found:
            continue
        counts = [own["calls"][0] for own in before]
        called = numbers(dict.fromkeys(counts)) if any(counts) else "none"
        called += f", on rank 0 {before[0]['calls'][1]} last" if counts[0] else ""
        why = EACH_ITS_OWN if differ(before, "gradient of", found) else EQUAL_GRADIENTS
        for rank in range(1, len(before)):
            both = before[0]["gradient of"], before[rank]["gradient of"]
            pairs = [tuple(gradients.get(name) for gradients in both) for name in found]
            factor = None if None in chain(*pairs) else common_factor(pairs, 1e-9)
            if factor and abs(factor - 1) > 1e-9 and sum(a[COUNT] for a, _ in pairs) > 3:
                why = ONE_FACTOR.format(rank, factor)
        if why == EQUAL_GRADIENTS and number == steps:
            why = AT_THE_END
        why = IN_THE_STEP if before[0]["closure"] else why
        why = OTHER_CALLS if len({*counts}) > 1 else why
        words = LEAVES.format(number, some(found, names), why.format(called))
        later = enumerate(rows[number + 1 :], number + 2)
        again = [step for step, row in later if not differ(row, "value of", found)]
        unclear = bool(again) or AT_THE_END in words
        return [words + AGAIN.format(again[0]) if again else words], unclear
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
