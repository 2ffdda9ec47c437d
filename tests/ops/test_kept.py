"""What backward reads of activations, kept as the codes of a rule's `saved`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ops.cases import under
from ops.test_by_product import gradients
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from torch_versions import compiles_regions

import lowp
from lowp import kernels
from lowp.errors import Unavailable
from lowp.ops.call import Call
from lowp.ops.table import row_of
from lowp.policy import Policy, Rule

CODES = "e4m3fn@fp32/128"
SAVED = Rule.of(saved=CODES)


def bytes_kept(run: Callable[[], Tensor]) -> tuple[int, Tensor]:
    """Return the bytes that autograd keeps, without parameters, each storage once, and the result."""
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if not isinstance(x, nn.Parameter):
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = run()
    return sum(found.values()), result


def decoded(x: Tensor, cast: str = CODES) -> Tensor:
    """Return the values of a tensor's codes, in blocks along its memory."""
    return kernels.quantize(x.detach().reshape(-1), cast).reshape(x.shape)


@pytest.mark.parametrize("cast", [CODES, "int8", "e5m2", "mxfp4", "e4m3fn@fp32/tensor", "bf16"])
def test_the_gradient_of_a_weight_reads_the_codes_of_the_input(cast: str) -> None:
    x, w = torch.randn(5, 8, 65, requires_grad=True), torch.randn(48, 65, requires_grad=True)
    result = under(Rule.of(saved=cast), F.linear, x, w)
    found, g = gradients(result, x, w)
    assert torch.equal(result, F.linear(x, w))
    kept = kernels.quantize(x.detach(), cast) if cast == "int8" else decoded(x, cast)
    torch.testing.assert_close(found[1], g.reshape(40, 48).t() @ kept.reshape(40, 65), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[0], (g.reshape(40, 48) @ w).reshape(x.shape), rtol=1e-5, atol=1e-5)


def test_codes_are_of_what_the_product_would_have_read() -> None:
    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(48, 64, requires_grad=True)
    casts = {"input": "mxfp4", "weight": "mxfp4", "saved": CODES}
    found, g = gradients(under(Rule.of(**casts), F.linear, x, w), x, w)
    torch.testing.assert_close(found[1], g.t() @ decoded(kernels.quantize(x.detach(), "mxfp4")), rtol=1e-5, atol=1e-5)
    anew = under(Rule.of(**casts, weight_gradient="input=bf16 grad=bf16"), F.linear, x, w)
    found, g = gradients(anew, x, w)
    wanted = g.bfloat16().float().t() @ decoded(x).bfloat16().float()
    torch.testing.assert_close(found[1], wanted, rtol=1e-5, atol=1e-5)


OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "silu": F.silu,
    "layer_norm": lambda x: F.layer_norm(x, (64,)),
    "square": torch.square,
}


@pytest.mark.parametrize("op", OPS)
def test_another_op_has_its_derivative_at_the_codes_of_its_input(op: str) -> None:
    x = torch.randn(32, 64, requires_grad=True)
    with lowp.autocast(Policy((Rule.of(op, saved=CODES),))):
        result = OPS[op](x)
    assert torch.equal(result, OPS[op](x))
    (found,), g = gradients(result, x)
    if op == "layer_norm":  # torch keeps the mean and the deviation in fp32 beside it
        _, mean, deviation = torch.native_layer_norm(x.detach(), (64,), None, None, 1e-5)
        mask = [True, False, False]
        wanted = torch.ops.aten.native_layer_norm_backward(g, decoded(x), (64,), mean, deviation, None, None, mask)[0]
    else:
        other = decoded(x).requires_grad_()
        (wanted,) = torch.autograd.grad(OPS[op](other), other, g)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_softmax_keeps_the_codes_of_its_result() -> None:
    x = torch.randn(8, 128, requires_grad=True)
    kept, result = bytes_kept(lambda: under(Rule.of(saved=CODES), torch.softmax, x, -1))
    (found,), g = gradients(result, x)
    y = decoded(result)
    torch.testing.assert_close(found, y * (g - (g * y).sum(-1, keepdim=True)), rtol=1e-5, atol=1e-6)
    assert kept == 8 * 128 + 8 * 4


