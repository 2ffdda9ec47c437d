"""The first call of a process is quick: it loads only lowp, and no compiler of torch, which takes seconds."""

from __future__ import annotations

import subprocess
import sys

CHILD = """
import sys, torch
SLOW = ("torch._dynamo", "torch._inductor", "sympy")
assert not set(SLOW) & set(sys.modules), "torch loads it itself"
torch.ones(1, requires_grad=True).sum().backward()
before = set(sys.modules)
import lowp

def check(what):
    found = [name for name in SLOW if name in sys.modules]
    assert not found, f"{what} loads {found}"

model = torch.nn.ModuleDict({
    "convolution": torch.nn.Conv2d(1, 2, 3, padding=1), "norm": torch.nn.BatchNorm2d(2),
    "attention": torch.nn.MultiheadAttention(8, 2, batch_first=True), "linear": torch.nn.Linear(8, 3),
})

def loss():
    hidden = model["norm"](model["convolution"](torch.ones(2, 1, 4, 8))).relu().mean(1)
    hidden, _ = model["attention"](hidden, hidden, hidden)
    return torch.nn.functional.cross_entropy(model["linear"](hidden).mean(1), torch.tensor([0, 1]))
"""
KERNELS = """
x = torch.randn(3, 40)
for cast in ("fp16", "e4m3fn:stochastic", "mxfp4", "int8", "nvfp4", "flex16+5", "dfp16"):
    lowp.quantize(x, cast)
    lowp.quantize(x.clone().requires_grad_(), cast).sum().backward()
    lowp.encode(x, cast)
lowp.decode(lowp.encode(x, "e4m3fn"), "e4m3fn")
lowp.statistics(x)
check("a kernel")
"""
REGION = """
with lowp.autocast("{preset}"):
    found = loss()
found.backward()
check("a region in {preset}")
precision = lowp.Precision("{preset}")
check("Precision({preset})")
"""
FIRST = """
lowp.quantize(torch.ones(3), "e4m3fn:stochastic")
with lowp.autocast("fp16"):
    model["linear"](torch.ones(2, 8)).sum().backward()
own = {name.partition(".")[0] for name in set(sys.modules) - before} - {"lowp"}
assert not own, f"the first use loads more than lowp: {own}"
"""
PRESETS = ("fp32", "fp16", "bf16", "bf16-tpu", "e5m7", "e4m3fn:stochastic", "fp8", "dfp16", "flex16+5")


def test_the_first_use_loads_no_compiler() -> None:
    code = "".join([CHILD, FIRST, KERNELS, *(REGION.format(preset=preset) for preset in PRESETS)])
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
