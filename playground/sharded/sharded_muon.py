"""Muon under FSDP: an optimizer that needs whole matrices, while each rank has some of their rows.

This lesson is optional. It is for those who train with such an optimizer, or write one, and it
needs some linear algebra: the singular value decomposition.

Run it (`--by` selects one of four ways, see below):
    torchrun --standalone --nproc-per-node 2 playground/sharded/sharded_muon.py --by owner

It prints what Muon trains. With `--double`, any number of ranks and all ways but torch print the
same twelve digits:
    Muon: 2 matrices, 8,192 parameters. Adam: 51,018 parameters
    epoch 3/3  loss 0.1118  train 96.62%  test 96.58%  23.66 s  2,532 images/s

Muon is SGD with momentum, but it orthogonalizes the step of each matrix: five Newton-Schulz
iterations bring its singular values close to 1, so the step is nearly as long in every direction
(https://kellerjordan.github.io/posts/muon/, and for large models https://arxiv.org/abs/2502.16982).
It is made for the matrices of hidden layers. The first layer or embedding, the output layer, biases
and norms keep Adam.

Adam treats each number separately, so shards are enough for it, and for Muon's momentum. But an
iteration has three products of whole matrices. With `--by dtensor`, a product gathers its matrix.
So the two 64 x 64 matrices of the default model take 2 x 5 x 3 = 30 all_gathers in a step (see them
with `playground/tools/watch.py`). What a rank sends is a mean over the n ranks, in units of the
bytes of both matrices:
    --by       calls in a step                a rank sends    a rank computes
    torch      30 all_gather, 2 all_reduce    7.5 (n-1)/n     1/n
    dtensor    30 all_gather, 2 all_reduce    15 (n-1)/n      1/n
    gather     2 all_gather                   (n-1)/n         everything
    owner      2 gather, 2 scatter            2 (n-1)/n^2     1/n, if n divides their number

torch is PyTorch's own Muon. It computes in bfloat16, so it sends half of what dtensor does, and its
losses agree to three digits only.

When does it matter? A w x w matrix takes 30 w^3 operations, and training 6 w^2 for each of T
tokens, so Muon adds 5 w / T to a step: 0.5% for w = 4,096 and 4 million tokens. But if each of
1,024 ranks computes all matrices, this takes five times as long as the rest of the step.

Try breaking it, in a copy beside it, with `--double`:
  1. In `by_gathering`, orthogonalize `update.to_local()`, and return it all. Is there an error?
  2. Leave out the line with `F.pad`. Train with 2 ranks, and twice with 3.
  3. In `by_owners`, orthogonalize each matrix just before its `scatter_rows`. What does it cost?

Builds on: fully_sharded_data_parallel.py
The next lesson, `manual_pipeline.py`, has a process for each stage of a model.
"""

import math
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # find common/ from any folder
from common import flags
from common.data import fetch, loaders
from common.models import make_model


def orthogonalize(matrix):
    """Bring the singular values of a matrix close to 1, by five Newton-Schulz iterations.

    Returns a matrix of the same shape and dtype. Rows of zeros stay zeros.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix  # so X X^T is the smaller one of the two products
    x = x / x.norm().clamp(min=1e-7)  # no singular value is larger than this norm
    for _ in range(5):
        # NEW: if X is U S V^T, then X X^T is U S^2 U^T. So an iteration replaces each singular
        # value s with 3.4445 s - 4.7750 s^3 + 2.0315 s^5, and leaves U and V alone. Values from
        # 0.003 to 1 end between 0.68 and 1.21. Each number of X X^T needs two rows of X, which may
        # be on two ranks.
        squares = x @ x.T
        # addmm(A, B, C, beta=b, alpha=c) is b A + c B C.
        polynomial = torch.addmm(squares, squares, squares, beta=-4.7750, alpha=2.0315)
        x = torch.addmm(x, polynomial, x, beta=3.4445)
    return x.T if tall else x


# Here are three ways to do this with matrices of which each rank has some rows. Each function gets
# a list of DTensors, (rows, columns), sharded by rows. It returns a list of tensors: this rank's
# rows of the results.
def by_dtensor(updates):
    """Leave the messages to DTensor, which sends in every iteration."""
    results = []
    for update in updates:
        result = orthogonalize(update)
        # NEW: DTensor has chosen how the result is sharded. The parameters are sharded by rows.
        results.append(result.redistribute(placements=update.placements).to_local())
    return results


def by_gathering(updates):
    """Gather each matrix once, on all ranks. All of them compute the same."""
    results = []
    for update in updates:
        whole = orthogonalize(update.full_tensor())  # NEW: one all_gather
        first = dist.get_rank() * rows_per_rank(update)
        results.append(whole[first : first + rows_per_rank(update)])
    return results


def by_owners(updates):
    """Gather each matrix on one rank, its owner. Only the owner computes, and returns the rows."""
    world_size = dist.get_world_size()
    owners = [number % world_size for number in range(len(updates))]  # NEW: the ranks take turns
    wholes = []
    for update, owner in zip(updates, owners, strict=True):
        wholes.append(gather_rows(update, owner))
    # NEW: no message in this line, so all ranks compute at the same time, each its own matrices.
    wholes = [None if whole is None else orthogonalize(whole) for whole in wholes]
    results = []
    for update, owner, whole in zip(updates, owners, wholes, strict=True):
        results.append(scatter_rows(whole, update, owner))
    return results


def gather_rows(update, owner):
    """Send this rank's rows of a matrix to its owner. Returns the matrix there, elsewhere None."""
    rows = update.to_local()
    # A gather needs equal shapes, so the last ranks add rows of zeros. These come last and stay
    # zeros, and they do not change the other rows.
    rows = F.pad(rows, (0, 0, 0, rows_per_rank(update) - len(rows)))
    if dist.get_rank() != owner:
        dist.gather(rows, dst=owner)
        return None
    gathered = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.gather(rows, gathered, dst=owner)
    return torch.cat(gathered)


