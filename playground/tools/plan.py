"""Plans the training of a transformer on many GPUs.

For each mesh that makes sense, it shows what a rank holds, sends and waits for:
    python playground/tools/plan.py --model llama-7b --nodes 8 --gpus 8 --batch_size 1024

Each formula names the lesson that counts it, or a paper. Seconds are as good as three inputs:
--efficiency, --within and --between (playground/pages/planning.md measures them).
"""

import argparse
import math
import signal
from collections.abc import Iterator
from decimal import Decimal
from itertools import product
from typing import NamedTuple

FULL = 4  # bytes of a parameter in a shard, of Adam's averages, and of gradients that are sent
# NCCL's seconds, of a call and of a step of a ring (src/graph/tuning.cc)
START = 8.4e-6
STEP_WITHIN = 3.4e-6
STEP_BETWEEN = 9.6e-6
LIMITS = {  # of the values of flags; all others are from 1 to 1e18
    "efficiency": (0.001, 1),
    "memory": (1e8, 1e18),
    "flops": (1e9, 1e18),
    "within": (1e5, 1e18),
    "between": (1e5, 1e18),
    "micro": (1, 64),
}
TITLES = ("data", "mesh", "micro", "again", "state", "kept", "pp", "dp", "cp", "tp")
TITLES += ("sends", "step", "tok/s", "lost to")
GROUPS = {"bytes held": "state kept", "bytes sent along": "pp dp cp tp", "seconds": "sends step"}


class Model(NamedTuple):
    """The sizes of a transformer, in bfloat16 and float32. The flags explain the fields."""

    parameters: float
    layers: int
    width: int
    heads: int
    kv_heads: int
    vocabulary: int
    matrices: int
    sequence: int = 4096
    half: int = 2
    tables: int = 2

    def block_size(self) -> float:
        """Return the parameters of a block: all but the embedding and the output layer."""
        tables = self.tables * self.vocabulary * self.width
        return (self.parameters - tables) / self.layers

    def block_flops(self) -> float:
        """Return the operations of a block for each token (arXiv 2204.02311, B)."""
        return 6 * self.block_size() + 12 * self.width * self.sequence

    def output_flops(self) -> float:
        """Return the operations of the output layer for each token."""
        return 6 * self.vocabulary * self.width

    def flops(self) -> float:
        """Return the operations of the model for each token, as language_model.py counts them."""
        return self.layers * self.block_flops() + self.output_flops()


MODELS = {
    "llama-7b": Model(6.74e9, 32, 4096, 32, 32, 32000, matrices=3),
    "llama3-8b": Model(8.03e9, 32, 4096, 32, 8, 128256, matrices=3),
    "llama3-405b": Model(405.9e9, 126, 16384, 128, 8, 128256, matrices=3),
}


class Cluster(NamedTuple):
    """The GPUs, and how fast they compute and send. The flags explain the fields."""

    nodes: int
    gpus: int
    memory: float
    flops: float
    efficiency: float
    within: float
    between: float


class Plan(NamedTuple):
    """A mesh of ranks, with its outermost axis first, and what each rank does in a step.

    The flags explain the fields.
    """

    data: str
    pp: int
    dp: int
    cp: int
    tp: int
    micro: int
    count: int
    again: float

    def axes(self) -> tuple[int, int, int, int]:
        """Return the sizes of the mesh."""
        return self.pp, self.dp, self.cp, self.tp

    def shards(self, gpus: int) -> int:
        """Return among how many ranks a parameter is sharded (four_axes.py; hybrid_parallel.py)."""
        if self.data == "ddp":
            return 1
        return self.dp * self.cp if self.data == "fsdp" else gpus // self.tp


def kept_by_block(model: Model, tp: int) -> float:
    """Return the bytes for each token that a block keeps for backward().

    activation_checkpointing.py counts 16 numbers for each of the width, two of them for each of the
    MLP's neurons, and, in float32, one for each head and four more.
    """
    keys = model.kv_heads / model.heads  # their size, compared with that of the queries
    attention = 2 * model.width**2 * (1 + keys)  # parameters
    neurons = (model.block_size() - attention) / (model.matrices * model.width)
    of_neuron = 2 if model.matrices == 2 else 4  # SwiGLU keeps more
    whole = 2 * model.width  # where pairs of layers begin: sequence_parallel.py
    split = model.width * (4 + 2 * keys) + neurons * of_neuron
    return model.half * (whole + split / tp) + FULL * (model.heads + 4) / tp


