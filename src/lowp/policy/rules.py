"""Rules: the ops and modules that a rule names, and one cast for each role a tensor plays there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any

from lowp import casts
from lowp.casts import Cast
from lowp.errors import InvalidInput, UnknownName, brief, check_name, unknown
from lowp.formats import FORMATS, FloatFormat, ScaledFormat, Scope

# the classes of ops that a rule can name, with the casts that a table itself adds
OP_CLASSES = {
    "contraction": "products that are summed: linear, matmul, convolution, attention, recurrent cells",
    "norm": "batch, layer, group, instance and RMS norm: read 16 bits, compute in fp32, write 16 bits",
    "softmax": "softmax and log_softmax: read 16 bits, compute in fp32, write 16 bits",
    "wide": "ops that need fp32's range or precision: losses, exponentials, powers, long reductions",
    "promote": "ops of several tensors that take the widest type among them: cat, stack, addcmul, where",
    "pointwise": "every other floating-point op, in the type of its input",
}
CAST_ROLES = ("input", "weight", "grad", "output", "saved")
# the products of the backward pass, and the operands that each of them reads
PRODUCTS = {"input_gradient": ("grad", "weight"), "weight_gradient": ("grad", "input")}
OF_OPERANDS = "delayed scales are for the operands of products, input, weight and grad: give"
HADAMARD_SIZES = tuple(2**power for power in range(1, 9))


@dataclass(frozen=True)
class Accumulation:
    """How the sum of a contraction is carried: products are exact, the running sum is rounded to `format`.

    `block` is the number of products summed exactly (in fp32) between two roundings to `format`; fp32 needs none.
    ``fp16/16`` is an fp16 accumulator that sees blocks of 16, ``exact`` a sum rounded once, ``int32`` the proven-safe
    integer chains of DFP-16.
    """

    format: str = "fp32"
    block: int = 0

    FORMATS = ("fp32", "fp16", "bf16", "int32", "exact")

    def __post_init__(self) -> None:
        check_name("accumulator", self.format, self.FORMATS)
        if (self.format in ("fp16", "bf16")) != (self.block > 0):
            raise InvalidInput(
                f"accumulator {self.format} with block {self.block}: fp16 and bf16 need a block of 1 or more products "
                "(fp16/16), the other formats have no block"
            )

    @classmethod
    def parse(cls, text: str | Accumulation) -> Accumulation:
        """``fp32``, ``fp16/16``, ``bf16/128``, ``int32`` or ``exact``; fp16 and bf16 alone mean a block of 1."""
        if isinstance(text, Accumulation):
            return text
        if not isinstance(text, str):
            raise InvalidInput(
                f"accumulate={text!r}: give a format and a block of products as text: fp16/16, bf16/128, "
                "fp32, int32 or exact"
            )
        format, slash, block = text.strip().lower().partition("/")
        if slash and not block.isdecimal():
            raise InvalidInput(f"accumulator {text!r}: after the slash comes the block length, as in fp16/16")
        return cls(format, int(block) if slash else int(format in ("fp16", "bf16")))

    def __str__(self) -> str:
        return f"{self.format}/{self.block}" if self.block else self.format


@dataclass(frozen=True)
class Operands:
    """The casts of the operands of one product of the backward pass, where they differ from those of its rule.

    None reads what the rule says: of `input` and `weight` the values that forward rounded, `grad` by the rule's `grad`.
    `hadamard` rotates both operands before their casts, in blocks of so many numbers along the sum.
    """

    input: Cast | None = None
    weight: Cast | None = None
    grad: Cast | None = None
    hadamard: int = 0

    def __post_init__(self) -> None:
        for role in ("input", "weight", "grad"):
            if (value := getattr(self, role)) is not None:
                object.__setattr__(self, role, carried(role, casts.parse(value)))
        size = self.hadamard
        if type(size) is not int or (size and size not in HADAMARD_SIZES):
            raise InvalidInput(f"hadamard={size!r}: give a power of two from 2 to 256, or 0 for none")

    @classmethod
    def parse(cls, given: str | Mapping[str, object] | Operands) -> Operands:
        """``input=mxfp8 grad=mxfp8:stochastic hadamard=16`` as text, or the same as a mapping."""
        if isinstance(given, Operands):
            return given
        if isinstance(given, str):
            pairs = [word.partition("=")[::2] for word in given.split()]
            given = dict(pairs)
            if len(given) < len(pairs):
                raise InvalidInput(f"{' '.join(map('='.join, pairs))}: a key is given twice")
        if not isinstance(given, Mapping):
            raise InvalidInput(f'{brief(given)} is not the casts of a product: give text, as "grad=bf16 input=bf16"')
        known_keys(given, [one.name for one in fields(cls)], "a product of the backward pass")
        size = given.get("hadamard", 0)
        size = int(size) if isinstance(size, str) and size.isdecimal() else size
        texts = {key: value for key, value in given.items() if key != "hadamard"}
        return cls(**{key: casts.parse(value) for key, value in texts.items()}, hadamard=size)  # type: ignore[arg-type]

    @property
    def other(self) -> Cast | None:
        """The cast of the operand of the forward product, of which each of these products reads one."""
        return self.input if self.weight is None else self.weight

    @property
    def casts(self) -> dict[str, Cast]:
        """The casts that are given, by role."""
        return {role: cast for role in ("input", "weight", "grad") if (cast := getattr(self, role)) is not None}

    def values(self) -> dict[str, Any]:
        """The entries that are given, by the keys of a policy file."""
        found: dict[str, Any] = {role: str(cast) for role, cast in self.casts.items()}
        return found | ({"hadamard": self.hadamard} if self.hadamard else {})

    def __str__(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.values().items())


@dataclass(frozen=True)
class Rule:
    """The casts for ops named `ops` in modules whose path matches `where`.

    `ops` holds op names (``linear``), classes (``contraction``) or patterns (``conv*``); empty means every op. `where`
    is a pattern over the module's path in which ``*`` matches anything (``layer4.*``, ``*.head``; ``*`` for all).
    Roles: `input` and `weight` are the operands of the forward product, `grad` the incoming gradient as an operand of
    the two backward products, `output` the result of each of the three products, or of any other op. None leaves a
    tensor unchanged. Casts may be given as text.

    `input_gradient` and `weight_gradient` are casts of one backward product alone: ``grad`` and ``weight`` of the
    former, ``grad`` and ``input`` of the latter. An operand of forward that is named there is kept as it came and
    rounded along the sum of that product. They hold for products of an input and a weight: attention and the steps of
    recurrent layers read operands that are rounded once.

    `saved` is the format of what backward keeps of an activation: of the input of a product, and of what other ops save
    that is as large as their input; attention keeps its operands. Backward reads the values of the codes.
    """

    ops: tuple[str, ...] = ()
    where: str = "*"
    input: Cast | None = None
    weight: Cast | None = None
    grad: Cast | None = None
    output: Cast | None = None
    accumulate: Accumulation | None = None
    input_gradient: Operands | None = None
    weight_gradient: Operands | None = None
    saved: Cast | None = None

    def __post_init__(self) -> None:
        ops = (self.ops,) if isinstance(self.ops, str) else tuple(self.ops)
        object.__setattr__(self, "ops", ops)
        for text in (self.where, *ops):
            check_text(text, "where and ops of a rule")
        for role in CAST_ROLES:
            value = getattr(self, role)
            if value is not None:
                object.__setattr__(self, role, carried(role, casts.parse(value)))
        if self.accumulate is not None:
            object.__setattr__(self, "accumulate", Accumulation.parse(self.accumulate))
        for product in PRODUCTS:
            if (value := getattr(self, product)) is not None:
                operands = Operands.parse(value)
                object.__setattr__(self, product, None if operands == Operands() else operands)
        if self.has_products or self.saved is not None:
            _check_products(self)
        if self.is_delayed:
            _check_delayed(self)

    @classmethod
    def of(
        cls,
        *ops: str,
        where: str = "*",
        input: str | Cast | None = None,
        weight: str | Cast | None = None,
        grad: str | Cast | None = None,
        output: str | Cast | None = None,
        accumulate: str | Accumulation | None = None,
        input_gradient: str | Mapping[str, object] | Operands | None = None,
        weight_gradient: str | Mapping[str, object] | Operands | None = None,
        saved: str | Cast | None = None,
    ) -> Rule:
        """A rule with its casts given as text: ``Rule.of("conv*", where="stem.*", input="bf16", weight="bf16")``."""
        accumulation = None if accumulate is None else Accumulation.parse(accumulate)
        first, second = (None if one is None else Operands.parse(one) for one in (input_gradient, weight_gradient))
        casts = _cast(input), _cast(weight), _cast(grad), _cast(output)
        return cls(ops, where, *casts, accumulation, first, second, _cast(saved))

    def matches(self, op: str, op_class: str, path: str) -> bool:
        """Whether the rule speaks of this op at this module path ('' outside any module)."""
        named = not self.ops or any(is_like(op, name) or name == op_class for name in self.ops)
        return named and (self.where == "*" or is_like(path, self.where))

    @property
    def is_empty(self) -> bool:
        """Whether the rule changes nothing: such a rule protects ops from the rules after it."""
        return self.accumulate is None and not self.has_products and not self.casts

    @property
    def has_products(self) -> bool:
        """Whether a product of the backward pass has casts of its own."""
        return self.input_gradient is not None or self.weight_gradient is not None

    @property
    def is_delayed(self) -> bool:
        """Whether an operand is rounded under a scale from earlier steps."""
        return any(one.is_delayed for one in self.casts)

    @property
    def current(self) -> Rule:
        """The same rule, in which every tensor has the scale of its own maximum where that of this one is delayed."""
        if not self.is_delayed:
            return self
        roles = {role: cast.current for role in CAST_ROLES if (cast := getattr(self, role)) is not None}
        products = {
            product: replace(own, **{role: cast.current for role, cast in own.casts.items()})
            for product in PRODUCTS
            if (own := getattr(self, product)) is not None
        }
        return replace(self, **roles, **products)

    @property
    def _products(self) -> tuple[Operands, ...]:
        return tuple(one for one in (self.input_gradient, self.weight_gradient) if one is not None)

    @property
    def grads(self) -> tuple[Cast, ...]:
        """The casts of the incoming gradient as an operand, of both products."""
        given = (self.grad, *(one.grad for one in self._products))
        return tuple(one for one in given if one is not None)

    @property
    def casts(self) -> tuple[Cast, ...]:
        """Every cast that the rule names."""
        given = (self.input, self.weight, *self.grads, self.output, self.saved, *(one.other for one in self._products))
        return tuple(one for one in given if one is not None)

    def __str__(self) -> str:
        given = [f"{role}={getattr(self, role)}" for role in (*CAST_ROLES, "accumulate") if getattr(self, role)]
        given += [f"{product}=({getattr(self, product)})" for product in PRODUCTS if getattr(self, product)]
        place = "" if self.where == "*" else f" in {self.where or 'the model itself'}"
        return f"{' '.join(self.ops) or 'every op'}{place}: {' '.join(given) or 'as it is'}"


def _cast(text: str | Cast | None) -> Cast | None:
    return None if text is None else casts.parse(text)


def carried(role: str, cast: Cast) -> Cast:
    """Return the cast. Raises InvalidInput for a range beyond fp32's, in which a training step carries values."""
    format, carrier = cast.format, FORMATS["fp32"]
    assert isinstance(carrier, FloatFormat)
    if isinstance(format, FloatFormat) and not (format.fits(carrier) or carrier.fits(format)):
        raise InvalidInput(
            f"{role}={cast}: {format} has numbers from 2**{format.min_exponent - format.mantissa_bits} to below "
            f"2**{format.max_exponent + 1}, and a training step carries them in fp32, from 2**-149 to below 2**128: "
            "give fewer exponent bits, another bias (bN), or no suffix; lowp.quantize takes the format on fp64 tensors"
        )
    return cast


