"""Attention under a rule: the fused call, and nn.MultiheadAttention's one call for everything."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ops.cases import sixteen_bit, under
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lowp import casts, kernels
from lowp.kernels import cpu
from lowp.kernels.products import scratch as scratch_memory
from lowp.kernels.products.attention import widened
from lowp.kernels.products.scratch import Scratch
from lowp.ops import attention
from lowp.policy import Policy, Rule
from lowp.region import autocast

EXACT = Rule.of(input="fp32", weight="fp32", grad="fp32", output="fp32")


class Under(TorchFunctionMode):
    """Runs one function by its runner."""

    def __init__(self, function: Any, rule: Rule) -> None:
        super().__init__()
        self.function, self.rule, self.seen = function, rule, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not self.function:
            return func(*args, **(kwargs or {}))
        self.seen += 1
        return under(self.rule, func, *args, **(kwargs or {}))


def test_dropout_is_the_same_in_backward() -> None:
    tensors = [torch.randn(2, 4, 9, 8) for _ in range(3)]
    mine, plain = ([x.clone().requires_grad_() for x in tensors] for _ in range(2))
    narrow = [x.bfloat16().float() for x in plain]
    torch.manual_seed(0)
    result = under(sixteen_bit("bf16"), F.scaled_dot_product_attention, *mine, dropout_p=0.5)
    torch.manual_seed(0)
    query, key, value = narrow
    wanted = F.scaled_dot_product_attention(query, key, value, dropout_p=0.5)
    assert torch.equal(result, wanted.bfloat16())
    gradient = torch.randn_like(result)
    state = torch.get_rng_state()
    found = torch.autograd.grad(result, mine, gradient)
    assert torch.equal(torch.get_rng_state(), state)
    for one, other in zip(found, torch.autograd.grad(wanted, narrow, gradient.float()), strict=True):
        assert torch.equal(one, other.bfloat16().float())


def test_a_mask_that_is_learnt_gets_its_gradient() -> None:
    q, k, v = (torch.randn(2, 4, 9, 8) for _ in range(3))
    mask = torch.randn(9, 9, requires_grad=True)
    plain = mask.detach().clone().requires_grad_()
    result = under(EXACT, F.scaled_dot_product_attention, q, k, v, mask)
    wanted = F.scaled_dot_product_attention(q, k, v, plain)
    (found,) = torch.autograd.grad(result.sin().sum(), mask)
    torch.testing.assert_close(found, torch.autograd.grad(wanted.sin().sum(), plain)[0])


FLAGS = ("bias_kv", "zero", "sizes", "cross", "weights", "unbatched")


@pytest.mark.parametrize("rows", [5, 9])
@pytest.mark.parametrize("bias", [causal_lower_right, causal_upper_left])
@pytest.mark.parametrize("name", ["bf16", "dfp16", "flex16+5"])
def test_a_causal_bias_is_the_mask_that_it_stands_for(name: str, bias: Any, rows: int) -> None:
    # the bias is a tensor of no numbers: those in its memory are nobody's, and it takes the shape (2, rows, columns)
    tensors = [torch.randn(3, 2, length, 8) for length in (rows, 9, 9)]
    diagonal = 9 - rows if bias is causal_lower_right else 0
    found = []
    for mask in (bias(rows, 9), torch.ones(rows, 9, dtype=torch.bool).tril(diagonal)):
        inputs = [x.clone().requires_grad_() for x in tensors]
        with autocast(name):
            result = F.scaled_dot_product_attention(*inputs, attn_mask=mask)
        found.append((result, *torch.autograd.grad(result.float().square().sum(), inputs)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)  # causality and a mask sum in other orders
    with autocast(name), pytest.raises(ValueError, match="should not be used with causal=True"):
        F.scaled_dot_product_attention(*tensors, attn_mask=bias(rows, 9), is_causal=True)


@pytest.mark.parametrize("flags", list(itertools.product((False, True), repeat=len(FLAGS))), ids=str)
def test_multi_head_attention_is_torch_s_in_every_form(flags: tuple[bool, ...]) -> None:
    bias_kv, zero, sizes, cross, weights, unbatched = flags
    torch.manual_seed(0)
    other = {"kdim": 12, "vdim": 10} if sizes else {}
    module = nn.MultiheadAttention(16, 4, add_bias_kv=bias_kv, add_zero_attn=zero, **other)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    batch = () if unbatched else (3,)
    query = torch.randn(7, *batch, 16)
    key = torch.randn(5, *batch, 12 if sizes else 16) if sizes or cross else query
    value = torch.randn(5, *batch, 10) if sizes else key
    for padding, mask in itertools.product(range(2), range(3)):
        last = (torch.arange(len(key)) >= len(key) - 1).expand(*batch, len(key))
        # torch wants both masks of one kind
        last = torch.zeros(last.shape).masked_fill(last, -torch.inf) if mask == 2 else last
        given = {
            "key_padding_mask": last if padding else None,
            "attn_mask": masks(len(key), 1 if unbatched else 3)[mask],
            "need_weights": weights,
        }
        wanted = module(query, key, value, **given)
        for rule, tolerance in ((EXACT, 1e-5), (sixteen_bit("bf16"), 0.06)):
            with Under(F.multi_head_attention_forward, rule) as mode:
                found = module(query, key, value, **given)
            assert mode.seen == 1
            close(found[0], wanted[0], tolerance)
            assert (found[1] is None) == (not weights)
            if weights:
                close(found[1], wanted[1], tolerance)


def masks(sources: int, batch: int) -> list[Tensor | None]:
    triangle = torch.ones(7, sources, dtype=torch.bool).triu(1)
    return [None, triangle, torch.randn(batch * 4, 7, sources)]


def close(one: Tensor, other: Tensor, tolerance: float) -> None:
    assert one.shape == other.shape
    assert (one.float() - other).abs().max() <= tolerance * other.abs().max()


@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "e4m3fn", "int8", "dfp16", "flex16+5", "accumulate in fp16"])
def test_a_row_that_a_mask_hides_as_a_whole_is_zeros_as_in_torch(precision: str, is_added: bool) -> None:
    x, allowed = torch.randn(2, 4, 5, 8), torch.ones(5, 5, dtype=torch.bool).tril()
    allowed[3] = False
    mask = torch.zeros(5, 5).masked_fill(~allowed, -torch.inf) if is_added else allowed
    leaf = x.clone().requires_grad_()
    with autocast(Policy((Rule.of(accumulate="fp16/32"),)) if precision == "accumulate in fp16" else precision):
        found = F.scaled_dot_product_attention(leaf, leaf, leaf, mask)
        found.float().sum().backward()
    assert leaf.grad is not None and leaf.grad.isfinite().all()
    assert not found[:, :, 3].any()
    wanted = F.scaled_dot_product_attention(x, x, x, mask)
    assert (found.float() - wanted).abs().max() < 0.3


def test_multi_head_attention_trains() -> None:
    module = nn.MultiheadAttention(16, 4, dropout=0.0)
    x = torch.randn(7, 3, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(7)
    gradients = []
    for rule in (None, EXACT, sixteen_bit("fp16")):
        module.zero_grad()
        if rule is None:
            result, _ = module(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)
        else:
            with Under(F.multi_head_attention_forward, rule):
                result, _ = module(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)
        result.float().sin().sum().backward()
        gradients.append([p.grad for p in module.parameters() if p.grad is not None])
    for plain, exact, narrow in zip(*gradients, strict=True):
        assert (plain - exact).abs().max() <= 1e-5 * plain.abs().max() + 1e-6
        assert (plain - narrow).abs().max() <= 2e-2 * plain.abs().max() + 1e-6


class Pieces(nn.Module):
    """Attention as calls of linear layers, in the order and the pieces of the one call."""

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool) -> tuple[Tensor]:
        module, weight = self.attention, self.attention.in_proj_weight
        if weight is None:
            weights = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
            parts = [F.linear(x, one) for x, one in zip((query, key, value), weights, strict=True)]
        elif query is key:
            parts = list(F.linear(query, weight).chunk(3, -1))
        else:
            parts = [F.linear(query, weight[:32]), *F.linear(key, weight[32:]).chunk(2, -1)]
        q, k, v = (part.unflatten(-1, (2, 16)).permute(1, 2, 0, 3) for part in parts)
        found = F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).flatten(2)
        return (F.linear(found, module.out_proj.weight),)


class Around(nn.Module):
    """A model with a layer, which is not its last one."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        found: Tensor = self.layer(query, key, key, need_weights=False)[0]
        return found


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "int8", "fp8"])
@pytest.mark.parametrize("kind", ["self", "cross", "sizes"])
def test_projections_of_multi_head_attention_have_the_rule_of_linear_layers(name: str, kind: str) -> None:
    torch.manual_seed(0)
    sizes = {"kdim": 16, "vdim": 16} if kind == "sizes" else {}
    layer, query = nn.MultiheadAttention(32, 2, bias=False, **sizes), torch.randn(5, 3, 32)
    key = {"self": query, "cross": torch.randn(7, 3, 32), "sizes": torch.randn(7, 3, 16)}[kind]
    found = []
    for model in (Around(layer), Around(Pieces(layer))):
        with autocast(name):
            found.append(model(query, key))
    assert torch.equal(*found)
    with autocast("bf16"):
        assert not torch.equal(Around(layer)(query, key).float(), found[0].float())
    found[0].float().square().sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_a_rule_that_names_multi_head_attention_holds_for_its_projections() -> None:
    layer, x = nn.MultiheadAttention(16, 2), torch.randn(4, 2, 16)
    rules = (
        Rule.of("multi_head_attention_forward", input="fp32"),
        Rule.of("linear", input="e2m1", weight="e2m1"),
        Rule.of("contraction", input="fp32"),
    )
    wanted = layer(x, x, x)[0]
    with pytest.warns(UserWarning, match="nothing matched rule 2"), autocast(Policy(rules)):
        torch.testing.assert_close(layer(x, x, x)[0], wanted)
    for _ in range(2):
        with autocast(Policy(rules[1:])) as region:
            assert (layer(x, x, x)[0] - wanted).norm() > 0.05 * wanted.norm()
        assert not region.report().unused


