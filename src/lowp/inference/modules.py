"""The layers of a served model: packed weights in buffers, products by `kernels.products.contract_packed`."""

import json
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowp import kernels
from lowp.casts import Cast, parse
from lowp.formats import ScaledFormat
from lowp.kernels.numbers import groups, packing, scaled
from lowp.kernels.packed import byte_products, byte_rows, few_bits, few_rows
from lowp.kernels.packed.byte_products import Panels
from lowp.kernels.packed.byte_rows import Activations, Bytes, Range
from lowp.kernels.packed.few_bits import ByteScales, PackedCodes
from lowp.kernels.packed.few_rows import StoredRows
from lowp.kernels.products import contract_packed
from lowp.kernels.tracing import is_eager
from lowp.portable.stored import Errors, Packed, parts_of, store, unpack
from lowp.quantized import Quantized


class Weight(nn.Module, ABC):
    """A weight matrix [n, k] in few bits, and the product of activations with it.

    A function of torch that is given it, as by a model that ties its output to its embedding, reads its values; so does
    whoever asks for what a tensor has (`weight.t()`, `weight.shape`). F.linear takes the product.
    """

    n: int
    k: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and len(args) > 1 and isinstance(args[1], Weight) and not isinstance(args[0], Weight):
            x, weight, bias = args[0], args[1], args[2] if len(args) > 2 else kwargs.get("bias")
            return linear(x.detach(), weight, bias) if is_eager(x) else ServedLinear(weight, bias)(x)
        plain = [one.values() if isinstance(one, Weight) else one for one in args]
        return func(*plain, **{name: one.values() if isinstance(one, Weight) else one for name, one in kwargs.items()})

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or not hasattr(Tensor, name):
                raise
            return getattr(self.values(), name)

    def rows_at(self, indices: Tensor) -> Tensor:
        """Return rows in fp32 [..., k]."""
        return F.embedding(indices, self.values())

    @abstractmethod
    def values(self) -> Tensor:
        """The weight in fp32 [n, k], in the order of the layer's own weight."""

    def values_of(self, first: int, count: int) -> Tensor:
        """The values of some rows, of which the first is a multiple of 64."""
        return self.values()[first : first + count]

    @abstractmethod
    def product(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Return rows @ weight.T + bias in fp32, of rows fp32 [m, k]."""


class _Bytewise(Weight):
    """Activations in bytes, over a range of calibration or of each tensor's own (dynamic)."""

    def __init__(self, weight: Tensor | Quantized, over: Range | None, highest: int) -> None:
        super().__init__()
        self.n, self.k = weight.shape
        self.highest = highest
        self.dynamic = over is None
        scale, zero, _ = over or Range(1.0, 0, highest)
        self.register_buffer("input_scale", torch.tensor(scale, dtype=torch.float32, device="cpu"))
        self.register_buffer("input_zero", torch.tensor(zero, dtype=torch.int32, device="cpu"))

    def range(self) -> Range | int:
        """Where the activations lie, by calibration; or the highest byte over their own range."""
        if self.dynamic:
            return self.highest
        scale, zero = self._buffers["input_scale"], self._buffers["input_zero"]
        assert scale is not None and zero is not None
        return Range(scale.item(), int(zero.item()), self.highest)

    def bytes(self, rows: Tensor) -> Bytes:
        """Activations in bytes."""
        over = self.range()
        return byte_rows.to_bytes(rows, *(byte_rows.own_range(rows, over) if isinstance(over, int) else over))


class Int8(_Bytewise):
    """int8, a scale a row, times activations in bytes."""

    def __init__(self, weight: Tensor | Quantized, over: Range | None, highest: int) -> None:
        super().__init__(weight, over, highest)
        codes = _encoded(weight, parse("int8"))
        for name, tensor in byte_products.pack(codes.payload, codes.scale, highest)._asdict().items():
            if isinstance(tensor, Tensor):
                self.register_buffer(name, tensor)

    def panels(self) -> Panels:
        """The packed weight."""
        held: Any = self._buffers
        return Panels(held["memory"], held["ways"], held["sums"], held["scales"], self.n, self.k, self.highest)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        """As every module; weights that were packed for another processor are packed for this one."""
        given = {name: state_dict.get(prefix + name) for name in ("memory", "ways", "sums", "scales")}
        if all(isinstance(one, Tensor) for one in given.values()) and given["memory"].ndim != self.panels().memory.ndim:
            packed = byte_products.repacked(Panels(**given, n=self.n, k=self.k, highest=self.highest))
            state_dict = {**state_dict, **{prefix + name: getattr(packed, name) for name in given}}
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def codes(self) -> Tensor:
        """The weight in int8 [n, k]."""
        return byte_products.unpacked(self.panels())

    def part(self, first: int, count: int) -> Panels:
        """The packed weight of some rows, whose number is a multiple of 16, as their first is."""
        whole = self.panels()
        panels, rows = (slice(first // unit, (first + count) // unit) for unit in (byte_products.PANEL, 1))
        memory = whole.memory[panels] if whole.memory.ndim == 4 else whole.memory[rows]
        return Panels(memory, whole.ways[panels], whole.sums[rows], whole.scales[rows], count, self.k, self.highest)

    def values(self) -> Tensor:
        """The codes times the scale of their row."""
        return self.codes().float() * self.get_buffer("scales")[: self.n, None]

    def rows_at(self, indices: Tensor) -> Tensor:
        """Of a layout in panels, of these alone."""
        codes = self.get_buffer("memory")
        if codes.ndim != 4:
            return super().rows_at(indices)
        found = codes[indices // byte_products.PANEL, :, indices % byte_products.PANEL].flatten(-2)[..., : self.k]
        return found.float() * self.get_buffer("scales")[indices][..., None]

    def product(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        return contract_packed((Activations(rows, self.range()), self.panels()), bias)


class _Coded(Weight):
    """Codes of few bits, which represent integers."""

    group: int
    shift: int

    def hold(self, made: PackedCodes) -> None:
        """Keep packed weights in buffers."""
        for name in ("memory", "scales", "levels"):
            self.register_buffer(name, getattr(made, name))
        self.group = made.group
        if made.read is not None:
            self.shift = made.read.shift
            self.register_buffer("factor", made.read.factor)

    def codes(self) -> PackedCodes:
        """The packed weight."""
        held: Any = self._buffers
        memory, scales, levels = held["memory"], held["scales"], held["levels"]
        read = ByteScales(self.shift, held["factor"]) if scales.dtype is torch.uint8 else None
        return PackedCodes(memory, scales, levels, self.n, self.k, self.group, read)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        """As every module; scales in fp32, as all formats had them before, stay so."""
        scales, factor = state_dict.get(f"{prefix}scales"), self._buffers.get("factor")
        if factor is not None and isinstance(scales, Tensor) and scales.dtype is torch.float32:
            self._buffers["scales"] = torch.empty_like(scales)
            state_dict = {f"{prefix}factor": factor, **state_dict}
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def values(self) -> Tensor:
        """The numbers of the codes times the scales of their groups."""
        return few_bits.code_values(self.codes())

    def values_of(self, first: int, count: int) -> Tensor:
        return few_bits.code_values(self.codes(), first, count)

    def rows_at(self, indices: Tensor) -> Tensor:
        return few_bits.code_rows(self.codes(), indices.flatten()).reshape(*indices.shape, self.k)


class Nibble(_Coded):
    """4 bits and less under scales of blocks: e2m1, mxfp4, nvfp4, if4, int4; activations stay in fp32."""

    def __init__(self, weight: Tensor | Quantized, cast: Cast) -> None:
        super().__init__()
        self.n, self.k = weight.shape
        other = cast.format.other if isinstance(cast.format, ScaledFormat) else None
        found = [few_bits.levels_of(one) for one in (cast.element, other) if one is not None]
        levels, (unit, *_) = zip(*found, strict=True)  # `packed` has seen that there are some
        codes, scales, group, read = _nibbles_of(weight, cast, unit)
        self.hold(few_bits.pack_codes(codes, scales, levels if other else levels[0], group, read))

    def product(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """In whole numbers, of fp32 numbers to 20 bits."""
        return contract_packed((rows, self.codes()), bias)


def _encoded(weight: Tensor | Quantized, cast: Cast) -> Any:
    """The codes of a weight, and those of one that is in codes already."""
    return weight if isinstance(weight, Quantized) else kernels.encode(weight.detach().float(), cast)


def _nibbles_of(weight: Tensor | Quantized, cast: Cast, unit: float) -> tuple[Tensor, Tensor, int, ByteScales | None]:
    """Codes 0 to 15, a scale a group times `unit`, the length of a group (16, 32 or 64), and how bytes are read.

    Scales that are stored as bytes stay so.
    """
    codes = _encoded(weight, cast)
    n, k = weight.shape
    if isinstance(codes, Tensor):
        return codes.long() & 15, torch.tensor(unit, device="cpu").expand(n, k)[:, ::64], 64, None
    format, of_all = scaled.scaled_format(cast), unit if codes.outer is None else codes.outer.double() * unit
    read = few_bits.byte_scales(format, of_all)
    scales = codes.scale if read is not None else (scaled.read_scales(codes.scale, format) * of_all).float()
    size = format.scope.size or 64
    group = next(one for one in (64, 32, 16) if size % one == 0)
    return (
        codes.payload.long() & 15,
        groups.spread(scales, weight.shape, format.scope).expand(n, k)[:, ::group],
        group,
        read,
    )


class Sign(_Bytewise, _Coded):
    """Binary or ternary: a bit or two a weight, a scale a row, times activations in bytes."""

    def __init__(self, weight: Tensor | Quantized, cast: Cast, over: Range | None, highest: int) -> None:
        super().__init__(weight, over, highest)
        if cast.element.bits == 2:
            found = _encoded(weight, cast)
            codes, scales, levels = found.payload.long() + 1, found.scale, [-1, 0, 1, 0]
        else:
            assert isinstance(weight, Tensor)
            weight = weight.detach().float()
            codes, scales, levels = (weight < 0).long(), weight.double().abs().mean(1), [1, -1]
        self.hold(few_bits.pack_codes(codes, scales.reshape(-1, 1), levels, 0))

    def product(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        return contract_packed((self.bytes(rows), self.codes()), bias)


class Stored(Weight):
    """Any other format: kept in its dtype, or as codes with their scales, whose values are multiplied."""

    def __init__(self, weight: Tensor | Quantized, cast: Cast) -> None:
        super().__init__()
        self.n, self.k = weight.shape
        self.cast = str(cast)
        if isinstance(weight, Quantized):
            pieces = parts_of(replace(weight, payload=packing.pack(weight.payload, cast.element)))
        else:
            found = store(weight.detach().float(), cast, 0, Errors())
            pieces = {suffix: torch.cat(some) if len(some) > 1 else some[0] for suffix, some in found.items()}
        for suffix, piece in pieces.items():
            self.register_buffer(f"part{suffix.replace('.', '_')}", piece)

    def rows(self) -> StoredRows | None:
        """The weight as the product of few rows reads it; None for a format that it does not read."""
        held, cast = self._buffers, parse(self.cast)
        memory = held["part"] if "part" in held else held["part_codes"]
        assert memory is not None
        return few_rows.stored_rows(memory, self.k, cast, held.get("part_scale"), held.get("part_outer"))

    def values(self) -> Tensor:
        rows, held = self.rows(), self._buffers
        if rows is not None:
            return few_rows.values(rows)
        if "part" in held:
            return self.get_buffer("part").float()
        parts = {name.removeprefix("part").replace("_", ".", 1): one for name, one in held.items() if one is not None}
        return unpack("", Packed(parse(self.cast), (self.n, self.k), torch.float32), parts)

    def values_of(self, first: int, count: int) -> Tensor:
        """Of these alone, in formats that the product of few rows reads."""
        rows = self.rows()
        return super().values_of(first, count) if rows is None else few_rows.values(rows, first, count)

    def rows_at(self, indices: Tensor) -> Tensor:
        """Of these alone, in formats that the product of few rows reads."""
        rows = self.rows()
        if rows is None or rows.together > 1:
            return super().rows_at(indices)
        flat = indices.flatten()
        some = rows._replace(memory=rows.memory[flat], scales=None if rows.scales is None else rows.scales[flat])
        return few_rows.values(some).reshape(*indices.shape, self.k)

    def product(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """In fp32; on a CPU few rows read weights as they are stored, and sum in fp64."""
        weight = self.rows()
        if weight is not None:
            return contract_packed((rows, weight), bias)
        return F.linear(rows, self.values(), bias)


def packed(weight: Tensor | Quantized, cast: Cast, over: Range | None, highest: int) -> Weight:
    """A weight [n, k], or its codes, in the form that its format is served in."""
    if str(cast) == "int8":
        return Int8(weight, over, highest)
    if str(cast) in ("binary", "ternary"):
        return Sign(weight, cast, over, highest)
    if few_bits.is_read(cast):
        return Nibble(weight, cast)
    return Stored(weight, cast)


# -- layers -----------------------------------------------------------------------------------------------------------
class Served(nn.Module, ABC):
    """A layer with a packed weight. It has no gradient: it is made from a trained layer, and serves.

    Compilers, exporters, modes and transforms see one operator of it, `lowp::served`, which runs the same.
    """

    def __init__(self, weight: Weight, bias: Tensor | None, **geometry: Any) -> None:
        super().__init__()
        self.weight = weight
        self.register_buffer("bias", None if bias is None else bias.detach().clone().float())
        for name, value in geometry.items():
            setattr(self, name, value)
        self._geometry = geometry
        self.describe()

    def describe(self) -> None:
        """Keep the text of what the layer is beside its tensors."""
        weight = self.weight
        of_weight = {name: value for name, value in vars(weight).items() if isinstance(value, (int, str))}
        held = [name for name, one in weight._buffers.items() if one is not None]
        self.text = json.dumps([type(self).__name__, self._geometry, type(weight).__name__, of_weight, held])

    def forward(self, x: Tensor) -> Tensor:
        """What the layer that this one replaces returns, computed with the packed weight."""
        if is_eager(x):
            return self.computed(x.detach())
        held = [one for one in (*self.weight._buffers.values(), self._bias()) if one is not None]
        found: Tensor = torch.ops.lowp.served(x.detach(), held, self.text)
        return found

    @abstractmethod
    def computed(self, x: Tensor) -> Tensor:
        """The result."""

    @abstractmethod
    def empty(self, x: Tensor) -> Tensor:
        """A tensor as the result, without its numbers, of an x that has none."""

    def _bias(self) -> Tensor | None:
        found: Tensor | None = self._buffers["bias"]
        return found


def linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias in x's dtype."""
    found = weight.product(x.reshape(-1, weight.k).float(), bias)
    return found.reshape(*x.shape[:-1], weight.n).to(x.dtype)


class ServedLinear(Served):
    """`nn.Linear` with a packed weight."""

    def computed(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias in x's dtype."""
        return linear(x, self.weight, self._bias())

    def empty(self, x: Tensor) -> Tensor:
        return x.new_empty(*x.shape[:-1], self.weight.n)

    def extra_repr(self) -> str:
        return f"{self.weight.k}, {self.weight.n}"


class ServedEmbedding(Served):
    """`nn.Embedding` whose rows are stored in few bits; only the requested rows are converted to fp32."""

    def computed(self, indices: Tensor) -> Tensor:
        """Return the rows at `indices`, in fp32."""
        return self.weight.rows_at(indices)

    def empty(self, indices: Tensor) -> Tensor:
        return indices.new_empty(*indices.shape, self.weight.k, dtype=torch.float32)
