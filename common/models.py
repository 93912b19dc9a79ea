"""The two networks that the lessons train.

Both are made of two stages, so that model_parallel.py can put each on a device of its own. A stage is
an ordinary `nn.Sequential`; the names of the weights are the same wherever a stage lives.
"""

from torch import Tensor, nn


class MLP(nn.Module):
    """A multi-layer perceptron, 784-width-width-width-10, with ReLU between the layers.

    Args:
        width: neurons in each hidden layer.
    """

    def __init__(self, width: int = 64):
        super().__init__()
        self.stage1 = nn.Sequential(
            nn.Flatten(), nn.Linear(28 * 28, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.stage2 = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, images: Tensor) -> Tensor:
        """Turn images, float32 (N, 1, 28, 28), into class scores (logits), float32 (N, 10)."""
        return self.stage2(self.stage1(images))


class CNN(nn.Module):
    """A convolutional network of LeNet-5's size (LeCun et al., 1998): two convolutions, two linear layers.

    Args:
        dropout: share of the hidden layer switched off at random in training. It is 0 because every
            process would draw other random numbers than a single process does, and then the lessons
            could not arrive at the same weights.
    """

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.stage1 = nn.Sequential(
            nn.Conv2d(1, 6, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, kernel_size=5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.stage2 = nn.Sequential(
            nn.Flatten(), nn.Linear(16 * 5 * 5, 120), nn.ReLU(), nn.Dropout(dropout), nn.Linear(120, 10)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Turn images, float32 (N, 1, 28, 28), into class scores (logits), float32 (N, 10)."""
        return self.stage2(self.stage1(images))


MODELS = {"mlp": MLP, "cnn": CNN}
