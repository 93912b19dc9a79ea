r"""The exercises in the docstrings end as playground/pages/answers.md says. Each is done on a copy.

An entry of EDITS has a lesson, an exercise, the ranks (-: it takes no such number), flags, and how
it is run: with 32 bits and not --double, with PyTorch's DETAIL, with watch.py in front of it, or by
torchrun.
`A => B` replaces A in the code. \n is a new line, and ... in B is A. `first` names a lesson that
runs before, with flags. Then comes what happens:

    loss L     the last loss is L, as in answers.md
    same       the loss is that of the lesson, to the last digit; differs: it is not. (Texts and
               random images are fewer than for answers.md, so the losses there are others.)
    says W     W is printed, and is in answers.md
    prints W   W is printed
    fails W    there is an error (otherwise there is none), and W is printed and in answers.md;
               V OR W: one of them, because a rank may be told of the other's end first

Answers about times, and about what differs from run to run, are not here. Those that take more than
an edit are in test_resumable.py, test_fsdp_checkpoints.py and test_hybrid_parallel.py.
"""

import re
import sys

import pytest
from launch import DIGITS, FEWER, Job, losses, once, run
from lessons import LESSONS, ROOT, docstring, small_data, talks

ANSWERS = (ROOT / "playground" / "pages" / "answers.md").read_text()
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
EDITS = r"""
blocking_p2p 1 | 2
    zeros(4, => zeros(3,
    fails 16 vs 12. Received data size doesn't match expected size
blocking_p2p 2 | 2
    src=rank - 1) => src=rank)
    fails Pair is not connected
blocking_p2p 3 | 3 | --deadlock
    prints rank 0: even ranks send first: received 2
nonblocking_p2p 1 | 2
    compute(mine.device)  # => mine.fill_(9)\n    ...
    prints nonblocking, rank 0: [-1.0, -1.0] -> [9.0, 9.0]
    prints nonblocking, rank 1: [-1.0, -1.0] -> [0.0, 0.0]
collectives 1 | 2 | --timeout 3
    dist.all_reduce(mine)\n => if rank != 1:\n        ...
    fails Timed out waiting OR closed by peer
collectives 1 | 2 | --timeout 3 | DETAIL
    dist.all_reduce(mine)\n => if rank != 1:\n        ...
    fails Rank 1 is running collective:
    fails OpType=ALLREDUCE
collectives 2 | 2
    dist.all_reduce(mine)\n => ones = torch.ones_like(mine)\n    ...    dist.all_reduce(ones)\n
    all_reduce(mine)\n    dist => all_reduce(mine if rank == 0 else ones)\n    dist
    all_reduce(ones) => all_reduce(ones if rank == 0 else mine)
    prints rank 0: [10.0, 11.0] -> [11.0, 12.0]
    prints rank 1: [20.0, 21.0] -> [21.0, 22.0]
collectives 3 | 2
    broadcast(mine, src => broadcast(mine[:1] if rank == 0 else mine, src
    prints rank 1: [20.0, 21.0] -> [10.0, 21.0]
collectives 3 | 2 | --timeout 3
    dist.all_reduce(mine)\n => dist.all_reduce(mine[:1] if rank == 0 else mine)\n
    fails error
single_gpu 1 | -
    train_loader.sampler.generator.manual_seed(args.seed + epoch) => pass
    differs
single_gpu 2 | -
    optimizer.zero_grad() => pass
    loss 1.4891
data_parallel 1 | - | --by hand -g 2
    def fit_epoch( => def end(model):\n    print(list(model.state_dict()))\n\n\n...
    optimizer, train_loader, test_loader, device, args)\n => ...    end(model)\n
    prints module.stage1
data_parallel 2 | - | --by hand -g 2
    functional_call(replica, parameters, part.to(device)) => replica(part.to(device))
    loss 2.31
manual_data_parallel 1 | 2
    send_weights(model)  # => pass  #
    loss 1.6639
manual_data_parallel 2 | 2
    average(model)  # => pass  #
    loss 1.5555
distributed_data_parallel 1 | 2
    train_loader.sampler.set_epoch(epoch) => print("first", list(train_loader.sampler)[:5])
    loss 1.3936
distributed_data_parallel 2 | 2
    _, test_correct, => if rank == 0: ...
    fails SIGABRT
distributed_data_parallel 3 | 2
    model = Distributed => model.unused = torch.nn.Linear(1, 1).to(device)\n    ...
    fails Expected to have finished reduction in the prior iteration
    fails Parameter indices which did not receive grad for rank
    fails find_unused_parameters=True
distributed_data_parallel2 1 | 2
    average=False => average=True
    images = sums["images"].item() => ...; print("images", images)
    prints images 720.0
    loss 1.4064
distributed_data_parallel2 2 | 2 | --timeout 3
    parts = comm.gather(run_epoch(model, test_loader, device)) => tested = run_epoch
    _, test_correct, => parts = comm.gather(tested(model, test_loader, device))\n        ...
    fails Timed out waiting OR closed by peer
distributed_data_parallel_torchrun 1 | 2 | | torchrun
    rank, device = join(args) => ...\n    assert rank == 0
    fails AssertionError
    fails SIGTERM
    prints rank : 1 (local_rank: 1) exitcode : 1 OR rank : 1 (local_rank: 1) exitcode : -6
    prints traceback : Traceback (most recent call last):
distributed_data_parallel_torchrun 1 | 2 | | torchrun
    rank, device = join(args) => ...\n    assert rank == 0
    @record => # @record
    fails To enable traceback see OR Signal 6 (SIGABRT)
model_parallel 1 | -
    self.stage1(micro_batch).to(self.devices[1]) => self.stage1(micro_batch)
    loss 1.4064
model_parallel 2 | - | --pipelined
    F.cross_entropy(logits, labels) => sum(map(F.cross_entropy, *parts))
    loss = => parts = logits.tensor_split(4), labels.tensor_split(4)\n            ...
    says 85.86%
overlapped_data_parallel 1 | 2
    optimizer.zero_grad()\n => ...            loss.backward(retain_graph=True)\n
    fails call finish() after each backward()
resnet 1 | 2 | --workers 0 --epochs 1 --accumulate 8
    model.no_sync() => nullcontext()
    same
resnet 2 | 2 | --workers 0 --epochs 1 --accumulate 4
    (loss * fraction).backward() => loss.backward()
    differs
profile_steps 2 | 2
    profiler.step() => pass
    fails not enough values to unpack (expected 4, got 0)
finding_hangs 1 | - | --fault loader --timeout 8
    batch_size=4, => ... num_workers=1, multiprocessing_context="fork",
    says for batch in DataLoader(
finding_hangs 2 | - | --fault early --timeout 5
    def root( => def at_the_end(rank):\n    return rank == 1 or dist.barrier()\n\n\n...
    (numbers)\n    dist.barrier()\n\n\ndef at => (numbers)\n    at_the_end(rank)\n\n\ndef at
    says by peer
    says exit code 0
finding_hangs 3 | - | --fault shapes --timeout 5
    torch.ones(5 if => torch.ones(1_000_000 if
    says exit code -6
    says Received data size doesn't match expected size
resumable 2 | 2 | --run_dir TMP/run --epochs 3
    first resumable --run_dir TMP/run
    optimizer.load_state_dict(state["optimizer"]) => pass
    loss 0.7156
resumable 3 | 2 | --run_dir TMP/run
    flag = torch => return asked\n    ...
    for epoch in range( => if rank == 0:\n        os.kill(os.getpid(), signal.SIGTERM)\n    ...
    fails Connection
    prints stopped after step 10 of epoch 1
sending_less 1 | 2 | --by diloco
    agreed - parameter => parameter - agreed
    loss 2.2781
sending_less 2 | 2
    model = DistributedDataParallel(model)\n => ...\n        model.register_comm_hook(None, HOOK)\n
    class LocalSteps => IMPORT\n\n\n...
    IMPORT => from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import HOOK
    HOOK) => bf16_compress_hook)
    import HOOK => import bf16_compress_hook
    loss 1.4058
sharded_data 1 | 2 | --workers 1 --files TMP
    first sharded_data --make --files TMP
    manual_seed(seed + epoch) => manual_seed(seed + epoch + rank)
    loss 1.3396
sharded_data 3 | 1 | --workers 1 --files TMP
    first sharded_data --make --files TMP
    self.starts = => self.images = [opened(path) for path in self.images]\n        ...
    opened(self.images[file]) => self.images[file]
    model = make_model( => import pickle\n    print("bytes", len(pickle.dumps(train_set)))\n    ...
    prints bytes 9408
sharded_optimizer 1 | 2
    [bucket.shard for bucket in self.buckets]) => [bucket.flat for bucket in self.buckets])
    loss 2.31
    prints rank 0 holds         0 bytes of optimizer state
sharded_optimizer 2 | 2
    handle = dist.all_gather_into_tensor(bucket.flat, bucket.shard, async_op=True) => handle = None
    prints epoch 2/2  loss
sharded_optimizer 3 | 2
    for tensor in model.state_dict().values():\n        dist.broadcast(tensor, src=0) => pass
    torch.manual_seed(args.seed)\n => torch.manual_seed(args.seed + rank)\n
    differs
manual_fully_sharded 1 | 2 | | 32 bits
    layer.register_forward_hook(self.leave) => pass
    loss 1.4064
    says 236,840
manual_fully_sharded 2 | 2
    Adam(shards, => Adam(model.parameters(),
    prints loss 2.3
manual_fully_sharded 3 | 2
    torch.manual_seed(args.seed)\n => torch.manual_seed(args.seed + rank)\n
    prints epoch 2/2  loss
fully_sharded_data_parallel 1 | 2
    shard(model, args)  # => optimizer = torch.optim.Adam(model.parameters())\n        ...
    optimizer = torch.optim.Adam(model.parameters(), lr => torch.optim.Adam(model.parameters(), lr
    says 0 bytes of optimizer state
fully_sharded_data_parallel 2 | 2 | | 32 bits
    layers = model.layers => layers = []
    loss 1.4064
    says 236,840
fully_sharded_data_parallel 3 | 2
    torch.manual_seed(args.seed)\n => torch.manual_seed(args.seed + rank)\n
    prints epoch 2/2  loss
fully_sharded_data_parallel 4 | 4 | | watch
    reshard_after_forward=not args.keep_weights => reshard_after_forward=2
    prints all_gather 2 dim_1 4 118,680
fully_sharded_checkpoints 4 | 2 | --load TMP/c.pt
    first distributed_data_parallel -s TMP/c.pt --epochs 1
    state["optimizer"] = by_name(state["optimizer"], model, optimizer) => pass
    loss 1.4028
fully_sharded_checkpoints 5 | 2 | -s TMP/c.pt
    full_state_dict=True, cpu => cpu
    dist.destroy => weight = torch.load(args.savefile)["model"]["stage2.0.weight"]\n    ...
    dist.destroy => print("saved", weight.to_local().shape)\n    ...
    prints saved torch.Size([32, 64])
manual_pipeline 1 | 2
    , reduction="sum") / self.count => )
    differs
manual_pipeline 2 | 2 | --timeout 3 --schedule F0,B0,F1,B1 F0,F1,B0,B1
    fails dist.recv(gradient,
    fails dist.recv(inputs,
pipeline_parallel 1 | 2
    run(*inputs, target=labels) => run(*inputs)
    fails loss_fn and target required for last stage
pipeline_parallel 3 | 2 | --schedule DualPipeV --micro_batches 4
    says 0F3 3B1 3F2 0B0 3B2 3F3 0B1
placements 1 | 2
    (tensor_parallel, [R, S1, S0]) => (tensor_parallel, [R, S0, S1])
    says tensor R (S1) S0 (R) S1 R all_gather, all_reduce all_gather, all_reduce
placements 2 | 2
    "softmax(a, 1)": => "softmax(a, 0)": lambda a: a.softmax(0),\n    ...
    says softmax(a, 0) R R all_gather S1 R all_reduce
message_gradients 1 | 2
    shift(x, -1, group) => shift(x, 1, group)
    prints to_next to_previous [10, 20] [1, 2] right
message_gradients 1 | 3
    shift(x, -1, group) => shift(x, 1, group)
    says [100, 200, 300] [1, 2, 3] [10, 20, 30]
    prints to_next to_previous [100, 200, 300] [1, 2, 3] [10, 20, 30] wrong
message_gradients 2 | 2
    (all_gather, reduce_scatter) => (all_gather, own_chunk)
    says [1, 2] [30, 40]
    prints all_gather own_chunk [1, 2] [30, 40] wrong
message_gradients 3 | 2
    (all_gather, own_chunk), => (all_gather, reduce_scatter),
    says [2, 4] [6, 8]
    prints all_gather reduce_scatter [2, 4] [6, 8] wrong
message_gradients 4 | 2
    OWN_LOSSES = [ => def send(x, group):\n    dist.broadcast(x := x.clone(), 0)\n    return x\n...
    OWN_LOSSES = [ => def back(x, group):\n    dist.reduce(x := x.clone(), 0)\n    return ONE\n...
    return ONE => return x if dist.get_rank() == 0 else 0 * x
    OWN_LOSSES = [ => ...\n    (send, back),
    says [11, 22] [0, 0]
    prints send back [11, 22] [0, 0] right
tensor_parallel 1 | 2
    inputs = Message.apply(inputs, nothing, all_reduce, None) => pass
    loss 1.5168
tensor_parallel 2 | 2
    torch.manual_seed(args.seed)\n    model = => torch.manual_seed(args.seed + rank)\n    model =
    loss 1.4322
tensor_parallel 2 | 2 | --by dtensor
    torch.manual_seed(args.seed)\n    model = => torch.manual_seed(args.seed + rank)\n    model =
    loss 1.4064
tensor_parallel 3 | 2
    sampler.set_epoch(epoch) => sampler.set_epoch(epoch + rank)
    loss 2.04
tensor_parallel 4 | 2 | --by dtensor
    plan[first] => plan[first + "x"]
    fails Parallelize plan key '1x' could not be resolved
tensor_parallel 4 | 2 | --by dtensor
    plan[first] => plan[first + "x"]
    plan[second] => plan[second + "x"]
    loss 1.4064
    says 59,210
hybrid_parallel 1 | 4 | --model cnn
    optimizer.step() => torch.nn.utils.clip_grad_norm_(model.parameters(), 1); ...
    fails must have the same mesh
hybrid_parallel 2 | 4
    sampler.set_epoch(epoch) => sampler.set_epoch(epoch + rank)
    loss 2.0458
hybrid_parallel 3 | 4
    split(model, mesh["tp"]) => shard(model, mesh["dp"])\n    ...
    fails Cannot distribute a DTensor with device mesh
mixed_precision 1 | 1 | --lr 1e-5 --epochs 3
    make_model(args) => make_model(args).bfloat16()
    loss 2.5101
mixed_precision 2 | 2
    return logits.float() => return logits
    loss 1.35
mixed_precision 3 | 2 | --precision float16 --clip 1
    scaler.unscale_(optimizer)  # => pass  #
    loss 2.2184
activation_checkpointing 1 | 2 | --dropout
    use_reentrant=False) => use_reentrant=False, preserve_rng_state=False)
    loss 1.3723
activation_checkpointing 2 | 2 | | 32 bits
    for stage in (model.stage1, model.stage2): => replace(chosen)\n    for stage in ():
    def build( => def replace(all):\n    for each in all: each.mlp = Checkpointed(each.mlp)\n\n\n...
    says 3,962,404
activation_checkpointing 3 | 2
    use_reentrant=False => use_reentrant=True
    DistributedDataParallel(model) => DistributedDataParallel(model, find_unused_parameters=True)
    fails Expected to mark a variable ready only once
activation_checkpointing 4 | 2
    import Block => import Block, Tokens
    if isinstance(layer, Block)] => if isinstance(layer, (Block, Tokens))]
    use_reentrant=False => use_reentrant=True
    fails None of the inputs have requires_grad=True
    fails Expected to have finished reduction in the prior iteration
head_parallel 1 | 2
    shard = parameter.detach() => whole = parameter.detach().unflatten(dim, (-1, 2))\n    ...
    parameter.detach().chunk( => torch.cat(whole.unbind(dim + 1), dim).chunk(
    loss 1.3572
head_parallel 2 | 2
    layer.bias = None => pass
    loss 1.4418
sequence_parallel 1 | 2
    .register_hook(partial(all_reduce, group=group)) => .clone()
    loss 1.3466
sequence_parallel 2 | 2
    Exchange(all_gather, own_tokens => Exchange(all_gather, reduce_scatter
    loss 1.34762
sequence_parallel 3 | 2 | --by dtensor
    plan[f"{name}.norm1"] = => _ =
    plan[f"{name}.norm2"] = => _ =
    loss 1.3466
ulysses 1 | 2
    DistributedDataParallel(model) => model
    differs
ulysses 2 | 2
    Message.apply(parts, all_to_all, all_to_all, group) => all_to_all(parts, group)
    fails Expected to have finished reduction in the prior iteration
ulysses 3 | 2
    module.positions = mine => pass
    differs
context_parallel 1 | 2 | --by ring
    return mean, log => return mean, torch.zeros_like(log)
    differs
context_parallel 2 | 2 | --by ring
    Message.apply(chunk, to_next, to_previous, group) => to_next(chunk, group)
    differs
context_parallel 3 | 2 | --by ring --order plain --timeout 3
    mean, log = attend_to_chunk => if later.all(): continue\n        ...
    fails to_previous
expert_parallel 1 | 2
    Message.apply(rows, dispatch, combine, self.group) => dispatch(rows, None)
    loss 1.3563
expert_parallel 1 | 2
    Message.apply(outputs, combine, dispatch, self.group) => combine(outputs, None)
    fails Expected parameter `tensor` of type torch.Tensor
expert_parallel 2 | 2
    group = same_experts if parameter in experts else None => group = None
    loss 1.3586
expert_parallel 3 | 1 | --balance 0.1
    dist.all_reduce(mixture.total)\n        load => load
    loss 1.301868
expert_parallel 3 | 2 | --balance 0.1
    dist.all_reduce(mixture.total)\n        load => load
    loss 1.301763
expert_parallel 4 | 2 | --timeout 3
    outputs[mine] = mlp => if mine.any(): ...
    order = expert.argsort() => expert = torch.zeros_like(expert)\n        ...
    fails average_gradients
    prints in backward
language_model 1 | 2 | --timeout 5
    text = sample( => text = "" if rank else sample(
    fails all_gather
    fails reduce_scatter
    prints loss.backward()
language_model 2 | 1 | --tied
    fully_shard(model, => fully_shard(model.stage1[0], mesh=mesh); ...
    fails is shared with a parameter already managed by another FSDP group
language_model 3 | 2
    total / labels.numel() => total / micro_labels.numel()
    loss 8.7017
language_model 4 | 2
    micro_batches = zip( => model.set_requires_gradient_sync(False)\n    ...
    loss 5.6411
language_model 4 | 2
    micro_batches = zip( => last = lambda part: part[-1].equal(rows[-1])\n    ...
    logits = model(micro => model.set_requires_gradient_sync(last(micro_rows))\n        ...
    prints loss 4.355
token_mean 1 | 2
    total / count * dist.get_world_size() => total / count
    differs
token_mean 2 | 2 | --micro_batches 4
    loss = total / count => own = (labels >= 0).sum()\n        dist.all_reduce(own)\n        ...
    total / count => total / own
    differs
token_mean 3 | 2 | --packed
    keep_apart(model)\n    if => pass\n    if
    differs
trainer_and_generator 1 | 2
    for _ in range(args.steps): => for step in range(args.steps):
    receive_weights(model)\n => step or receive_weights(model)\n
    send_weights(model, generator)\n => step or send_weights(model, generator)\n
    prints ratio 1 +- 0.248
    says 0.298
trainer_and_generator 2 | 2 | --stale
    new - old => new - new.detach()
    says reward 0.997
trainer_and_generator 3 | 3
    advantages = (rewards => rewards = rewards[own]\n    advantages = (rewards
    advantages[own, None] => advantages[:, None]
    says 0.083
trainer_and_generator 4 | 2
    torch.no_grad(): => torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
    prints ratio 1 +- 0.009
    says 0.009
trainer_and_generator 5 | 3 | --timeout 3
    if isinstance(tensor, DTensor): => if isinstance(tensor, DTensor) and dist.get_rank() == 0:
    fails full_tensor() OR receive_weights
vocabulary_parallel 1 | 2
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group) => pass
    differs
vocabulary_parallel 2 | 2
    scores.amax(dim=1) => torch.zeros_like(scores[:, 0])
    same
vocabulary_parallel 3 | 2
    self.weight) * own[..., None] => self.weight)
    differs
vocabulary_parallel 4 | 2
    tokens = Message.apply(tokens, nothing, all_reduce, self.group) => pass
    differs
four_axes 1 | 2 | --mesh 1x1x2x1
    step(*inputs, target=self.own(labels)) => step(*inputs, target=self.own(rows).roll(-1, dims=1))
    differs
four_axes 2 | 2 | --mesh 1x1x2x1
    shard(stage, flat => [vars(each).pop("positions", None) for each in stage.modules()]\n    ...
    differs
four_axes 3 | 2 | --mesh 1x2x1x1
    self.tokens * self.ranks => self.tokens
    differs
four_axes 4 | 4 | --mesh 1x2x1x2 --width 64
    shard(stage, flat => _ = (stage, flat
    split_layers(stage, mesh => shard(stage, flat["dp_cp"]); ...
    fails The size of tensor a (64) must match the size of tensor b (32)
thousand_ranks 1 | - | --mesh 32x32
    fails unflatten: Provided sizes [-1, 128] don't multiply up to the size of dim 2 (64)
thousand_ranks 2 | -
    fully_shard(layer, => fully_shard(layer, reshard_after_forward=False,
    says 6,145.9
    says 1,565.3
thousand_ranks 3 | -
    block.norm1 = => _ =
    block.norm2 = => _ =
    end.norm = => _ =
    says 5,419.7
thousand_ranks 4 | -
    loss.backward() => dist.barrier() if dist.get_rank() == 0 else None\n        ...
    prints 4,601.8
"""
FLAGS = {
    "digits": (*DIGITS, "--batch_size", 120, "--epochs", 2),  # as in answers.md
    "fake": ("--dataset", "fake", "--device", "cpu", "--batch_size", 60, "--epochs", 2),
    "text": ("--device", "cpu", "--width", 16, "--epochs", 2),
}
INTRODUCTION, *SECTIONS = re.split(r"^## ", ANSWERS, flags=re.M)


