"""Plans a run on many GPUs: what a rank holds, sends and waits for, on each mesh that makes sense.

Run it:
    python playground/plan.py --model llama-7b --nodes 8 --gpus 8 --batch_size 1024

For each set of axes, it prints the plan with the shortest step, of those that fit. Bytes are
counted: each formula names the lesson that counts them, or a paper. Seconds are as good as three
inputs: --efficiency, --within and --between (playground/pages/planning.md measures them).
"""

import math
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Iterator
from decimal import Decimal
from itertools import product
from typing import NamedTuple

MODELS = {  # parameters, layers, width, heads, heads of keys and values, vocabulary, MLP's matrices
    "llama-7b": (6.74e9, 32, 4096, 32, 32, 32000, 3),
    "llama3-8b": (8.03e9, 32, 4096, 32, 8, 128256, 3),
    "llama3-70b": (70.6e9, 80, 8192, 64, 8, 128256, 3),
    "llama3-405b": (405.9e9, 126, 16384, 128, 8, 128256, 3),
}
START = 8.4e-6  # seconds of NCCL's rings (src/graph/tuning.cc): to start,
STEP_WITHIN, STEP_BETWEEN = 3.4e-6, 9.6e-6  # for a step inside a node, and between two
AXES = ("pp", "dp", "cp", "tp")
HEAD = "{:>42}{:>26}{:>21}\n".format("bytes held", "bytes sent along", "seconds")
TITLES = ("data", "mesh", "batches", "again", "state", "kept", *AXES, "messages", "step", "loss")
ROW = "{:<5}{:<11}{:>7}{:>6}" + "{:>7}" * 6 + "{:>9}{:>12}  {}"


class Model(NamedTuple):
    """A transformer's sizes, and the bytes of its numbers: by default, bfloat16 and float32."""

    parameters: float
    layers: int
    width: int
    heads: int
    kv_heads: int
    vocabulary: int
    matrices: int  # of an MLP: 2, or 3 with SwiGLU
    sequence: int
    half: int = 2  # of gathered parameters and of activations (mixed_precision.py)
    full: int = 4  # of shards, of Adam's averages, and of the gradients that are sent
    tables: int = 2  # the embedding and the output layer, or 1 that is both (--tied)


class Plan(NamedTuple):
    """A mesh, with its outermost axis first, and what each rank does in a step."""

    data: str  # ddp, fsdp or hsdp
    pp: int
    dp: int
    cp: int
    tp: int
    micro: int  # sequences in a micro-batch
    count: int  # micro-batches in a step
    again: float  # the part of the blocks with activation checkpointing: 0, 0.5 or 1


def block_size(m: Model) -> float:
    """Return the parameters of a block: all but the embedding and the output layer."""
    return (m.parameters - m.tables * m.vocabulary * m.width) / m.layers


def kept_by_block(m: Model, tp: int) -> float:
    """Return the bytes for each token that a block keeps for backward()."""
    # activation_checkpointing.py: 16 w + h + 4 numbers, two of them for each of the MLP's neurons.
    # SwiGLU keeps four. sequence_parallel.py --sequence: 2 w, where pairs begin, are not split.
    attention = 2 * m.width**2 * (1 + m.kv_heads / m.heads)  # parameters
    neurons = (block_size(m) - attention) / (m.matrices * m.width)
    rest = m.width * (4 + 2 * m.kv_heads / m.heads) + neurons * (2 if m.matrices == 2 else 4)
    return m.half * (2 * m.width + rest / tp) + m.full * (m.heads + 4) / tp


def activations(m: Model, p: Plan) -> float:
    """Return the bytes that the fullest rank keeps for backward()."""
    block = kept_by_block(m, p.tp)
    stage = m.layers / p.pp * (p.again * m.half * m.width / p.tp + (1 - p.again) * block)
    once = block if p.again else 0  # what activation_checkpointing.py computes again
    # vocabulary_parallel.py: scores, and in float32 the scores, log_softmax and a gradient.
    scores = m.vocabulary / p.tp * (m.half + 3 * m.full)
    first = stage * min(p.count, p.pp) + once  # 1F1B (manual_pipeline.py; arXiv 2104.04473)
    return p.micro * m.sequence / p.cp * max(first, stage + max(once, scores))


