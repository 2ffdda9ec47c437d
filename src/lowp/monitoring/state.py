"""What a monitor knows of models and optimizers beside numbers of tensors: dtypes, rates, scale, what is trained."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from lowp.compat import scale_of, unwrapped
from lowp.exponents import SharedExponents
from lowp.kernels.int16.late import at_once
from lowp.kernels.steps.spectra import some_of
from lowp.monitoring.look import Look, Named, by_device
from lowp.monitoring.seen import Sight
from lowp.numerics.models import Models
from lowp.numerics.modes import numbers_of
from lowp.optim.shards import is_sharded
from lowp.region import entries

_SEARCHED = 16  # steps in which the scaler is looked for
_INITIAL = 2.0**16  # the scale at which GradScalers begin
_JUMP = 8.0  # times the scale of the pass before
_STALE = 16  # steps in which an average must have moved
_REREAD = 16  # looks after which the state of an optimizer is read again that seems unchanged

Numbers = dict[str, dict[str, float]]


class _Held:
    """What an optimizer held when it was last read."""

    def __init__(self, optimizer: Optimizer, parameters: Named) -> None:
        names, groups = {id(one): name for name, one in parameters}, optimizer.param_groups
        self.parameters, self.groups = parameters, _sizes(optimizer)
        self.names = [[names[id(one)] for one in group["params"] if id(one) in names] for group in groups]
        self.known: tuple[int, int, list[torch.dtype]] | None = None  # its state, how much it is of, and dtypes
        self.trains: list[bool] | None = None
        self.looks = 0


def _sizes(optimizer: Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


def _dtypes_of(parameters: Named, state: Any) -> dict[str, str]:
    """Return the dtypes of parameters and of an optimizer's state of them, by name."""
    found = {}
    for name, one in parameters:
        found[name] = _name(one)
        for key, value in (state.get(one) or {}).items():
            if isinstance(value, Tensor) and value.dim():
                found[f"{key} of {name}"] = _name(value)
    return found


