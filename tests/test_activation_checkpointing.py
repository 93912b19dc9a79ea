"""The activation checkpointing lesson: bytes, passes, dropout, DDP, FSDP, and its exercises."""

import re
import weakref

import pytest
import torch
import torch.distributed as dist
from conftest import DIGITS, ROOT, fails, lesson_path, losses, one_line, single_gpu, train
from forked import in_group
from torch import nn
from torch.distributed.fsdp import fully_shard

LESSON = "activation_checkpointing"
# A small transformer, so that a run takes a second.
SMALL = (*DIGITS, "--batch_size", 120, "--tokens", 7, "--width", 16, "--epochs", 1)
ROW = r"^wrapped: (none|second|every) +([\d,]+) bytes kept, (\d+) forward passes of blocks$"
ENV = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
ENV |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
REENTRANT = ("use_reentrant=False", "use_reentrant=True")


def rows(out):
    """Return the bytes that are kept, and the passes, for each way to wrap."""
    found = {}
    for which, *numbers in re.findall(ROW, out, re.M):
        found[which] = [int(number.replace(",", "")) for number in numbers]
    return found


def predicted(images, wrapped, tokens=7, width=16, heads=4, layers=2, size=4):
    """Return the bytes that a step should keep on a CPU, without dropout.

    Args:
        images: how many there are in the batch.
        wrapped: how many blocks keep only their input.
        size: bytes of a number.
    """
    # Attention keeps the input of LayerNorm, its output, query, key and value, and what was read.
    # The MLP keeps the input of LayerNorm, its output, and four times as much before and after
    # GELU. For each token, LayerNorm keeps two more numbers, and attention one for each head.
    of_block = tokens * (16 * width + 4 + heads)
    numbers = wrapped * tokens * width + (layers - wrapped) * of_block
    # The first layer keeps the image. The last one keeps the output of the last block, the last
    # token after LayerNorm, with two more numbers, and 10 scores.
    numbers += 784 + tokens * width + width + 2 + 10
    labels = 8 * images
    return images * numbers * size + labels + size  # and the sum of the labels' weights


@pytest.fixture(scope="module")
def right():
    """The losses of single_gpu.py, in float64."""
    flags = (*SMALL, "--model", "transformer", "--double")
    return pytest.approx([line["loss"] for line in single_gpu(*flags)], abs=1e-10)


