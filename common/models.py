"""The networks of the lessons: an MLP, a CNN and a transformer.

`make_model` makes that of --model, also the language model of language.py. Each consists of two
stages, so that model_parallel.py can put them on two devices. A stage is an ordinary
`nn.Sequential`. The names of the parameters do not depend on where a stage is.
"""

import argparse
from itertools import chain, pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# On newer GPUs, cuDNN would round the inputs of convolutions to 10 bits (TF32). Then the lessons
# could not compute the same numbers.
torch.backends.cudnn.allow_tf32 = False


PIXELS = 28 * 28  # of an image


class Model(nn.Module):
    """A network of two stages."""

    stage1: nn.Sequential
    stage2: nn.Sequential

    @property
    def layers(self) -> list[nn.Module]:
        """The layers that have parameters, in the order in which they compute."""
        both = (*self.stage1, *self.stage2)
        return [layer for layer in both if list(layer.parameters())]

    def forward(self, images: Tensor) -> Tensor:
        """Turn images, (N, 1, 28, 28), into class scores (logits), (N, 10), of the same dtype."""
        return self.stage2(self.stage1(images))


class MLP(Model):
    """A multi-layer perceptron, 784-width-...-width-10, with ReLU between the layers.

    Args:
        width: neurons in each hidden layer; None: 64.
        layers: hidden layers, the larger half of them in the first stage; None: 3.
    """

    def __init__(self, width: int | None = None, layers: int | None = None):
        super().__init__()
        sizes = [PIXELS] + [width or WIDTH["mlp"]] * (layers or LAYERS["mlp"])
        hidden = [(nn.Linear(*pair), nn.ReLU()) for pair in pairwise(sizes)]
        half = len(hidden) // 2 + 1
        self.stage1 = nn.Sequential(nn.Flatten(), *chain(*hidden[:half]))
        self.stage2 = nn.Sequential(*chain(*hidden[half:]), nn.Linear(sizes[-1], 10))