class RunState:
    """Follows scaler, shared exponents, dtypes and the parameters that are trained."""

    def __init__(self, models: Models, scaler: Any, precision: Any, optimizers: Sequence[Optimizer]) -> None:
        self._models = models
        scaler = scaler if scaler is not None else getattr(precision, "scaler", None)
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._exponents: SharedExponents | None = getattr(precision, "exponents", None)
        self._searches = 0 if scaler is not None or precision is not None else _SEARCHED
        self.is_sharded = any(map(is_sharded, (one for _, one in models.named_parameters())))
        self._resumed = max((_steps_of(one) for one in optimizers), default=-1)
        self._is_fresh = self._resumed > 0 and _is_fresh(self.scaler)
        self._held: dict[int, _Held] = {}  # by the id of the optimizer
        self._trained: dict[str, int] = {}  # parameters that were trained, and the id of the optimizer
        self._dtypes: dict[str, str] = {}
        self._rates: dict[str, float] = {}
        self._left: list[str] = []  # those that their optimizer has stepped without in this look
        self._step = self._version = -1
        self._matrices: set[str] = set()
        self._last_scale: list[float] = []
        self._writes: dict[str, tuple[float, float]] = {}
        self._averages: dict[str, tuple[int, list[tuple[list[str], Tensor]]]] = {}  # a step, and what was read then

    @property
    def scale(self) -> Tensor | None:
        """The loss scale, on its device."""
        return None if self.scaler is None else scale_of(self.scaler)

    @property
    def searches(self) -> bool:
        """Whether the scaler is still looked for."""
        return self._searches > 0

    def find(self, scaler: Any, precision: Any) -> None:
        """Take the scaler and the precision that were found to run the step."""
        self._searches = 0 if scaler is not None or precision is not None else self._searches - 1
        self.scaler = scaler
        self._exponents = getattr(precision, "exponents", None)
        if self._resumed > 0:
            self._is_fresh = _is_fresh(scaler)

    # -- in a look ----------------------------------------------------------------------------------------------------
    def saw(self, optimizer: Optimizer, parameters: Named) -> None:
        """Note what an optimizer holds; `parameters` are the same list while it holds the same."""
        if self._resumed < 0:
            self._resumed = max(_steps_of(optimizer) - 1, 0)
            self._is_fresh = self._resumed > 0 and _is_fresh(self.scaler)
        held = self._held.get(id(optimizer))
        if held is None or held.parameters is not parameters or held.groups != _sizes(optimizer):
            held = self._held[id(optimizer)] = _Held(optimizer, parameters)
        for group, names in zip(optimizer.param_groups, held.names, strict=True):
            rate = group.get("lr", 1.0)
            self._rates.update(dict.fromkeys(names, 1.0 if isinstance(rate, Tensor) else float(rate)))
        state = getattr(getattr(optimizer, "optimizer", optimizer), "state", {})
        known = id(state), len(state), [one.dtype for _, one in parameters]
        held.looks += 1
        if known != held.known or held.looks % _REREAD == 0:
            held.known = known
            self._dtypes = {**self._dtypes, **_dtypes_of(parameters, state)}
        trains = [one.requires_grad for _, one in parameters]
        if trains != held.trains:
            held.trains = trains
            self._find_left(id(optimizer), parameters)

    def _find_left(self, optimizer: int, parameters: Named) -> None:
        """Find the parameters that the optimizer has trained, and does not train now."""
        trained = {name for name, one in parameters if one.requires_grad}
        self._trained.update(dict.fromkeys(trained, optimizer))
        for name, _ in () if self.is_sharded else self._models.named_parameters():
            if self._trained.get(name) == optimizer and name not in trained:
                self._left.append(name)

    def add_to(self, look: Look) -> None:
        """Add the loss scale, the counts of shared exponents, and the averages of weights."""
        if (scale := self.scale) is not None:
            look.add("scale", [""], scale)
        entry = entries.current()
        if self._exponents is None and entry is not None and entry.engine is not None:
            self._exponents = entry.region.exponents if entry.region is not None else None
        if self._exponents is not None:
            for group in self._exponents.state_dict()["groups"]:
                for count in ("writes", "saturated"):
                    look.add(count, group["sites"], group["state"][count])
        for name, root in self._models.roots.items():
            if _is_average(name, root):
                self._compare(look, name, root)

    def _compare(self, look: Look, name: str, average: nn.Module) -> None:
        """Compare some numbers of an average with those of an earlier look, as far as their parameters are trained."""
        step, before = self._averages.get(name, (0, []))
        if before and look.step - step < _STALE:
            return
        ends = {path.partition(".")[2] for path in self._trained}
        inner = getattr(unwrapped(average), "module", None)  # of an AveragedModel
        found = (inner if isinstance(inner, nn.Module) else unwrapped(average)).named_parameters()
        mine = [(path, numbers_of(one.detach())) for path, one in found if path in ends and one.is_floating_point()]
        few = [([path for path, _ in some], some_of([x for _, x in some])) for some in by_device(mine)]
        self._averages[name] = look.step, few
        for (names, now), (others, then) in zip(few, before, strict=False):
            if names == others:
                look.add(f"average {name}", names, (now == then).float().mean(1))

    def described(self, look: Look, losses: list[tuple[int, float]], passes: int, added: bool) -> Sight:
        """Return what is known of a look before its numbers have arrived."""
        if self._version != self._models.version:
            self._version = self._models.version
            self._matrices = {name for name, one in self._models.named_parameters() if one.dim() > 1}
        seen = Sight(
            look.step,
            {},
            losses,
            passed=max(look.step - self._step, 1),
            steps=len({step for step, _ in losses}) or max(look.step - self._step, 1),
            backwards=passes,
            adds_up=added,
            half=look.half,
            missing=look.missing,
            is_kept=look.is_kept,
            dtypes=self._dtypes,
            rates=dict(self._rates),
            left=self._left,
            resumed=max(self._resumed, 0),
            is_fresh_scale=self._is_fresh,
            matrices=self._matrices,
        )
        self._step, self._is_fresh = look.step, False
        self._left = []
        return seen

    def _growth(self, steps: int) -> float:
        """Return by how much the loss scale may have grown in some steps, of which not all scales are seen."""
        if self.scaler is None:
            return 1.0
        times = min(steps // max(self.scaler.get_growth_interval(), 1), 128)  # it stays within fp32's range
        return float(self.scaler.get_growth_factor() ** times)

    # -- afterwards ---------------------------------------------------------------------------------------------------
    def completed(self, seen: Sight, numbers: Numbers) -> Sight:
        """Return a look with its numbers."""
        late, scales = numbers.pop("loss", {}), numbers.pop("scales", {})
        scale = next(iter(numbers.pop("scale", {}).values()), None)
        passed = [*self._last_scale, *scales.values(), *([] if scale is None else [scale])]
        self._last_scale, pairs = passed[-1:], list(pairwise(passed))
        skipped = sum(after < before for before, after in pairs)
        adds = seen.adds_up and _stays(numbers, scale)
        return replace(
            seen,
            numbers=numbers,
            losses=[(step, late.get(str(place), loss)) for place, (step, loss) in enumerate(seen.losses)]
            if late
            else seen.losses,
            are_late=bool(late),
            scale=scale,
            skipped=skipped,
            jump=next((pair for pair in pairs if pair[1] >= _JUMP * self._growth(seen.passed) * pair[0] > 0), None),
            steps=seen.steps + skipped,
            adds_up=adds,
            saturated=self._saturated(numbers.pop("writes", {}), numbers.pop("saturated", {})),
            averages=_stillness(numbers),
            compared=numbers.pop("compared", {}),
        )

    def _saturated(self, writes: dict[str, float], saturated: dict[str, float]) -> dict[str, float]:
        """Return the share of the writes since the look before that were saturated, by site."""
        found = {}
        for site, count in writes.items():
            before = self._writes.get(site, (0.0, 0.0))
            self._writes[site] = count, saturated[site]
            if count - before[0] > 0:
                found[site] = (saturated[site] - before[1]) / (count - before[0])
        return found


def _stillness(numbers: Numbers) -> dict[str, float]:
    """Return by average the share of its numbers that have not moved, in the median parameter."""
    kinds = [kind for kind in numbers if kind.startswith("average ")]
    return {kind.removeprefix("average "): statistics.median(numbers.pop(kind).values()) for kind in kinds}


def _stays(numbers: Numbers, scale: float | None) -> bool:
    """Whether a gradient was there before the last backward pass, and is no smaller before the step than after it."""
    latest, carried = numbers.pop("latest", {}), numbers.pop("carried", {})
    for name, norm in latest.items():
        if not carried.get(name):
            return False
        now = numbers.get("gradient", {}).get(name)
        if now is not None and norm:
            return now * (scale or 1.0) > 0.75 * norm or now > 0.75 * norm
    return False


def _is_average(name: str, root: nn.Module) -> bool:
    if isinstance(root, AveragedModel):
        return root.avg_fn is not None or root.multi_avg_fn is not None
    return "ema" in name.lower()


def _steps_of(optimizer: Optimizer) -> int:
    """Return how many steps an optimizer has taken, as far as its state says; 0 where a device would be waited for."""
    for state in list(optimizer.state.values())[:1]:
        step = state.get("step") if isinstance(state, dict) else None
        if isinstance(step, Tensor):
            found = at_once(step)
            return 0 if isinstance(found, Tensor) else int(found)
        if isinstance(step, (int, float)):
            return int(step)
    return 0


def _is_fresh(scaler: Any) -> bool:
    """Whether a scaler begins at its usual scale; asked once, before or in the first step."""
    if scaler is None:
        return False
    state = scaler.state_dict()
    return bool(state.get("scale") == _INITIAL and state.get("_growth_tracker", 0) <= 1)


def _name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
