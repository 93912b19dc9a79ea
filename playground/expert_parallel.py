"""Expert parallelism: each token travels to the rank of its expert, and back.

A block of a transformer ends with an MLP, which computes each token separately. A mixture of
experts has several MLPs in its place, the experts. A small linear layer, the router, gives each
token a score for every expert, and the expert with the best score computes the token. So the model
has more parameters, but each token is still computed by a single MLP.

Each rank keeps some of the experts, and reads images of its own, as in data parallelism. So tokens
travel. Here rank 0 has the experts A and B, and rank 1 has C and D. A1 is a token of rank 1 whose
expert is A. A bar separates the tokens for rank 0 from those for rank 1. After all_to_all, it
separates those that come from rank 0 and from rank 1:
    tokens               rank 0: C0 A0 B0 A0       rank 1: D1 A1 D1 C1
    sorted by expert     rank 0: A0 A0 B0 | C0     rank 1: A1 | C1 D1 D1
    counts of A B C D    rank 0: 2 1 | 1 0         rank 1: 1 0 | 1 2
    all_to_all           rank 0: A0 A0 B0 | A1     rank 1: C0 | C1 D1 D1
    all_to_all back      rank 0: A0 A0 B0 | C0     rank 1: A1 | C1 D1 D1
    in the old order     rank 0: C0 A0 B0 A0       rank 1: D1 A1 D1 C1

The counts travel first, so a rank knows how many tokens arrive for each expert. A rank to which no
token comes calls each all_to_all as well. Autograd does not see dist.all_to_all: gradients end
there, without an error. So Exchange, below, sends them back in backward(). An expert's gradient has
the terms of all images, so nothing is added up. It is divided by n, because each rank's loss is the
mean over its own images. All other parameters are replicas, whose gradients are averaged.

Nothing makes the router spread the load (the tokens of each expert). --balance 0.1 adds a term to
the loss (https://arxiv.org/abs/2101.03961). Each expert then got 21% to 28% of the tokens.

Run it:
    torchrun --standalone --nproc-per-node 2 playground/expert_parallel.py
    torchrun --standalone --nproc-per-node 2 playground/expert_parallel.py --balance 0.1

It prints the same losses with 1, 2 and 4 processes. Of one more step, the first command prints:
    tokens of expert    0      1      2      3      (even: 25%)
    block 1             24%    59%    13%    4%
    block 2             43%    4%     34%    19%
    rank 0 sends        counted  predicted  bytes        predicted
    all_to_all          10       10         944,160      944,160
    all_reduce          35       35         44,800       44,800
A block calls 5 all_to_alls: 1 of counts, 2 of tokens and 2 of their gradients.

Try breaking it, in a copy, with --double --dataset digits --batch_size 120 --timeout 10:
  1. In compute, replace the first or the second `Exchange.apply` with `all_to_all`. What is lost?
  2. In average_gradients, write `if True:`, so that experts are averaged, too. Is there an error?
  3. In balance_loss, delete the all_reduce. Compare 1 and 2 processes with --balance 0.1.
  4. Before the line with `mlp(`, write `if mine.any():`, and indent that line. In forward, before
     `order = ...`, write `expert = torch.zeros_like(expert)`. Which rank waits, and for what?

Now write expert_dispatch.py in playground/exercises/, and repair fault_averaged_experts.py.

The next lesson, three_axes.py, combines three kinds of parallelism.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common import flags
from common.data import equal_batches, fetch, loaders
from common.guard_rails import check, explained
from common.models import Block, make_model
from common.report import RANKS, bar, epoch_line, rank_row
from common.roll_call import meet
from measure.experts import load_lines, message_lines
from measure.messages import Messages


def all_to_all(rows, send_counts, receive_counts):
    """Send send_counts[r] rows to rank r, and receive receive_counts[r]. Returns what arrives."""
    arrived = rows.new_empty(sum(receive_counts), rows.shape[1])
    # The output comes first: the tensors received and sent, then the counts received and sent.
    dist.all_to_all_single(arrived, rows.contiguous(), receive_counts, send_counts)
    return arrived


class Exchange(torch.autograd.Function):
    """all_to_all with a gradient. Without it, the graph of autograd would end at the message."""

    @staticmethod
    def forward(ctx, rows, send_counts, receive_counts):
        """Return the rows that arrive."""
        ctx.send_counts = send_counts
        ctx.receive_counts = receive_counts
        return all_to_all(rows, send_counts, receive_counts)

    @staticmethod
    def backward(ctx, gradient):
        """Return the gradients of the rows that were sent."""
        # NEW: each row's gradient is on the rank that has received the row, so it travels back. The
        # counts have no gradients.
        return all_to_all(gradient, ctx.receive_counts, ctx.send_counts), None, None


def make_expert(width):
    """Return an MLP like that of a block."""
    first = torch.nn.Linear(width, 4 * width)
    second = torch.nn.Linear(4 * width, width)
    return torch.nn.Sequential(first, torch.nn.GELU(), second)


class Mixture(torch.nn.Module):
    """`count` experts on all ranks together. The first one is the MLP whose place they take."""

    def __init__(self, mlp, count):
        super().__init__()
        self.count = count
        width = mlp[0].in_features
        self.router = torch.nn.Linear(width, count, bias=False)
        experts = [mlp]
        for _ in range(count - 1):
            experts.append(make_expert(width))
        here = count // dist.get_world_size()
        first = dist.get_rank() * here
        # NEW: all ranks draw the same experts, because their seeds are equal, and each keeps some.
        self.experts = torch.nn.ModuleList(experts[first : first + here])

    def forward(self, tokens):
        """Turn tokens, (N, tokens, width), into tokens of the same shape."""
        rows = tokens.flatten(0, 1)
        scores = self.router(rows).softmax(dim=-1)
        score, expert = scores.max(dim=-1)  # NEW: of each token, the best score and its expert
        order = expert.argsort()  # the tokens of expert 0 first, then those of expert 1
        self.load = torch.bincount(expert, minlength=self.count)  # how many tokens for each expert
        self.mean_scores = scores.mean(dim=0)
        outputs = torch.empty_like(rows)
        outputs[order] = self.compute(rows[order])  # NEW: back to the places of the tokens
        # NEW: without this factor, the router would get no gradient, because `expert` has none.
        outputs = outputs * score.unsqueeze(-1)
        return outputs.view_as(tokens)

    def compute(self, rows):
        """Let the experts of all ranks compute rows, which are sorted by expert."""
        world_size = dist.get_world_size()
        here = len(self.experts)
        # NEW: the counts first. Each rank sends one number for each expert to the expert's rank.
        arriving = torch.empty_like(self.load)
        dist.all_to_all_single(arriving, self.load)
        # all_to_all takes its counts as Python numbers. On a GPU, tolist() waits for them.
        send_counts = self.load.view(world_size, here).sum(dim=1).tolist()
        receive_counts = arriving.view(world_size, here).sum(dim=1).tolist()
        arrived = Exchange.apply(rows, send_counts, receive_counts)
        # The rows arrive rank by rank, and those of each rank expert by expert. This rank's experts
        # are numbered from 0. In the docstring's example, `numbers` is 0 1 0 1. On rank 0,
        # `arriving` is 2 1 1 0, so `expert` is 0 0 1 0.
        numbers = torch.arange(here, device=rows.device).repeat(world_size)
        expert = numbers.repeat_interleave(arriving)  # the expert of each row
        outputs = torch.empty_like(arrived)
        for number, mlp in enumerate(self.experts):
            mine = expert == number
            # NEW: called with 0 rows, too. Then the parameters of this MLP have gradients (0), and
            # `outputs` depends on `arrived`. If a rank called none of its MLPs, autograd would
            # leave out both Exchanges on this rank, and the other ranks would wait for them.
            outputs[mine] = mlp(arrived[mine]).to(outputs.dtype)  # autocast may have changed it
        return Exchange.apply(outputs, receive_counts, send_counts)


def average_gradients(model):
    """Average the gradients over the ranks. Call it after backward()."""
    world_size = dist.get_world_size()
    for name, parameter in model.named_parameters():
        # NEW: gradients of experts are not added up. They have the terms of all images already,
        # and at their place the other ranks have different experts.
        if ".experts." not in name:
            dist.all_reduce(parameter.grad)  # one by one, as in manual_data_parallel.py
        # An expert's gradient is divided, too: each rank's loss is the mean over its own images.
        parameter.grad /= world_size


def balance_loss(mixtures):
    """Return the mean over the blocks of: number of experts * sum(fraction * mean score).

    An expert's fraction is the part of all tokens that it gets. An even load has the result 1.
    """
    load = torch.stack([mixture.load for mixture in mixtures])
    # NEW: the fractions over all ranks. With those of one rank's tokens, the ranks would average
    # products, which is not the product of averages. The mean scores may stay local, because the
    # loss is linear in them: average_gradients() averages their gradients.
    dist.all_reduce(load)
    fractions = load / load.sum(dim=1, keepdim=True)
    # Counts have no gradients, but scores have. The more tokens an expert gets, the more its scores
    # are lowered.
    mean_scores = torch.stack([mixture.mean_scores for mixture in mixtures])
    return mixtures[0].count * (fractions * mean_scores).sum() / len(mixtures)


def join(args):
    """Join the process group and print the table of ranks. Returns this rank and its device."""
    local_rank = int(os.environ["LOCAL_RANK"])
    if args.device == "cuda":
        gpu = torch.device("cuda", local_rank)
        device = gpu
        backend = "nccl"
        torch.cuda.set_device(gpu)  # otherwise every rank would also take memory on GPU 0
    else:
        gpu = None
        device = torch.device("cpu")
        backend = "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout), device_id=gpu)
    rank = dist.get_rank()
    node = os.environ.get("GROUP_RANK", "0")
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, rank_row(node, rank, local_rank, device))
    if rank == 0:
        print(RANKS, *rows, sep="\n", flush=True)
    return rank, device


def run_epoch(model, mixtures, loader, device, optimizer=None, balance=0.0):
    """Train, or only test if there is no optimizer. Returns sums over the images of all ranks."""
    model.train(optimizer is not None)
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        with torch.set_grad_enabled(model.training):
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
        if optimizer is not None:
            optimizer.zero_grad()
            # NEW: the second term is not in the printed loss. It is computed even if it is 0.
            (loss + balance * balance_loss(mixtures)).backward()
            average_gradients(model)
            optimizer.step()
        sums[0] += loss.detach() * len(labels)
        sums[1] += (logits.argmax(dim=1) == labels).sum()
        sums[2] += len(labels)
    dist.all_reduce(sums)
    return sums.tolist()


def train(args):
    """Train and test, and print one line for each epoch. Then count the tokens of one more step."""
    rank, device = join(args)
    meet(args)  # guard rail: compares the flags of the ranks
    world_size = dist.get_world_size()
    train_loader, test_loader = loaders(args, rank, world_size)
    # forward() sends messages, so all ranks must call it the same number of times, also in a test.
    test_loader = equal_batches(test_loader.dataset, rank, world_size)
    torch.manual_seed(args.seed)
    model = make_model(args)
    mixtures = []
    for block in (*model.stage1, *model.stage2):
        if isinstance(block, Block):
            # NEW: with one process and --experts 1, this model is that of single_gpu.py.
            block.mlp = Mixture(block.mlp, args.experts)
            mixtures.append(block.mlp)
    dtype = next(model.parameters()).dtype  # new experts are float32, also with --double
    model = model.to(device, dtype)
    torch.manual_seed(args.seed + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)

    for epoch in range(args.epochs):
        train_loader.sampler.set_epoch(epoch)
        start = time.perf_counter()
        progress = bar(train_loader, show=rank == 0)
        trained = run_epoch(model, mixtures, progress, device, optimizer, args.balance)
        seconds = time.perf_counter() - start
        tested = run_epoch(model, mixtures, test_loader, device)
        if rank == 0:
            print(epoch_line(args, epoch, seconds, trained, tested), flush=True)
    batch = next(iter(train_loader))
    with Messages() as messages:
        run_epoch(model, mixtures, [batch], device, optimizer, args.balance)
    loads = [None] * world_size
    dist.all_gather_object(loads, [mixture.load.tolist() for mixture in mixtures])
    if rank == 0:
        lines = load_lines(loads) + message_lines(messages, loads, model)
        print(*lines, sep="\n", flush=True)
    dist.destroy_process_group()


@explained  # guard rail: explains errors
@record  # torchrun's report then shows the error of the rank that failed first
def main():
    """Read the flags, make sure that the data is there, and train as one of the ranks."""
    parser = flags.Parser(__doc__, parents=[flags.training(), flags.ranks()])
    parser.set_defaults(model="transformer")
    experts = "experts in a block, on all ranks together"
    parser.add_argument("--experts", type=int, default=4, help=experts)
    balance = "factor of the term of the loss that balances the experts"
    parser.add_argument("--balance", type=float, default=0.0, help=balance)
    args = parser.parse_args()
    check(parser, args)  # guard rail: refuses impossible flags
    if args.model != "transformer":
        parser.error(f"--model {args.model} has no tokens: use --model transformer")
    world_size = int(os.environ["WORLD_SIZE"])
    if args.experts % world_size:
        nearest = max(1, round(args.experts / world_size)) * world_size
        wrong = f"--experts {args.experts} cannot be divided by {world_size} processes"
        parser.error(f"{wrong}: use --experts {nearest}")
    if not 0 <= args.balance <= 1:
        parser.error(f"--balance {args.balance}: must be from 0 to 1, as in --balance 0.1")
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    train(args)


if __name__ == "__main__":
    main()
