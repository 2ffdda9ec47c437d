"""`convert`: writes a checkpoint in another number format, tensor by tensor, and reports the errors of each."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from lowp import casts, files
from lowp.casts import Cast
from lowp.errors import InvalidInput
from lowp.formats import Format, ScaledFormat
from lowp.formats.types import FloatFormat
from lowp.kernels.numbers.floats import CARRIERS
from lowp.portable.safetensors_file import Spool
from lowp.portable.sources import KEY, METADATA, ShardedSource, Source, open_source
from lowp.portable.stored import Errors, Packed, is_narrow, overflow_limit, store, stored_dtype

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


@dataclass(frozen=True)
class TensorReport:
    """The conversion of one tensor: `reason` says why it was not converted, and is empty if it was."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    reason: str
    largest_error: float
    rms_error: float
    flushed: int
    overflowed: int
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class Converted:
    """The result of a conversion: the files, the format, and a report of each tensor."""

    files: tuple[str, ...]
    format: str
    tensors: tuple[TensorReport, ...]
    left_out: Mapping[str, str]

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


@dataclass(frozen=True)
class _Job:
    cast: Cast
    keep: tuple[str, ...]
    seed: int
    done: Callable[[str], None]


def convert(
    source: str | Path,
    target: str | Path,
    to: str | Cast | Format,
    *,
    keep: Iterable[str] = (),
    entry: str | None = None,
    seed: int = 0,
    overwrite: bool = False,
    started: Callable[[int], None] = lambda count: None,
    done: Callable[[str], None] = lambda name: None,
) -> Converted:
    """Write the tensors of a checkpoint in another format, and return a report of each.

    `source`: a safetensors file, the index or the folder of one in shards, or a torch file; `target`: a .safetensors
    file, a torch file (.pt, .pth, .bin, .ckpt), or a folder for shards like those of the source. One tensor is in
    memory at a time. Formats that torch has a dtype for are stored in it; others as packed codes with their scales,
    named in the metadata, for `lowp.load` to read. Not converted: integers, tensors with fewer than two dimensions if
    the format has a shared scale or fewer than 16 bits, tensors with numbers that the format cannot hold, and names
    that match a pattern in `keep`. `seed` decides stochastic rounding. `started` is called with the number of tensors,
    `done` with the name of each.

    The target is written under a temporary name and renamed; an existing file is replaced only with `overwrite`.
    Raises InvalidCheckpoint for a damaged or hostile source, InvalidInput for an invalid target.
    """
    cast, out = casts.parse(to), Path(target)
    if cast.scaling is not None and cast.scaling.kind not in ("current", "static"):
        raise InvalidInput(f"{cast}: a {cast.scaling.kind} scale depends on earlier tensors: give current scaling")
    job = _Job(cast, tuple(keep), seed, done)
    with open_source(source, entry) as opened:
        shards = _shards(opened, out)
        _check_targets(opened, [out / name for name in (*shards, _index_name(opened))] if shards else [out], overwrite)
        names = opened.names()
        if not names:
            raise InvalidInput(f"{opened.path} holds no tensors")
        for pattern in job.keep:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise InvalidInput(f"no tensor is named {pattern}; the first are {', '.join(names[:5])}")
        started(len(names))
        if shards:
            reports = _write_shards(opened, out, shards, job)
            written = [*(out / name for name in shards), out / _index_name(opened)]
        else:
            reports = _write_file(opened, out, names, job)
            written = [out]
        return Converted(tuple(map(str, written)), str(cast), tuple(reports), dict(opened.left_out))


# -- targets ----------------------------------------------------------------------------------------------------------
def _shards(source: Source, out: Path) -> list[str]:
    """Return the files of a sharded target; an empty list for a single file."""
    if out.suffix == ".safetensors" or out.suffix in TORCH_SUFFIXES:
        return []
    if not out.is_dir():
        allowed = ", ".join((".safetensors", *TORCH_SUFFIXES))
        raise InvalidInput(
            f"{out} has none of the endings {allowed}, and is not a folder (for shards): give one of these"
        )
    if not isinstance(source, ShardedSource):
        raise InvalidInput(f"{out} is a folder, which is for shards, but {source.path} has none: give a file in it")
    return [Path(name).with_suffix(".safetensors").name for name in dict.fromkeys(map(source.file_of, source.names()))]


def _index_name(source: Source) -> str:
    return source.path.name.replace(".bin.", ".safetensors.")


def _check_targets(source: Source, targets: list[Path], overwrite: bool) -> None:
    if len(set(targets)) < len(targets):
        raise InvalidInput(f"two shards of {source.path} would have one name: rename them first")
    own = {source.path, *(source.path.parent / source.file_of(name) for name in source.names())}
    for target in targets:
        here = files.target_of(target)
        if any(files.same_file(here, one) for one in own):
            raise InvalidInput(f"{target} is the input checkpoint: give another file")
        files.check_target(target, overwrite=overwrite)


# -- writing ----------------------------------------------------------------------------------------------------------
def _write_file(source: Source, out: Path, names: list[str], job: _Job) -> list[TensorReport]:
    with ExitStack() as stack:
        file = stack.enter_context(files.replacing(out))
        spool = stack.enter_context(Spool(files.target_of(out).parent))
        reports, packed = _spool(source, names, job, spool)
        metadata = _metadata(source, job.cast, packed)
        if out.suffix in TORCH_SUFFIXES:
            _write_torch(file, spool, metadata, source.modules)
        else:
            spool.write(file, metadata)
    return reports


