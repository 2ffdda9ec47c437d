"""All private or version-dependent names of torch, and the supported range of torch versions.

lowp uses names that torch does not promise to keep. No other module uses a name of torch that begins with an underscore
(a test checks this). A missing name raises one error, which says which torch version has the name.
"""

import functools
import re
import sys
import warnings
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, TypeVar, cast

import torch

from lowp.errors import Unavailable

_Result = TypeVar("_Result")
_Function = TypeVar("_Function", bound=Callable[..., Any])
_OneKey = TypeVar("_OneKey", bound=Callable[[Any], Any])

# pyproject.toml requires TORCH_MINIMUM or later. The tests run with the version in constraints.txt and, by
# tests/versions.py, with others up to TORCH_TESTED; a later one is accepted with a warning.
TORCH_MINIMUM = (2, 11)
# the first torch whose compiler passes objects to functions that are constant when compiled, as regions need
TORCH_COMPILES_REGIONS = (2, 12)
TORCH_TESTED = (2, 15)
_MOST_KEPT = 8192


def check_torch(version: str) -> None:
    """Raise Unavailable for a torch that is too old; warn for one that is newer than those lowp was tested with.

    `version` is torch's own text ("2.13.0+cpu", "2.14.0a0+git1234567"); only major.minor is compared.
    """
    found = _parsed(version)
    wanted = f"lowp supports torch >={_dotted(TORCH_MINIMUM)}"
    if found is None:
        raise Unavailable(f"{wanted}; this torch has the version {version!r}, which cannot be read")
    if found < TORCH_MINIMUM:
        raise Unavailable(
            f"{wanted}; this is torch {version}. Install one with: pip install 'torch=={_dotted(TORCH_TESTED)}.*'"
        )
    if found > TORCH_TESTED:
        message = f"lowp is tested with torch up to {_dotted(TORCH_TESTED)}, not yet with this torch {version}"
        warnings.warn(message, UserWarning, stacklevel=2)


def _parsed(version: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version)
    return None if match is None else (int(match[1]), int(match[2]))


@functools.cache
def private(path: str) -> object:
    """Return the object at a dotted path such as "torch._C._DisableAutocast". Raises Unavailable if there is none."""
    parts = path.split(".")
    found: object = import_module(parts[0])
    for depth, part in enumerate(parts[1:], start=2):
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = import_module(".".join(parts[:depth]))
            except ImportError:
                tested = _dotted(TORCH_TESTED)
                message = f"torch {torch.__version__} has no {path}, which lowp needs; torch {tested} has it"
                raise Unavailable(message) from None
    return found


def constant_when_compiled(function: _Function) -> _Function:
    """Mark a function whose results torch.compile treats as constants; torch.compile runs the function as plain Python.

    Same mark as torch.compiler.assume_constant_result, without loading the compiler, which takes seconds.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_when_compiled
def refuse_compiled_region() -> None:
    """Raise Unavailable while torch.compile traces a call in a region that this torch's compiler cannot follow."""
    raise Unavailable(
        f"torch.compile follows a region of lowp from torch {_dotted(TORCH_COMPILES_REGIONS)} on; this is torch "
        f"{torch.__version__}: call the compiled function under torch.compiler.set_stance('force_eager'), which runs "
        "it uncompiled"
    )


