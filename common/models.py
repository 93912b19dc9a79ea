"""The networks that the lessons train: MLP and CNN, and ResNet-18 for fine-tuning.

The first two are made of two stages, so that model_parallel.py can put each on a device of its own. A stage is
an ordinary `nn.Sequential`; the names of the weights are the same wherever a stage lives.
"""

import sys
from itertools import chain, pairwise

from torch import Tensor, nn


class MLP(nn.Module):
    """A multi-layer perceptron, 784-width-...-width-10, with ReLU between the layers.

    Args:
        width: neurons in each hidden layer; None: 64.
        layers: hidden layers, the larger half of them in the first stage; None: 3.
    """

    def __init__(self, width: int | None = None, layers: int | None = None):
        super().__init__()
        sizes = [28 * 28] + [width or 64] * (layers or 3)
        hidden = [(nn.Linear(*pair), nn.ReLU()) for pair in pairwise(sizes)]
        half = len(hidden) // 2 + 1
        self.stage1 = nn.Sequential(nn.Flatten(), *chain(*hidden[:half]))
        self.stage2 = nn.Sequential(*chain(*hidden[half:]), nn.Linear(sizes[-1], 10))

    def forward(self, images: Tensor) -> Tensor:
        """Turn images, float32 (N, 1, 28, 28), into class scores (logits), float32 (N, 10)."""
        return self.stage2(self.stage1(images))


class CNN(nn.Module):
    """A convolutional network of LeNet-5's size (LeCun et al., 1998): two convolutions, two linear layers.

    Args:
        width: neurons in each hidden linear layer; None: 120.
        layers: hidden linear layers; None: 1.
        dropout: share of the hidden layer switched off at random in training. It is 0 because every
            process would draw other random numbers than a single process does, and then the lessons
            could not arrive at the same weights.
    """

    def __init__(self, width: int | None = None, layers: int | None = None, dropout: float = 0.0):
        super().__init__()
        sizes = [16 * 5 * 5] + [width or 120] * (layers or 1)
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
        """Turn images, float32 (N, 1, 28, 28), into class scores (logits), float32 (N, 10)."""
        return self.stage2(self.stage1(images))


MODELS = {"mlp": MLP, "cnn": CNN}


def cut(model: MLP | CNN, stages: int) -> list[nn.Sequential]:
    """Cut a model into stages that share its weights, each with about equally many layers.

    Raises:
        ValueError: if it has fewer layers with weights than that.
    """
    modules = [*model.stage1, *model.stage2]
    layers = [place for place, module in enumerate(modules) if list(module.parameters())]  # not ReLU and the like
    if stages > len(layers):
        raise ValueError(f"{stages} stages need as many layers with weights, this model has {len(layers)}")
    edges = [layers[stage * len(layers) // stages] for stage in range(1, stages)]
    edges = [edge - isinstance(modules[edge - 1], nn.Flatten) for edge in edges]  # a stage can't pass on a view
    return [nn.Sequential(*modules[start:end]) for start, end in pairwise([0, *edges, None])]


def resnet18(pretrained: bool = False) -> nn.Module:
    """Make torchvision's ResNet-18 (He et al., 2015) with ten classes.

    Args:
        pretrained: take weights that were trained on ImageNet, all but those of the last layer.

    Returns:
        A module from images, float32 (N, 3, H, W) or grey (N, 1, H, W), to logits, float32 (N, 10).

    Raises:
        SystemExit: with one line, when the weights can't be had.
    """
    from torchvision.models import ResNet, ResNet18_Weights, resnet  # here, because the other lessons do without it

    class ResNet18(ResNet):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images.expand(-1, 3, -1, -1))  # grey images get three equal channels

    model = ResNet18(resnet.BasicBlock, [2, 2, 2, 2])
    if pretrained:
        try:
            model.load_state_dict(ResNet18_Weights.DEFAULT.get_state_dict(progress=False, check_hash=True))
        except (OSError, RuntimeError) as error:
            why = f"ResNet-18's weights can't be fetched ({error}): leave --pretrained out"
            sys.exit(f"error: {why}, or copy {ResNet18_Weights.DEFAULT.url} to ~/.cache/torch/hub/checkpoints")
    model.fc = nn.Linear(model.fc.in_features, 10)
    return model