def _check_products(rule: Rule) -> None:
    """Raise InvalidInput for casts of products that no product has, or that its sums cannot read."""
    for product, read in PRODUCTS.items():
        operands: Operands | None = getattr(rule, product)
        if operands is None:
            continue
        given = operands.values()
        if unread := [role for role in given if role not in (*read, "hadamard")]:
            raise InvalidInput(f"{product}: its product reads {read[0]} and {read[1]}: omit {unread[0]}")
        if operands.hadamard and operands.other is None:
            raise InvalidInput(
                f"{product}: hadamard={operands.hadamard} rotates both operands before their casts: name {read[1]}, too"
            )
    sums, output = rule.accumulate, rule.output
    if sums is not None and sums.format in ("int32", "exact"):
        raise InvalidInput(
            f"accumulate={sums} sums the integers that forward has rounded, in all products: omit input_gradient, "
            "weight_gradient and saved, or accumulate in fp32, fp16/n or bf16/n"
        )
    if output is not None and output.scaling is not None and output.scaling.kind != "current":
        raise InvalidInput(
            f"output={output} is written at sites, whose products read what forward has rounded: omit input_gradient, "
            "weight_gradient and saved, or write the output in another format"
        )


def _check_delayed(rule: Rule) -> None:
    """Raise InvalidInput for a delayed scale that no operand of a product can have."""
    for role in ("output", "saved"):
        if (cast := getattr(rule, role)) is not None and cast.is_delayed:
            raise InvalidInput(f"{role}={cast}: {OF_OPERANDS} {cast.current}")
    for cast in rule.casts:
        format = cast.format
        if not cast.is_delayed or not isinstance(format, ScaledFormat):
            continue
        if format.scope.kind != "tensor" or format.affine or format.element.bits < 3:
            whole = replace(format, scope=Scope("tensor"), outer=None, affine=False, name="")
            raise InvalidInput(
                f"{cast}: a delayed scale is that of a whole tensor and follows its largest number: give a format such "
                f"as {whole if format.element.bits > 2 else 'e4m3fn@fp32/tensor'}, or omit delayed"
            )
    sums, output = rule.accumulate, rule.output
    if sums is not None and sums.format in ("int32", "exact"):
        raise InvalidInput(f"accumulate={sums} sums integers under scales of the present step: omit delayed")
    if output is not None and output.scaling is not None and output.scaling.kind != "current":
        raise InvalidInput(f"output={output} is written at sites, whose operands are the values written: omit delayed")


def check_text(value: object, what: str) -> None:
    """Raise InvalidInput for a text that a file cannot hold: a policy is saved in every checkpoint."""
    if not isinstance(value, str):
        raise InvalidInput(f"{what} must be text, not {brief(value)}")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise InvalidInput(f"{what} must be valid Unicode text, not {brief(value)}: it has an unpaired surrogate")


def is_like(name: str, pattern: str) -> bool:
    """Whether a name matches a pattern. Most patterns are plain names; torch.compile warns about tracing fnmatch."""
    return name == pattern or (any(one in pattern for one in "*?[") and fnmatchcase(name, pattern))


def known_keys(data: Mapping[str, object], allowed: Iterable[str], source: str) -> None:
    """Raise UnknownName for a key that is not allowed."""
    for key in data:
        if key not in allowed:
            raise UnknownName(f"{source}: " + unknown("key", key, allowed))
