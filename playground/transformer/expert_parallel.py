"""Expert parallelism: each token travels to the rank of its expert, and back.

Run it:
    torchrun --standalone --nproc-per-node 2 playground/transformer/expert_parallel.py

It prints the same losses with 1, 2 and 4 ranks, up to rounding. At the end it prints which part of
the last test batch's tokens went to each expert:
    epoch 3/3  loss 0.1132  train 96.47%  test 96.83%  ...
    block 1: its experts get 26%, 56%, 14%, 4% of the tokens
    block 2: its experts get 52%, 4%, 28%, 16% of the tokens

A block of a transformer ends with an MLP, which computes each token separately. A mixture of
experts (MoE) has several MLPs in its place, the experts. A small linear layer, the router or gate,
gives each token a score for every expert, and the expert with the best score computes the token
(top-1 routing). Its output is multiplied by the score. So the model has more parameters, but a
token still passes through one MLP. With `--top 2`, two experts compute it, and these products are
added.

Each rank keeps some of the experts, and reads images of its own, as in data parallelism. In each
block, one all_to_all sends counts, one the tokens to the ranks of their experts, and one the
outputs back (`playground/pages/figures/experts.svg`). All else is replicated, with averaged
gradients.

With 4 ranks and `--ep 2`, the ranks are a mesh: tokens travel between ranks 0 and 1, and between 2
and 3. Ranks 0 and 2 have the same experts, so gradients of these are summed over the two, others
over all four, and all are divided by 4. (With FSDP, call `fully_shard(expert, mesh=mesh["efsdp"])`,
and then `expert.set_gradient_divide_factor(world_size)`. DDP would average different experts.)

Nothing makes the router spread the load (the tokens of each expert). `--balance` adds an auxiliary
loss (https://arxiv.org/abs/2101.03961). With `--bias`, a number is added to an expert's scores when
experts are chosen. It grows after a step with fewer tokens than the mean, and falls after one with
more (https://arxiv.org/abs/2408.15664). On MNIST, the load becomes even:
    torchrun --standalone --nproc-per-node 2 playground/transformer/expert_parallel.py --balance 0.1
    block 1: its experts get 27%, 26%, 26%, 21% of the tokens
    block 2: its experts get 24%, 25%, 23%, 28% of the tokens

Try breaking it, in a copy beside it (`--double --dataset digits --batch_size 120 --timeout 10`):
  1. In `compute`, write `dispatch(rows, None)`, or at its end `combine(outputs, None)`. What is
     lost?
  2. In `average_gradients`, write `group = None`, so experts are averaged, too. Is there an error?
  3. In `balance_loss`, delete the all_reduce. Compare 1 and 2 ranks with `--balance 0.1`.
  4. Before the line with `mlp(`, write `if mine.any():`, and indent that line. In `forward`, before
     `order = ...`, write `expert = torch.zeros_like(expert)`. Which rank waits, and for what?
Now write `expert_dispatch.py` in `playground/exercises/`. In `playground/museum/`, repair
`balanced_experts.py` and `two_experts.py`.
Builds on: message_gradients.py
This is the last lesson of this part. The next part begins with `language_model.py`.
"""

import os
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # find common/ from any folder
from common import flags
from common.data import fetch, loaders
from common.models import make_model
from common.transformer import Block


def all_to_all(rows, group, send_counts, receive_counts):
    """Send send_counts[r] rows to rank r, and receive receive_counts[r]. Returns what arrives."""
    arrived = rows.new_empty(sum(receive_counts), rows.shape[1])
    # The output comes first: the tensors received and sent, then the counts received and sent.
    dist.all_to_all_single(arrived, rows, receive_counts, send_counts, group=group)
    return arrived


def make_expert(width):
    """Return an MLP like that of a block."""
    first = torch.nn.Linear(width, 4 * width)
    second = torch.nn.Linear(4 * width, width)
    return torch.nn.Sequential(first, torch.nn.GELU(), second)


