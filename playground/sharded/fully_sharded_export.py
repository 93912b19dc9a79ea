r"""One file of a sharded model, and back: with the optimizer state, or as safetensors.

Run it, and start from the file, or from one that `distributed_data_parallel.py --savefile` wrote:
    torchrun --standalone --nproc-per-node 2 playground/sharded/fully_sharded_export.py \
        --savefile fsdp.pt
    torchrun --standalone --nproc-per-node 2 playground/sharded/fully_sharded_export.py \
        --load fsdp.pt --epochs 4 --export runs/exported

`--export` needs `pip install safetensors`. The second command prints where it resumes:
    fsdp.pt: 3 of 4 epochs are done
    epoch 4/4  loss 0.0957  train 97.08%  test 96.39%  9.99 s  5,995 images/s

Only dcp reads a sharded checkpoint. All other programs want one file:
    flag            written or read by              memory that a rank needs for it, on the CPU
    --savefile      rank 0                          rank 0: all tensors, the others: one tensor
    --load FILE     rank 0                          one tensor
    --export        all ranks, merged by rank 0     a copy of its shards, rank 0: one tensor, too
    --load FOLDER   all ranks                       none

For `--savefile`, the ranks gather one tensor after the other, and rank 0 writes a file that a plain
model and optimizer can load. For `--load`, rank 0 reads such a file, and sends its tensors one by
one.

`--export` writes only parameters and buffers, as safetensors, which many programs read. Those of
`--model language` get the names of Llama in Hugging Face's transformers, so `LlamaForCausalLM` can
load them. `--load` takes this folder, too. It has no optimizer state and no epoch, so training
begins at epoch 1, with these parameters.

Try breaking it, in a copy beside it:
  1. Leave out the line with `by_name`, and load a file that DDP has written. Is there an error?
  2. In `save_file`, leave out `full_state_dict=True`. What is in the file?

Builds on: fully_sharded_checkpoints.py
This is the last lesson of this part. The next part begins with `manual_pipeline.py`.
"""

import json
import os
import sys
import time
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # find common/ from any folder
from common import flags
from common.data import fetch, loaders
from common.models import make_model


def save_file(args, epoch, model, optimizer):
    """Write one file with whole tensors. If this fails, an older file stays."""
    # NEW: full_state_dict gathers the shards of one tensor after the other. cpu_offload moves each
    # whole tensor to the CPU of rank 0. The other ranks keep none, and get empty dicts.
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        state = {"model": model_state, "optimizer": optimizer_state}
        state |= {"epoch": epoch, "args": vars(args)}
        unfinished = Path(f"{args.savefile}.unfinished")
        try:
            with open(unfinished, "wb") as file:  # so that a full disk gives a clear error
                torch.save(state, file)
            os.replace(unfinished, args.savefile)
        finally:
            unfinished.unlink(missing_ok=True)  # left over only after an error


def load_file(path, model, optimizer):
    """Load one file, which only rank 0 reads. Returns how many epochs are done."""
    state = {"model": {}, "optimizer": {}, "epoch": None}
    if dist.get_rank() == 0:
        # With mmap=True, a tensor is read only when it is used.
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        state["optimizer"] = by_name(state["optimizer"], model, optimizer)
    # NEW: full_state_dict says that the tensors are whole. broadcast_from_rank0 says that only rank
    # 0 has them. It sends one after the other, and each rank keeps its shard.
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state["model"], options=options)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    done = [state["epoch"]]
    dist.broadcast_object_list(done)
    return done[0]


def by_name(optimizer_state, model, optimizer):
    """Return the state of an optimizer with names for the parameters, which it may number."""
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    named = {"state": {}, "param_groups": []}
    groups = optimizer_state["param_groups"]
    for group, own_group in zip(groups, optimizer.param_groups, strict=True):
        names = [name_of[parameter] for parameter in own_group["params"]]
        named["param_groups"].append(group | {"params": names})
        for name, number in zip(names, group["params"], strict=True):
            # A parameter that has got no gradient has no state.
            named["state"][name] = optimizer_state["state"].get(number, {})
    return named


def export(args, model):
    """Write the parameters as safetensors."""
    # NEW: each rank writes its shards to a folder inside, and rank 0 puts them together.
    writer = dcp.HuggingFaceStorageWriter(
        args.export, save_distributed=True, enable_consolidation=True
    )
    dcp.save(exported_shards(model, args), storage_writer=writer)
    if dist.get_rank() == 0 and args.model == "language":
        config = json.dumps(llama_config(model), indent=2)
        Path(args.export, "config.json").write_text(config)


def load_exported(path, args, model):
    """Load exported parameters, however many ranks wrote them."""
    # NEW: each rank reads its shards from the file, into the shards of the model.
    reader = dcp.HuggingFaceStorageReader(path)
    dcp.load(exported_shards(model, args), storage_reader=reader)


