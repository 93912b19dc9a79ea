"""Plans the training of a transformer on many GPUs.

For each mesh that makes sense, it shows what a rank holds, sends and waits for:
    python playground/tools/plan.py --model llama-7b --nodes 8 --gpus 8 --batch_size 1024

Each formula names the lesson that counts it, or a paper. Seconds are as good as three inputs:
--efficiency, --within and --between (playground/pages/planning.md measures them).
"""

import math
import signal
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Iterator
from decimal import Decimal
from itertools import product
from pathlib import Path
from typing import Annotated, NamedTuple

MODELS = {  # parameters, layers, width, heads, heads of keys and values, vocabulary, MLP's matrices
    "llama-7b": (6.74e9, 32, 4096, 32, 32, 32000, 3),
    "llama3-8b": (8.03e9, 32, 4096, 32, 8, 128256, 3),
    "llama3-405b": (405.9e9, 126, 16384, 128, 8, 128256, 3),
}
START, STEP = 8.4e-6, {"within": 3.4e-6, "between": 9.6e-6}  # NCCL's, src/graph/tuning.cc
CHOICES = {"data": ("ddp", "fsdp", "hsdp"), "again": (0, 0.5, 1)}
FULL = 4  # bytes of a parameter in a shard, of Adam's averages, and of gradients that are sent
LEAST = {"efficiency": 0.001, "memory": 1e8, "flops": 1e9, "within": 1e5, "between": 1e5}
HEAD = "{:>43}{:>26}{:>20}\n".format("bytes held", "bytes sent along", "seconds")
TITLES = "data,mesh,batches,again,state,kept,pp,dp,cp,tp,messages,step,tokens/s,lost to"
ROW = "{:<4} {:<11} {:>7} {:>5}" + " {:>6}" * 6 + " {:>8} {:>11} {:>8}  {}"


class Model(NamedTuple):
    """A transformer's sizes, and the bytes of its numbers: by default, bfloat16 and float32."""

    parameters: Annotated[float, "in all. The flags of a model's sizes go together"]
    layers: Annotated[int, "blocks"]
    width: Annotated[int, "numbers of a token between blocks"]
    heads: Annotated[int, "heads of queries"]
    kv_heads: Annotated[int, "heads of keys and values"]
    vocabulary: Annotated[int, "words"]
    matrices: Annotated[int, "of an MLP: 2, or 3 with SwiGLU"]
    sequence: Annotated[int, "tokens of a sequence (4096)"]
    half: Annotated[int, "bytes of a gathered parameter or an activation. With 4, also --flops"] = 2
    tables: Annotated[int, "1 if embedding and output layer are one matrix"] = 2

    def block_size(self) -> float:
        """Return the parameters of a block: all but the embedding and the output layer."""
        return (self.parameters - self.tables * self.vocabulary * self.width) / self.layers

    def flops(self, layers: int, output: bool = True) -> float:
        """Return the operations for each token (language_model.py; arXiv 2204.02311, B)."""
        block = 6 * self.block_size() + 12 * self.width * self.sequence
        return layers * block + (6 * self.vocabulary * self.width if output else 0)


