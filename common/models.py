"""The networks that the lessons train: an MLP and a CNN. `make_model` makes the one of --model.

Each consists of two stages, so that model_parallel.py can put them on two devices. A stage is an
ordinary `nn.Sequential`. The names of the parameters do not depend on where a stage is.
"""

import argparse
from itertools import chain, pairwise

import torch
from torch import Tensor, nn

# On newer GPUs, cuDNN would round the inputs of convolutions to 10 bits (TF32). Then the lessons
# could not compute the same numbers.
torch.backends.cudnn.allow_tf32 = False


class MLP(nn.Module):
    """A multi-layer perceptron, 784-width-...-width-10, with ReLU between the layers.

    Args:
        width: neurons in each hidden layer; None: 64.
        layers: hidden layers, the larger half of them in the first stage; None: 3.
    """

    def __init__(self, width: int | None = None, layers: int | None = None):
        super().__init__()
        sizes = [28 * 28] + [width or WIDTH["mlp"]] * (layers or 3)
        hidden = [(nn.Linear(*pair), nn.ReLU()) for pair in pairwise(sizes)]
        half = len(hidden) // 2 + 1
        self.stage1 = nn.Sequential(nn.Flatten(), *chain(*hidden[:half]))
        self.stage2 = nn.Sequential(*chain(*hidden[half:]), nn.Linear(sizes[-1], 10))

    def forward(self, images: Tensor) -> Tensor:
        """Turn images, (N, 1, 28, 28), into class scores (logits), (N, 10), of the same dtype."""
        return self.stage2(self.stage1(images))


class CNN(nn.Module):
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
        sizes = [16 * 5 * 5] + [width or WIDTH["cnn"]] * (layers or 1)
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

    def forward(self, images: Tensor) -> Tensor:
        """Turn images, (N, 1, 28, 28), into class scores (logits), (N, 10), of the same dtype."""
        return self.stage2(self.stage1(images))


MODELS = {"mlp": MLP, "cnn": CNN}
WIDTH = {"mlp": 64, "cnn": 120}  # without --width


def make_model(args: argparse.Namespace) -> nn.Module:
    """Return the model of --model, --width and --layers, with random parameters.

    With --double the parameters are float64. They start with the numbers that float32 starts with.
    """
    model = MODELS[args.model](args.width, args.layers)
    return model.double() if args.double else model


def make_layers(args: argparse.Namespace) -> nn.Sequential:
    """Return the same model as one sequence of layers, so that it can be cut anywhere."""
    model = make_model(args)
    return nn.Sequential(*model.stage1, *model.stage2)