def train(args):
    """Train a sharded model, from one file or from the beginning, and write one file."""
    rank, device = join(args)
    train_loader, test_loader = loaders(args, rank, dist.get_world_size())
    torch.manual_seed(args.seed)  # the same on all ranks
    model = make_model(args)
    shard(model, args)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)
    done = 0
    if args.load and os.path.isdir(args.load):
        load_exported(args.load, args, model)
    elif args.load:
        done = load_file(args.load, model, optimizer)
    if args.load and rank == 0:
        print(f"{args.load}: {done} of {args.epochs} epochs are done", flush=True)
    for epoch in range(done, args.epochs):
        fit_epoch(epoch, model, optimizer, train_loader, test_loader, device, args)
    if args.savefile:
        save_file(args, max(done, args.epochs), model, optimizer)
    if args.export:
        export(args, model)
    dist.barrier()  # DTensor keeps the group, and without this Python may abort at exit
    dist.destroy_process_group()


# You can stop here: what follows renames the parameters of --model language, and reads flags.
LLAMA = {  # the layers of a block, and their names in transformers
    "norm1": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "norm2": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def exported_shards(model, args):
    """Return this rank's shards, for --model language under the names of a Llama's layers."""
    if args.model != "language":
        # Without integers (of batch norm), and with one name for a table that two layers share.
        named = [*model.named_parameters(), *model.named_buffers()]
        names = {name for name, tensor in named if tensor.is_floating_point()}
        return {name: each for name, each in model.state_dict().items() if name in names}
    embedding, *blocks, end = model.layers
    layers = {"model.embed_tokens": embedding, "model.norm": end.norm, "lm_head": end.output}
    for number, block in enumerate(blocks):
        for name, other_name in LLAMA.items():
            layers[f"model.layers.{number}.{other_name}"] = block.get_submodule(name)
    return {f"{name}.weight": layer.weight.detach() for name, layer in layers.items()}


def llama_config(model):
    """Return the sizes of --model language, under the names of transformers."""
    embedding, *blocks, _ = model.layers
    attention = blocks[0].attention
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": embedding.num_embeddings,
        "hidden_size": embedding.embedding_dim,
        "intermediate_size": blocks[0].mlp.up.out_features,
        "num_hidden_layers": len(blocks),
        "num_attention_heads": attention.query.out_features // attention.size,
        "num_key_value_heads": attention.key.out_features // attention.size,
        "rms_norm_eps": blocks[0].norm1.eps,
    }


def add_flags(parser):
    """Add the flags that only this lesson has."""
    add = parser.add_argument
    add("--load", type=os.path.expanduser, help="start from this file, or from an export")
    add("-s", "--savefile", type=flags.new_file, help="one file with whole tensors, at the end")
    export = "an empty folder for the parameters as safetensors, at the end"
    add("--export", type=flags.new_folder, help=export)


def check_flags(parser, args, world_size):
    """Refuse flags that do not fit the number of ranks or the disk."""
    parser.check_batch(args.batch_size, world_size)
    if args.export and os.listdir(args.export):
        # The shards of an earlier export by more ranks would get into the new file.
        parser.error(f"--export {args.export}: this folder is not empty")
    if (args.export or os.path.isdir(args.load or "")) and not find_spec("safetensors"):
        parser.error("--export, and --load with a folder, need: pip install safetensors")
    if os.path.isdir(args.load or "") and not list(Path(args.load).glob("*.safetensors")):
        other = "fully_sharded_checkpoints.py --run_dir resumes its own"
        parser.error(f"--load {args.load}: this folder has no export ({other})")


# ---------- Unchanged from fully_sharded_checkpoints.py ----------
# You know what follows: join(), shard(), fit_epoch(), run_epoch() and main(). If you copy this
# lesson, copy this, too.


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


def shard(model, args):
    """Shard each layer, and then the whole model."""
    mesh = dist.init_device_mesh(args.device, (dist.get_world_size(),))
    mesh.get_group().set_timeout(timedelta(seconds=args.timeout))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def fit_epoch(epoch, model, optimizer, train_loader, test_loader, device, args):
    """Train for one epoch, test, and print a line."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    train_loader.sampler.set_epoch(epoch)  # a new order, the same on all ranks
    # Dropout, if there is any, draws different numbers on each rank and in each epoch. With
    # `args.seed + rank` alone, a resumed run would draw those of the first epoch again.
    torch.manual_seed(args.seed + epoch * world_size + rank)
    start = time.perf_counter()
    title = f"epoch {epoch + 1}/{args.epochs}"
    bar = tqdm(train_loader, title, leave=False, disable=None if rank == 0 else True)
    loss, correct, images = run_epoch(model, bar, device, optimizer)
    seconds = time.perf_counter() - start
    speed = len(train_loader) * args.batch_size / seconds
    _, test_correct, test_images = run_epoch(model, test_loader, device)
    if rank == 0:
        digits = 12 if args.double else 4
        print(
            f"{title}  loss {loss / images:.{digits}f}"
            f"  train {correct / images:.2%}  test {test_correct / test_images:.2%}"
            f"  {seconds:.2f} s  {speed:,.0f} {args.unit}/s",
            flush=True,
        )


def run_epoch(model, loader, device, optimizer=None):
    """Train, or with no optimizer, test. Returns sums over all ranks: loss, correct, images."""
    model.train(optimizer is not None)
    # The sums stay on the device. Reading them in each step would make Python wait for the GPU.
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        with torch.set_grad_enabled(model.training):
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
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
