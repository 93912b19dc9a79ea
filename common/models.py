"""The models of the lessons: an MLP, a CNN, a transformer and a language model.

Each consists of two stages, so that model_parallel.py can put them on two devices. A stage is an
ordinary `nn.Sequential`. `width` is the hidden size (d_model), `layers` the number of hidden layers
or of blocks.
"""

import argparse
from itertools import chain, pairwise

import torch
from torch import Tensor, nn

from common.language import Scores, make_language_block
from common.transformer import LastToken, Tokens, make_block

# On newer GPUs, cuDNN would round the inputs of convolutions to 10 bits (TF32). Then the lessons
# could not compute the same numbers.
torch.backends.cudnn.allow_tf32 = False


class Model(nn.Module):
    """A model of two stages."""

    def __init__(self, stage1: list[nn.Module], stage2: list[nn.Module]):
        super().__init__()
        self.stage1 = nn.Sequential(*stage1)
        self.stage2 = nn.Sequential(*stage2)

    @property
    def layers(self) -> list[nn.Module]:
        """The layers that have parameters, in the order in which they compute."""
        both = (*self.stage1, *self.stage2)
        return [layer for layer in both if list(layer.parameters())]

    def forward(self, inputs: Tensor) -> Tensor:
        """Turn images, (N, 1, 28, 28), into class scores (logits), (N, 10), of the same dtype.

        The language model turns bytes, int64 (N, tokens), into logits, (N, 256, tokens).
        """
        return self.stage2(self.stage1(inputs))


class MLP(Model):
    """A multi-layer perceptron, 784-width-...-width-10, with ReLU after each hidden layer."""

    def __init__(self, width: int = 64, layers: int = 3):
        sizes = [28 * 28] + [width] * layers
        hidden = [(nn.Linear(*pair), nn.ReLU()) for pair in pairwise(sizes)]
        half = layers // 2 + 1
        stage1 = [nn.Flatten(), *chain(*hidden[:half])]
        super().__init__(stage1, [*chain(*hidden[half:]), nn.Linear(width, 10)])


class CNN(Model):
    """A convolutional network of LeNet-5's size (LeCun et al., 1998).

    It has two convolutions, and `layers` hidden linear layers.
    """

    def __init__(self, width: int = 120, layers: int = 1):
        convolutions = [nn.Conv2d(1, 6, kernel_size=5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
        convolutions += [nn.Conv2d(6, 16, kernel_size=5), nn.ReLU(), nn.MaxPool2d(2)]
        sizes = [16 * 5 * 5] + [width] * layers
        hidden = [(nn.Linear(*pair), nn.ReLU()) for pair in pairwise(sizes)]
        super().__init__(convolutions, [nn.Flatten(), *chain(*hidden), nn.Linear(width, 10)])


class Transformer(Model):
    """A transformer that reads an image as a sequence of tokens: by default, its 28 rows."""

    def __init__(self, width: int = 32, layers: int = 2, heads: int = 4, tokens: int = 28):
        blocks = [make_block(width, heads) for _ in range(layers)]
        half = (layers + 1) // 2
        stage1 = [Tokens(width, tokens), *blocks[:half]]
        super().__init__(stage1, [*blocks[half:], LastToken(width)])


class Language(Model):
    """A model that scores the next byte, 0 to 255, at each position. See language.py.

    If it is tied, the output layer has the embedding's weight.
    """

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4, tied: bool = False):
        blocks = [make_language_block(width, heads) for _ in range(layers)]
        half = (layers + 1) // 2
        embedding = nn.Embedding(256, width)
        nn.init.normal_(embedding.weight, std=width**-0.5)
        scores = Scores(width)
        if tied:
            scores.output.weight = embedding.weight
        super().__init__([embedding, *blocks[:half]], [*blocks[half:], scores])


MODELS = {"mlp": MLP, "cnn": CNN, "transformer": Transformer, "language": Language}


def make_model(args: argparse.Namespace) -> Model:
    """Return the model that the flags describe, with random parameters.

    With --double the parameters are float64. They start with the numbers that float32 starts with.
    """
    names = ("width", "layers", "heads", "tokens", "tied")
    given = {name: getattr(args, name) for name in names if getattr(args, name, None)}
    model = MODELS[args.model](**given)
    return model.double() if args.double else model


def make_layers(args: argparse.Namespace) -> nn.Sequential:
    """Return the same model as one sequence of layers, so that it can be cut anywhere."""
    model = make_model(args)
    return nn.Sequential(*model.stage1, *model.stage2)