def activations(model: Model, plan: Plan) -> float:
    """Return the bytes that the fullest rank keeps for backward()."""
    block = kept_by_block(model, plan.tp)
    its_input = model.half * model.width / plan.tp
    stage = model.layers / plan.pp * (plan.again * its_input + (1 - plan.again) * block)
    computed_again = block if plan.again else 0  # one at a time (activation_checkpointing.py)
    scores = model.vocabulary / plan.tp * (model.half + 3 * FULL)  # vocabulary_parallel.py
    # 1F1B: the first stage keeps most micro-batches (manual_pipeline.py; arXiv 2104.04473).
    first_stage = stage * min(plan.count, plan.pp) + computed_again
    last_stage = stage + max(computed_again, scores)
    tokens = plan.micro * model.sequence / plan.cp
    return tokens * max(first_stage, last_stage)


def state(model: Model, cluster: Cluster, plan: Plan) -> float:
    """Return the bytes of the parameters, gradients, and Adam's averages (sharding.md)."""
    own = model.parameters / (plan.tp * plan.pp)
    if plan.data == "ddp":
        autocast = model.half if model.half < FULL else 0  # its copy (mixed_precision.py)
        return own * (4 * FULL + autocast)
    if plan.pp > 1:  # all stay whole during a step (four_axes.py)
        whole = own * (model.half + FULL)
    else:  # two layers, a gradient, and the copy of it that is sent
        layer = max(model.block_size(), model.vocabulary * model.width) / plan.tp
        whole = layer * (3 * model.half + FULL)
    return own * 4 * FULL / plan.shards(cluster.gpus) + whole