def test_what_multi_head_attention_refuses_is_refused_in_its_words() -> None:
    module, x = nn.MultiheadAttention(16, 4), torch.randn(7, 3, 16)
    for given in ({"is_causal": True}, {"key_padding_mask": torch.zeros(2, 7, dtype=torch.bool)}):
        with pytest.raises((RuntimeError, AssertionError)) as plain:
            module(x, x, x, **given)
        rule = sixteen_bit("bf16")
        with pytest.raises(type(plain.value)) as found, Under(F.multi_head_attention_forward, rule):
            module(x, x, x, **given)
        assert str(found.value) == str(plain.value)


@pytest.mark.parametrize("masked", [None, "boolean", "float"])
def test_the_definition_of_fused_attention_is_in_fp64_forward_and_backward(masked: str | None) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(2, 2, 9, 8).bfloat16().float() for _ in range(3)]
    mask = None if masked is None else torch.ones(9, 9).tril()
    mask = mask if mask is None or masked == "float" else mask.bool()
    wide = [x.double().requires_grad_() for x in tensors]
    narrow = [x.clone().requires_grad_() for x in tensors]
    rule = Rule.of("scaled_dot_product_attention", input="bf16")
    exact = F.scaled_dot_product_attention(*wide, mask if mask is None or mask.dtype is torch.bool else mask.double())
    with kernels.use("reference"):
        found = under(rule, F.scaled_dot_product_attention, *narrow, mask)
        found.sum().backward()
    exact.sum().backward()
    assert torch.equal(found, exact.float())
    for one, other in zip(narrow, wide, strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.allclose(one.grad, other.grad.float(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("masked", [None, "causal", "boolean", "float"])
@pytest.mark.parametrize("name", ["bf16", "fp16", "bf16-trunc"])
def test_backward_reads_the_result_as_it_was_before_it_was_rounded(name: str, masked: str | None) -> None:
    torch.manual_seed(0)
    # values that are nearly equal: what is left of a gradient is a difference of numbers a thousand times as large,
    # and with the rounded result nothing would be
    cast, dtype = casts.parse(name), torch.float16 if name == "fp16" else torch.bfloat16
    query, key = (torch.randn(2, 2, 33, 8).to(dtype) for _ in range(2))
    value = (10 + 0.05 * torch.randn(2, 2, 33, 8)).to(dtype)
    mask = {"boolean": torch.ones(33, 33).tril().bool(), "float": torch.randn(33, 33)}.get(masked or "")
    given: dict[str, Any] = {"attn_mask": mask, "is_causal": masked == "causal"}
    narrow = [x.clone().requires_grad_() for x in (query, key, value)]
    wide = [x.float().requires_grad_() for x in (query, key, value)]
    rule = Rule.of(input=cast, grad=cast, output=cast)
    result = under(rule, F.scaled_dot_product_attention, *narrow, **given)
    wanted = F.scaled_dot_product_attention(*wide, **given)
    gradient = torch.randn_like(wanted).to(dtype)
    with Counted() as counted:
        found = torch.autograd.grad(result, narrow, gradient)
    assert counted.names.count(FORWARD) == 0  # nothing is computed again
    assert counted.names.count(f"{FORWARD}_backward") == 1
    for one, other in zip(found, torch.autograd.grad(wanted, wide, gradient.float()), strict=True):
        assert one.dtype is dtype
        assert (one.float() - other).norm() <= 2.0**-7 * other.norm()


FORWARD = "aten::_scaled_dot_product_flash_attention_for_cpu"


class Counted(TorchDispatchMode):
    """Keeps the names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fused", [True, False])
def test_operands_are_widened_to_the_same_numbers_wherever_they_lie(fused: bool) -> None:
    block = torch.randn(2, 5, 3, 4, 6).bfloat16()
    tensors = list(block.permute(2, 0, 3, 1, 4))
    tensors = tensors if fused else [tensors[0], tensors[2], tensors[1].clone()]
    with Scratch() as scratch:
        for one, other in zip(widened(tensors, scratch), tensors, strict=True):
            assert one.dtype is torch.float32 and torch.equal(one, other.float())


def test_lent_memory_for_a_fused_projection_may_begin_within_its_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    # as memory does that is not aligned to a huge page: Linux before 6.7 places it anywhere
    monkeypatch.setattr(scratch_memory, "_memory", lambda elements: torch.full((elements + 24,), torch.nan)[24:])
    monkeypatch.setattr(scratch_memory, "_blocks", scratch_memory._Blocks())
    tensors = list(torch.randn(3, 4, 64, 64).bfloat16())
    with torch.no_grad(), Scratch() as scratch:
        for one, other in zip(widened(tensors, scratch), tensors, strict=True):
            assert torch.equal(one, other.float())
        assert scratch.lent


def test_attention_asks_torch_for_its_product_in_one_place() -> None:
    calls = [
        f"{path.name}:{node.lineno}"
        for path in Path(attention.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("F.scaled_dot_product_attention")
    ]
    assert len(calls) == 1  # the product of the form, which kernels.contract calls


@pytest.mark.parametrize("causal", [False, True])
def test_operands_that_are_in_the_format_are_read_as_they_lie(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    is_kept = attention.payloads.is_kept

    def steps() -> list[Tensor]:
        torch.manual_seed(0)
        project, out, found = nn.Linear(32, 96), nn.Linear(32, 32), []
        region = autocast("flex16+5")
        for _ in range(3):
            x = torch.randn(4, 20, 32).requires_grad_()
            with region:
                heads = project(x).view(4, 20, 3, 4, 8).permute(2, 0, 3, 1, 4)
                y = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=causal)
                z = out(y.transpose(1, 2).reshape(4, 20, 32))
            z.backward(torch.randn_like(z))
            assert x.grad is not None and region.exponents is not None
            found += [y.detach(), z.detach(), x.grad, *(one.grad.clone() for one in project.parameters())]
            region.exponents.flush()
        assert region.exponents is not None
        summary = region.exponents.summary()["all"]
        exponents = [region.exponents.exponent(site) for site in region.exponents.sites()]
        return [*found, torch.tensor([summary.writes, summary.saturated, summary.moved, *exponents])]

    def spied(x: Tensor, cast: Any) -> bool:
        asked.append(is_kept(x, cast))
        return asked[-1]

    monkeypatch.setattr(attention.payloads, "is_kept", spied)
    found = steps()
    # query, key, value and the gradient of each step; without the library no mantissas are kept
    assert len(asked) == 12 and all(asked) == (cpu.library() is not None)
    monkeypatch.setattr(attention.payloads, "is_kept", lambda x, cast: False)
    assert all(map(torch.equal, found, steps()))
