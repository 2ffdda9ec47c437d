"""A layer as in Llama (RMS norms, grouped queries, a gated unit) launches what it does under torch.autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu.fake_cuda import Launches, fake_cuda, on_cuda, torch_autocast
from torch import Tensor, nn

import lowp
from lowp import kernels

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
WIDTH, HEADS, GROUPS = 64, 4, 2


class ComposedNorm(nn.Module):
    """The norm as transformers writes it, in operations that no rule is for."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class LlamaLayer(nn.Module):
    """Touvron et al. 2023, arXiv 2302.13971, with groups of queries that share keys and values."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        each = WIDTH // HEADS
        self.before_attention, self.before_unit = norm(WIDTH), norm(WIDTH)
        sizes = {"queries": WIDTH, "keys": GROUPS * each, "values": GROUPS * each, "joined": WIDTH}
        for name, size in sizes.items():
            self.add_module(name, nn.Linear(WIDTH, size, bias=False))
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        normed, (batch, length, _) = self.before_attention(x), x.shape
        names = ("queries", "keys", "values")
        q, k, v = (self.get_submodule(name)(normed).view(batch, length, -1, WIDTH // HEADS) for name in names)
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        q, k = (one * cosine + torch.cat((-one.chunk(2, -1)[1], one.chunk(2, -1)[0]), -1) * sine for one in (q, k))
        k, v = (one.repeat_interleave(HEADS // GROUPS, 1) for one in (k, v))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.joined(found.transpose(1, 2).reshape(batch, length, WIDTH))
        normed = self.before_unit(x)
        added: Tensor = self.down(F.silu(self.gate(normed)) * self.up(normed))
        return x + added


def _made(norm: Any) -> nn.Module:
    torch.manual_seed(0)
    return LlamaLayer(norm)


def _given(device: str) -> list[Tensor]:
    return [torch.ones(shape, device=device) for shape in ((2, 8, WIDTH), (8, WIDTH // HEADS), (8, WIDTH // HEADS))]


@pytest.mark.parametrize("preset", DTYPES)
@pytest.mark.parametrize("norm", [ComposedNorm, nn.RMSNorm])
def test_its_forward_launches_no_kernel_beyond_torch_autocasts(norm: Any, preset: str) -> None:
    names = []
    for region in (torch_autocast(DTYPES[preset]), lowp.autocast(preset)):
        with fake_cuda():
            layer, given = on_cuda(_made(norm)), _given("cuda")
            with Launches() as launches, region:
                layer(*given)
        names.append(launches.names())
    # of 16 bits a torch without CUDA composes the norm's one kernel, which widens and narrows
    composed = 2 * 2 if norm is nn.RMSNorm and "_fused_rms_norm" not in names[1] else 0
    assert len(names[1]) - composed <= len(names[0])


def test_nor_does_its_backward() -> None:
    counts = []
    for region in (lambda: torch.autocast("cpu", torch.bfloat16), lambda: lowp.autocast("bf16")):
        layer, given = _made(ComposedNorm), _given("cpu")
        with kernels.use("native"), Launches() as launches:
            with region():
                result = layer(*given)
            result.sum().backward()
        counts.append(len(launches.seen))
    assert counts[1] <= counts[0]
