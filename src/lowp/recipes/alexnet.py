"""AlexNet: the first deep network for ImageNet, and one of the networks of the Flexpoint paper (Köster et al. 2017).

Most of its parameters are in its large linear layers; its gradients are small, so loss scaling matters in fp16.

Three of its convolutions have two groups, and activations are normalised across channels, as published: Krizhevsky,
Sutskever, Hinton, "ImageNet Classification with Deep Convolutional Neural Networks", 2012, section 3.
"""

from functools import partial

from torch import nn

from lowp.recipes.classification import DRAWN_LARGE, classifier, load_large
from lowp.recipes.detection import initialise
from lowp.recipes.recipe import Size, built, one_cycle, sgd_with_momentum, step_decay


# -- the network -------------------------------------------------------------------------------------------------------
class AlexNet(nn.Sequential):
    """AlexNet: five convolutions and three linear layers, from float images [N, 3, side, side] to scores [N, classes].

    `side` is at least 63. `share` scales the published widths; with 1 and images of 224x224 it is the paper's network,
    with 60,965,224 parameters. Weights are initialised as in He et al. 2015, arXiv 1502.01852: the published standard
    deviation of 0.01 is for pixels of 0 to 255; with it on normalised pixels, or with torch's default initialisation,
    gradients almost vanish over eight layers.
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
        map_side = (side + 4 - 11) // 4 + 1
        for _ in range(3):
            map_side = (map_side - 3) // 2 + 1
        self.classify = nn.Sequential(
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(widths[4] * map_side * map_side, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, classes),
        )
        initialise(self.modules())


def _response_norm() -> nn.Module:
    """Return the normalisation of section 3.3: n = 5, alpha = 1e-4, beta = 0.75, k = 2. torch divides alpha by n."""
    return nn.LocalResponseNorm(5, alpha=5e-4, beta=0.75, k=2.0)


# -- the recipe --------------------------------------------------------------------------------------------------------
# With an eighth of the width, the linear layers have 32 input features, too few for a dropout of a half.
_SMALL = {"side": 64, "share": 0.125, "classes": 10, "dropout": 0.1, "images": (2000, 500)}
_FULL = {"side": 224, "share": 1.0, "classes": 1000, "dropout": 0.5, "images": (1000, 200)}

ALEXNET = classifier(
    name="alexnet",
    summary="five convolutions and three linear layers, as in the Flexpoint paper",
    source="Krizhevsky, Sutskever, Hinton 2012; Köster et al. 2017, arXiv 1711.02213",
    data=DRAWN_LARGE,
    sizes={"cpu": Size(30, 50, 0.02, 325_114, _SMALL, one_cycle), "full": Size(90, 128, 0.01, 60_965_224, _FULL)},
    load=load_large,
    make_model=built(AlexNet, "side", "share", "classes", "dropout"),
    make_optimizer=partial(sgd_with_momentum, weight_decay=5e-4),  # as in the paper
    schedule=step_decay,
)
