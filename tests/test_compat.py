"""The range of torch versions is stated once and checked, and a missing private name raises a clear error."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import versions
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import lowp
from lowp import compat
from lowp.errors import Unavailable
from lowp.region import context, engine


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1+cpu", "2.13.0", "2.14.1+cu130", "2.15.0"])
def test_the_tested_torch_passes_in_silence(version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compat.check_torch(version)


@pytest.mark.parametrize("version", ["2.16.0a0+git1234567", "2.16.0.dev20270101+cpu", "3.0.0"])
def test_a_later_torch_is_announced_and_accepted(version: str) -> None:
    expected = re.escape(f"lowp is tested with torch up to 2.15, not yet with this torch {version}")
    with pytest.warns(UserWarning, match=f"^{expected}$"):
        compat.check_torch(version)


@pytest.mark.parametrize("version", ["1.13.1", "2.9.1", "2.10.0+cpu"])
def test_an_earlier_torch_is_refused(version: str) -> None:
    text = f"lowp supports torch >=2.11; this is torch {version}. Install one with: pip install 'torch==2.15.*'"
    with pytest.raises(Unavailable, match=f"^{re.escape(text)}$"):
        compat.check_torch(version)


def test_a_version_that_is_none_is_refused() -> None:
    with pytest.raises(Unavailable, match="has the version 'unknown', which cannot be read"):
        compat.check_torch("unknown")


def test_the_minimum_is_the_one_that_pip_reads(repository: Path) -> None:
    assert f'"torch>={compat._dotted(compat.TORCH_MINIMUM)}"' in (repository / "pyproject.toml").read_text()


def test_the_tests_run_with_every_version_from_the_minimum_to_the_newest(repository: Path) -> None:
    pinned = re.search(r"^torch==(\S+)$", (repository / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    minors = sorted(tuple(map(int, version.split(".")[:2])) for version in (*versions.VERSIONS, pinned[1]))
    low, tested = compat.TORCH_MINIMUM, compat.TORCH_TESTED
    assert minors == [(low[0], minor) for minor in range(low[1], tested[1] + 1)]
    assert all((Path(versions.__file__).parent / one).exists() for one in versions.PART)


def test_a_region_that_the_compiler_cannot_follow_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (engine, context):
        monkeypatch.setattr(module, "COMPILES_REGIONS", False)
    layer, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="eager")
    with lowp.autocast("bf16"):
        with pytest.raises(
            Exception, match=r"follows a region of lowp from torch 2\.12 on; this is torch .*set_stance"
        ):
            compiled(x)
        with torch.compiler.set_stance("force_eager"):
            assert torch.equal(compiled(x), layer(x))
    torch._dynamo.reset()


def test_a_private_name_is_found() -> None:
    assert compat.private("torch._C._DisableTorchDispatch") is torch._C._DisableTorchDispatch
    assert compat.private("torch.utils._python_dispatch.TorchDispatchMode").__name__ == "TorchDispatchMode"


def test_a_private_name_that_torch_lacks_is_named() -> None:
    text = f"torch {torch.__version__} has no torch._C._NoSuchThing, which lowp needs; torch 2.15 has it"
    with pytest.raises(Unavailable, match=re.escape(text)):
        compat.private("torch._C._NoSuchThing")


def test_a_constant_is_marked_as_torch_marks_it() -> None:
    def ours() -> int:
        return 1

    def theirs() -> int:
        return 1

    assert compat.constant_when_compiled(ours) is ours
    torch.compiler.assume_constant_result(theirs)
    assert vars(ours) == vars(theirs)


def test_gradients_are_torch_s_own() -> None:
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    given = torch.randn(3)
    for create_graph in (False, True):
        found = compat.gradients_of(x * y.exp(), [x, y], given, create_graph)
        wanted = torch.autograd.grad(x * y.exp(), [x, y], given, create_graph=create_graph)
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        assert all(one.requires_grad is create_graph for one in found)
    assert compat.gradients_of(x * 2, [], given) == ()
    assert x.grad is None


# -- constants --------------------------------------------------------------------------------------------------------
_MAKERS = ("tensor", "zeros", "ones", "empty", "full", "arange", "linspace", "eye", "from_numpy", "as_tensor")


def made(node: ast.AST) -> Iterator[int]:
    """Yield the lines on which a node creates tensors, except under `real_tensors` and in functions that it defines."""
    if isinstance(node, ast.With) and "real_tensors()" in map(ast.unparse, (item.context_expr for item in node.items)):
        return
    if isinstance(node, ast.Call) and ast.unparse(node.func) in [f"torch.{name}" for name in _MAKERS]:
        yield node.lineno
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.Lambda)):
            yield from made(child)


def test_tensors_that_modules_and_caches_keep_are_no_fake_ones(repository: Path) -> None:
    found = []
    for file in (repository / "src").rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        kept = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and _is_cached(one)]
        found += [f"{file.name}:{line}" for node in (tree, *kept) for line in made(node)]
    assert found == []


def _is_cached(function: ast.FunctionDef) -> bool:
    return any("cache" in ast.unparse(one) for one in function.decorator_list)


def test_real_tensors_have_values_under_a_mode() -> None:
    with FakeTensorMode():
        with compat.real_tensors():
            x = torch.ones(2)
        assert type(torch.ones(2)) is FakeTensor
    assert type(x) is torch.Tensor and x.tolist() == [1.0, 1.0]
    with compat.real_tensors():
        assert torch.ones(1).item() == 1.0