class Mixture(torch.nn.Module):
    """`count` experts on all ranks together. The first is the MLP that was there before.

    With two ranks, rank 0 has the experts A and B, and rank 1 has C and D. A1 is a token of rank 1
    whose expert is A. A bar separates the tokens by the rank that they go to, and after all_to_all
    by the rank that they come from:

        tokens               rank 0: C0 A0 B0 C0       rank 1: D1 A1 D1 C1
        sorted by expert     rank 0: A0 B0 | C0 C0     rank 1: A1 | C1 D1 D1
        counts of A B C D    rank 0: 1 1 | 2 0         rank 1: 1 0 | 1 2
        counts that arrive   rank 0: 1 1 | 1 0         rank 1: 2 0 | 1 2
        dispatch             rank 0: A0 B0 | A1        rank 1: C0 C0 | C1 D1 D1
        combine              rank 0: A0 B0 | C0 C0     rank 1: A1 | C1 D1 D1
        in the old order     rank 0: C0 A0 B0 C0       rank 1: D1 A1 D1 C1
    """

    def __init__(self, mlp, count, top, group):
        super().__init__()
        self.count = count
        self.top = top
        self.group = group
        width = mlp[0].in_features
        self.router = torch.nn.Linear(width, count, bias=False)
        experts = [mlp, *(make_expert(width) for _ in range(count - 1))]
        if repr(experts[-1]) != repr(mlp):
            raise ValueError("make_expert() makes an MLP that differs from that of the block")
        self.register_buffer("bias", torch.zeros(count))  # bfloat16 loses its small steps
        if count % dist.get_world_size(group):
            raise ValueError(f"{dist.get_world_size(group)} ranks cannot split {count} experts")
        here = count // dist.get_world_size(group)
        first = dist.get_rank(group) * here
        # NEW: all ranks draw the same experts, because their seeds are equal, and each keeps some.
        # An expert's name is its number over all ranks, so torch.distributed.checkpoint can tell
        # them apart. (clip_grad_norm_ would find a different norm on each rank: add up the experts'
        # squares over ep, and count all other parameters once.)
        names = [str(first + number) for number in range(here)]
        own = experts[first : first + here]
        self.experts = torch.nn.ModuleDict(zip(names, own, strict=True))

    def forward(self, tokens):
        """Turn tokens, (N, tokens, width), into tokens of the same shape."""
        rows = tokens.flatten(0, 1)
        scores = self.router(rows).softmax(dim=-1)
        expert = (scores + self.bias).topk(self.top).indices  # NEW: of each token, the best ones
        score = scores.gather(-1, expert)  # without the bias, which only chooses
        expert = expert.flatten()  # with --top 2: two of token 0, two of token 1 ...
        order = expert.argsort()  # the tokens of expert 0 first, then those of expert 1
        self.load = torch.bincount(expert, minlength=self.count)  # how many tokens for each expert
        self.mean_scores = scores.mean(dim=0)  # for balance_loss()
        outputs = rows.new_empty(len(order), rows.shape[1])
        # NEW: row i of what is computed belongs to place order[i], whose token is order[i] // top.
        outputs[order] = self.compute(rows[order // self.top])
        # NEW: without this factor, the router would get no gradient, because `expert` has none.
        outputs = outputs.view(*score.shape, -1) * score.unsqueeze(-1)
        return outputs.sum(dim=1).view_as(tokens)

    def compute(self, rows):
        """Let the experts of all ranks compute rows, which are sorted by expert."""
        world_size = dist.get_world_size(self.group)
        here = len(self.experts)
        # Without this, a rank on which all is frozen would send no gradients back.
        rows.requires_grad_(torch.is_grad_enabled())
        # NEW: the counts first. Each rank sends one number for each expert to the expert's rank.
        arriving = torch.empty_like(self.load)
        dist.all_to_all_single(arriving, self.load, group=self.group)
        # all_to_all takes its counts as Python numbers. On a GPU, tolist() waits for them.
        send_counts = self.load.view(world_size, here).sum(dim=1).tolist()
        receive_counts = arriving.view(world_size, here).sum(dim=1).tolist()
        # NEW: the gradient of a row is on the rank that has received the row, so it travels back.
        dispatch = partial(all_to_all, send_counts=send_counts, receive_counts=receive_counts)
        combine = partial(all_to_all, send_counts=receive_counts, receive_counts=send_counts)
        # NEW: a rank to which no token comes calls each all_to_all, too.
        arrived = Message.apply(rows, dispatch, combine, self.group)
        # Which expert does each of these rows need? On rank 0 of the example, `arriving` counts A
        # and B of each rank: 1 1 1 0. So the experts of the rows A0 B0 A1 are 0 1 0.
        numbers = torch.arange(here, device=rows.device).repeat(world_size)
        expert = numbers.repeat_interleave(arriving)
        outputs = torch.empty_like(arrived)
        for number, mlp in enumerate(self.experts.values()):
            mine = expert == number
            # NEW: called with 0 rows, too. Then the parameters of this MLP have gradients (0), and
            # `outputs` depends on `arrived`. Otherwise autograd would skip both messages here,
            # and the other ranks would wait.
            outputs[mine] = mlp(arrived[mine]).to(outputs.dtype)  # autocast may have changed it
        return Message.apply(outputs, combine, dispatch, self.group)


def train(args):
    """Train a transformer with mixtures of experts, and show how many tokens each expert gets."""
    rank, device = join(args)
    train_loader, test_loader = loaders(args, rank, dist.get_world_size())
    torch.manual_seed(args.seed)  # the same on all ranks: nothing else makes the replicas equal
    model = make_model(args)
    world_size = dist.get_world_size()
    # NEW: experts are split along ep. Ranks along the other axis have the same experts.
    shape = (world_size // args.ep, args.ep)
    mesh = init_device_mesh(args.device, shape, mesh_dim_names=("efsdp", "ep"))
    for layer in model.layers:
        if isinstance(layer, Block):
            # NEW: the rest of the model stays whole.
            layer.mlp = Mixture(layer.mlp, args.experts, args.top, mesh.get_group("ep"))
    model.to(device, torch.float64 if args.double else torch.float32)
    torch.manual_seed(args.seed + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)
    # fit_epoch() hands this to run_epoch() in place of the optimizer.
    step = partial(make_step, model, optimizer, mesh.get_group("efsdp"), args)
    for epoch in range(args.epochs):
        fit_epoch(epoch, model, step, train_loader, test_loader, device, args)
    show_load(model)
    dist.destroy_process_group()


def make_step(model, optimizer, same_experts, args, loss):
    """Compute the gradients of a loss, and let the optimizer make a step."""
    optimizer.zero_grad()
    # NEW: the second term is not in the printed loss. With --balance 0, it adds 0.
    (loss + args.balance * balance_loss(model)).backward()
    average_gradients(model, same_experts)
    optimizer.step()
    for mixture in mixtures_of(model):
        # NEW: more tokens for an expert that has got fewer than the mean. (If a step has several
        # micro-batches, add up their totals.)
        mixture.bias += args.bias * (mixture.total.float().mean() - mixture.total).sign()


def average_gradients(model, same_experts):
    """Average the gradients over the ranks. Call it after backward().

    same_experts: the group of the ranks that have the same experts as this one.
    """
    world_size = dist.get_world_size()
    experts = {each for mixture in mixtures_of(model) for each in mixture.experts.parameters()}
    for parameter in model.parameters():
        if not parameter.requires_grad:  # frozen, so there is no gradient
            continue
        # NEW: a replica has the gradient of its own rank's loss only, so add up those of all ranks.
        # An expert has the sum over its ep group already, because their tokens have come to it.
        group = same_experts if parameter in experts else None
        dist.all_reduce(parameter.grad, group=group)  # one by one, as in manual_data_parallel.py
        parameter.grad /= world_size  # the loss of a batch is the average of the ranks' losses


def balance_loss(model):
    """Return the mean over the blocks of: number of experts * sum(fraction * mean score).

    An expert's fraction is the part of all tokens that it gets. With an even load the result is 1.
    (In a pipeline, most stages have no loss. There, an autograd.Function on their output can give
    this term the gradient 1 in its backward().)
    """
    mixtures = mixtures_of(model)
    total = 0
    for mixture in mixtures:
        # NEW: the loss multiplies fractions by mean scores, so the fractions must be those of all
        # ranks. The mean scores may stay local: their gradients are averaged later.
        mixture.total = mixture.load.clone()  # also for the bias; checkpoint() rewrites load
        dist.all_reduce(mixture.total)
        load = mixture.total.to(mixture.mean_scores.dtype)
        # Only scores have gradients. The more tokens an expert gets, the more they are lowered.
        total = total + mixture.count * (load / load.sum() * mixture.mean_scores).sum()
    return total / len(mixtures)


def mixtures_of(model):
    """Return the mixtures of experts in a model, block by block."""
    return [module for module in model.modules() if isinstance(module, Mixture)]


# You can stop here: what follows only prints, and reads the flags.
def show_load(model):
    """Print which part of the tokens of the last test batch each expert has got."""
    for number, mixture in enumerate(mixtures_of(model), start=1):
        dist.all_reduce(mixture.load)  # over the tokens of all ranks
        parts = (mixture.load / mixture.load.sum()).tolist()
        percent = ", ".join(f"{part:.0%}" for part in parts)
        if dist.get_rank() == 0:
            print(f"block {number}: its experts get {percent} of the tokens", flush=True)


def add_flags(parser):
    """Add the flags that only this lesson has. It trains the transformer by default."""
    parser.set_defaults(model="transformer")
    add = parser.add_argument
    add("--experts", type=flags.positive, default=4, help="experts of a block, over all ranks")
    add("--top", type=flags.positive, default=1, help="experts of a token")
    add("--ep", type=flags.positive, help="ranks that split the experts (default: all)")
    add("--balance", type=flags.number, default=0.0, help="factor of the loss that balances them")
    add("--bias", type=flags.number, default=0.0, help="by how much the bias changes in a step")


def check_flags(parser, args, world_size):
    """Refuse a batch and experts that the ranks cannot divide, and a model without tokens."""
    parser.check_batch(args.batch_size, world_size)
    if args.model != "transformer":
        parser.error(f"--model {args.model} has no tokens: use --model transformer")
    args.ep = args.ep or world_size
    if world_size % args.ep:
        parser.error(f"{world_size} ranks cannot make groups of --ep {args.ep}")
    if args.experts % args.ep or args.top > args.experts:
        near = max(1, round(args.experts / args.ep)) * args.ep
        parser.error(f"{args.ep} ranks cannot divide --experts {args.experts}: use {near}")


# ---------- Unchanged from message_gradients.py ----------
# You know what follows: Message(). If you copy this lesson, copy this, too.


class Message(torch.autograd.Function):
    """A message with a gradient.

    An autograd.Function is a function with a gradient of our own. Its `apply` calls forward().
    Later, autograd calls backward() with the gradient of the output, and takes what it returns as
    the gradient of the input. What backward() needs, forward() keeps in `ctx`.
    """

    @staticmethod
    def forward(ctx, x, send, send_back, group):
        """Send x. Returns what arrives. `group` has the ranks that take part; None: all."""
        ctx.back = (send_back, send, group)
        return send(x.contiguous(), group)  # messages need contiguous memory

    @staticmethod
    def backward(ctx, gradient):
        """Send the gradient of what has arrived. Returns the gradient of x."""
        # The gradient of a message is a message, which has a gradient, too.
        gradient = Message.apply(gradient, *ctx.back)
        return gradient, None, None, None  # the other arguments of forward() have no gradient


# ---------- Unchanged from mixed_precision.py ----------
# You know what follows: join(), fit_epoch(), run_epoch() and main(). If you copy this lesson, copy
# this, too.


def join(args):
    """Join the process group that torchrun describes. Returns this rank and its device."""
    local_rank = int(os.environ["LOCAL_RANK"])  # torchrun has numbered this node's processes
    device, gpu = torch.device(args.device), None  # gpu stays None on a CPU
    if args.device != "cpu":
        device = gpu = torch.device(args.device, local_rank)
        torch.accelerator.set_device_index(gpu)  # otherwise all ranks would take memory on GPU 0
    backend = dist.get_default_backend_for_device(device)  # nccl for NVIDIA's GPUs, gloo for CPUs
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout), device_id=gpu)
    rank = dist.get_rank()  # torchrun has set it, the world size and the address of rank 0
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, vars(args))
    flags.check_same(everyone)  # an error, if nodes have different flags
    if rank == 0:
        print(f"{len(everyone)} ranks, {backend}, {args.device}", flush=True)
    return rank, device


