r"""Checkpoints of a sharded model: each rank writes its shards, and any number of ranks resumes.

Run it, then resume it with more ranks, and make one file:
    torchrun --standalone --nproc-per-node 2 playground/sharded/fully_sharded_checkpoints.py \
        --run_dir runs/fsdp
    torchrun --standalone --nproc-per-node 4 playground/sharded/fully_sharded_checkpoints.py \
        --run_dir runs/fsdp --epochs 5 --savefile runs/fsdp.pt

It prints where it resumes. This is the second command, with four processes on two cores:
    runs/fsdp/epoch-0003: 3 of 5 epochs are done
    epoch 4/5  loss 0.0952  train 97.09%  test 96.52%  34.88 s  1,717 images/s

Start from this file, or from one that `distributed_data_parallel.py --savefile` has written, and
export the parameters for other programs (`pip install safetensors`):
    torchrun --standalone --nproc-per-node 2 playground/sharded/fully_sharded_checkpoints.py \
        --load runs/fsdp.pt --epochs 6 --export runs/exported

With --run_dir, all ranks write their shards to a folder after each epoch, so none needs memory for
the whole model. All nodes must see this folder. `dcp` is torch.distributed.checkpoint. When a run
resumes, each rank looks up which files contain its new shards, so the number of ranks may differ.
With --async_save, training does not wait for the disk: dcp copies the shards to CPU memory, and a
thread writes this copy while the next epoch trains.

With --savefile, the ranks gather one tensor at a time, and rank 0 writes a file that a plain model
and optimizer can load. With --load, rank 0 reads such a file, and sends one tensor at a time.

With --export, rank 0 makes one file of the shards that all ranks write to a folder that all nodes
see. Those of --model language get the names that Llama has in Hugging Face's transformers, so its
`LlamaForCausalLM` can load it. --load takes it, too, and begins to train these parameters anew.

Try breaking it, in a copy beside it:
  1. Delete the file .metadata in the newest folder. Where does the next run resume, and why?
  2. Leave out `process_group=group`, and run it with --async_save. What goes wrong, and why?
  3. Comment out the second `torch.manual_seed(...)`. With --model cnn --dropout 0.5, train two
     epochs without a break, and then two with a break after the first. Compare the losses.

Now write it yourself: `seeded_dropout.py` in playground/exercises/.
Builds on: fully_sharded_data_parallel.py
The next lesson, `sharded_muon.py`, has an optimizer that needs whole matrices.
"""

import json
import os
import re
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

# The numbers depend on these flags, so a run must be resumed with the same ones.
MUST_AGREE = ["model", "width", "layers", "tokens", "heads", "dropout"]
MUST_AGREE += ["dataset", "batch_size", "lr", "seed", "double"]


def save_shards(args, epoch, model, optimizer, group):
    """Write a sharded checkpoint. Returns the future of a thread with --async_save, else None."""
    # NEW: each rank gets its own shards, under the parameters' names.
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "epoch": epoch, "args": vars(args)}
    folder = f"{args.run_dir}/epoch-{epoch:04}"
    if not args.async_save:
        dcp.save(state, checkpoint_id=folder)  # NEW: all ranks write at the same time
        return None
    # NEW: returns as soon as the shards are copied. Then the next step may change them.
    return dcp.async_save(state, checkpoint_id=folder, process_group=group)


def load_shards(path, args, model, optimizer):
    """Load a sharded checkpoint, however many ranks wrote it. Returns how many epochs are done."""
    # NEW: dcp.load() replaces the values of a dict. It reads only what the dict already has.
    progress = {"epoch": None, "args": dict.fromkeys(MUST_AGREE)}
    dcp.load(progress, checkpoint_id=path)
    compare(path, progress["args"], args)
    # NEW: here the dict has the shards of this rank, and dcp.load() writes into them. Adam has no
    # state before its first step, so get_state_dict() makes a step with zero gradients. Adam counts
    # it, and loading corrects the count. A new run must not call get_state_dict() before training.
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    set_model_state_dict(model, model_state)
    set_optimizer_state_dict(model, optimizer, optimizer_state)  # also sets the learning rate
    return progress["epoch"]


def train(args):
    """Train a sharded model, from a checkpoint if there is one, and write checkpoints."""
    rank, device = join(args)
    train_loader, test_loader = loaders(args, rank, dist.get_world_size())
    torch.manual_seed(args.seed)  # the same on all ranks
    model = make_model(args)
    for layer in model.modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = args.dropout  # 0 by default
    shard(model, args)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)
    done = resume(args, model, optimizer, device)
    fit(model, optimizer, train_loader, test_loader, device, args, done)
    if args.savefile:
        save_file(args, max(done, args.epochs), model, optimizer)
    if args.export:
        export(args, model)
    dist.barrier()  # DTensor keeps the group, and without this Python may abort at exit
    dist.destroy_process_group()


