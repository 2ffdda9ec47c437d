"""A weight update as text."""

from collections.abc import Iterator
from fractions import Fraction

from lowp.casts import Cast, Rounding
from lowp.explain.exact import Rounded
from lowp.explain.numbers import bits_text, brief, decimal_text, floor_log2, line, power_text, text_of
from lowp.explain.update import Threshold, Trajectory, Verdict, WeightUpdate

_VERDICTS = {
    Verdict.LOST: "LOST: the weight stays as it was",
    Verdict.DISTORTED: "DISTORTED: the update is below one ulp and is taken for another size",
    Verdict.KEPT: "KEPT",
    Verdict.OVERFLOW: "OVERFLOW: the sum is beyond the largest number",
    Verdict.UNDERFLOW: "LOST before it is added: the gradient is too small for the format and becomes zero",
    Verdict.NONE: "nothing to lose: the update is zero",
    Verdict.CHANCE: "KEPT ON AVERAGE: below one ulp, stochastic rounding moves the weight by a whole ulp or not",
    Verdict.BIASED: "BIASED: on average the weight moves by another size than the update",
}


@text_of
def render_update(update: WeightUpdate) -> Iterator[str]:
    """The explanation of a weight update, as text."""
    sign = "-" if update.upward == update.gradient.given.negative else "+"
    rate = f"{decimal_text(update.learning_rate)} x " if update.learning_rate is not None else ""
    yield f"weight {sign} {rate}gradient in {update.cast}: {update.weight.given} {sign} {rate}{update.gradient.given}"
    for name, operand in (("weight", update.weight), ("gradient", update.gradient)):
        yield from _operand_lines(name, operand)
    yield line("update", f"{decimal_text(update.step)}, exact")
    if update.threshold is not None:
        yield from _size_lines(update, update.threshold)
    yield line("sum", decimal_text(update.weight.result.value + update.step) + " exactly")
    if update.first is not None:
        yield line("", f"rounded to {update.first.result}   {bits_text(update.first.code, update.first.format)}")
    yield line("verdict", _VERDICTS[update.verdict] + _moved(update))
    yield from _bias_lines(update)
    yield from _threshold_lines(update)
    yield f"after {update.steps} step{'s' * (update.steps > 1)}"
    for trajectory in (update.trajectory, update.fp32):
        if trajectory is not None:
            yield from _trajectory_lines(trajectory, update.steps)
    if update.expected is None:
        largest = decimal_text(Fraction(update.cast.element.maximum))
        yield line("stochastic", f"beyond the largest number, {largest}: there is no mean")
    else:
        yield line("stochastic", f"{decimal_text(update.expected)} expected: unbiased, whatever the format")


def _bias_lines(update: WeightUpdate) -> Iterator[str]:
    """Yield the average error caused by a limited number of random bits."""
    bias, spacing = update.bias, update.threshold.spacing if update.threshold else None
    count = update.cast.random_bits
    if bias is None or spacing is None or count is None:
        return
    bits = f"{count} random bits" if count != 1 else "a single random bit"
    size, is_one = (f"{brief(bias / spacing)} ulp a step", "is no number") if bias else ("none", "is a number")
    yield line("bias", f"{size}: the share of the spacing {is_one} of {bits}")


def _operand_lines(name: str, operand: Rounded) -> Iterator[str]:
    taken = "" if operand.is_exact else f" (from {operand.given})"
    yield line(name, f"{operand.result}{taken}")
    yield line("", bits_text(operand.code, operand.format))


def _size_lines(update: WeightUpdate, threshold: Threshold) -> Iterator[str]:
    toward = "up" if update.upward else "down"
    yield line("spacing", f"{power_text(threshold.spacing)} to the next number {toward}")
    if note := _binade_note(update):
        yield line("", note)
    if update.step and update.spacing_ratio is not None:
        relative = update.relative_step
        share = "" if relative is None else f", |update| / |weight| = {brief(relative)}"
        yield line("size", f"{brief(update.spacing_ratio)} of that spacing{share}")


