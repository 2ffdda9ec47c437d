"""What a recipe is made of, in numbers: its data, model, optimizer and schedule, a loss, and the metrics.

    python tests/recipes/described.py > tests/recipes/described.txt

writes that of every recipe, at a size of few examples, for which `test_described.py` looks. The weights are waves, so
that no number depends on how torch draws.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lowp.recipes import faster_rcnn, get, ssd
from lowp.recipes.recipe import Examples, tensors_of

SMALL: dict[str, dict[str, Any]] = {
    "digits": {},
    "digits-hard": {},
    "mnist": {},
    **{name: {"images": (6, 4)} for name in ("cifar10-mlp", "resnet-20", "resnet-50", "alexnet", "vit", "unet")},
    "rossmann": {"drawn": (12, 400)},
    "gpt": {"bytes": 3000},
    "words": {"drawn": (300, 100), "vocabulary": 500},
    "bert": {"drawn": 60, "layers": 1, "width": 32},
    "seq2seq": {"drawn": 60},
    **{name: {"images": (6, 3)} for name in ("ssd", "faster-rcnn")},
}
_DETECTORS = ("ssd", "faster-rcnn")  # whose losses sort what nearly ties


def described(name: str) -> Iterator[str]:
    """Yield the lines of a recipe: words, and numbers with their names."""
    recipe = get(name)
    for spelled, size in recipe.sizes.items():
        schedule = size.schedule or recipe.schedule
        numbers = f"{size.epochs} {size.batch} {size.learning_rate} {size.parameters}"
        yield f"{spelled}: {numbers} {schedule.__name__} {size.options}"
    metric, rest = recipe.metric, (recipe.default_size, recipe.clip, recipe.threads, recipe.unit, recipe.classes)
    yield f"recipe {metric.name} {metric.higher_is_better} {metric.share} {' '.join(map(str, rest))}"
    size = recipe.size("cpu")
    size = replace(size, options={**size.options, **SMALL[name]})
    data = recipe.load(size, None)
    yield f"data {data.description}"
    torch.manual_seed(0)
    model = recipe.make_model(size)
    yield from _initial(model)
    _wave(model)
    optimizer = recipe.make_optimizer(model, 0.5)
    yield from _optimizer(optimizer)
    progress = (0.0, 0.02, 0.05, 0.1, 0.3, 0.5, 0.6, 0.75, 0.9, 0.99)
    rates = []
    for share in progress:
        (size.schedule or recipe.schedule)(optimizer, share)
        rates.append(optimizer.param_groups[0]["lr"])
    yield f"rates {_numbers(rates)}"
    batches = []
    for part, examples in (("training", data.training), ("validation", data.validation)):
        yield f"{part} {len(examples)}"
        batches.append(examples.batch(torch.arange(min(4, len(examples)))))
        if name == "gpt":  # whose text is that of the Python which runs
            batches[-1] = tuple(torch.arange(256).view(4, 64) * step % 256 for step in (1, 7))
        else:
            yield from _batches(part, examples)
        yield f"{part} units {recipe.units(batches[-1])}"
    model.eval()
    if name in _DETECTORS:
        with torch.no_grad():
            yield from _detector(model, batches[0]["images"])
        return
    loss = recipe.loss(model, batches[0])
    yield f"loss {_numbers([loss.item()])} {str(loss.dtype).removeprefix('torch.')}"
    loss.backward()
    norms = [one.grad.norm().item() for one in model.parameters() if one.grad is not None]
    yield f"gradients {len(norms)} {_numbers([math.fsum(norms), norms[0], norms[-1]])}"
    with torch.no_grad():
        for metric_name, value in recipe.evaluate(model, batches).items():
            yield f"evaluated {metric_name} {_numbers([value])}"


def _detector(model: Any, images: Tensor) -> Iterator[str]:
    """Yield what comes out of a detector, and the boxes to which that refers."""
    if isinstance(model, ssd.SSD):
        found = [*model(images), *map(ssd.default_boxes, (ssd.SSD300, ssd.SMALL))]
    else:
        features, box = model.features(images), torch.tensor([[0.125, 0.25, 0.75, 0.875]])
        boxes = [box, box / 2, box.repeat(2, 1), box[:0]]
        anchors = [faster_rcnn.region_anchors(shape, 3, 4) for shape in (faster_rcnn.SMALL, faster_rcnn.VGG_16)]
        found = [features, *model.propose(features), *model.judge(features, boxes), *anchors]
    yield from (f"found {_about(one)}" for one in found)


def _initial(model: nn.Module) -> Iterator[str]:
    """Yield what the initialisation of a model is: of each kind of parameter the mean and the standard deviation."""
    for name, one in model.named_parameters():
        if one.numel() >= 2000:  # of fewer numbers they say little
            yield f"starts {name} {_numbers([one.std().item()], 2)}"
        elif not one.std(correction=0) > 0:
            yield f"starts {name} {_numbers([one.mean().item()])}"


def _wave(model: nn.Module) -> None:
    with torch.no_grad():
        for place, (name, one) in enumerate(model.named_parameters()):
            wave = torch.sin(torch.arange(one.numel(), dtype=torch.float64) * 0.7 + place).view(one.shape)
            scale = one[0].numel() ** -0.5 if one.dim() > 1 else 0.1
            one.copy_(wave * scale + (one.dim() == 1 and name.endswith("weight")))


def _optimizer(optimizer: torch.optim.Optimizer) -> Iterator[str]:
    for group in optimizer.param_groups:
        kept = {name: group[name] for name in ("lr", "weight_decay", "momentum", "betas", "eps") if name in group}
        yield f"optimizer {type(optimizer).__name__} {len(group['params'])} {kept}"


def _batches(part: str, examples: Examples) -> Iterator[str]:
    first = examples.batch(torch.arange(1))
    rows = torch.arange(min(4 if max(one.numel() for one in tensors_of(first)) > 1000 else 5000, len(examples)))
    for seed in (None, 3):
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        found = examples.batch(rows) if generator is None else examples.batch(rows, generator)
        for tensor in tensors_of(found):
            yield f"{part} {'as it is' if seed is None else 'at random'} {_about(tensor)}"


def _about(tensor: Tensor) -> str:
    """Return the dtype, the shape, the sum and a sum that tells places apart."""
    flat = tensor.detach().double().flatten()
    places = torch.cos(torch.arange(flat.numel(), dtype=torch.float64) * 0.37)
    shape = "x".join(map(str, tensor.shape))
    digits = 5 if tensor.is_floating_point() else 9
    sums = _numbers([flat.sum().item(), (flat * places).sum().item()], digits)
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape} {sums}"


def _numbers(values: Any, digits: int = 5) -> str:
    return " ".join(f"{float(value):.{digits}g}" for value in values)


CASES: Mapping[str, Any] = SMALL

if __name__ == "__main__":
    for name in CASES:
        print(f"## {name}", *described(name), sep="\n")
        sys.stdout.flush()