def shard(model, args):
    """Shard each layer, and then the whole model."""
    mesh = dist.init_device_mesh(args.device, (dist.get_world_size(),))
    mesh.get_group().set_timeout(timedelta(seconds=args.timeout))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def resume(args, model, optimizer, device):
    """Load the newest checkpoint of --run_dir, or else --load. Returns how many epochs are done."""
    newest = [None]
    if dist.get_rank() == 0 and args.run_dir:
        newest = checkpoints(args.run_dir)[-1:] or [None]
    # NEW: rank 0 chooses for all ranks, because nodes may see a new folder at different times.
    dist.broadcast_object_list(newest, device=device)
    path = newest[0] or args.load
    if path is None:
        return 0
    try:
        if newest[0]:
            advice = "move it away to resume from an older one"
            done = load_shards(path, args, model, optimizer)
        elif os.path.isdir(path):
            advice = "use an export of the same model"
            done = load_exported(path, args, model)
        else:
            done = load_file(path, args, model, optimizer, device)
    except dcp.CheckpointException as error:  # has the error of each rank, and its traceback
        reason, _ = next(iter(error.failures.values()))
        raise ValueError(
            f"{path} cannot be read ({type(reason).__name__}: {reason}): {advice}"
        ) from None
    if dist.get_rank() == 0:
        print(f"{path}: {done} of {args.epochs} epochs are done", flush=True)
    return done


def checkpoints(run_dir):
    """Return the complete checkpoints in a folder, sorted by epoch."""
    found = {}
    # NEW: dcp writes the file .metadata last, so a folder without it is not complete.
    for path in Path(run_dir).glob("*/.metadata"):
        match = re.fullmatch(r"epoch-([0-9]+)", path.parent.name)
        if match:
            found[int(match[1])] = str(path.parent)
    return [found[epoch] for epoch in sorted(found)]


def compare(path, flags_before, args):
    """Refuse a checkpoint that was written with different flags."""
    for flag, before in flags_before.items():
        now = getattr(args, flag)
        if before != now:
            raise ValueError(
                f"{path} was written with --{flag} {before}, not {now}:"
                " use the same flags, or start another run"
            )


def load_file(path, args, model, optimizer, device):
    """Load one file, which only rank 0 reads. Returns how many epochs are done."""
    whole = {"model": {}, "optimizer": {}, "epoch": None, "args": None}
    if dist.get_rank() == 0:
        whole = read(path)
    progress = [whole["epoch"], whole["args"]]
    dist.broadcast_object_list(progress, device=device)
    epoch, before = progress
    # The other lessons lack some flags of this one.
    compare(path, {flag: before[flag] for flag in MUST_AGREE if flag in before}, args)
    if dist.get_rank() == 0:
        whole["optimizer"] = by_name(whole["optimizer"], model)
    # NEW: full_state_dict says that the tensors are whole. broadcast_from_rank0 says that only rank
    # 0 has them. It sends one after the other, and each rank keeps its shard.
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole["model"], options=options)
    set_optimizer_state_dict(model, optimizer, whole["optimizer"], options=options)
    return epoch


def read(path):
    """Return what save_file() has written, a dict."""
    expected = {"model", "optimizer", "epoch", "args"}
    try:
        # With mmap=True, a tensor is read only when it is used.
        whole = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        if not isinstance(whole, dict) or whole.keys() != expected:
            raise ValueError("the file has other contents")
    except Exception as error:  # its type depends on what is wrong with the file
        error.add_note(f"{path} should be a checkpoint, a dict with {', '.join(sorted(expected))}.")
        raise
    return whole


def by_name(optimizer_state, model):
    """Return an optimizer's state, with the names of parameters in place of their numbers."""
    names = [name for name, _ in model.named_parameters()]
    [group] = optimizer_state["param_groups"]
    state = {}
    for name, number in zip(names, group["params"], strict=True):
        state[name] = optimizer_state["state"][number]
    return {"state": state, "param_groups": [group | {"params": names}]}