def scatter_rows(whole, update, owner):
    """Return this rank's rows of a matrix that only its owner has."""
    rows = update.to_local().new_empty(rows_per_rank(update), update.shape[1])
    if dist.get_rank() == owner:
        shards = whole.contiguous().chunk(dist.get_world_size())
        dist.scatter(rows, list(shards), src=owner)
    else:
        dist.scatter(rows, src=owner)
    return rows[: len(update.to_local())]  # without the zeros


def rows_per_rank(update):
    """Return how many rows of a matrix each rank has. The last ranks may have fewer, or none."""
    return math.ceil(update.shape[0] / dist.get_world_size())


class Muon(torch.optim.Optimizer):
    """SGD with momentum, whose step for each matrix is orthogonalized.

    It leaves out Nesterov's momentum and weight decay, which treat each number separately. Its
    messages go to all ranks, so on a mesh with several axes it would need a group.
    """

    def __init__(self, matrices, lr, way):
        super().__init__(matrices, {"lr": lr, "momentum": 0.95})
        self.way = way  # by_dtensor, by_gathering or by_owners

    @torch.no_grad()
    def step(self):
        """Move the matrices. All ranks must call it, because it sends messages."""
        for group in self.param_groups:
            updates = []
            for matrix in group["params"]:
                if matrix not in self.state:
                    self.state[matrix]["average"] = torch.zeros_like(matrix)
                average = self.state[matrix]["average"]
                # NEW: this treats each number separately, so it needs no message.
                average.lerp_(matrix.grad, 1 - group["momentum"])
                updates.append(average)
            steps = self.way(updates)
            for matrix, step in zip(group["params"], steps, strict=True):
                rows, columns = matrix.shape
                # PyTorch's Muon scales the learning rate of a tall matrix, too.
                lr = group["lr"] * math.sqrt(max(1, rows / columns))
                matrix.to_local().sub_(lr * step)


def choose(model):
    """Return the parameters for Muon, and those for Adam."""
    matrices = []
    for layer in model.layers[1:-1]:  # NEW: not the first layer or embedding, not the output layer
        matrices += [each for each in layer.parameters() if each.ndim == 2]
    chosen = set(matrices)
    others = [each for each in model.parameters() if each not in chosen]
    return matrices, others


def train(args):
    """Shard a model. Train its hidden matrices with Muon, and all other parameters with Adam."""
    rank, device = join(args)
    train_loader, test_loader = loaders(args, rank, dist.get_world_size())
    torch.manual_seed(args.seed)  # the same on all ranks
    model = make_model(args)
    shard(model, args)
    torch.manual_seed(args.seed + rank)
    matrices, others = choose(model)  # after shard(), which has replaced the parameters
    if args.by == "torch":
        # NEW: PyTorch's own. It gets DTensors, too, and computes the iterations in bfloat16.
        muon = torch.optim.Muon(matrices, args.muon_lr, weight_decay=0, nesterov=False)
    else:
        ways = {"dtensor": by_dtensor, "gather": by_gathering, "owner": by_owners}
        muon = Muon(matrices, args.muon_lr, ways[args.by])
    adam = torch.optim.Adam(others, lr=args.lr, eps=1e-6, fused=True)
    if rank == 0:
        hidden = sum(each.numel() for each in matrices)
        rest = sum(each.numel() for each in others)
        line = f"Muon: {len(matrices)} matrices, {hidden:,} parameters. Adam: {rest:,} parameters"
        print(line, flush=True)
    for epoch in range(args.epochs):
        fit_epoch(epoch, model, [muon, adam], train_loader, test_loader, device, args)
    dist.barrier()  # DTensor keeps the group, and without this Python may abort at exit
    dist.destroy_process_group()


# You can stop here. What follows trains with two optimizers in place of one.
def run_epoch(model, loader, device, optimizers=None):
    """Train, or only test without optimizers. Returns sums: loss, correct, images."""
    model.train(optimizers is not None)
    # The sums stay on the device. Reading them in each step would make Python wait for the GPU.
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        with torch.set_grad_enabled(model.training):
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
        if optimizers is not None:
            for optimizer in optimizers:  # NEW: Muon, and Adam
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
        sums[0] += loss.detach() * labels.numel()
        sums[1] += (logits.argmax(dim=1) == labels).sum()
        sums[2] += labels.numel()
    dist.all_reduce(sums)
    return sums.tolist()


def shard(model, args):
    """Shard each layer, and then the whole model."""
    mesh = dist.init_device_mesh(args.device, (dist.get_world_size(),))
    mesh.get_group().set_timeout(timedelta(seconds=args.timeout))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def add_flags(parser):
    """Add the flags that only this lesson has."""
    add = parser.add_argument
    ways = ["torch", "dtensor", "gather", "owner"]
    add("--by", choices=ways, default="owner", help="which ranks orthogonalize a matrix")
    add("--muon_lr", type=flags.number, default=0.02, help="Muon's learning rate (--lr is Adam's)")


def check_flags(parser, args, world_size):
    """Refuse flags that do not fit the number of ranks, or the model."""
    parser.check_batch(args.batch_size, world_size)
    if args.model == "mlp" and args.layers == 1:
        parser.error("--layers 1: no layer between the first and the last one, so use --layers 2")


# ---------- Unchanged from fully_sharded_data_parallel.py ----------
# You know what follows: join(), fit_epoch() and main(). If you copy this lesson, copy this, too.


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