def shards(c: Namespace, p: Plan) -> int:
    """Return among how many ranks a parameter is sharded (four_axes.py; hybrid_parallel.py)."""
    return {"ddp": 1, "fsdp": p.dp * p.cp, "hsdp": c.gpus // p.tp}[p.data]


def state(m: Model, c: Namespace, p: Plan) -> float:
    """Return the bytes of the model, gradients, and Adam's averages (sharding.md)."""
    own = m.parameters / (p.tp * p.pp)
    if p.data == "ddp":  # and autocast's copy (mixed_precision.py)
        return own * (4 * m.full + (m.half if m.half < m.full else 0))
    # Whole are: in a pipeline, all (four_axes.py); or two layers, a gradient, and the copy to send.
    layer = max(block_size(m), m.vocabulary * m.width) / p.tp
    whole = own * (m.half + m.full) if p.pp > 1 else layer * (3 * m.half + m.full)
    return own * 4 * m.full / shards(c, p) + whole


def ring(c: Namespace, nbytes: float, size: int, stride: int) -> float:
    """Return the seconds of an all_gather or reduce_scatter over every stride-th rank."""
    # collectives.py: (n-1)/n of all bytes, in n-1 steps. NCCL makes a ring for each GPU's link.
    together = max(1, min(size, c.gpus // stride))  # of the group's ranks, on one node
    nodes = math.ceil(size / together)
    bandwidth = c.within if nodes == 1 else min(c.within, together * c.between)
    steps = (size - nodes) * STEP_WITHIN + (nodes - 1) * STEP_BETWEEN
    return START + steps + (size - 1) / size * nbytes / bandwidth if size > 1 else 0


def flops(m: Model) -> float:
    """Return the operations for each token (language_model.py; arXiv 2204.02311, appendix B)."""
    embedding = (m.tables - 1) * m.vocabulary * m.width  # multiplies nothing
    return 6 * (m.parameters - embedding) + 12 * m.layers * m.width * m.sequence


def messages(m: Model, c: Namespace, p: Plan, computing: float) -> list[tuple]:
    """Return axis, bytes sent (sharding.md), seconds, and seconds that can hide them."""
    own = m.parameters / (p.tp * p.pp)
    blocks = m.layers / p.pp
    calls = blocks + 1  # language_model.py: a call for the embedding and the output layer
    near, far = shards(c, p), p.dp * p.cp // shards(c, p)  # far: ranks that have the same shard
    scatters = p.count if p.pp == 1 else 1  # four_axes.py: once. Otherwise, blocks gather twice:
    gathers = scatters * (1 + m.layers * block_size(m) / m.parameters) if p.pp == 1 else 1
    gather = calls * ring(c, m.half * own / calls, near, p.tp)
    scatter = calls * ring(c, m.full * own / calls, near, p.tp)
    sharded = (gathers * m.half + scatters * m.full) * own * (near - 1) / near
    reduce = 2 * calls * ring(c, m.full * own / near / calls, far, p.tp * near)
    last = computing / p.count * 2 / 3  # backward() of the last micro-batch
    tokens = m.half * m.width * p.micro * m.sequence / p.cp  # S in sharding.md, of a micro-batch
    # sequence_parallel.py: 8 + 3 passes (checkpoint() stops early); vocabulary_parallel.py: 4.
    passes = p.count * (blocks * (8 + 3 * p.again) + 4)
    keys = 2 * tokens * m.kv_heads / m.heads / p.tp  # and values (context_parallel.py)
    hops = p.count * blocks * (3 * p.cp - 2 + p.again * (p.cp - 1)) if p.cp > 1 else 0
    attention = 12 * m.layers * m.width * m.sequence / flops(m) * computing
    sent = p.count * min(2, p.pp - 1) * tokens / p.tp  # to both sides (manual_pipeline.py)
    inner = c.within if p.cp * p.tp <= c.gpus else c.between
    return [
        ("pp", sent, sent / (c.within if c.nodes == 1 else c.between), 0),
        ("dp", sharded, gathers * gather + scatters * scatter, computing if p.pp == 1 else last),
        ("dp", 2 * (far - 1) / far * m.full * own / near, reduce, last),
        ("cp", hops * keys, hops * keys / inner, attention),
        ("tp", passes * (p.tp - 1) / p.tp * tokens, passes * ring(c, tokens, p.tp, 1), 0),
    ]


def judge(m: Model, c: Namespace, p: Plan) -> dict:
    """Return what a rank holds and sends in a step, and the parts of the step's seconds."""
    tokens = p.micro * p.count * m.sequence / (p.pp * p.cp * p.tp)  # for each GPU
    useful = flops(m) * tokens / (c.flops * c.efficiency)
    again = useful * p.again / 3  # a second forward pass (activation_checkpointing.py)
    sent, all_seconds, waits = [dict.fromkeys(AXES, 0) for _ in range(3)]
    for axis, nbytes, seconds, hidden in messages(m, c, p, useful + again):
        sent[axis] += nbytes
        all_seconds[axis] += seconds
        waits[axis] += max(0, seconds - hidden)
    fill = (p.pp - 1) / p.count  # manual_pipeline.py: of what a micro-batch does, so not along dp
    bubble = fill * (useful + again + sum(waits.values()) - waits["dp"])
    parts = {"computing": useful, "again": again, "bubble": bubble} | waits
    total = sum(all_seconds.values())
    longest = useful + again + total + fill * (useful + again + total - all_seconds["dp"])
    held = {"state": state(m, c, p), "activations": activations(m, p)}
    axes = tuple(size > 1 for size in p[1:5])
    step = sum(parts.values())  # of steps within 2%, the one with the fewest axes comes first
    order = (max(0, sum(held.values()) - c.memory), round(50 * math.log(step)), sum(axes), total)
    row = {"plan": p, "axes": axes, "held": held, "sent": sent, "parts": parts, "order": order}
    return row | held | {"step": step, "longest": longest, "messages": total}


def sensible(m: Model, c: Namespace) -> Iterator[Plan]:
    """Yield the plans that divide ranks, model and batch, and have the fields that were given."""
    ranks = c.nodes * c.gpus
    given = {name: getattr(c, name) for name in Plan._fields if getattr(c, name) is not None}
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    for pp, cp, tp in product(sizes, repeat=3):
        dp = ranks // (pp * cp * tp)
        whole = pp * dp * cp * tp == ranks and c.batch_size % dp == 0
        split = pp <= m.layers and m.sequence % cp == 0 and m.kv_heads % tp == 0
        # Unless asked for: stages are nearly equal, and tp stays in a node, with the fastest links.
        usual = (c.pp or -m.layers % pp <= m.layers / 50) and (c.tp or c.gpus % tp == 0)
        if whole and split and usual and (c.cp or cp <= 16):
            nodes = pp == 1 and 0 < c.gpus // tp < dp * cp  # each has a replica
            for data, micro, again in product(("ddp", "fsdp", "hsdp"), range(1, 65), (0, 0.5, 1)):
                plan = Plan(data, pp, dp, cp, tp, micro, c.batch_size // dp // micro, again)
                possible = (nodes or data != "hsdp") and c.batch_size // dp % micro == 0
                if possible and given.items() <= plan._asdict().items():
                    yield plan


def amount(number: float) -> str:
    """Return 48.3G for 48.3e9."""
    text = Decimal(f"{number:.3g}").to_eng_string()
    return text.replace("E+12", "T").replace("E+9", "G").replace("E+6", "M").replace("E+3", "k")


def describe(row: dict) -> str:
    """Return the line of a plan. The step: inputs 25% better, or 25% worse and nothing hidden."""
    p, parts = row["plan"], row["parts"]
    step = f"{row['step'] / 1.25:.3g}-{row['longest'] / 0.75:.3g}"
    most = max(list(parts)[1:], key=parts.get)  # of all but computing
    loss = "does not fit" if row["order"][0] else f"{most} {parts[most] / row['step']:.0%}"
    cells = [p.data, "x".join(map(str, p[1:5])), f"{p.count}x{p.micro}", p.again]
    cells += [amount(size) for size in (*row["held"].values(), *row["sent"].values())]
    return ROW.format(*cells, f"{row['messages']:.3g}", step, loss)


def main(words: list[str] | None = None) -> None:
    """Read the flags, and print a plan for each set of axes."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0], usage=SUPPRESS)
    add = parser.add_argument
    add("--model", choices=MODELS, default="llama-7b", help="its sizes, unless other flags say so")
    for name, kind in (Model.__annotations__ | Plan.__annotations__).items():
        add(f"--{name}", type=kind, help="of the model, or of the plans to consider")
    add("--batch_size", type=int, default=1024, help="sequences in a step, over all ranks")
    add("--nodes", type=int, default=8)
    add("--gpus", type=int, default=8, help="on each node")
    add("--memory", type=float, default=68e9, help="free bytes of a GPU; CUDA and gaps take some")
    add("--flops", type=float, default=989e12, help="a GPU's most operations per second")
    add("--efficiency", type=float, default=0.45, help="the part of them reached while computing")
    add("--within", type=float, default=450e9, help="bytes/s that a GPU sends inside its node")
    add("--between", type=float, default=50e9, help="bytes/s that a GPU sends to other nodes")
    add("--all", action="store_true", help="print all plans")
    add("--plot", metavar="FILE", help="draw the first eight")
    c = parser.parse_args(words)
    for name, value in vars(c).items():
        if type(value) in (int, float) and name != "again" and not 0 < value < math.inf:
            parser.error(f"--{name} {value} must be more than 0")
    given = {name: getattr(c, name) for name in Model._fields if getattr(c, name) is not None}
    m = Model(*MODELS[c.model], 4096)._replace(**given)
    rows = [judge(m, c, p) for p in sensible(m, c) if block_size(m) > 2 * m.width**2]
    if not rows:
        parser.error(f"no plan of {c.nodes * c.gpus} ranks divides the model and --batch_size")
    print(HEAD + ROW.format(*TITLES))
    shown = {}
    for row in sorted(rows, key=lambda row: row["order"]):
        shown.setdefault(row["plan"] if c.all else row["axes"], row)
    print(*[describe(row) for row in shown.values()], sep="\n")
    if c.plot:
        try:
            from figures.charts import draw_plans

            draw_plans(list(shown.values())[:8], c.memory, c.plot)
        except (ImportError, OSError, ValueError) as error:
            parser.error(f"--plot: {error} (it needs playground/figures/requirements.txt)")


if __name__ == "__main__":
    main()