@pytest.mark.parametrize(("processes", "flags"), [(1, ()), (4, ("--sharded",))])
def test_numbers_are_those_of_one_process(processes, flags, right):
    """The losses of single_gpu.py, as many bytes as predicted, and a second pass of each block."""
    done = train(LESSON, *SMALL, "--double", *flags, processes=processes)
    assert not done.stderr
    assert losses(done.stdout) == right
    expected = {}
    for wrapped, which in enumerate(("none", "second", "every")):
        expected[which] = [predicted(120 // processes, wrapped, size=8), 2 + wrapped]
    assert rows(done.stdout) == expected


def test_bytes_of_another_transformer():
    """The formula holds for other numbers of heads, layers and tokens, and another width."""
    shape = {"heads": 2, "layers": 3, "tokens": 4, "width": 24}
    flags = [word for name, number in shape.items() for word in (f"--{name}", number)]
    found = rows(train(LESSON, *SMALL, *flags, processes=1).stdout)
    for which, wrapped in (("none", 0), ("second", 2), ("every", 3)):
        assert found[which] == [predicted(120, wrapped, **shape), 3 + wrapped]


def test_one_block_at_a_time():
    """In backward(), the activations of a block are gone when the block before it is computed."""
    from activation_checkpointing import Checkpointed

    alive = []
    most = []

    def note(layer, inputs, output):
        alive.append(weakref.ref(output.untyped_storage()))
        most.append(sum(each() is not None for each in alive))

    blocks = []
    for _ in range(4):
        hidden = nn.Linear(8, 32)
        hidden.register_forward_hook(note)
        blocks.append(Checkpointed(nn.Sequential(hidden, nn.Tanh(), nn.Linear(32, 8))))
    model = nn.Sequential(*blocks)
    model(torch.randn(5, 8, requires_grad=True)).sum().backward()
    assert len(most) == 8  # two passes of each block
    assert max(most) == 1


def test_dropout(change):
    """Wrapped or not, the same neurons are dropped. Exercise 1: without the state, others are."""
    flags = (*SMALL, "--double", "--dropout")
    expected = losses(train(LESSON, *flags, "--checkpoint", "none", processes=2).stdout)
    found = losses(train(LESSON, *flags, processes=2).stdout)
    assert found == pytest.approx(expected, abs=1e-10)
    copy = change(LESSON, (REENTRANT[0], f"{REENTRANT[0]}, preserve_rng_state=False"))
    wrong = losses(train(copy, *flags, processes=2).stdout)
    assert abs(wrong[0] - expected[0]) > 1e-5


def test_only_the_mlp(change, right):
    """Exercise 2: half of the bytes of a block stay, and the numbers are the same."""
    text = lesson_path(LESSON).read_text()
    before = re.search(r"^    for stage in .*?Checkpointed\(layer\)$", text, re.M | re.S)[0]
    after = "    for block in chosen:\n        block.mlp = Checkpointed(block.mlp)"
    out = train(change(LESSON, (before, after)), *SMALL, "--double", processes=1).stdout
    assert losses(out) == right
    found = rows(out)
    blocks = predicted(120, 0, size=8) - predicted(120, 2, size=8)  # without their inputs
    mlp = found["none"][0] - found["every"][0]
    assert mlp == 120 * 7 * 8 * 2 * 8 * 16
    assert 0.5 < mlp / blocks < 0.55
    answers = (ROOT / "playground" / "pages" / "answers.md").read_text()
    none, every = (predicted(60, wrapped, tokens=28, width=32) for wrapped in (0, 2))
    kept = none - 60 * 28 * 8 * 2 * 4 * 32  # with the default sizes
    assert f"keeps {kept:,} bytes instead of {every:,}, and `none` keeps {none:,}" in answers


def test_the_older_way_with_unused_parameters(change):
    """Exercise 3: DDP's error."""
    ddp = "DistributedDataParallel(model"
    copy = change(LESSON, REENTRANT, (ddp, f"{ddp}, find_unused_parameters=True"))
    assert "mark a variable ready only once" in fails(copy, *SMALL, processes=2)


def test_the_older_way_without_a_gradient_of_the_input(change):
    """Exercise 4: no wrapped module is trained. There is a warning, and then DDP's error."""
    layers = ("isinstance(layer, Block)]", "isinstance(layer, (Block, Tokens))]")
    imported = ("import Block, make_model", "import Block, Tokens, make_model")
    copy = change(LESSON, REENTRANT, layers, imported)
    told = fails(copy, *SMALL, processes=2)
    assert "None of the inputs have requires_grad=True. Gradients will be None" in told
    # The first layer has 3 parameters, and each of the two blocks 16.
    missing = " ".join(map(str, range(35)))
    assert f"Parameter indices which did not receive grad for rank 0: {missing}\n" in told


def compiled_and_sharded(rank):
    """Checkpoint a block, compile it, then shard it. Its gradients are those of the block."""
    from activation_checkpointing import Checkpointed

    from common.models import Block

    torch.manual_seed(0)
    block = Block(16, 4).double()
    tokens = torch.randn(2, 7, 16, dtype=torch.float64)
    block(tokens).square().mean().backward()
    right = [parameter.grad for parameter in block.parameters()]
    block.zero_grad()
    # Of torch.compile, this is all but the last part, which needs a C++ compiler.
    wrapped = torch.compile(Checkpointed(block), backend="aot_eager")
    fully_shard(wrapped, mesh=dist.init_device_mesh("cpu", (1,)))
    wrapped(tokens).square().mean().backward()
    for parameter, gradient in zip(wrapped.parameters(), right, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), gradient, atol=1e-14, rtol=0)


def test_in_which_order():
    """Steps 3 to 5 of troubleshooting.md's list work together."""
    in_group(compiled_and_sharded, 1)


def count_gathers(rank):
    """With wrapped blocks, FSDP gathers each layer as often as without."""
    from activation_checkpointing import Checkpointed

    from common.models import Block
    from figures.messages import Messages

    tokens = torch.randn(2, 7, 16)
    counts = []
    for wrap in (nn.Sequential, Checkpointed):
        model = nn.Sequential(nn.Linear(16, 16), wrap(Block(16, 4)), wrap(Block(16, 4)))
        for layer in (*model, model):
            fully_shard(layer, mesh=dist.init_device_mesh("cpu", (2,)))
        with Messages() as messages:
            model(tokens).sum().backward()
        counts.append(len(messages.of("all_gather")))
    assert counts == [6, 6]


def test_no_messages_are_added():
    """The second forward pass uses the parameters that FSDP gathers in backward() anyway."""
    in_group(count_gathers, 2)


def test_wrong_flags(main):
    """Status 2, one line."""
    words = ("--model mlp has no blocks", "use --model transformer")
    one_line(main(LESSON, *DIGITS, "--batch_size", 120, "--model", "mlp", env=ENV), *words)