def answers_of(lesson):
    """Return what answers.md has about a lesson: what stands above the answers, and the answers."""
    found = [section for section in SECTIONS if section.startswith(f"`{lesson}.py`\n")]
    assert found, f"answers.md has no section `{lesson}.py`"
    return [" ".join(part.split()) for part in re.split(r"^\d\. ", found[0], flags=re.M)]


def test_each_exercise_has_an_answer():
    """answers.md answers as many exercises of each lesson as its docstring has."""
    for lesson in LESSONS:
        exercises = docstring(lesson).partition("Try breaking it")[2]
        numbers = re.findall(r"^  (\d)\. ", exercises, re.M)
        assert len(answers_of(lesson)) - 1 == len(numbers) > 0, lesson


# In language_model.py, to read the first twelve documents of the text; in resnet.py, few images.
TWELVE = "from pydoc_data import topics\n\ntopics.topics = dict(sorted(topics.topics.items())[:12])"
LESS = {"language_model": [("import math\n", f"import math\n{TWELVE}\n")], "resnet": [FEWER]}


def parsed(lines):
    """Return what an entry replaces, the command that runs before or None, and what happens."""
    pairs, before, expected = [], None, []
    for line in lines:
        kind, _, words = line.strip().partition(" ")
        if " => " in line:
            old, new = line[4:].encode().decode("unicode_escape").split(" => ")
            pairs.append((old, new.replace("...", old)))
        elif kind == "first":
            before = words.split()
        else:
            expected.append((kind, " ".join(words.split())))
    return pairs, before, expected


