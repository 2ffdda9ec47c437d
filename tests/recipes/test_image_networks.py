"""The residual networks and AlexNet are the published ones, and accept the published image sizes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowp.recipes.alexnet import AlexNet
from lowp.recipes.resnet import cifar_resnet, imagenet_resnet
from lowp.recipes.unet import UNet


def layers_of(model: nn.Module) -> int:
    """Return the layers as papers count them: convolutions and linear layers, without projections on shortcuts."""
    return sum(
        isinstance(module, nn.Conv2d | nn.Linear) and ".shortcut" not in name for name, module in model.named_modules()
    )


@pytest.mark.parametrize("layers", [8, 20, 110])
def test_a_small_residual_network_has_as_many_layers_as_its_name_says(layers: int) -> None:
    with torch.device("meta"):
        assert layers_of(cifar_resnet(layers)) == layers


@pytest.mark.parametrize(("blocks", "layers"), [((3, 4, 6, 3), 50), ((3, 4, 23, 3), 101)])
def test_a_large_residual_network_has_as_many_layers_as_its_name_says(blocks: tuple[int, ...], layers: int) -> None:
    with torch.device("meta"):
        assert layers_of(imagenet_resnet(blocks)) == layers


def test_a_depth_that_no_small_residual_network_has_is_refused() -> None:
    with pytest.raises(ValueError, match=r"21 layers: give 6n \+ 2"):
        cifar_resnet(21)


def test_the_stages_halve_the_map_and_double_the_channels() -> None:
    network = cifar_resnet(20)
    with torch.no_grad():
        assert network.blocks(network.stem(torch.zeros(1, 3, 32, 32))).shape == (1, 64, 8, 8)
    large = imagenet_resnet((1, 1, 1, 1), width=8)
    with torch.no_grad():
        assert large.blocks(large.stem(torch.zeros(1, 3, 64, 64))).shape == (1, 256, 2, 2)


def test_a_shortcut_without_parameters_passes_every_second_place_and_empty_channels() -> None:
    network = cifar_resnet(8, width=4).eval()
    block = network.blocks[1]
    for parameter in block.parameters():
        nn.init.zeros_(parameter)
    x = torch.rand(1, 4, 8, 8)
    y = block(x)
    assert torch.equal(y[:, :4], x[:, :, ::2, ::2]) and not y[:, 4:].any()


@pytest.mark.parametrize(("side", "share"), [(63, 0.125), (64, 0.125), (96, 0.25)])
def test_alexnet_gives_ten_scores_for_images_of_the_side_it_was_made_for(side: int, share: float) -> None:
    with torch.no_grad():
        assert AlexNet(side, share, classes=10)(torch.zeros(2, 3, side, side)).shape == (2, 10)


def test_alexnet_has_maps_of_55_27_and_13_places() -> None:
    with torch.device("meta"):
        layers = AlexNet().features
        x, sides = torch.zeros(1, 3, 224, 224), []
        for layer in layers:
            x = layer(x)
            sides.append(x.shape[-1])
    assert [side for side, layer in zip(sides, layers, strict=True) if isinstance(layer, nn.Conv2d)] == [
        55,
        27,
        *[13] * 3,
    ]


@pytest.mark.parametrize(("side", "share"), [(64, 0.125), (96, 0.25)])
def test_a_signal_comes_through_the_layers_of_alexnet_and_its_gradient_comes_back(side: int, share: float) -> None:
    torch.manual_seed(0)
    network = AlexNet(side, share, classes=10, dropout=0.0)
    scores = network(torch.randn(16, 3, side, side))
    assert 0.05 < float(scores.detach().std(0).mean()) < 5
    nn.functional.cross_entropy(scores, torch.arange(16) % 10).backward()
    gradient = network.features[0].weight.grad
    assert float(gradient.norm() / network.features[0].weight.detach().norm()) > 0.05


@pytest.mark.parametrize(("side", "left"), [(256, 164), (160, 68), (188, 100)])
def test_the_unet_classifies_the_middle_of_the_image(side: int, left: int) -> None:
    with torch.device("meta"):
        assert UNet((4, 8, 8, 8))(torch.zeros(1, 3, side, side)).shape == (1, 9, left, left)


def test_the_unet_sees_of_each_pixel_only_what_is_around_it() -> None:
    network = UNet((4, 4, 4, 4)).eval()
    image = torch.rand(1, 3, 160, 160, requires_grad=True)
    network(image)[0, :, 0, 0].sum().backward()
    seen = image.grad.abs().sum((0, 1)).nonzero()
    assert seen.min() >= 0 and seen.max() < 100


def test_the_full_unet_has_exactly_the_published_parameters() -> None:
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in UNet().parameters()) == 7_703_497