def ring(cluster: Cluster, nbytes: float, size: int, stride: int) -> float:
    """Return the seconds of an all_gather or reduce_scatter over every stride-th rank.

    A rank sends (size-1)/size of all bytes, in size-1 steps (collectives.py). NCCL makes a ring for
    each GPU's link, so those of a node share the bytes that leave the node.
    """
    if size == 1:
        return 0
    on_a_node = max(1, math.gcd(size * stride, cluster.gpus) // stride)
    nodes = size // on_a_node
    if nodes == 1:
        bandwidth = cluster.within
    else:
        bandwidth = min(cluster.within, on_a_node * cluster.between)
    steps = (size - nodes) * STEP_WITHIN + (nodes - 1) * STEP_BETWEEN
    return START + steps + (size - 1) / size * nbytes / bandwidth


class Messages(NamedTuple):
    """What a rank sends in a step along an axis, and how long it takes without computing."""

    axis: str
    bytes: float
    seconds: float
    hidden: float = 0  # at most so many seconds, because the rank computes meanwhile


def messages(model: Model, cluster: Cluster, plan: Plan, computing: float) -> list[Messages]:
    """Return what a rank sends (sharding.md). It computes for some seconds in a step."""
    own = model.parameters / (plan.tp * plan.pp)
    blocks = model.layers / plan.pp
    tokens = model.half * model.width * plan.micro * model.sequence / plan.cp  # S in sharding.md

    # Stages send activations to the next one, and gradients back (manual_pipeline.py).
    sent = plan.count * min(2, plan.pp - 1) * tokens / plan.tp
    bandwidth = cluster.within if cluster.nodes == 1 else cluster.between
    stages = Messages("pp", sent, sent / bandwidth)

    # FSDP gathers parameters and scatters gradients.
    calls = blocks + 1  # one for the embedding and the output layer (language_model.py)
    last_backward = computing / plan.count * 2 / 3  # of the last micro-batch
    if plan.pp > 1:  # once in a step (four_axes.py)
        gathers = scatters = 1
        hidden = last_backward
    else:  # by each micro-batch, which gathers blocks in both passes
        scatters = plan.count
        gathers = plan.count * (1 + model.layers * model.block_size() / model.parameters)
        hidden = computing
    near = plan.shards(cluster.gpus)
    gather = calls * ring(cluster, model.half * own / calls, near, plan.tp)
    scatter = calls * ring(cluster, FULL * own / calls, near, plan.tp)
    sent = (gathers * model.half + scatters * FULL) * own * (near - 1) / near
    shards = Messages("dp", sent, gathers * gather + scatters * scatter, hidden)

    # Ranks with the same shard, or DDP's with all parameters, average their gradients.
    far = plan.dp * plan.cp // near
    reduce = 2 * calls * ring(cluster, FULL * own / near / calls, far, plan.tp * near)
    copies = Messages("dp", 2 * (far - 1) / far * FULL * own / near, reduce, last_backward)

    # Keys and values move in a ring, and then with their gradients (context_parallel.py).
    keys = 2 * tokens * model.kv_heads / model.heads / plan.tp
    hops = 3 * plan.cp - 2 + plan.again * (plan.cp - 1) if plan.cp > 1 else 0
    sent = plan.count * blocks * hops * keys
    on_a_node = cluster.gpus % (plan.cp * plan.tp) == 0
    parts = Messages("cp", sent, sent / (cluster.within if on_a_node else cluster.between))

    # Activations are gathered or scattered 8 times for a block, and 3 times when it is computed
    # again, where checkpoint() stops early (sequence_parallel.py), and 4 times for the words
    # (vocabulary_parallel.py).
    passes = plan.count * (blocks * (8 + 3 * plan.again) + 4)
    seconds = passes * ring(cluster, tokens, plan.tp, 1)
    layers = Messages("tp", passes * (plan.tp - 1) / plan.tp * tokens, seconds)
    return [stages, shards, copies, parts, layers]


def judge(model: Model, cluster: Cluster, plan: Plan, hide: bool = True) -> dict:
    """Return what a rank holds and sends in a step, and the parts of the step's seconds.

    Args:
        hide: whether messages are hidden wherever there is something to compute.
    """
    gpus_of_replica = plan.pp * plan.cp * plan.tp
    tokens = plan.micro * plan.count * model.sequence / gpus_of_replica  # for each GPU
    useful = model.flops() * tokens / (cluster.flops * cluster.efficiency)
    again = useful * plan.again / 3  # a second forward pass (activation_checkpointing.py)
    computing = useful + again
    sent = dict.fromkeys(("pp", "dp", "cp", "tp"), 0)
    waits = dict.fromkeys(sent, 0)
    total = 0
    for each in messages(model, cluster, plan, computing):
        hidden = each.hidden if hide else 0
        sent[each.axis] += each.bytes
        waits[each.axis] += max(0, each.seconds - hidden)
        total += each.seconds
    # All stages wait for the slowest: one with most blocks, or the last one with the output layer.
    most_blocks = math.ceil(model.layers / plan.pp) * model.block_flops()
    last_stage = model.layers // plan.pp * model.block_flops() + model.output_flops()
    slowest = max(most_blocks, last_stage) * plan.pp / model.flops()
    # While a pipeline fills and empties, ranks wait for as long as pp-1 micro-batches take, but
    # not along dp (manual_pipeline.py).
    filling = (plan.pp - 1) / plan.count * (computing + sum(waits.values()) - waits["dp"])
    bubble = computing * (slowest - 1) + filling
    parts = {"computing": useful, "again": again, "bubble": bubble} | waits
    step = sum(parts.values())
    return {
        "plan": plan,
        "held": {"state": state(model, cluster, plan), "activations": activations(model, plan)},
        "sent": sent,
        "parts": parts,
        "messages": total,
        "step": step,
        "speed": tokens / step,
    }


def meshes(model: Model, ranks: int, gpus: int, wanted: dict) -> Iterator[tuple]:
    """Yield the sizes of meshes that divide ranks and model. Unusual ones must be wanted."""
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    for pp, cp, tp in product(sizes, repeat=3):
        dp = ranks // (pp * cp * tp)
        divide = pp <= model.layers and model.sequence % cp == 0 and model.kv_heads % tp == 0
        nearly_equal = "pp" in wanted or -model.layers % pp <= model.layers / 50  # stages
        long = "cp" in wanted or cp == 1 or model.sequence // cp >= 4096  # parts of a sequence
        in_a_node = "tp" in wanted or gpus % tp == 0
        if pp * dp * cp * tp == ranks and divide and nearly_equal and long and in_a_node:
            yield pp, dp, cp, tp


def plans(model: Model, cluster: Cluster, batch_size: int, wanted: dict) -> Iterator[Plan]:
    """Yield the plans that divide ranks, model and batch.

    Args:
        batch_size: sequences in a step.
        wanted: fields of a Plan, and the only value that each may have.
    """
    gpus = cluster.gpus
    for pp, dp, cp, tp in meshes(model, cluster.nodes * gpus, gpus, wanted):
        ways = ["ddp", "fsdp"]
        if pp == 1 and gpus % tp == 0 and gpus // tp < dp * cp:
            ways.append("hsdp")  # shards in each node, and a copy on every node
        for data, micro, again in product(ways, range(1, 65), (0, 0.5, 1)):
            plan = Plan(data, pp, dp, cp, tp, micro, batch_size // dp // micro, again)
            divides = dp * micro * plan.count == batch_size
            shards = data == "ddp" or plan.shards(gpus) > 1
            if divides and shards and wanted.items() <= plan._asdict().items():
                yield plan


def lacking(row: dict, cluster: Cluster) -> float:
    """Return how many bytes a GPU has too few for a plan."""
    return max(0, sum(row["held"].values()) - cluster.memory)


def best(rows: list[dict], cluster: Cluster) -> list[dict]:
    """Return the best plan for each set of axes, and of steps within 2% that with fewer axes."""

    def order(row):
        axes = [size for size in row["plan"].axes() if size > 1]
        return lacking(row, cluster), round(50 * math.log(row["step"])), len(axes), row["messages"]

    found = {}
    for row in sorted(rows, key=order):
        used = tuple(size > 1 for size in row["plan"].axes())
        found.setdefault(used, row)
    return list(found.values())


def amount(number: float, digits: int = 3) -> str:
    """Return 48.3G for 48.3e9, or less of its digits."""
    text = Decimal(f"{number:.{digits}g}").to_eng_string()
    return text.replace("E+12", "T").replace("E+9", "G").replace("E+6", "M").replace("E+3", "k")


def describe(model: Model, cluster: Cluster, row: dict) -> list[str]:
    """Return the words of a plan. Its step is 25% faster, or 25% slower with nothing hidden."""
    plan = row["plan"]
    faster = cluster._replace(efficiency=1.25 * cluster.efficiency)
    shortest = judge(model, faster, plan)["step"]
    longest = judge(model, cluster, plan, hide=False)["step"] / 0.75
    losses = row["parts"].copy()
    del losses["computing"]
    largest = max(losses, key=losses.get)
    lost = f"{largest} {losses[largest] / row['step']:.0%}" if losses[largest] else "nothing"
    return [
        plan.data,
        "x".join(map(str, plan.axes())),
        f"{plan.count}x{plan.micro}",
        f"{plan.again:g}",
        *map(amount, row["held"].values()),
        *map(amount, row["sent"].values()),
        amount(row["messages"], 2),
        f"{amount(shortest, 2)}-{amount(longest, 2)}",
        amount(row["speed"]),
        "does not fit" if lacking(row, cluster) else lost,
    ]


def table(rows: list[list[str]]) -> list[str]:
    """Return the lines of a table, without the columns that are 0 in all rows."""
    columns = [column for column in zip(TITLES, *rows, strict=True) if set(column[1:]) != {"0"}]
    widths = [max(map(len, column)) for column in columns]
    heads = ""
    for name, titles in GROUPS.items():
        found = [i for i, column in enumerate(columns) if column[0] in titles.split()]
        if found:
            heads = f"{heads:<{sum(widths[: found[0]]) + found[0]}}{name} "
    lines = [heads.rstrip()]
    for words in zip(*columns, strict=True):
        data, mesh, *numbers, lost = zip(words, widths, strict=True)
        cells = [f"{word:<{width}}" for word, width in (data, mesh)]
        cells += [f"{word:>{width}}" for word, width in numbers]
        lines.append(" ".join([*cells, lost[0]]))
    return lines


def make_parser() -> argparse.ArgumentParser:
    """Return the flags of this program."""
    first_line = __doc__.partition("\n")[0]
    parser = argparse.ArgumentParser(description=first_line, usage=argparse.SUPPRESS)
    add = parser.add_argument
    add("--batch_size", type=int, default=1024, help="sequences in a step, over all ranks")

    add = parser.add_argument_group("the model").add_argument
    add("--model", choices=MODELS, default="llama-7b", help="its sizes, unless other flags say so")
    add("--parameters", type=float, help="in all. The flags of a model's sizes go together")
    add("--layers", type=int, help="blocks")
    add("--width", type=int, help="numbers of a token between blocks")
    add("--heads", type=int, help="heads of queries")
    add("--kv_heads", type=int, help="heads of keys and values")
    add("--vocabulary", type=int, help="words")
    add("--matrices", type=int, help="of an MLP: 2, or 3 with SwiGLU")
    add("--sequence", type=int, help="tokens of a sequence (4096)")
    half = "bytes of a gathered parameter or an activation. With 4, also --flops"
    add("--half", type=int, help=half)
    add("--tables", type=int, help="1 if embedding and output layer are one matrix")

    add = parser.add_argument_group("the GPUs").add_argument
    add("--nodes", type=int, default=8)
    add("--gpus", type=int, default=8, help="on each node")
    add("--memory", type=float, default=68e9, help="free bytes of a GPU; CUDA and gaps take some")
    add("--flops", type=float, default=989e12, help="peak of a GPU, dense, for numbers of --half")
    add("--efficiency", type=float, default=0.45, help="the part of it reached while computing")
    add("--within", type=float, default=360e9, help="bytes/s that a GPU sends inside its node")
    add("--between", type=float, default=46e9, help="bytes/s that a GPU sends to other nodes")

    add = parser.add_argument_group("only plans that have").add_argument
    add("--data", choices=("ddp", "fsdp", "hsdp"), help="kind of data parallelism")
    add("--pp", type=int, help="stages of a pipeline")
    add("--dp", type=int, help="ranks with different sequences")
    add("--cp", type=int, help="ranks that split a sequence")
    add("--tp", type=int, help="ranks that split a layer")
    add("--micro", type=int, help="sequences in a micro-batch")
    add("--count", type=int, help="micro-batches in a step")
    again = "part of the blocks with activation checkpointing"
    add("--again", type=float, choices=(0, 0.5, 1), help=again)
    return parser


def given(args: argparse.Namespace, fields: tuple) -> dict:
    """Return those of some fields for which a flag has a value."""
    values = {name: getattr(args, name) for name in fields}
    return {name: value for name, value in values.items() if value is not None}


def main(words: list[str] | None = None) -> None:
    """Read the flags, and print a plan for each set of axes."""
    parser = make_parser()
    args = parser.parse_args(words)
    for name, value in vars(args).items():
        least, most = LIMITS.get(name, (1, 1e18))
        is_number = isinstance(value, (int, float)) and name != "again"
        if is_number and not least <= value <= most:
            parser.error(f"--{name} {value:g} must be between {least:g} and {most:g}")
    model = MODELS[args.model]._replace(**given(args, Model._fields))
    if not 6 <= model.block_size() / model.width**2 <= 60:  # about 12 is usual
        size = amount(model.parameters)
        parser.error(f"{size} parameters do not go with the model's other sizes")
    cluster = Cluster(**given(args, Cluster._fields))
    wanted = given(args, Plan._fields)
    found = plans(model, cluster, args.batch_size, wanted)
    rows = best([judge(model, cluster, plan) for plan in found], cluster)
    if not rows:
        ranks = cluster.nodes * cluster.gpus
        reason = f"no plan of {ranks} ranks divides --batch_size and the model's layers and heads"
        if args.batch_size % ranks:
            reason += f": try --batch_size {max(1, args.batch_size // ranks) * ranks}"
        parser.error(reason)
    print(*table([describe(model, cluster, row) for row in rows]), sep="\n")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a word
    main()
