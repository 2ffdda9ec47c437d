"""lowp.reproducible: the same bits on every instruction set and any number of threads; what has none is named."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lowp
from lowp.kernels import cpu
from lowp.kernels.products import contraction as products
from lowp.reproducing import functions

pytestmark = pytest.mark.skipif(
    cpu.library() is None or not cpu.has_multiply_add(), reason="needs the C++ library and fused multiply-adds"
)
HERE = Path(__file__).parent
STORED = json.loads((HERE / "hashes.json").read_text())
# what holds torch, MKL and oneDNN to the instructions of a level of the library
HELD = {
    "portable": ("default", "SSE4_2", "SSE41"),
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx512": ("avx512", "AVX512", "AVX512_CORE_VNNI"),
}
NETWORKS = "mlp", "cnn", "transformer"
PRECISIONS = "bf16", "fp16", "e4m3fn", "mxfp8", "nvfp4", "e5m7"


def _check(runs: Callable[[int], Iterator[str]]) -> None:
    """Compare the hashes of runs, given for each level by its index, with those that are stored."""
    started = []
    for index, level in enumerate(cpu.available()):
        capability, mkl, onednn = HELD.get(level, ("default", "", ""))
        held = {"LOWP_CPU_ISA": level, "ATEN_CPU_CAPABILITY": capability, "ONEDNN_MAX_CPU_ISA": onednn}
        environment = {**os.environ, **held, "MKL_ENABLE_INSTRUCTIONS": mkl}
        command = [sys.executable, str(HERE / "training.py"), *runs(index)]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        started.append((level, capability, process))
    hashes: dict[str, dict[str, str]] = {}
    if torch.__version__.startswith(STORED["torch"] + "."):
        hashes = {run: {"stored": value} for run, value in STORED["hashes"].items()}
    for level, capability, process in started:
        printed, _ = process.communicate()
        assert process.returncode == 0, level
        found = json.loads(printed)
        assert level not in HELD or found["capability"].lower() == capability
        for run, value in found["hashes"].items():
            name, _, threads = run.rpartition("/")
            hashes.setdefault(name, {})[f"{level}, {threads} threads"] = value
    assert not {run: values for run, values in hashes.items() if len(set(values.values())) > 1}


def test_training_has_the_stored_bits_on_every_instruction_set() -> None:
    def runs(index: int) -> Iterator[str]:
        for number, name in enumerate(f"{network}/{one}" for network in NETWORKS for one in PRECISIONS):
            yield f"{name}/{(number + index) % 3 + 1}"

    _check(runs)


@pytest.mark.slow
def test_training_has_the_stored_bits_with_every_number_of_threads() -> None:
    _check(lambda _: (f"{name}/{threads}" for name in STORED["hashes"] for threads in (1, 2, 3)))


@pytest.mark.parametrize("name", "exp expm1 log log1p tanh sigmoid erf sqrt sin cos".split())
def test_functions_are_those_of_fp64_rounded_once(name: str) -> None:
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, -1e-40, 1, -1, 88.7, -103.9, 200, 1e-8])
    x = torch.cat([torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 5, special])
    found, wanted = getattr(functions, name)(x), getattr(torch, name)(x.double()).float()
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num().view(torch.int32), wanted.nan_to_num().view(torch.int32))


def _points(least: float, most: float, smallest: int = 0, largest: int = 0) -> Tensor:
    """Numbers between two, and powers of ten between two."""
    return torch.cat(
        [torch.linspace(least, most, 999).double(), 10.0 ** torch.linspace(smallest, largest, 99).double()]
    )


POINTS = {
    **{"exp": _points(-745, 709.7), "expm1": _points(-40, 709.7, -300), "sigmoid": _points(-700, 40)},
    **{"log": _points(0.5, 2, -323, 308), "log1p": _points(-0.999, 3, -300, 308), "sqrt": _points(0, 9, -323, 308)},
    **{"tanh": _points(-20, 20, -300), "erf": _points(-6, 6, -300)},
    **{"sin": _points(-10, 10, -300, 6), "cos": _points(-10, 10, -300, 6)},
}


@pytest.mark.parametrize("name", POINTS)
def test_functions_of_fp64_are_accurate_to_four_units_in_the_last_place_and_erf_to_twelve(name: str) -> None:
    exact = getattr(math, name, lambda x: 1 / (1 + math.exp(-x)))
    for x, found in zip(POINTS[name].tolist(), getattr(functions, name)(POINTS[name]).tolist(), strict=True):
        assert abs(found - exact(x)) <= (12 if name == "erf" else 4) * math.ulp(exact(x)), x


def _conv(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x.view(2, 6, 5, 6), w.view(6, 3, 4, 5)[..., :3, :2], None, 2, 1, 1, 2)


def _turned(x: Tensor, w: Tensor) -> Tensor:
    return F.conv_transpose2d(x.view(2, 6, 5, 6), w.view(6, 3, 4, 5)[..., :3, :2], w.flatten()[:3], 2, 1, 1)


COMPUTED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "conv2d": _conv,
    "conv_transpose2d": _turned,
    "conv1d of one": lambda x, w: F.conv1d(x.view(4, 90), w.view(10, 4, 9), w.flatten()[:10]),
    "layer_norm": lambda x, w: F.layer_norm(x, (10, 4), w[0], w[1]),
    "rms_norm": lambda x, w: F.rms_norm(x, (10, 4), w[0]),
    "batch_norm": lambda x, w: F.batch_norm(x.view(2, 6, 30), None, None, w.flatten()[:6], None, True),
    "batch_norm, eval": lambda x, w: F.batch_norm(
        x.view(2, 6, 30), w.detach().flatten()[:6], w.detach().flatten()[:6] ** 2, w.flatten()[:6]
    ),
    "group_norm": lambda x, w: F.group_norm(x.view(2, 6, 30), 3, w.flatten()[:6], w.flatten()[6:12]),
    "softmax": lambda x, w: x.softmax(1) * w.sum(),
    "log_softmax": lambda x, w: x.log_softmax(0) + w.mean(0).sum(),
    "logsumexp": lambda x, w: x.logsumexp(1) + w.var() + w.std(1).sum() + w.norm() + w.norm(1),
    "cross_entropy": lambda x, w: (
        F.cross_entropy(
            x.flatten(1),
            torch.tensor([0, 3, -100, 8, 1, 2, 3, 4, 5]),
            w.detach().flatten()[:40].abs(),
            label_smoothing=0.1,
        )
        + w.sum()
    ),
    "losses": lambda x, w: F.mse_loss(x, w) + F.smooth_l1_loss(x, w, reduction="sum") + F.huber_loss(x, w),
    "attention": lambda x, w: F.scaled_dot_product_attention(
        x.view(3, 2, 10, 6), w.view(3, 2, 10, 6), x.view(3, 2, 10, 6), is_causal=True
    ),
    "gelu": lambda x, w: F.gelu(x) + F.gelu(w, approximate="tanh"),
    "functions": lambda x, w: F.silu(x) + F.softplus(w) + x.tanh() * w.sigmoid() + torch.lerp(x, w, 0.3) ** 3,
    "products": lambda x, w: torch.addmm(x[0], w[1], w[2, :4], beta=0.5, alpha=2) + (x[3] @ w[0, :4, 0])[:, None],
    "added": lambda x, w: torch.baddbmm(x[:, :, :1], x, w[:, :4]) + torch.dot(x[0, 0], w[0, 0]),
    "added products": lambda x, w: torch.addcmul(x, x, w, value=3) + torch.addcdiv(x, x, w.abs() + 1) + x.abs() ** 1.5,
    "indices": lambda x, w: x[[0, 0, 2]] * F.embedding(torch.tensor([1, 1, 1]), w[0])[:, None],
}


@pytest.mark.parametrize("name", COMPUTED)
def test_definitions_agree_with_torch_forward_and_backward(name: str) -> None:
    def run() -> list[Tensor]:
        given = torch.Generator().manual_seed(3)
        x, w = (torch.rand(9, 10, 4, generator=given).sub(0.4).requires_grad_() for _ in range(2))
        result = COMPUTED[name](x, w)
        weights = (torch.arange(result.numel()) / 100 - 1).reshape(result.shape)
        return [result.detach(), *torch.autograd.grad(result, (x, w), weights)]

    wanted = run()
    with lowp.reproducible() as mode:
        found = run()
    assert not mode.unpromised
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=2e-6)


def test_what_has_no_definition_is_named() -> None:
    with pytest.warns(UserWarning, match=r"as torch has them.*: _linalg_det, erfinv_;"), lowp.reproducible() as mode:
        torch.eye(2).det()
        torch.zeros(3).erfinv_()
        torch.zeros(3).add_(1)
    assert mode.unpromised == {"_linalg_det": 1, "erfinv_": 1}


def test_shapes_that_int16_layers_are_planned_with_are_no_operators_of_a_step() -> None:
    layer, x = torch.nn.Linear(7, 5), torch.ones(2, 3, 7)
    with lowp.reproducible() as mode, lowp.autocast("dfp16"):
        layer(x).sum().backward()
        assert torch.empty(2, 3, device="meta").sum().is_meta
    assert not mode.unpromised


def test_random_numbers_are_uniform_and_normal() -> None:
    with lowp.reproducible():
        torch.manual_seed(0)
        normal, placed, uniform = (
            torch.randn(20001),
            torch.empty(20001).normal_(3, 0.5),
            torch.empty(20001).uniform_(-2, 1),
        )
    for x, mean, deviation in ((normal, 0, 1), (placed, 3, 0.5), (uniform, -0.5, 3 / 12**0.5)):
        assert abs(x.mean() - mean) < 0.03 and abs(x.std() - deviation) < 0.02
    assert uniform.min() >= -2 and uniform.max() < 1


def test_what_operators_make_beside_a_result_has_the_dtypes_and_shapes_of_torch_s() -> None:
    x, double = torch.randn(3, 4, 5), {"dtype": torch.float64}

    def made() -> list[Tensor]:
        normal = [torch.randn(3, **double), torch.randn(2, 3), torch.randn((2, 2), dtype=torch.bfloat16)]
        normal += [torch.randn_like(x), torch.randn_like(x, **double), torch.randn_like(x.half())]
        normal += [torch.normal(0.0, 1.0, (3,)), torch.normal(1.0, 2.0, (3,), **double)]
        placed = [torch.empty(3, **double).normal_(), torch.empty(3, **double).uniform_()]
        norms = [
            *torch.native_batch_norm(x, None, None, torch.zeros(4), torch.ones(4), False, 0.1, 1e-5),
            *torch.native_batch_norm(x, None, None, torch.zeros(4), torch.ones(4), True, 0.1, 1e-5),
            *torch.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5),
            *torch.native_layer_norm(x, [5], None, None, 1e-5),
            *torch.native_group_norm(x, None, None, 3, 4, 5, 2, 1e-5),
        ]
        return [*normal, *placed, *norms]

    with lowp.reproducible():
        found = made()
    for one, other in zip(found, made(), strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())


def test_bf16_is_emulated_and_the_context_leaves_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "multiplies", lambda *_: True)
    x = torch.ones(2, 2, dtype=torch.bfloat16)
    to = lowp.Cast(lowp.FORMATS["bf16"])
    assert products.is_native(to, x, x)
    with lowp.reproducible() as mode, mode:
        assert not products.is_native(to, x, x)
    assert products.is_native(to, x, x)


def test_lists_of_tensors_are_computed_one_by_one() -> None:
    with lowp.reproducible() as mode:
        x = [torch.full((3,), 4.0), torch.full((2,), 9.0)]
        torch._foreach_sqrt_(x)
        torch._foreach_addcdiv_(x, x, x, value=2.0)
        (first, second) = torch._foreach_norm(x)
    assert [first.item(), second.item()] == pytest.approx([4 * 3**0.5, 5 * 2**0.5])
    assert not mode.unpromised


def test_without_the_library_nothing_is_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "library", lambda: None)
    with pytest.raises(lowp.Unavailable, match="the library was not built"), lowp.reproducible():
        pass