def _write_shards(source: Source, folder: Path, shards: list[str], job: _Job) -> list[TensorReport]:
    """Write every shard atomically and the index last, so that an old index of the folder stays valid until then."""
    assert isinstance(source, ShardedSource)
    reports: list[TensorReport] = []
    weight_map: dict[str, str] = {}
    total = 0
    for shard in shards:
        names = [name for name in source.names() if Path(source.file_of(name)).stem == Path(shard).stem]
        with files.replacing(folder / shard) as file, Spool(files.target_of(folder / shard).parent) as spool:
            found, packed = _spool(source, names, job, spool)
            spool.write(file, _metadata(source, job.cast, packed))
            reports += found
            total += spool.nbytes
            weight_map.update(dict.fromkeys(spool.names, shard))
    index = {"metadata": {**source.index["metadata"], "total_size": total}, "weight_map": weight_map}
    files.write(folder / _index_name(source), json.dumps(index, indent=2))
    return reports


def _write_torch(file: IO[bytes], spool: Spool, metadata: dict[str, str], modules: dict[str, Any]) -> None:
    """Write a plain state_dict; metadata is stored in torch's entry for module metadata."""
    from collections import OrderedDict

    state = OrderedDict(spool.mapped())
    state._metadata = OrderedDict({**modules, METADATA: metadata})  # type: ignore[attr-defined]
    torch.save(state, file)


def _metadata(source: Source, cast: Cast, packed: dict[str, Packed]) -> dict[str, str]:
    own = {name: text for name, text in source.metadata.items() if not name.startswith("lowp.")}
    own["lowp.format"] = str(cast)
    if packed:
        own[KEY] = json.dumps({name: one.as_json() for name, one in packed.items()})
    return own


# -- a tensor ---------------------------------------------------------------------------------------------------------
def _spool(source: Source, names: list[str], job: _Job, spool: Spool) -> tuple[list[TensorReport], dict[str, Packed]]:
    reports, packed = [], {}
    for name in names:
        x = source.tensor(name)
        before, errors = spool.nbytes, Errors()
        reason = _why_unconverted(name, x, job, errors)
        if reason:
            spool.add(name, [x], tuple(x.shape))
        else:
            parts = store(x, job.cast, job.seed, errors)
            for suffix, pieces in parts.items():
                rows = sum(piece.shape[0] for piece in pieces) if pieces[0].ndim else 0
                spool.add(name + suffix, pieces, (rows, *pieces[0].shape[1:]) if pieces[0].ndim else ())
            if stored_dtype(job.cast) is None:
                wide = torch.float64 if x.dtype is torch.float64 else torch.float32
                packed[name] = Packed(job.cast, tuple(x.shape), wide)
            del parts
        seen = (errors.largest, errors.rms, errors.flushed, errors.overflowed)
        dtype, sizes = str(x.dtype).removeprefix("torch."), (x.numel() * x.element_size(), spool.nbytes - before)
        reports.append(TensorReport(name, tuple(x.shape), dtype, reason, *seen, *sizes))
        del x  # before the next one is read
        job.done(name)
    return reports, packed


def _why_unconverted(name: str, x: Tensor, job: _Job, errors: Errors) -> str:
    """Return why a tensor is not converted; '' if it is."""
    if not x.is_floating_point():
        return "not floating-point"
    if any(fnmatchcase(name, pattern) for pattern in job.keep):
        return "asked for (keep)"
    if not x.numel():
        return "no elements"
    if x.ndim < 2 and is_narrow(job.cast):
        return "fewer than two dimensions (a bias, a norm)"
    return _unfit(x if x.dtype in CARRIERS else x.float(), job.cast, errors)


def _unfit(x: Tensor, cast: Cast, errors: Errors) -> str:
    """Return which numbers of a tensor the format cannot represent; '' if it represents all."""
    element = cast.element
    low, high = (float(one) for one in torch.aminmax(x))  # NaN if there is one
    is_finite = math.isfinite(low) and math.isfinite(high)
    floating = element if isinstance(element, FloatFormat) and not isinstance(cast.format, ScaledFormat) else None
    if not is_finite and (missing := _missing(x, floating)):
        return f"holds {missing}, which {cast.format} has not"
    if floating is not None and cast.overflow != "saturate":
        limit = overflow_limit(floating)
        beyond = 0
        if not is_finite or max(-low, high) >= limit:
            beyond = int((x.isfinite() & (x.double().abs() >= limit)).sum())
        if beyond:
            errors.overflowed = beyond
            words = "a number is" if beyond == 1 else f"{beyond} numbers are"
            return f"{words} beyond {floating.maximum:g}; {cast.format}:saturate would cut them"
    if isinstance(element, FloatFormat) and not element.signed and bool((x < 0).any()):
        return f"holds negative numbers, which {cast.format} has not"
    return ""


def _missing(x: Tensor, format: FloatFormat | None) -> str:
    """Return how many numbers are not finite, if a format lacks them; None: integers, or one with a shared scale."""
    nans, infinite = int(x.isnan().sum()), int(x.isinf().sum())
    has_nans, has_infinities = (False, False) if format is None else (format.has_nan, format.has_infinity)
    if (has_nans or not nans) and (has_infinities or not infinite):
        return ""
    return f"{nans} NaN and {infinite} infinite numbers"