def fit(model, optimizer, train_loader, test_loader, device, args, done):
    """Train and test from epoch `done` on, and write a checkpoint after each epoch."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    group = None
    if args.async_save:
        # NEW: the threads send messages, too, which must not mix with those of training. So they
        # have a group of their own. It uses gloo, because the copies are in CPU memory.
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=args.timeout))
    writing = None  # the future of a checkpoint that a thread writes
    for epoch in range(done, args.epochs):
        train_loader.sampler.set_epoch(epoch)
        # NEW: the seed depends on epoch and rank only. So with --dropout, a run that is resumed
        # with as many ranks drops the same neurons as one without a break.
        torch.manual_seed(args.seed + epoch * world_size + rank)
        start = time.perf_counter()
        bar = tqdm(train_loader, leave=False, disable=None if rank == 0 else True)
        loss, correct, images = run_epoch(model, bar, device, optimizer)
        seconds = time.perf_counter() - start
        speed = len(train_loader) * args.batch_size / seconds
        _, test_correct, test_images = run_epoch(model, test_loader, device)
        if rank == 0:
            digits = 12 if args.double else 4
            print(
                f"epoch {epoch + 1}/{args.epochs}  loss {loss / images:.{digits}f}"
                f"  train {correct / images:.2%}  test {test_correct / test_images:.2%}"
                f"  {seconds:.2f} s  {speed:,.0f} {args.unit}/s",
                flush=True,
            )
        if writing:
            writing.result()  # NEW: waits for the thread, and raises its error
        if args.run_dir:
            writing = save_shards(args, epoch + 1, model, optimizer, group)
    if writing:
        writing.result()


def save_file(args, epoch, model, optimizer):
    """Write one file with whole tensors. If this fails, an older file stays."""
    # NEW: full_state_dict gathers the shards of one tensor after the other. cpu_offload moves each
    # whole tensor to the CPU of rank 0. The other ranks keep none, and get empty dicts.
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    if dist.get_rank() > 0:
        return
    whole = {"model": model_state, "optimizer": optimizer_state, "epoch": epoch, "args": vars(args)}
    part = f"{args.savefile}.{time.time_ns()}"  # a name that no other job uses
    try:
        with open(part, "wb") as file:
            torch.save(whole, file)
            file.flush()
            os.fsync(file.fileno())  # the data is on the disk before the file has its name
        os.replace(part, args.savefile)
    finally:
        Path(part).unlink(missing_ok=True)


def export(args, model):
    """Write the parameters as safetensors, a format that does not depend on PyTorch."""
    # NEW: each rank writes its shards to a folder inside, and rank 0 puts them together.
    writer = dcp.HuggingFaceStorageWriter(
        args.export, save_distributed=True, enable_consolidation=True
    )
    dcp.save(exported_shards(model, args), storage_writer=writer)
    if dist.get_rank() == 0 and args.model == "language":
        config = json.dumps(llama_config(model), indent=2)
        Path(args.export, "config.json").write_text(config)


def load_exported(path, args, model):
    """Load exported parameters, however many ranks wrote them. Returns 0: no epoch is done."""
    # NEW: each rank reads its shards from the file, into the shards of the model.
    reader = dcp.HuggingFaceStorageReader(path)
    dcp.load(exported_shards(model, args), storage_reader=reader)
    return 0


LLAMA = {  # the layers of a block of --model language, and their names in transformers
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
        return model.state_dict()
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
    folder = "folder for sharded checkpoints; resumes from its newest"
    add("--run_dir", type=flags.new_folder, help=folder)
    add("--async_save", action="store_true", help="write them while the next epoch trains")
    load = "start from this file, unless --run_dir has a checkpoint"
    add("--load", type=os.path.expanduser, help=load)
    add("-s", "--savefile", type=flags.new_file, help="one file with whole tensors, at the end")
    export = "an empty folder for the parameters as safetensors, at the end"
    add("--export", type=flags.new_folder, help=export)
    add("--dropout", type=float, default=0.0, help="fraction of the hidden neurons to drop (cnn)")


def check_flags(parser, args, world_size):
    """Refuse flags that do not fit each other, the number of ranks or the disk."""
    parser.check_batch(args.batch_size, world_size)
    if not 0 <= args.dropout < 1:
        parser.error(f"--dropout {args.dropout}: must be 0 or more, and below 1")
    if args.dropout and args.model != "cnn":
        parser.error(f"--dropout {args.dropout}: only the CNN has it, so add --model cnn")
    if args.async_save and not args.run_dir:
        parser.error("--async_save writes to --run_dir, which is missing")
    if args.export and os.listdir(args.export):
        # The shards of an earlier export by more ranks would get into the new file.
        parser.error(f"--export {args.export}: this folder is not empty")
    if (args.export or os.path.isdir(args.load or "")) and not find_spec("safetensors"):
        parser.error("--export, and --load with a folder, need: pip install safetensors")


# ---------- Unchanged from distributed_data_parallel_torchrun.py ----------
# You know what follows: join(), run_epoch() and main(). If you copy this lesson, copy it, too.


def join(args):
    """Join the process group that torchrun describes. Returns this rank and its device."""
    local_rank = int(os.environ["LOCAL_RANK"])  # torchrun has numbered this node's processes
    device = torch.device(args.device)
    gpu = None
    if args.device != "cpu":
        gpu = device = torch.device(args.device, local_rank)
        torch.accelerator.set_device_index(gpu)  # otherwise all ranks would take memory on GPU 0
    backend = dist.get_default_backend_for_device(device)  # nccl for NVIDIA's GPUs, gloo for CPUs
    # The address, the rank and the world size are in the environment.
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout), device_id=gpu)
    rank = dist.get_rank()
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, vars(args))
    flags.check_same(everyone)  # an error, if nodes have different flags
    if rank == 0:
        print(f"{len(everyone)} ranks, {backend}, {args.device}", flush=True)
    return rank, device


def run_epoch(model, loader, device, optimizer=None):
    """Train, or only test without optimizer. Returns sums over all ranks: loss, correct, images."""
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
    # There is no group yet, so a download may take long. One process of each node does it.
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    train(args)


if __name__ == "__main__":
    main()