def check(done, kind, words, unchanged):
    """Check one thing that happens. `unchanged` returns what the lesson as it is prints."""
    if kind == "loss":
        rounding = 0.6 * 10 ** -len(words.partition(".")[2])
        if "--double" not in done.args:
            rounding += 3e-4
        assert losses(done.stdout)[-1] == pytest.approx(float(words), abs=rounding)
    elif kind in ("same", "differs"):
        right = pytest.approx(losses(unchanged()), abs=1e-10)
        assert (losses(done.stdout) == right) == (kind == "same")
    else:
        printed = " ".join((done.stdout + done.stderr).split())
        assert any(each in printed for each in words.split(" OR ")), printed


@pytest.mark.parametrize(
    "edit", re.findall(r"^\w.*\n(?: .*\n)+", EDITS, re.M), ids=lambda edit: edit.split(" |")[0]
)
def test_an_edit(edit, change, tmp_path):
    """What happens, and that answers.md has it."""
    head, *lines = edit.replace("TMP", str(tmp_path)).strip().splitlines()
    name, count, more, how = [part.strip() for part in f"{head}| | |".split("|")][:4]
    lesson, number = name.split()
    pairs, before, expected = parsed(lines)
    flags = [] if talks(lesson) else [*FLAGS[small_data(lesson)]]
    if flags and lesson != "mixed_precision" and how not in ("32 bits", "watch"):
        flags.append("--double")
    options = {"processes": None if count == "-" else int(count), "env": {}}
    if "fails" in dict(expected):
        options["status"] = "error"
    if how == "DETAIL":  # PyTorch reads it when it is imported
        options |= {"env": {"TORCH_DISTRIBUTED_DEBUG": how}, "cold": True}
    if small_data(lesson) == "text" and lesson != "language_model":
        options["env"] = {"DOCUMENTS": "40"}
    if before is not None:
        run(before[0], *flags, *before[1:], processes=None if "--make" in before else 2)
    flags += more.split()
    less = LESS.get(lesson, [])
    copy = change(lesson, *less, *pairs)
    if how == "torchrun":
        done = Job(*TORCHRUN, count, copy, *flags).wait()
        assert done.returncode == 1
    else:
        behind = ["watch"] if how == "watch" else []
        done = run(*behind, copy, *flags, **options)

    def unchanged():
        def make(folder):
            out = run(change(lesson, *less), *flags, **options).stdout
            (folder / "out").write_text(out)

        key = ("unchanged", lesson, *map(str, flags), str(options))
        return (once(key, make) / "out").read_text()

    above, *answers = answers_of(lesson)
    answer = INTRODUCTION + above + answers[int(number) - 1]
    for kind, words in expected:
        assert kind == "prints" or all(each in answer for each in words.split(" OR "))
        check(done, kind, words, unchanged)