class CNN(Model):
    """A convolutional network of LeNet-5's size (LeCun et al., 1998).

    It has two convolutions and two linear layers.

    Args:
        width: neurons in each hidden linear layer; None: 120.
        layers: hidden linear layers; None: 1.
        dropout: probability with which a neuron of a hidden layer is switched off in training. It
            is 0 because each process draws other random numbers than a single one does, so the
            lessons could not compute the same numbers.
    """

    def __init__(self, width: int | None = None, layers: int | None = None, dropout: float = 0.0):
        super().__init__()
        sizes = [16 * 5 * 5] + [width or WIDTH["cnn"]] * (layers or LAYERS["cnn"])
        self.stage1 = nn.Sequential(
            nn.Conv2d(1, 6, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, kernel_size=5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        hidden = [(nn.Linear(*pair), nn.ReLU(), nn.Dropout(dropout)) for pair in pairwise(sizes)]
        self.stage2 = nn.Sequential(nn.Flatten(), *chain(*hidden), nn.Linear(sizes[-1], 10))


class Tokens(nn.Module):
    """The embedding: turn an image into a sequence of tokens, each with its position.

    Args:
        width: numbers of an embedded token.
        tokens: into how many pieces an image is cut. It divides the 784 pixels.
    """

    def __init__(self, width: int, tokens: int):
        super().__init__()
        self.tokens = tokens
        self.embed = nn.Linear(PIXELS // tokens, width)
        self.position = nn.Parameter(torch.randn(tokens, width) * 0.02)

    def forward(self, images: Tensor) -> Tensor:
        """Turn images, (N, 1, 28, 28), into embedded tokens, (N, tokens, width)."""
        pieces = images.flatten(1).unflatten(1, (self.tokens, -1))
        return self.embed(pieces) + self.position


class Attention(nn.Module):
    """Causal self-attention: each token looks at itself and at the tokens before it.

    The query, key, value and output layers are separate, so that they can be split by heads.

    Args:
        width: numbers of a token. Each head gets an equal part of them.
        heads: attention heads.
        groups: heads of the keys and values, a divisor of `heads`; None: `heads`. Heads of a group
            share a key and a value.
        bias: whether the layers have biases.
    """

    def __init__(self, width: int, heads: int, groups: int | None = None, bias: bool = True):
        super().__init__()
        self.size = width // heads  # numbers of a token in a head
        groups = groups or heads
        self.query = nn.Linear(width, width, bias)
        self.key = nn.Linear(width, groups * self.size, bias)
        self.value = nn.Linear(width, groups * self.size, bias)
        self.output = nn.Linear(width, width, bias)

    def split_heads(self, inputs: Tensor) -> Tensor:
        """Turn (N, tokens, heads * size) into (N, heads, tokens, size)."""
        return inputs.unflatten(-1, (-1, self.size)).transpose(1, 2)

    def project(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values of tokens, (N, tokens, width), split into heads."""
        query = self.split_heads(self.query(inputs))
        key = self.split_heads(self.key(inputs))
        value = self.split_heads(self.value(inputs))
        return query, key, value

    def forward(self, inputs: Tensor) -> Tensor:
        """Turn tokens, (N, tokens, width), into what each token has read from the others."""
        query, key, value = self.project(inputs)
        read = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.output(read.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A block of a transformer: attention and an MLP. Each adds its output to its input.

    Each of the two has a norm before it. All four modules turn (N, tokens, width) into the same.
    """

    def __init__(self, norm1: nn.Module, attention: nn.Module, norm2: nn.Module, mlp: nn.Module):
        super().__init__()
        self.norm1 = norm1
        self.attention = attention
        self.norm2 = norm2
        self.mlp = mlp

    def forward(self, tokens: Tensor) -> Tensor:
        """Turn tokens, (N, tokens, width), into tokens of the same shape."""
        tokens = tokens + self.attention(self.norm1(tokens))
        return tokens + self.mlp(self.norm2(tokens))


class LastToken(nn.Module):
    """The end of the transformer: the last token, which has seen all others, gives the class."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        """Turn tokens, (N, tokens, width), into class scores, (N, 10)."""
        return self.linear(self.norm(tokens[:, -1]))


class Transformer(Model):
    """A transformer that reads an image as a sequence of tokens: by default, its 28 rows.

    Args:
        width: numbers of a token, a multiple of `heads`; None: 32.
        layers: blocks, the larger half of them in the first stage; None: 2.
        tokens: into how many tokens an image is cut; None: 28.
        heads: attention heads of a block; None: 4.
    """

    def __init__(
        self,
        width: int | None = None,
        layers: int | None = None,
        tokens: int | None = None,
        heads: int | None = None,
    ):
        super().__init__()
        width = width or WIDTH["transformer"]
        layers = layers or LAYERS["transformer"]
        blocks = [self.block(width, heads or HEADS) for _ in range(layers)]
        half = (len(blocks) + 1) // 2
        self.stage1 = nn.Sequential(Tokens(width, tokens or TOKENS), *blocks[:half])
        self.stage2 = nn.Sequential(*blocks[half:], LastToken(width))

    @staticmethod
    def block(width: int, heads: int) -> Block:
        """Return a block with random parameters."""
        attention = Attention(width, heads)
        hidden = 4 * width
        mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        return Block(nn.LayerNorm(width), attention, nn.LayerNorm(width), mlp)


MODELS = {"mlp": MLP, "cnn": CNN, "transformer": Transformer}
WIDTH = {"mlp": 64, "cnn": 120, "transformer": 32, "language": 64}  # without --width
LAYERS = {"mlp": 3, "cnn": 1, "transformer": 2, "language": 2}  # without --layers
TOKENS = 28  # without --tokens
HEADS = 4  # without --heads


def make_model(args: argparse.Namespace) -> nn.Module:
    """Return the model of --model, --width, --layers, --tokens and --heads, with random parameters.

    With --double the parameters are float64. They start with the numbers that float32 starts with.
    """
    if args.model == "language":
        from common.language import Language  # here, because language.py imports from this file

        model = Language(args.width, args.layers, args.heads, getattr(args, "tied", False))
    elif args.model == "transformer":
        model = Transformer(args.width, args.layers, args.tokens, args.heads)
    else:
        model = MODELS[args.model](args.width, args.layers)
    return model.double() if args.double else model


def make_layers(args: argparse.Namespace) -> nn.Sequential:
    """Return the same model as one sequence of layers, so that it can be cut anywhere."""
    model = make_model(args)
    return nn.Sequential(*model.stage1, *model.stage2)
