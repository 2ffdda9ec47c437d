"""AlexNet as first published: two groups in three of its convolutions, and normalisation across channels.

Krizhevsky, Sutskever, Hinton, "ImageNet Classification with Deep Convolutional Neural Networks", 2012, section 3.
"""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["AlexNet"]


class AlexNet(nn.Module):
    """Five convolutions and three linear layers: float images [N, 3, H, W], H and W at least 63, to scores.

    `share` scales the published widths; 1 and images of 224x224 are the paper's network with 60,965,224 parameters.
    Weights are initialised as in He et al. 2015, arXiv 1502.01852: the published deviation of 0.01 is for pixels of 0
    to 255; with it on standardised pixels, or with torch's default, gradients almost vanish over eight layers.
    """

    def __init__(self, side: int = 224, share: float = 1.0, classes: int = 1000, dropout: float = 0.5) -> None:
        super().__init__()
        widths = [round(width * share) for width in (96, 256, 384, 384, 256)]
        hidden = round(4096 * share)
        self.features = nn.Sequential(
            nn.Conv2d(3, widths[0], 11, stride=4, padding=2),
            nn.ReLU(),
            _response_norm(),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(widths[0], widths[1], 5, padding=2, groups=2),
            nn.ReLU(),
            _response_norm(),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(widths[1], widths[2], 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(widths[2], widths[3], 3, padding=1, groups=2),
            nn.ReLU(),
            nn.Conv2d(widths[3], widths[4], 3, padding=1, groups=2),
            nn.ReLU(),
            nn.MaxPool2d(3, 2),
        )
        places = (side + 4 - 11) // 4 + 1
        for _ in range(3):
            places = (places - 3) // 2 + 1
        self.classify = nn.Sequential(
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(widths[4] * places * places, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, classes),
        )
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                assert module.bias is not None
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Return scores [N, classes]."""
        scores: Tensor = self.classify(self.features(images))
        return scores


def _response_norm() -> nn.Module:
    """Return the norm of section 3.3 with n = 5, alpha = 1e-4, beta = 0.75, k = 2; only torch divides alpha by n."""
    return nn.LocalResponseNorm(5, alpha=5e-4, beta=0.75, k=2.0)