class Plan(NamedTuple):
    """A mesh, with its outermost axis first, and what each rank does in a step."""

    data: Annotated[str, "kind of data parallelism"]
    pp: Annotated[int, "stages of a pipeline"]
    dp: Annotated[int, "ranks with different sequences"]
    cp: Annotated[int, "ranks that split a sequence"]
    tp: Annotated[int, "ranks that split a layer"]
    micro: Annotated[int, "sequences in a micro-batch"]
    count: Annotated[int, "micro-batches in a step"]
    again: Annotated[float, "part of the blocks with activation checkpointing"]

    def shards(self, gpus: int) -> int:
        """Return among how many ranks a parameter is sharded (four_axes.py; hybrid_parallel.py)."""
        return {"ddp": 1, "fsdp": self.dp * self.cp, "hsdp": gpus // self.tp}[self.data]


def kept_by_block(m: Model, tp: int) -> float:
    """Return the bytes for each token that a block keeps for backward()."""
    # activation_checkpointing.py: 16 w + h + 4 numbers, two of them for each of the MLP's neurons.
    # SwiGLU keeps four. sequence_parallel.py --sequence: 2 w, where pairs begin, are not split.
    attention = 2 * m.width**2 * (1 + m.kv_heads / m.heads)  # parameters
    neurons = (m.block_size() - attention) / (m.matrices * m.width)
    rest = m.width * (4 + 2 * m.kv_heads / m.heads) + neurons * (2 if m.matrices == 2 else 4)
    return m.half * (2 * m.width + rest / tp) + FULL * (m.heads + 4) / tp


def activations(m: Model, p: Plan) -> float:
    """Return the bytes that the fullest rank keeps for backward()."""
    block = kept_by_block(m, p.tp)
    stage = m.layers / p.pp * (p.again * m.half * m.width / p.tp + (1 - p.again) * block)
    once = block if p.again else 0  # what activation_checkpointing.py computes again
    scores = m.vocabulary / p.tp * (m.half + 3 * FULL)  # vocabulary_parallel.py: 3 in float32
    first = stage * min(p.count, p.pp) + once  # 1F1B (manual_pipeline.py; arXiv 2104.04473)
    return p.micro * m.sequence / p.cp * max(first, stage + max(once, scores))


def state(m: Model, c: Namespace, p: Plan) -> float:
    """Return the bytes of the model, gradients, and Adam's averages (sharding.md)."""
    own = m.parameters / (p.tp * p.pp)
    if p.data == "ddp":  # and autocast's copy (mixed_precision.py)
        return own * (4 * FULL + (m.half if m.half < FULL else 0))
    # Whole are: in a pipeline, all (four_axes.py); or two layers, a gradient, and the copy to send.
    layer = max(m.block_size(), m.vocabulary * m.width) / p.tp
    whole = own * (m.half + FULL) if p.pp > 1 else layer * (3 * m.half + FULL)
    return own * 4 * FULL / p.shards(c.gpus) + whole


def ring(c: Namespace, nbytes: float, size: int, stride: int) -> float:
    """Return the seconds of an all_gather or reduce_scatter over every stride-th rank."""
    # collectives.py: (n-1)/n of all bytes, in n-1 steps. NCCL makes a ring for each GPU's link.
    together = max(1, math.gcd(size * stride, c.gpus) // stride)  # of its ranks, on one node
    nodes = size // together
    bandwidth = c.within if nodes == 1 else min(c.within, together * c.between)
    steps = (size - nodes) * STEP["within"] + (nodes - 1) * STEP["between"]  # seconds
    return START + steps + (size - 1) / size * nbytes / bandwidth if size > 1 else 0


def messages(m: Model, c: Namespace, p: Plan, computing: float) -> list[tuple]:
    """Return axis, bytes sent (sharding.md), seconds, and seconds that can hide them."""
    own = m.parameters / (p.tp * p.pp)
    blocks = m.layers / p.pp
    calls = blocks + 1  # language_model.py: a call for the embedding and the output layer
    near, far = p.shards(c.gpus), p.dp * p.cp // p.shards(c.gpus)  # far: have the same shard
    scatters = p.count if p.pp == 1 else 1  # four_axes.py: once. Otherwise, blocks gather twice:
    gathers = scatters * (1 + m.layers * m.block_size() / m.parameters) if p.pp == 1 else 1
    gather = calls * ring(c, m.half * own / calls, near, p.tp)
    scatter = calls * ring(c, FULL * own / calls, near, p.tp)
    sharded = (gathers * m.half + scatters * FULL) * own * (near - 1) / near
    reduce = 2 * calls * ring(c, FULL * own / near / calls, far, p.tp * near)
    last = computing / p.count * 2 / 3  # backward() of the last micro-batch
    tokens = m.half * m.width * p.micro * m.sequence / p.cp  # S in sharding.md, of a micro-batch
    # sequence_parallel.py: 8 + 3 passes (checkpoint() stops early); vocabulary_parallel.py: 4.
    passes = p.count * (blocks * (8 + 3 * p.again) + 4)
    keys = 2 * tokens * m.kv_heads / m.heads / p.tp  # and values (context_parallel.py)
    hops = p.count * blocks * (3 * p.cp - 2 + p.again * (p.cp - 1)) if p.cp > 1 else 0
    sent = p.count * min(2, p.pp - 1) * tokens / p.tp  # to both sides (manual_pipeline.py)
    inner = c.within if c.gpus % (p.cp * p.tp) == 0 else c.between
    return [
        ("pp", sent, sent / (c.within if c.nodes == 1 else c.between), 0),
        ("dp", sharded, gathers * gather + scatters * scatter, computing if p.pp == 1 else last),
        ("dp", 2 * (far - 1) / far * FULL * own / near, reduce, last),
        ("cp", hops * keys, hops * keys / inner, 0),
        ("tp", passes * (p.tp - 1) / p.tp * tokens, passes * ring(c, tokens, p.tp, 1), 0),
    ]


def judge(m: Model, c: Namespace, p: Plan, hide: bool = True) -> dict:
    """Return what a rank holds and sends in a step, and the parts of the step's seconds."""
    tokens = p.micro * p.count * m.sequence / (p.pp * p.cp * p.tp)  # for each GPU
    useful = m.flops(m.layers) * tokens / (c.flops * c.efficiency)
    again = useful * p.again / 3  # a second forward pass (activation_checkpointing.py)
    sent, waits = {}, {}
    total = 0
    for axis, nbytes, seconds, hidden in messages(m, c, p, useful + again):
        sent[axis] = sent.get(axis, 0) + nbytes
        waits[axis] = waits.get(axis, 0) + max(0, seconds - hidden * hide)
        total += seconds
    # The stage with the output layer has no more blocks than others. All wait for the slowest.
    slowest = max(m.flops(math.ceil(m.layers / p.pp), False), m.flops(m.layers // p.pp))
    uneven = (useful + again) * (slowest * p.pp / m.flops(m.layers) - 1)
    fill = (p.pp - 1) / p.count  # manual_pipeline.py: of what a micro-batch does, so not along dp
    bubble = uneven + fill * (useful + again + sum(waits.values()) - waits["dp"])
    parts = {"computing": useful, "again": again, "bubble": bubble} | waits
    held = {"state": state(m, c, p), "activations": activations(m, p)}
    step = sum(parts.values())  # of steps within 2%, the one with the fewest axes comes first
    order = (max(0, sum(held.values()) - c.memory), round(50 * math.log(step)), -p[1:5].count(1))
    row = {"plan": p, "order": order, "step": step, "messages": total, "speed": tokens / step}
    return row | {"held": held, "sent": sent, "parts": parts}


def sensible(m: Model, c: Namespace) -> Iterator[Plan]:
    """Yield the plans that divide ranks, model and batch, and have the fields that were given."""
    ranks = c.nodes * c.gpus
    given = {(name, getattr(c, name)) for name in Plan._fields if getattr(c, name) is not None}
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    for pp, cp, tp in product(sizes, repeat=3):
        dp = ranks // (pp * cp * tp)
        whole = pp * dp * cp * tp == ranks and c.batch_size % dp == 0
        split = pp <= m.layers and m.sequence % cp == 0 and m.kv_heads % tp == 0
        # Unless asked for: stages are nearly equal, tp stays in a node, sequences of cp are long.
        usual = (c.pp or -m.layers % pp <= m.layers / 50) and (c.tp or c.gpus % tp == 0)
        if whole and split and usual and (c.cp or cp == 1 or m.sequence // cp >= 4096):
            replicas = pp == 1 and c.gpus % tp == 0 and c.gpus // tp < dp * cp  # one on each node
            for data, micro, again in product(CHOICES["data"], range(1, 65), CHOICES["again"]):
                plan = Plan(data, pp, dp, cp, tp, micro, c.batch_size // dp // micro, again)
                possible = data == "ddp" or plan.shards(c.gpus) > 1 and (data == "fsdp" or replicas)
                if possible and c.batch_size // dp % micro == 0 and given <= plan._asdict().items():
                    yield plan


def amount(number: float) -> str:
    """Return 48.3G for 48.3e9."""
    text = Decimal(f"{number:.3g}").to_eng_string()
    return text.replace("E+12", "T").replace("E+9", "G").replace("E+6", "M").replace("E+3", "k")


def describe(m: Model, c: Namespace, row: dict) -> str:
    """Return the line of a plan. Its step is 25% faster, or 25% slower with nothing hidden."""
    p, parts = row["plan"], row["parts"]
    faster = Namespace(**vars(c) | {"efficiency": 1.25 * c.efficiency})
    shortest, longest = judge(m, faster, p)["step"], judge(m, c, p, hide=False)["step"] / 0.75
    most = max(list(parts)[1:], key=parts.get)  # of all but computing
    lost = f"{most} {parts[most] / row['step']:.0%}" if parts[most] else "nothing"
    cells = [p.data, "x".join(map(str, p[1:5])), f"{p.count}x{p.micro}", p.again]
    cells += map(amount, (*row["held"].values(), *row["sent"].values(), row["messages"]))
    cells += [f"{amount(shortest)}-{amount(longest)}", amount(row["speed"])]
    return ROW.format(*cells, "does not fit" if row["order"][0] else lost)


def main(words: list[str] | None = None) -> None:
    """Read the flags, and print a plan for each set of axes."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0], usage=SUPPRESS)
    add = parser.add_argument
    add("--model", choices=MODELS, default="llama-7b", help="its sizes, unless other flags say so")
    for name, kind in (Model.__annotations__ | Plan.__annotations__).items():
        add(f"--{name}", type=kind.__origin__, choices=CHOICES.get(name), help=kind.__metadata__[0])
    add("--batch_size", type=int, default=1024, help="sequences in a step, over all ranks")
    add("--nodes", type=int, default=8)
    add("--gpus", type=int, default=8, help="on each node")
    add("--memory", type=float, default=68e9, help="free bytes of a GPU; CUDA and gaps take some")
    add("--flops", type=float, default=989e12, help="peak of a GPU, dense, for numbers of --half")
    add("--efficiency", type=float, default=0.45, help="the part of it reached while computing")
    add("--within", type=float, default=360e9, help="bytes/s that a GPU sends inside its node")
    add("--between", type=float, default=46e9, help="bytes/s that a GPU sends to other nodes")
    add("--plot", metavar="FILE", help="draw the first eight")
    c = parser.parse_args(words)
    for name, value in vars(c).items():
        least, most = LEAST.get(name, 1), {"efficiency": 1, "micro": 64}.get(name, 1e18)
        if type(value) in (int, float) and name != "again" and not least <= value <= most:
            parser.error(f"--{name} {value:g} must be between {least:g} and {most:g}")
    given = {name: getattr(c, name) for name in Model._fields if getattr(c, name) is not None}
    m = Model(*MODELS[c.model], 4096)._replace(**given)
    if not 6 <= m.block_size() / m.width**2 <= 60:  # about 12 is usual
        parser.error(f"{amount(m.parameters)} parameters do not go with the model's other sizes")
    rows = [judge(m, c, p) for p in sensible(m, c)]
    if not rows:
        ranks, line = c.nodes * c.gpus, "divides --batch_size and the model's layers and heads"
        hint = f": try --batch_size {max(1, c.batch_size // ranks) * ranks}"
        parser.error(f"no plan of {ranks} ranks {line}{hint if c.batch_size % ranks else ''}")
    print(HEAD + ROW.format(*TITLES.split(",")))
    shown = {}
    for row in sorted(rows, key=lambda row: (row["order"], row["messages"])):
        shown.setdefault(tuple(size > 1 for size in row["plan"][1:5]), row)
    print(*[describe(m, c, row) for row in shown.values()], sep="\n")
    if c.plot:
        try:
            sys.path.append(str(Path(__file__).resolve().parents[1] / "pages"))
            from figures.charts import draw_plans

            draw_plans(list(shown.values())[:8], c.memory, c.plot)
        except (ImportError, OSError, ValueError) as error:
            parser.error(f"--plot: {error} (it needs playground/pages/figures/requirements.txt)")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a word
    main()