def fit_epoch(epoch, model, optimizer, train_loader, test_loader, device, args):
    """Train for one epoch, test, and print a line."""
    rank = dist.get_rank()
    train_loader.sampler.set_epoch(epoch)  # without this, all epochs have the same order
    start = time.perf_counter()
    title = f"epoch {epoch + 1}/{args.epochs}"
    bar = tqdm(train_loader, title, leave=False, disable=None if rank == 0 else True)
    loss, correct, images = run_epoch(model, bar, device, optimizer)
    seconds = time.perf_counter() - start
    speed = len(train_loader) * args.batch_size / seconds
    _, test_correct, test_images = run_epoch(model, test_loader, device)
    if rank == 0:
        digits = 12 if args.double else 4
        peak = ""  # of the memory that this rank's tensors have taken on its GPU
        if args.device != "cpu":
            peak = f"  {torch.accelerator.max_memory_allocated() / 2**20:,.0f} MiB"
        print(
            f"{title}  loss {loss / images:.{digits}f}"
            f"  train {correct / images:.2%}  test {test_correct / test_images:.2%}"
            f"  {seconds:.2f} s  {speed:,.0f} {args.unit}/s{peak}",
            flush=True,
        )


def run_epoch(model, loader, device, step=None):
    """Train, or only test without step. Returns sums over all ranks: loss, correct, images."""
    model.train(step is not None)
    # The sums stay on the device. Reading them in each step would make Python wait for the GPU.
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        with torch.set_grad_enabled(model.training):
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
        if step is not None:
            step(loss)  # make_step(), in place of backward() and the optimizer's step()
        sums[0] += loss.detach() * labels.numel()
        sums[1] += (logits.argmax(dim=1) == labels).sum()
        sums[2] += labels.numel()
    dist.all_reduce(sums)
    return sums.tolist()


@record  # writes the traceback of an error to a file, and torchrun's report shows it
def main():
    """Read the flags, make sure that the data is there, and train as one of the ranks."""
    parser = flags.ranks(__doc__)
    add_flags(parser)
    args = parser.parse_args()
    parser.check_torchrun(args)  # an error of one line if torchrun has not started this
    check_flags(parser, args, world_size=int(os.environ["WORLD_SIZE"]))
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)  # only one rank downloads
    train(args)


if __name__ == "__main__":
    main()