class Block(nn.Module):
    """A block of a transformer without attention: norms, a layer of four times the width and its activation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return result


def test_a_block_keeps_at_most_a_third_of_bf16s_bytes_and_its_gradients_are_near() -> None:
    model, x = Block(), torch.randn(16, 32, 64)
    codes = Policy((Rule.of("linear", "layer_norm", "gelu", saved=CODES),))

    def step(precision: Any) -> tuple[int, list[Tensor]]:
        def run() -> Tensor:
            with lowp.autocast(precision):
                result: Tensor = model(x).sin().sum()
            return result

        kept, loss = bytes_kept(run)
        return kept, list(torch.autograd.grad(loss, list(model.parameters())))

    (plain, wanted), (in_bf16, _), (kept, found) = (step(one) for one in ("fp32", "bf16", codes))
    of_sine = 4 * 16 * 32 * 64  # which no rule names
    assert kept - of_sine <= 0.27 * (plain - of_sine) and kept - of_sine <= 0.55 * (in_bf16 - of_sine // 2)
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() <= 0.05 * other.norm()


def test_the_input_itself_is_not_kept() -> None:
    w = torch.randn(16, 64, requires_grad=True)
    for run in (lambda x: under(SAVED, F.linear, x, w), lambda x: under(SAVED, F.gelu, x)):
        x = torch.randn(32, 64, requires_grad=True) * 1
        result, storage = run(x), StorageWeakRef(x.untyped_storage())
        del x
        assert storage.expired() and result.requires_grad


def test_a_checkpoint_keeps_no_codes_and_has_the_same_gradients() -> None:
    model, x = Block(), torch.randn(4, 32, 64, requires_grad=True)
    policy = Policy((Rule.of("linear", "layer_norm", "gelu", saved=CODES),))

    def run(x: Tensor) -> Tensor:
        with lowp.autocast(policy):
            result: Tensor = model(x)
        return result

    wanted, _ = gradients(run(x), x, *model.parameters())
    kept, result = bytes_kept(lambda: checkpoint(run, x, use_reentrant=False))
    assert kept <= 4 * x.numel()
    found, _ = gradients(result, x, *model.parameters())
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


def test_second_derivatives_and_torch_func_go_on() -> None:
    x, w = torch.randn(8, 64, requires_grad=True), torch.randn(16, 64, requires_grad=True)

    def loss(x: Tensor, rule: Rule) -> Tensor:
        result: Tensor = under(rule, F.gelu, under(rule, F.linear, x, w)).sum()
        return result

    (first,) = torch.autograd.grad(loss(x, SAVED), w, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    (of_plain,) = torch.autograd.grad(loss(x, Rule()), w, create_graph=True)
    (wanted,) = torch.autograd.grad(of_plain.square().sum(), x)
    assert (second - wanted).norm() <= 0.1 * wanted.norm()
    found = torch.func.grad(loss)(x.detach(), SAVED)
    torch.testing.assert_close(found, torch.autograd.grad(loss(x, Rule()), x)[0])


def test_strides_stay_and_what_has_no_codes_is_kept_as_it_is() -> None:
    x = torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last).requires_grad_()
    w = torch.randn(4, 8, 3, 3, requires_grad=True)
    found, g = gradients(under(Rule.of(saved="e4m3fn@fp32/32"), F.conv2d, x, w), x, w)
    by_memory = kernels.quantize(x.detach().permute(0, 2, 3, 1).reshape(-1), "e4m3fn@fp32/32")
    kept = by_memory.reshape(2, 6, 6, 8).permute(0, 3, 1, 2)
    (wanted,) = torch.autograd.grad(F.conv2d(kept, w), w, g)
    torch.testing.assert_close(found[1], wanted, rtol=1e-4, atol=1e-4)
    y = torch.tensor([[1.1, math.nan]], requires_grad=True)
    (found_of_y,), _ = gradients(under(Rule.of(saved="int8"), torch.square, y), y)
    assert found_of_y[0, 0].isfinite() and found_of_y[0, 1].isnan()


@compiles_regions
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own
def test_compiled_code_refuses_codes() -> None:
    row, x, w = row_of(F.linear), torch.randn(4, 8), torch.randn(3, 8, requires_grad=True)
    assert row is not None
    run = row.run(SAVED)
    torch.compiler.reset()
    layer = torch.compile(
        lambda x, w: run(Call("linear", F.linear, (x, w), {}, SAVED)), backend="aot_eager", fullgraph=True
    )
    with pytest.raises(Exception, match="compile under a policy without saved") as caught:
        layer(x, w)
    assert "Unavailable" in f"{caught.type} {caught.value}" or isinstance(caught.value, Unavailable)
