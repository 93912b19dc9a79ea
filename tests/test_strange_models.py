"""The lessons' classes in models of a reader's own: right to 1e-12, or refused in one line."""

import copy
import math
import re
import shutil
import tempfile
from functools import partial
from types import SimpleNamespace

import activation_checkpointing
import data_parallel
import expert_parallel
import fully_sharded_checkpoints
import head_parallel
import manual_fully_sharded
import manual_pipeline
import numpy
import overlapped_data_parallel
import pipeline_parallel
import pytest
import sequence_parallel
import sharded_data
import sharded_optimizer
import tensor_parallel
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import trainer_and_generator
import ulysses
import vocabulary_parallel
from lessons import ROOT
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from common.models import Language, Transformer
from watch_ranks.ranks import call

PAGE = (ROOT / "playground/pages/sharding.md").read_text()
ADAM = partial(torch.optim.Adam, lr=1e-2)
close = partial(torch.testing.assert_close, atol=1e-12, rtol=0)


# ---------- Models that change beneath what keeps state over the steps ----------


class Net(nn.Module):
    """A convolution, a linear layer, and two parameters of its own, in float64."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.randn(6))
        self.shift = nn.Parameter(torch.randn(6))
        self.first = nn.Conv2d(2, 4, 3)
        self.second = nn.Linear(4 * 9, 6)
        self.ignores = False  # one of its own parameters
        self.by_hand = False  # uses a parameter of `second` outside of its forward()
        self.as_dict = False
        self.double()

    def forward(self, images):
        hidden = self.first(images).relu().flatten(1)
        if self.by_hand:
            outputs = F.linear(hidden, self.second.weight, self.second.bias)
        else:
            outputs = self.second(hidden)
        outputs = outputs * self.scale
        if not self.ignores:
            outputs = outputs + self.shift
        return {"logits": outputs} if self.as_dict else outputs


def plain(net):
    """Train in one process. Returns the optimizer, and what averages after backward()."""
    return ADAM([each for each in net.parameters() if each.requires_grad]), lambda: None


def buckets(net):
    """Average by buckets, of a parameter each."""
    return plain(net)[0], partial(overlapped_data_parallel.Buckets(net, 1e-4).finish, net)


def zero2(net, overlap=False):
    """Train with sharded optimizer state and gradients."""
    return sharded_optimizer.ShardedOptimizer(net, ADAM, overlap), lambda: None


def zero3(net):
    """Train with sharded parameters."""
    layers = manual_fully_sharded.shard_layers(net)
    net.gather_all = lambda: [layer.gather() for layer in layers]
    return ADAM([layer.shard for layer in layers]), lambda: None


WAYS = {"buckets": buckets, "zero2": zero2, "overlap": partial(zero2, overlap=True), "zero3": zero3}


def nothing(net, step):
    """Leave the model as it is."""


def without_one(net, step):
    """One step does without a parameter."""
    net.ignores = step == 1


def used_by_hand(net, step):
    """A layer's parameters are used outside of its forward()."""
    net.by_hand = True


def returns_a_dict(net, step):
    """As models of Hugging Face do."""
    net.as_dict = True


def channels_last(net, step):
    """The parameters move to memory of another layout."""
    if step == 1:
        net.to(memory_format=torch.channels_last)


def swaps_data(net, step):
    """As an average of the parameters (EMA) is swapped in."""
    if step == 1:
        for parameter in net.parameters():
            parameter.data = parameter.data.clone()


def assigns(net, step):
    """Load a state in place of the parameters."""
    if step == 1:
        state = {name: value.clone() for name, value in net.state_dict().items()}
        net.load_state_dict(state, assign=True)


def unfreezes(net, step):
    """A layer is frozen at first."""
    net.first.requires_grad_(step > 0)


def is_interrupted(net, step):
    """Leave the backward() of a batch in the middle, as after a lack of memory."""
    if step == 1:

        def stop(*_):
            raise MemoryError

        hook = net.first.register_full_backward_pre_hook(stop)
        with pytest.raises(MemoryError):
            net(torch.ones(2, 2, 5, 5, dtype=torch.float64)).sum().backward()
        hook.remove()


def has_old_weight_norm(net, step):
    """Nothing more: the hook is there from the beginning."""


