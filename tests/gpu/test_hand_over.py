"""On CUDA a region of fp16 or bf16 is torch.autocast, but for norms and softmax.

It launches no kernel more, but for the casts of the scale and shift of a norm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu.calls import CALLS, CUDA_ALONE, NARROW, Tensors
from gpu.fake_cuda import Launches, fake_cuda, on_cuda, torch_autocast
from torch import Tensor, nn
from torch_versions import compiles_regions

import lowp
from lowp import kernels
from lowp.ops.torch_lists import LISTS

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
NORMS, PARAMETERS = 2, 2  # of a layer, and of a norm


def test_every_op_on_torchs_cuda_lists_is_called_here() -> None:
    listed = {name for names in LISTS["cuda"].values() for name in names} - {"binary_cross_entropy"}
    assert listed - CUDA_ALONE <= CALLS.keys() and not CUDA_ALONE & CALLS.keys()


@pytest.mark.skipif(
    torch.backends.cuda.is_built() and not torch.cuda.is_available(),
    reason="torch's build for CUDA runs ops without a fake implementation on a device, which is not there",
)
@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")
@pytest.mark.parametrize("preset", DTYPES)
@pytest.mark.parametrize("given", ["fp32", "sixteen"])
def test_every_listed_op_writes_the_dtype_that_torch_autocast_gives_it_and_launches_no_more(
    preset: str, given: str
) -> None:
    sixteen, found = DTYPES[preset], {}
    dtype = torch.float32 if given == "fp32" else sixteen
    for name, call in CALLS.items():
        expected, theirs = _of(call, dtype, torch_autocast(sixteen))
        written, ours = _of(call, dtype, lowp.autocast(preset))
        if name in NARROW:
            assert (expected, written) == (torch.float32, sixteen), name
        elif written is not expected or len(ours) > len(theirs):
            found[name] = expected, theirs, written, ours
    assert found == {}


def _of(call: Callable[[Tensors], Any], dtype: torch.dtype, region: Any) -> tuple[torch.dtype, list[str]]:
    with fake_cuda(), torch.no_grad(), Launches() as launches:
        tensors = Tensors(dtype)
        with region:
            result = call(tensors)
    return result.dtype, launches.names()


def test_binary_cross_entropy_is_refused_as_by_torch() -> None:
    with fake_cuda(), lowp.autocast("fp16"), pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
        F.binary_cross_entropy(torch.empty(3, device="cuda"), torch.empty(3, device="cuda"))


def _layer(norm_first: bool) -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=norm_first)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("preset", DTYPES)
def test_a_transformer_layer_launches_no_kernel_beyond_torch_autocasts_and_casts_for_norms(
    preset: str, norm_first: bool
) -> None:
    counts = []
    for region in (torch_autocast(DTYPES[preset]), lowp.autocast(preset)):
        with fake_cuda():
            layer, x = on_cuda(_layer(norm_first)), torch.empty(2, 4, 16, device="cuda")
            with Launches() as launches, region:
                layer(x)
        counts.append(len(launches.seen))
    assert counts[1] <= counts[0] + NORMS * PARAMETERS


@pytest.mark.parametrize("norm_first", [False, True])
def test_nor_does_its_backward(norm_first: bool) -> None:
    counts = []
    for region in (lambda: torch.autocast("cpu", torch.bfloat16), lambda: lowp.autocast("bf16")):
        layer, x = _layer(norm_first), torch.randn(2, 4, 16)
        with kernels.use("native"), Launches() as launches:
            with region():
                result = layer(x)
            result.sum().backward()
        counts.append(len(launches.seen))
    assert counts[1] <= counts[0] + 2 * NORMS * PARAMETERS  # and the casts of their gradients


def _trained(region: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
    with kernels.use("native"), region:
        result = model(x)
        loss = result.float().square().mean()
    loss.backward()
    return [result.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def _network() -> nn.Module:
    torch.manual_seed(0)
    parts = nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.GELU(), nn.Linear(8, 3, bias=False)
    return nn.Sequential(*parts)


def test_what_is_handed_over_has_torch_autocasts_own_bits_forward_and_backward() -> None:
    x = torch.randn(5, 2, 6, 6)
    expected = _trained(torch.autocast("cpu", torch.bfloat16), _network(), x)
    found = _trained(lowp.autocast("bf16"), _network(), x)
    assert all(torch.equal(one, other) and one.dtype is other.dtype for one, other in zip(found, expected, strict=True))


def test_an_observer_changes_no_bit_of_the_results() -> None:
    x, region = torch.randn(5, 2, 6, 6), lowp.autocast("bf16")
    seen: list[str] = []
    region.observe(lambda event: seen.append(event.role))
    found, expected = _trained(region, _network(), x), _trained(lowp.autocast("bf16"), _network(), x)
    assert {"input", "weight", "output", "grad"} <= set(seen)
    assert torch.equal(found[0], expected[0])
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= 2**-6 * other.abs().max()


def test_no_node_of_lowps_is_in_the_graph_of_a_product() -> None:
    with kernels.use("native"), lowp.autocast("bf16"):
        result = F.linear(torch.randn(2, 3), nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4)))
    assert result.grad_fn is not None and result.grad_fn.name() == "AddmmBackward0"


@pytest.mark.usefixtures("as_on_a_device")
def test_the_weights_of_a_call_are_cast_by_torch_and_from_the_second_use_on_once_an_entry() -> None:
    layer, x = nn.Linear(3, 4), torch.randn(2, 3, dtype=torch.bfloat16)
    with kernels.use("native"), lowp.autocast("bf16"), Launches() as launches:
        for _ in range(4):
            layer(x)
    assert [name for name in launches.names() if "copy" in name] == ["_to_copy"] * 4


def test_a_weight_that_is_written_within_an_entry_is_cast_anew() -> None:
    layer, x = nn.Linear(3, 4), torch.randn(2, 3)
    with kernels.use("native"), lowp.autocast("bf16"):
        layer(x)
        with torch.no_grad():
            layer.weight.zero_()
        assert torch.equal(layer(x), layer.bias.bfloat16().expand(2, 4))


def test_a_cast_made_without_gradients_serves_a_use_with_them() -> None:
    layer, x = nn.Linear(3, 4), torch.randn(2, 3)
    with kernels.use("native"), lowp.autocast("bf16"):
        with torch.no_grad():
            layer(x)
        layer(x).sum().backward()
    assert all(one.grad is not None and one.grad.dtype is torch.float32 for one in layer.parameters())


def test_gradients_of_gradients_pass_the_weights_casts() -> None:
    layer, x = nn.Linear(3, 4), torch.randn(2, 3)
    with kernels.use("native"), lowp.autocast("bf16"):
        loss = layer(x).square().sum()
    found = torch.autograd.grad(loss, list(layer.parameters()), create_graph=True)
    (second,) = torch.autograd.grad(found[0].square().sum(), layer.weight)
    assert second.dtype is torch.float32 and bool(torch.isfinite(second).all()) and bool(second.any())


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_attention_that_shows_its_probabilities_writes_them_in_16_bits() -> None:
    with fake_cuda(), lowp.autocast("fp16"):
        with torch.device("meta"):
            attention = nn.MultiheadAttention(16, 2)
        x = torch.empty(4, 1, 16, device="cuda")
        result, probabilities = on_cuda(attention)(x, x, x)
    assert result.dtype is probabilities.dtype is torch.float16


def test_a_nested_torch_autocast_that_is_switched_off_is_honoured() -> None:
    x, w = torch.randn(2, 3), torch.randn(4, 3)
    with kernels.use("native"), lowp.autocast("bf16"):
        with torch.autocast("cpu", enabled=False):
            assert F.linear(x, w).dtype is torch.float32
        assert F.linear(x, w).dtype is torch.bfloat16


def test_a_policy_that_says_otherwise_is_not_handed_over() -> None:
    policy = lowp.Policy((lowp.Rule.of("linear", input="fp16", weight="fp16", output="fp32"),))
    x, w = torch.randn(2, 3), torch.randn(4, 3)
    with kernels.use("native"), lowp.autocast(policy):
        assert torch.equal(F.linear(x, w), F.linear(x.half().float(), w.half().float()))


@pytest.mark.filterwarnings("ignore:.*has rounded no contraction")
def test_double_precision_stays_as_it_is() -> None:
    x, w = torch.randn(2, 3).double(), torch.randn(4, 3).double()
    with kernels.use("native"), lowp.autocast("bf16"):
        assert F.linear(x, w).dtype is torch.float64


def test_torchs_cache_is_left_as_it_was() -> None:
    with kernels.use("native"), torch.autocast("cpu", torch.bfloat16), lowp.autocast("bf16"):
        F.linear(torch.randn(2, 3), nn.Parameter(torch.randn(4, 3)))
        assert torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("norm", [nn.LayerNorm(4), nn.RMSNorm(4), nn.GroupNorm(2, 4), nn.BatchNorm1d(4)])
def test_a_norm_is_one_kernel_on_16_bits(norm: nn.Module) -> None:
    with fake_cuda():
        norm, x = on_cuda(norm), torch.empty(2, 4, device="cuda", dtype=torch.float16)
        with lowp.autocast("fp16"), torch.no_grad(), Launches() as launches:
            assert norm(x).dtype is torch.float16
    names = launches.names()
    casts = 0 if isinstance(norm, nn.BatchNorm1d) else len(list(norm.parameters()))  # the kernels take x's dtype
    if isinstance(norm, nn.RMSNorm) and "_fused_rms_norm" not in names:  # a torch without CUDA composes it
        casts = 3
    assert names.count("_to_copy") == casts


@compiles_regions
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_what_is_compiled_is_handed_over_too(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[str] = []
    layer, x = nn.Linear(3, 4), torch.randn(2, 3)

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph.print_readable(print_output=False))
        return graph

    @torch.compile(backend=backend, fullgraph=True)
    def run(x: Tensor) -> Tensor:
        result: Tensor = layer(x)
        return result

    monkeypatch.setattr("lowp.region.handover.torchs_own_device", lambda *asked: "cpu")
    with lowp.autocast("bf16"):
        assert run(x).dtype is torch.bfloat16
    assert "autograd_function_apply" not in graphs[0] and "enter_autocast" in graphs[0]