def remembered(function: _OneKey) -> _OneKey:
    """Return a function of one hashable argument with cached results; Dynamo warns about functools.cache."""
    kept: dict[Any, Any] = {}

    @functools.wraps(function)
    def look_up(key: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(key)
        if key not in kept:
            if len(kept) >= _MOST_KEPT:
                kept.clear()
            kept[key] = function(key)
        return kept[key]

    return cast(_OneKey, look_up)


def remembered_by_identity(function: _OneKey) -> _OneKey:
    """Return a function of one frozen value with results cached by the id of the value, which the cache keeps alive.

    For casts and rules, whose hash takes longer than most functions of them.
    """
    kept: dict[int, tuple[Any, Any]] = {}

    @functools.wraps(function)
    def look_up(value: Any) -> Any:
        found = kept.get(id(value))
        if found is None:
            if len(kept) >= _MOST_KEPT:
                kept.clear()
            found = kept[id(value)] = value, function(value)
        return found[1]

    return cast(_OneKey, look_up)


def once(function: Callable[[], _Result]) -> Callable[[], _Result]:
    """Return a function that runs this one at its first call alone, also where torch.compile traces the call.

    Dynamo would warn of functools.cache, and trace what it holds.
    """
    done = functools.cache(function)

    @constant_when_compiled
    def run() -> _Result:
        return done()

    return run


def plain_when_run(function: _Function) -> _Function:
    """Mark a function that torch.compile does not compile, nor its calls, where Python runs it; it may be traced.

    Python runs it beside a graph break. The mark is of its code, which a function that another decorator has returned
    shares with others: it comes first.
    """
    _set_strategy(function.__code__, _strategy(_action.SKIP, _action.SKIP))
    return function


def skipped_by_compilers(function: _Function) -> _Function:
    """Mark a function that torch.compile neither traces nor compiles, with all its calls, at no cost; a graph break."""
    plain_when_run(function)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def gradients_of(
    result: torch.Tensor, inputs: Sequence[torch.Tensor], gradient: torch.Tensor, create_graph: bool = False
) -> Sequence[torch.Tensor]:
    """Return the gradients of the inputs, on each of which `result` depends. `gradient` has the result's shape.

    torch.autograd.grad loads SymPy to compare the shapes, which takes seconds. Unless code is traced, the autograd
    engine is called directly.
    """
    if create_graph or type(result) is not torch.Tensor or torch.compiler.is_compiling():
        return torch.autograd.grad(result, inputs, gradient, create_graph=create_graph)
    if not inputs:
        return ()
    found: Sequence[torch.Tensor] = _run_backward((result,), (gradient,), False, False, tuple(inputs), False)
    return found


def applied_at_once(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return `apply` of a Function for tensors on which no torch.func transform has ever run.

    torch's own `apply` first checks whether a transform is active, searches the arguments for remains of an earlier
    one, and then calls this function.
    """
    return cast(Any, super(torch.autograd.Function, function)).apply  # type: ignore[no-any-return]


def with_tangents(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return `apply` of a Function whose `tangent` method gives forward-mode derivatives.

    Three classes implement it. torch.compile refuses any Function that defines `jvp`. torch.func needs `setup_context`
    separate from `forward`. Otherwise a combined `forward` halves the cost of a call, since torch need not bind the
    arguments by name.
    """
    forward, setup_context = function.forward, function.setup_context

    def at_once(ctx: Any, *arguments: Any) -> Any:
        output = forward(*arguments)
        setup_context(ctx, arguments, output)
        return output

    tangent = staticmethod(function.tangent)  # type: ignore[attr-defined]
    transformed = cast(Any, type(function.__name__, (function,), {"jvp": tangent}))
    members = {"forward": staticmethod(at_once), "backward": staticmethod(function.backward), "jvp": tangent}
    eager = cast(Any, type(function.__name__, (torch.autograd.Function,), members))

    def apply(*arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            return cast(Any, function).apply(*arguments)
        return (transformed if functorch_transforms() else eager).apply(*arguments)

    return apply


def enclosing_hooks() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None:
    """Return the hooks on saved tensors that are in force; None without any, and of a torch that does not tell."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    found: tuple[Any, Any] | None = None if top is None else top(True)
    return found


def real_tensors() -> AbstractContextManager[object]:
    """Return a context in which tensors have values in any mode: for constants that are kept after the mode ends.

    Under FakeTensorMode and during tracing, tensors have no values, and a kept tensor would be used by later calls.
    """
    return _without_modes() if _modes() or _modes_before_dispatch() else nullcontext()


@constant_when_compiled
def accelerator() -> str | None:
    """Return the type of the accelerator that this machine has; None if it has none, whatever torch was built for."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


@constant_when_compiled
def has_fp64(device: str) -> bool:
    """Whether a device type computes in fp64: Apple's GPUs and some of Intel's do not."""
    return _tried_fp64(device)


def widest_float(device: torch.device) -> torch.dtype:
    """Return fp64, or fp32 for a device without fp64."""
    return torch.float64 if has_fp64(device.type) else torch.float32


@functools.cache
def _tried_fp64(device: str) -> bool:
    if device in ("cpu", "cuda", "meta"):
        return True
    try:
        with real_tensors():
            return bool((torch.ones((), dtype=torch.float64, device=device) + 1 == 2).item())
    except (RuntimeError, TypeError):
        return False


def has_compiled() -> bool:
    """Whether torch.compile has compiled anything in this process; does not load the compiler."""
    found = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return bool(found and found.get("frames"))


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model within DataParallel, DistributedDataParallel and compiled modules."""
    while True:
        if isinstance(model, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), torch.nn.Module):
            model = inner
        else:
            return model


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether a module, or one within it, is what torch.compile has returned."""
    return any(isinstance(getattr(one, "_orig_mod", None), torch.nn.Module) for one in model.modules())


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """Whether `module.compile()` was called, after which its hooks are part of the compiled code."""
    return getattr(module, "_compiled_call_impl", None) is not None


def forward_hooks(module: torch.nn.Module) -> MutableMapping[object, Callable[..., Any]]:
    """Return what a module calls after its forward, by a key: adding without a handle takes a tenth of the time."""
    return cast(MutableMapping[object, Callable[..., Any]], module._forward_hooks)


def gathered_parameters(module: Any) -> Iterator[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
    """Yield each parameter of which FSDP2 (fully_shard) has gathered the whole for this module, and its shard.

    The optimizer holds the shard; the leaf of the graph, which receives this rank's gradient, is the whole.
    """
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for one in group.fsdp_params:
            whole = getattr(one, "_unsharded_param", None)  # made by the first forward pass
            if whole is not None:
                yield whole, one.sharded_param


def part_of(tensor: Any) -> tuple[Sequence[int], Sequence[int]]:
    """Return where this rank's part of a DTensor begins in the whole, along each dimension, and its sizes."""
    given = tensor.shape, tensor.device_mesh, tensor.placements
    sizes, begins = cast(Any, private("torch.distributed.tensor._utils.compute_local_shape_and_global_offset"))(*given)
    return begins, sizes


def rendezvous_store() -> Any:
    """Return the store by which the ranks of the default group have found each other; None if it has none (MPI)."""
    return cast(Any, private("torch.distributed.distributed_c10d._get_default_store"))()


def all_gather(output: torch.Tensor, own: torch.Tensor, group: Any) -> None:
    """Gather a tensor of every rank into one; torch 2.13 has renamed it."""
    gather = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
    gather(output, own, group=group)


def hooks_after_accumulation(parameter: torch.Tensor) -> dict[int, Any]:
    """The hooks that run once a parameter's gradient is accumulated, as torch looks them up; {} where there is none."""
    found: dict[int, Any] | None = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return {} if found is None else found


def norms(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the Euclidean norm of each tensor of one device, fp32, computed in fp32; 0 for an empty one."""
    return torch.stack(_foreach_norm(list(tensors), 2.0, torch.float32))


def scale_of(scaler: Any) -> torch.Tensor | None:
    """Return the loss scale of a GradScaler as a tensor of its device; None before its first use."""
    found = getattr(scaler, "_scale", None)
    return found if isinstance(found, torch.Tensor) else None


def stages_of(scaler: Any) -> Any:
    """Return what a GradScaler knows of the step that is going on: another object after each update; None without."""
    return getattr(scaler, "_per_optimizer_states", None)


def adds_up(loss: torch.Tensor, scaled: bool) -> bool:
    """Whether a loss is the mean of its batch as a function of torch's has computed it, with no factor behind it.

    `scaled`: but for one of a loss scaler.
    """
    node: Any = loss.grad_fn
    if scaled and type(node).__name__.startswith("Mul"):
        node = node.next_functions[0][0]
    for _ in range(8):
        name = type(node).__name__
        if name.startswith(_REDUCING):
            return name.startswith("Mean") or getattr(node, "_saved_reduction", _MEAN) == _MEAN
        if not name.startswith(_PASSING):
            return False
        node = node.next_functions[0][0]
    return False


def is_multiplied(loss: torch.Tensor) -> bool:
    """Whether a constant factor, such as that of a loss scaler, was the last that was done to a loss."""
    node: Any = loss.grad_fn
    return type(node).__name__.startswith("Mul") and any(before is None for before, _ in node.next_functions)


def metadata_of(edge: Any) -> Any:
    """Return what has the shape, dtype and device of the tensor at an edge of the graph."""
    return edge.node._input_metadata[edge.output_nr]


def sparse_values(x: torch.Tensor) -> torch.Tensor | None:
    """Return the dense tensor of values of a sparse or jagged tensor; None for layouts that have none (mkldnn)."""
    if x.layout is torch.sparse_coo:
        return _values(x)  # not coalesced: values() requires coalesced tensors
    return None if x.layout is _MKLDNN else x.values()


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


check_torch(torch.__version__)
_foreach_norm = cast(Callable[..., list[torch.Tensor]], private("torch._foreach_norm"))
_REDUCING = ("Mean", "NllLoss", "MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "CrossEntropyLoss")
_PASSING = ("ToCopy", "View", "Squeeze", "Alias", "Clone")  # nodes of the graph that leave a loss's value as it is
_MEAN = 1  # at::Reduction::Mean
COMPILES_REGIONS = (_parsed(torch.__version__) or TORCH_TESTED) >= TORCH_COMPILES_REGIONS
_values = cast(Callable[[torch.Tensor], torch.Tensor], private("torch.Tensor._values"))
_MKLDNN = private("torch._mkldnn")
functorch_transforms = cast(
    Callable[[], bool], private("torch._C._are_functorch_transforms_active")
)  # whether any is active
_modes = cast(Callable[[], int], private("torch._C._len_torch_dispatch_stack"))
_modes_before_dispatch = cast(Callable[[], int], private("torch._ops._len_torch_dispatch_stack_pre_dispatch"))
_without_modes = cast(
    Callable[[], AbstractContextManager[object]], private("torch.utils._python_dispatch._disable_current_modes")
)
_set_strategy: Any = private("torch._C._dynamo.eval_frame.set_code_exec_strategy")
_strategy: Any = private("torch._C._dynamo.eval_frame._FrameExecStrategy")
_action: Any = private("torch._C._dynamo.eval_frame._FrameAction")
_run_backward: Any = private("torch.autograd.graph._engine_run_backward")