NOT_SENT = "was not sent"
NO_GRADIENT = "got no gradient"
LEFT = "left the flat tensor"
ANEW = "unfrozen, or a parameter replaced"
CHANGES = {  # what happens to the model, and what is refused; all else is right
    nothing: {},
    has_old_weight_norm: {"zero3": None},  # it computes a weight outside of forward()
    without_one: {way: NO_GRADIENT for way in WAYS},
    used_by_hand: {"overlap": "outside its layer's forward", "zero3": None},  # crashes Python
    returns_a_dict: {"zero3": "must return a tensor or a tuple"},
    channels_last: {"zero2": LEFT, "overlap": LEFT, "zero3": None},
    swaps_data: {"zero2": LEFT, "overlap": LEFT, "zero3": None},
    assigns: {"buckets": NOT_SENT, "zero2": ANEW, "overlap": ANEW, "zero3": "is sharded"},
    unfreezes: {"buckets": NOT_SENT, "zero2": ANEW, "overlap": ANEW, "zero3": "require gradient"},
    is_interrupted: {"buckets": "call finish"},
}


def trained(change, way, rank, world_size):
    """Train for three steps. Returns the parameters."""
    net = Net()
    if change is unfreezes:
        net.first.requires_grad_(False)
    if change is has_old_weight_norm:
        nn.utils.weight_norm(net.second)
    optimizer, average = way(net)
    if change is assigns and way is plain:
        change = nothing  # a new tensor with the old numbers
    for step in range(3):
        change(net, step)
        if way is plain and change is unfreezes and step == 1:
            optimizer.add_param_group({"params": list(net.first.parameters())})
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(4, 2, 5, 5, generator=generator, dtype=torch.float64)
        labels = torch.randint(6, (4,), generator=generator)
        optimizer.zero_grad()
        outputs = net(images[rank::world_size])
        outputs = outputs["logits"] if isinstance(outputs, dict) else outputs
        F.cross_entropy(outputs, labels[rank::world_size]).backward()
        average()
        optimizer.step()
    if way is WAYS["zero3"]:
        net.gather_all()
    return [*net.parameters()] if way is WAYS["zero3"] else [*net.state_dict().values()]


def change_on_a_rank(rank, change):
    """Train in each way while the model changes."""
    expected = trained(change, plain, 0, 1)
    if change is has_old_weight_norm:  # the computed weight is no parameter
        expected = expected[: len([*Net().parameters()]) + 1]
    for name, way in WAYS.items():
        refusal = CHANGES[change].get(name, "")
        if refusal:
            with pytest.raises((RuntimeError, TypeError), match=refusal):
                trained(change, way, rank, dist.get_world_size())
        elif refusal is not None:
            close(trained(change, way, rank, dist.get_world_size()), expected, msg=name)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_model_that_changes(change):
    """Buckets and shards fit it in each step, or say that they do not."""
    call(change_on_a_rank, 2, change)


# ---------- Layers that are split, and what they cannot do ----------


def gradients_of(module, inputs, loss):
    """Return the gradients of a module's parameters."""
    module.zero_grad()
    loss(module(inputs)).backward()
    return [parameter.grad for parameter in module.parameters()]


def refused(words, function, *args, **kwargs):
    """Check that a call ends with an error that says this."""
    with pytest.raises((ValueError, IndexError, RuntimeError), match=words):
        function(*args, **kwargs)


