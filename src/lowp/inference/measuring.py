"""What a model takes to serve: bytes of weights, multiplications, and an estimate of their energy."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowp.cost import READ_ENERGY, cost
from lowp.formats import FORMATS, Format
from lowp.inference.modules import Int8, Served, ServedEmbedding, Sign


@dataclass(frozen=True)
class Footprint:
    """The cost of one call: bytes of all parameters and buffers, multiply-adds of layers, and picojoules of both.

    Energy by `lowp.cost`: a multiplication and an addition each in the format the product runs in (sums of bytes and
    signs in 32-bit integers, others in fp32), and every weight read once from DRAM.
    """

    bytes: int
    multiply_adds: int
    energy: float


def footprint(
    model: nn.Module, *arguments: Any, forward: Callable[[nn.Module], Any] | None = None, **keywords: Any
) -> Footprint:
    """Run a model once, on the arguments or by `forward(model)`, and return its footprint."""
    counted: list[tuple[int, Format]] = []

    def after(module: nn.Module, given: Any, result: Any) -> None:
        if isinstance(result, Tensor):
            served = isinstance(module, Served)
            each: Any = module.weight.k if served else module.weight[0].numel()  # type: ignore[index, union-attr]
            counted.append((result.numel() * each, _format_of(module)))

    with ExitStack() as stack, torch.no_grad():
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d)) or (
                isinstance(module, Served) and not isinstance(module, ServedEmbedding)
            ):
                stack.callback(module.register_forward_hook(after).remove)
        if forward is None:
            model(*arguments, **keywords)
        else:
            forward(model)
    size = sum(one.numel() * one.element_size() for one in (*model.parameters(), *model.buffers()))
    energy = size / 4 * READ_ENERGY["DRAM"] + sum(count * _energy(format) for count, format in counted)
    return Footprint(size, sum(count for count, _ in counted), energy)


def _energy(format: Format) -> float:
    """Picojoules of a multiply-add: integers are added up in 32 bits, floats in fp32."""
    integer = str(format) in ("int8", "ternary", "binary")
    return cost(format).multiply_energy.value + (0.1 if integer else cost(FORMATS["fp32"]).add_energy.value)


def _format_of(module: nn.Module) -> Format:
    """The format that the products of a layer run in."""
    if isinstance(module.weight, Sign):
        return FORMATS["ternary" if module.weight.codes().bits == 2 else "binary"]
    return FORMATS["int8" if isinstance(module.weight, Int8) else "fp32"]