def _binade_note(update: WeightUpdate) -> str:
    """Return a note that the spacing toward zero is smaller if the weight is a power of two."""
    weight = update.weight.result
    toward_zero = update.upward == weight.negative
    power = weight.magnitude and weight.magnitude == Fraction(2) ** floor_log2(weight.magnitude)
    if not (toward_zero and power and update.threshold):
        return ""
    return f"below the power of two 2^{floor_log2(weight.magnitude)} numbers are closer"


def _moved(update: WeightUpdate) -> str:
    if update.verdict is Verdict.OVERFLOW and len(update.outcomes) > 1:
        over = sum(outcome.probability for outcome in update.outcomes if outcome.rounded.overflowed)
        return f", with a probability of {brief(Fraction(over))}"
    if update.first is None or update.verdict not in (Verdict.DISTORTED, Verdict.KEPT):
        return ""
    moved = update.first.result.value - update.weight.result.value
    if moved == update.step:
        return ": exactly"
    return f": the weight moves by {decimal_text(moved)}, {brief(moved / update.step)} times the update"


def _threshold_lines(update: WeightUpdate) -> Iterator[str]:
    threshold = update.threshold
    if threshold is None:
        yield line("counts", "at no size: the weight is the largest number, and sums saturate")
        return
    if update.cast.is_stochastic:
        yield line("counts", _probability_words(update.cast))
        return
    weight = update.weight.result.magnitude
    share = f" = {brief(threshold.size / weight)} of the weight" if weight and threshold.size else ""
    how = "from" if threshold.inclusive else "above"
    size = f"{power_text(threshold.size)} = {decimal_text(threshold.size)}" if threshold.size else "0"
    yield line("counts", f"{how} |update| {size}{share}")
    if threshold.size == threshold.tie and update.cast.rounding in (Rounding.NEAREST_EVEN, Rounding.NEAREST_AWAY):
        last = "odd" if threshold.inclusive else "even"
        rule = (
            f"a tie goes to the even neighbour, and the weight's last bit is {last}"
            if update.cast.rounding is Rounding.NEAREST_EVEN
            else "a tie goes away from zero"
        )
        yield line("", f"{rule}: at exactly that size it is {'moved' if threshold.inclusive else 'lost'}")
    if update.learning_rate:
        needed = threshold.size / abs(update.learning_rate)
        yield line("", f"that is a gradient {how} {brief(needed, 6)}")


def _probability_words(cast: Cast) -> str:
    if cast.random_bits is None:
        return "at every size, with a probability of update / spacing"
    how, places, brought = {
        Rounding.STOCHASTIC: ("from", cast.random_bits, "cut"),
        Rounding.STOCHASTIC_B: ("from", cast.random_bits + 1, "rounded half up"),
        Rounding.STOCHASTIC_C: ("above", cast.random_bits + 1, "rounded half to even"),
    }[cast.rounding]
    bits = f"{cast.random_bits} bit{'s' * (cast.random_bits != 1)}"
    return f"{how} 2^-{places} of the spacing, with a probability of update / spacing, {brought} to {bits}"


def _trajectory_lines(trajectory: Trajectory, steps: int) -> Iterator[str]:
    format = str(trajectory.cast)
    yield line(format, f"{trajectory.last}{_stuck(trajectory)}")
    shown = [f"{index}: {value.brief(9)}" for index, value in trajectory.shown if 0 < index < steps]
    if shown and trajectory.stuck_after != 0:
        yield line("", "step " + ", ".join(shown))


def _stuck(trajectory: Trajectory) -> str:
    if trajectory.stuck_after is None or not trajectory.last.is_finite:
        return ""
    if trajectory.stuck_after == 0:
        return ", for ever: no step moves it"
    return f", for ever from step {trajectory.stuck_after} on"