def vocabulary(rank):
    """Words outside of it, options that would be lost, and labels of -100."""
    for options in ({"padding_idx": 0}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}):
        embedding = nn.Embedding(6, 4, **options)
        refused("would be lost", vocabulary_parallel.SplitEmbedding, embedding, None)
    refused("bias would be lost", vocabulary_parallel.SplitOutput, nn.Linear(4, 6), None)
    embedding = vocabulary_parallel.SplitEmbedding(nn.Embedding(6, 4), None)
    scores = torch.randn(2, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    own = scores.chunk(2, dim=1)[rank].clone().requires_grad_()
    for word in (-1, 6):
        refused("out of range", embedding, torch.tensor([[0, word]]))
        labels = torch.tensor([[0, 1, 2], [3, 4, word]])
        refused("out of bounds", vocabulary_parallel.mean_loss, own, labels)
    labels = torch.tensor([[0, -100, 2], [-100, 4, 5]])
    with torch.no_grad():
        own[0, :, 1] = math.nan  # as of a token whose attention is masked
    loss, correct = vocabulary_parallel.mean_loss(own, labels)
    refused("no second derivatives", torch.autograd.grad, loss, own, create_graph=True)
    loss.backward()
    whole = scores.clone().requires_grad_()
    right = F.cross_entropy(whole, labels)
    right.backward()
    close(loss, right)
    close(own.grad, whole.grad.chunk(2, dim=1)[rank])
    assert correct.equal(whole.argmax(dim=1) == labels)


def second_derivatives(rank):
    """Through the messages of a pair: a penalty on the gradient of a curved loss."""

    def penalty(pair, inputs):
        outputs = pair(inputs).tanh().sum()
        [gradient] = torch.autograd.grad(outputs, inputs, create_graph=True)
        pair.zero_grad()
        (outputs + gradient.square().sum()).backward()
        return inputs.grad

    torch.manual_seed(0)
    pair = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()  # 7 columns
    inputs = torch.randn(2, 5, dtype=torch.float64)
    right = penalty(pair, inputs.clone().requires_grad_())
    expected = [pair[2].bias.grad, pair[0].weight.grad.tensor_split(dist.get_world_size())[rank]]
    tensor_parallel.split(pair, [("0", "2")])
    close(penalty(pair, inputs.clone().requires_grad_()), right)
    close([pair[2].bias.grad, pair[0].weight.grad], expected)


def used_first_but_made_last(rank):
    """ZeRO 2 sees that a layer is used outside of its forward(), whichever was made last."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(4, 2)
            self.first = nn.Linear(3, 4)

        def forward(self, inputs):
            return self.last(F.linear(inputs, self.first.weight, self.first.bias))

    net = Net()
    optimizer = sharded_optimizer.ShardedOptimizer(net, ADAM, overlap=True)
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    refused("outside its layer's forward", net(torch.ones(2, 3)).sum().backward)


def momentum_in_a_checkpoint(rank):
    """SGD has no count of steps. Its momentum is loaded all the same."""
    torch.manual_seed(0)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    model = nn.Linear(6, 4)
    saved, loaded = copy.deepcopy(model), model
    optimizers = []
    for each in (saved, loaded):
        fully_shard(each)
        optimizers.append(torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9))
    saved(torch.ones(2, 6)).sum().backward()
    optimizers[0].step()
    args = SimpleNamespace(**dict.fromkeys(fully_sharded_checkpoints.MUST_AGREE))
    fully_sharded_checkpoints.save(folder[0], 1, saved, optimizers[0], args)
    fully_sharded_checkpoints.load(folder[0], loaded, optimizers[1])
    for right, found in zip(saved.parameters(), loaded.parameters(), strict=True):
        averages = [
            optimizer.state[each]["momentum_buffer"].to_local()
            for optimizer, each in zip(optimizers, (right, found), strict=True)
        ]
        assert averages[0].any()
        close(*averages)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder[0])  # over the other one
    with pytest.raises(KeyError, match='nothing under the key "optimizer"'):
        fully_sharded_checkpoints.load(folder[0], loaded, optimizers[1])
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])


def what_ranks_cannot_divide(rank):
    """Heads, tokens, layers, experts and stages."""
    model = Language(width=16, heads=4)  # two heads of keys, and three ranks
    refused("cannot split 2 heads", head_parallel.split_by_hand, model, None)
    refused("cannot split 7 tokens", sequence_parallel.own_tokens, torch.ones(1, 7), None)
    block = next(each for each in model.modules() if hasattr(each, "attention"))
    block.gamma = nn.Parameter(torch.ones(16))  # as with LayerScale
    refused("would be left out", head_parallel.SplitBlock, block, None, None, None)
    mine = torch.arange(11).tensor_split(3)[rank]
    refused(r"unequal.*\[4, 4, 3\]", ulysses.split_tokens, model, None, mine)
    mlp = expert_parallel.make_expert(2)
    refused("cannot split 4 experts", expert_parallel.Mixture, mlp, 4, 1, None)
    two = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    for lesson in (manual_pipeline, pipeline_parallel):
        refused("3 stages, but only 2 layers", lesson.cut, two, 3)
    dtypes = nn.Linear(2, 2, dtype=torch.float64 if rank else torch.float32)
    refused("different dtypes", manual_pipeline.Pipeline, dtypes, ((2,), (2,)), [], None)
    refused("different shapes or dtypes", trainer_and_generator.check_weights, dtypes)


def other_layers(rank):
    """Layers of other names, or between others, would be left as they are."""
    plain = nn.Sequential(nn.Linear(4, 4))
    refused("no layer Attention", ulysses.split_tokens, plain, None, torch.arange(4))
    model = Transformer(width=16, tokens=4)
    model.stage2.insert(0, nn.LayerNorm(16))
    refused("all must be blocks", sequence_parallel.split_by_hand, model, None)
    model.stage1, model.stage2 = model.stage1[:1], model.stage2[-1:]
    refused("all must be blocks", sequence_parallel.split_by_hand, model, None)
    mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    refused("differs from that of the block", expert_parallel.Mixture, mlp, 2, 1, None)


def experts_by_another_name(rank):
    """A mixture that is the whole model: the names of its experts begin with "experts."."""
    torch.manual_seed(0)
    mixture = expert_parallel.Mixture(expert_parallel.make_expert(4), 4, top=1, group=None).double()
    torch.manual_seed(0)
    alone = dist.new_group([rank], use_local_synchronization=True)
    whole = expert_parallel.Mixture(expert_parallel.make_expert(4), 4, top=1, group=alone).double()
    tokens = torch.randn(4, 3, 4, dtype=torch.float64)
    gradients_of(mixture, tokens[rank::2], lambda out: out.square().mean())
    expert_parallel.average_gradients(mixture, alone)
    gradients_of(whole, tokens, lambda out: out.square().mean())
    expected = dict(whole.named_parameters())
    for name, parameter in mixture.named_parameters():
        close(parameter.grad, expected[name].grad, msg=name)


def one_trained_expert(rank):
    """All other parameters, and those before the mixture, are frozen. No rank waits forever."""
    torch.manual_seed(0)
    mixture = expert_parallel.Mixture(expert_parallel.make_expert(4), 2, top=1, group=None)
    mixture.requires_grad_(False)
    if rank == 1:
        mixture.experts.requires_grad_()
    mixture.router.requires_grad_()
    mixture(torch.randn(2, 9, 4)).sum().backward()
    gradients = [parameter.grad is not None for parameter in mixture.experts.parameters()]
    assert gradients == [rank == 1] * 4


def experts_that_are_checkpointed(rank):
    """backward() computes their tokens again, and the bias still counts those of all ranks."""
    torch.manual_seed(0)
    mixture = expert_parallel.Mixture(expert_parallel.make_expert(4), 4, top=1, group=None)
    model = activation_checkpointing.Checkpointed(mixture)
    args = SimpleNamespace(balance=0.1, bias=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alone = dist.new_group([rank], use_local_synchronization=True)
    torch.manual_seed(rank)
    for _ in range(3):
        loss = model(torch.randn(2, 9, 4, requires_grad=True)).square().mean()
        expert_parallel.make_step(model, optimizer, alone, args, loss)
    biases = [torch.empty(4) for _ in range(2)]
    dist.all_gather(biases, mixture.bias)
    assert biases[0].equal(biases[1]) and biases[0].any()


def accumulated_steps_of_a_pipeline(rank):
    """Two steps of a schedule before one of the optimizer add up."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double()
    images = torch.randn(2, 8, 6, dtype=torch.float64)
    labels = torch.randint(6, (2, 8))
    for batch in range(2):
        F.cross_entropy(layers(images[batch]), labels[batch]).backward()
    expected = [parameter.grad.clone() for parameter in layers[rank].parameters()]
    layers.zero_grad()
    model = pipeline_parallel.make_1f1b(layers, "cpu", 4)
    for batch in range(2):
        model(images[batch], labels[batch])
        with torch.no_grad():  # a test between the two
            model.eval()(images[batch], labels[batch])
        model.train()
    close([parameter.grad for parameter in model.parameters()], expected)


def a_norm_unfrozen_later(rank):
    """A norm that is frozen while the tokens are split, and trained later."""
    torch.manual_seed(0)
    whole = Transformer(width=16, tokens=4).double()
    model = copy.deepcopy(whole)
    norm = next(each for each in model.modules() if isinstance(each, nn.LayerNorm))
    norm.requires_grad_(False)
    sequence_parallel.split_by_hand(model, None)
    norm.requires_grad_()
    images = torch.randn(3, 1, 28, 28, dtype=torch.float64)
    for each in (model, whole):
        gradients_of(each, images, lambda logits: logits.logsumexp(dim=1).mean())
    right = next(each for each in whole.modules() if isinstance(each, nn.LayerNorm))
    close([*(each.grad for each in norm.parameters())], [*(p.grad for p in right.parameters())])


def pipelines(rank):
    """Labels of -100, unequal in the micro-batches, and a test between two steps."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).double()
    images = torch.randn(2, 8, 6, dtype=torch.float64)
    labels = torch.randint(6, (2, 8))
    labels[0, :5] = labels[1, 6] = -100
    whole = copy.deepcopy(layers)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    for batch in range(2):
        optimizer.zero_grad()
        F.cross_entropy(whole(images[batch]), labels[batch]).backward()
        optimizer.step()
    expected = dict(whole.named_parameters())
    passes = ["F0", "F1", "F2", "F3", "B0", "B1", "B2", "B3"]

    def by_hand(copied):
        stage = manual_pipeline.cut(copied, 2)[rank]
        return manual_pipeline.Pipeline(stage, (images.shape[2:], (6,)), passes, None)

    where = {"device": "cpu", "micro_batches": 4}
    makers = {"by hand": by_hand, "1F1B": partial(pipeline_parallel.make_1f1b, **where)}
    for name in ("Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"):
        makers[name] = partial(pipeline_parallel.make_other, name, **where)
    for name, make in makers.items():
        copied = copy.deepcopy(layers)
        names = {parameter: key for key, parameter in copied.named_parameters()}
        model = make(copied)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        for batch in range(2):
            model.train()
            model(images[batch], labels[batch])
            optimizer.step()
            optimizer.zero_grad()  # behind step(), so before the test
            with torch.no_grad():
                model.eval()(images[batch], labels[batch])
        for parameter in model.parameters():
            close(parameter, expected[names[parameter]], msg=name)


def an_infinite_gradient_on_one_rank(rank):
    """All ranks skip the step together, as sharding.md says."""
    names = {"torch": torch, "dist": dist}
    exec(re.search(r"^```python\n(def agree_on_infinity.*?)^```", PAGE, re.M | re.S)[1], names)
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for infinite_on in (0, 5):
        parameter.grad = torch.full((2,), math.inf if rank == infinite_on else 4.0)
        scaler.scale(torch.ones(()))  # makes its scale a tensor
        names["agree_on_infinity"]([parameter])
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    close(parameter.detach(), torch.full((2,), 0.8), atol=1e-6, rtol=0)  # one step of two
    assert scaler.get_scale() == 2.0


ON_RANKS = {
    vocabulary: 2,
    second_derivatives: 5,
    used_first_but_made_last: 2,
    momentum_in_a_checkpoint: 2,
    what_ranks_cannot_divide: 3,
    other_layers: 2,
    experts_by_another_name: 2,
    one_trained_expert: 2,
    experts_that_are_checkpointed: 2,
    accumulated_steps_of_a_pipeline: 2,
    a_norm_unfrozen_later: 2,
    pipelines: 2,
    an_infinite_gradient_on_one_rank: 2,
}


@pytest.mark.parametrize("what", ON_RANKS, ids=lambda what: what.__name__)
def test_a_model_that_is_split(what):
    """It has the gradients of one process, or is refused."""
    call(what, ON_RANKS[what])


# ---------- In one process ----------


def test_replicas_have_the_settings_of_the_model():
    """A part in eval() stays so, and autocast reaches the threads."""
    body = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.9)).eval()
    model = data_parallel.Replicas(nn.Sequential(body, nn.Linear(4, 2)), ["cpu", "cpu"])
    inputs = torch.randn(6, 4)
    model.train()
    body.eval()
    close(model(inputs), model.module(inputs), atol=1e-6, rtol=0)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(inputs).dtype == torch.bfloat16


def test_batch_norm_in_a_checkpointed_block():
    """backward() would update its running averages again."""
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    refused("batch norm", activation_checkpointing.Checkpointed, block)


def test_a_file_without_its_labels(tmp_path):
    """Images never get the labels of another file."""
    for number in range(3):
        for name, shape in (("images", (4, 1, 28, 28)), ("labels", (4,))):
            numpy.save(tmp_path / f"train-{number}-{name}.npy", numpy.zeros(shape))
    assert len(sharded_data.Files(tmp_path, "train")) == 12
    (tmp_path / "train-1-labels.npy").unlink()
    refused("do not match", sharded_data.Files, tmp_path, "train")
    numpy.save(tmp_path / "train-1-labels.npy", numpy.zeros(3))
    sharded_data.opened.cache_clear()
    refused("do not match", sharded_data.Files, tmp_path, "train")
