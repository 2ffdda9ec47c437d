"""The recipes' forward passes on CUDA: dtypes and launches as torch.autocast's, but around norms and softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu.fake_cuda import Launches, fake_cuda, like, on_cuda, torch_autocast
from torch import Tensor, nn

import lowp
from lowp.recipes import RECIPES, get

PICTURES = {"resnet-20": 32, "vit": 32, "resnet-110": 32, "resnet-50": 64, "resnet-101": 64, "alexnet": 64}
OF_PIXELS = {"digits": (64,), "digits-hard": (64,), "mnist": (784,), "cifar10-mlp": (3, 32, 32)}
DETECTORS = {"ssd", "faster-rcnn"}  # their losses choose boxes by what the numbers are
RECURRENT = {"seq2seq"}  # its GRU has kernels in CUDA builds alone
NARROW = {"bert", "gpt", "rossmann", "vit"}  # norms write 16 bits: what follows them is of 16 bits, too
WIDE = {"alexnet"}  # its local response norm squares in fp32, where torch.autocast squares in 16 bits
SUMS = {"mm", "addmm", "bmm", "convolution", "nll_loss_forward", "_log_softmax"}
_PLUMBING = {"_to_copy", "_foreach_copy_", "copy_"}


def _labels(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def _batch(name: str) -> Any:
    """Return two examples, of the shapes that the recipe's own have."""
    if name in PICTURES:
        return torch.zeros(2, 3, PICTURES[name], PICTURES[name]), _labels(2)
    if name in OF_PIXELS:
        return torch.zeros(2, *OF_PIXELS[name]), _labels(2)
    if name == "bert":
        return {**{key: _labels(2, 48) for key in ("pieces", "segments")}, "start": _labels(2), "end": _labels(2)}
    made: dict[str, Callable[[], Any]] = {
        "unet": lambda: (torch.zeros(2, 3, 160, 160), _labels(2, 68, 68)),
        "rossmann": lambda: (_labels(2, 22), torch.zeros(2, 16), torch.zeros(2)),
        "gpt": lambda: (_labels(2, 64), _labels(2, 64)),
        "words": lambda: (_labels(2, 3), _labels(2)),
    }
    return made[name]()


def _model(name: str) -> nn.Module:
    with torch.device("meta"):
        return get(name).make_model(get(name).size())


def _boxes(model: Any, images: Tensor) -> Any:
    """Run a detector's parts on three boxes an image."""
    if not hasattr(model, "propose"):
        return model(images)
    features = model.features(images)
    boxes = [torch.empty(3, 4, device="cuda") for _ in images]
    return model.propose(features), model.judge(features, boxes)


def _seen(name: str, region: Any) -> tuple[list[tuple[str, tuple[torch.dtype, ...]]], Any]:
    empty, recipe = _model(name), get(name)
    with fake_cuda(), torch.no_grad():
        model = on_cuda(empty).train()
        inputs = torch.empty(2, 3, 96, 96, device="cuda") if name in DETECTORS else like(_batch(name))
        with Launches() as launches, region:
            result = _boxes(model, inputs) if name in DETECTORS else recipe.loss(model, inputs)
    return launches.seen, result


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in RECURRENT])
def test_a_forward_pass_has_torch_autocasts_dtypes_and_its_launches_but_for_casts_of_norms(name: str) -> None:
    expected, theirs = _seen(name, torch_autocast(torch.float16))
    found, ours = _seen(name, lowp.autocast("fp16"))
    work, own = ([op for op in seen if op[0] not in _PLUMBING] for seen in (expected, found))
    assert [op for op, _ in own] == [op for op, _ in work]
    assert [one for one in own if one[0] in SUMS] == [one for one in work if one[0] in SUMS]
    norms = sum("norm" in op for op, _ in own)
    assert len(found) <= len(expected) + 2 * norms  # the casts of scale and shift
    assert name in DETECTORS or ours.dtype is theirs.dtype is torch.float32
    if name in NARROW:
        pairs = [pair for one, other in zip(own, work, strict=True) for pair in zip(one[1], other[1], strict=True)]
        assert all(mine.itemsize <= other.itemsize for mine, other in pairs) and own != work
    elif name not in WIDE:
        assert own == work


@pytest.mark.parametrize("name", ["rossmann", "gpt", "resnet-20"])  # Adam, AdamW, SGD
def test_adam_is_torchs_fused_one_on_cuda_and_its_default_elsewhere(name: str) -> None:
    recipe, empty = get(name), _model(name)
    elsewhere = recipe.make_optimizer(empty, 0.1)
    with fake_cuda():
        on_device = recipe.make_optimizer(on_cuda(empty), 0.1)
    assert elsewhere.defaults["fused"] is None
    assert on_device.defaults["fused"] is (True if isinstance(on_device, torch.optim.Adam) else None)
