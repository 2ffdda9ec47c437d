"""Served models under torch.compile, torch.export and torch.func: the bits of the plain call."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import lowp
from lowp.kernels import cpu
from lowp.kernels.packed import byte_rows

FORMATS = ["int8", "int4", "ternary", "fp16", "e5m7", "int8-affine"]  # every kind of packed weight


class Model(nn.Module):
    """An embedding, convolutions of both dimensions and in groups, attention and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.lines = nn.Conv1d(16, 16, 3, padding="same", padding_mode="circular", groups=2)
        self.planes = nn.Conv2d(1, 3, (3, 1), padding=(1, 0), bias=False)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Sequential(nn.Linear(48, 20), nn.ReLU(), nn.Linear(20, 3))

    def forward(self, indices: Tensor) -> Tensor:
        """Of indices [N, 6]."""
        x = self.lines(self.embedding(indices).transpose(1, 2)).transpose(1, 2)
        x = self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.planes(x[:, None]).movedim(1, 2).flatten(2))  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def served(format: str, calibrated: bool) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    indices = torch.randint(0, 20, (5, 6))
    return lowp.quantize_model(Model(), format, [indices] if calibrated else None), indices


@pytest.mark.parametrize(("format", "calibrated"), [("int8", True), *((one, False) for one in FORMATS)])
def test_a_served_model_gives_the_same_bits_plain_compiled_exported_and_loaded(format: str, calibrated: bool) -> None:
    model, indices = served(format, calibrated)
    wanted = model(indices)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(indices), wanted)
    program = torch.export.export(model, (indices,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for some in (indices, indices[:2]):
        assert torch.equal(loaded(some), model(some))


def test_examples_of_vmap_are_served_as_if_each_were_alone() -> None:
    model, indices = served("int8", False)
    found = torch.func.vmap(model)(indices[:, None])  # a range of its own for each
    assert torch.equal(found, torch.stack([model(one[None]) for one in indices]))


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # of torch's own, when first used
def test_int8_compiles_with_torch_s_own_compiler_without_a_warning() -> None:
    model, indices = served("int8", True)
    assert torch.equal(torch.compile(model, fullgraph=True)(indices), model(indices))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")  # torch's own
def test_a_served_model_compiled_ahead_of_time_gives_the_same_bits(tmp_path: Path) -> None:
    model, indices = served("int8", True)
    package = torch._inductor.aoti_compile_and_package(
        torch.export.export(model, (indices,)), package_path=str(tmp_path / "model.pt2")
    )
    assert torch.equal(torch._inductor.aoti_load_package(package)(indices), model(indices))


@pytest.mark.skipif(cpu.library() is None, reason="the C++ library was not built")
def test_a_compiler_that_meets_a_kernel_leaves_the_reading_of_memory_to_the_call() -> None:
    def rounded(x: Tensor) -> Tensor:
        return byte_rows.to_bytes(x * 2, 0.1, 3, 127).payload

    x = torch.randn(40, 64)
    counters.clear()
    with pytest.warns(UserWarning, match="Dynamo detected a call to a `functools"):
        found = torch.compile(rounded, backend="aot_eager")(x)
    assert torch.equal(found, rounded(x))
    assert not [reason for reason in counters["graph_break"] if "data_ptr" in reason or "storage_offset" in reason]
