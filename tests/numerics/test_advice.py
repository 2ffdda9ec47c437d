"""Advice: none for a healthy model, with evidence for faults, and a policy that the library accepts."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
import torch
from numerics.small import network, train
from rich.console import Console
from torch import Tensor, nn

import lowp
from lowp.errors import InvalidInput, UnknownName
from lowp.loss_scale import LossScale
from lowp.numerics.advice import Advice, _judged, advise, fits_fp8, modules_of_contractions
from lowp.numerics.findings import FINDINGS, explained
from lowp.numerics.policies import cheapest, effects, sensitivities
from lowp.numerics.prediction import effect
from lowp.numerics.record import Key, OpSeen, Part, Record, StepSeen
from lowp.numerics.spectrum import Spectrum, Updates
from lowp.numerics.windows import initial_scale, window_of
from lowp.presets import PRESETS
from lowp.report.profile import part_seen, print_profile, recommendation, scale_line
from lowp.report.profile_html import page


def record_of(model: nn.Module, rate: float = 0.1, loss: object = nn.functional.cross_entropy) -> Record:
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    with lowp.profile(model, optimizer, max_overhead=None) as profile:
        train(model, optimizer, 3, loss)  # type: ignore[arg-type]
    return profile.record


def verdict(advice: Advice, name: str) -> str:
    return next(one.verdict for one in advice.verdicts if one.format == name)


def test_a_healthy_model_gets_no_finding() -> None:
    advice = advise(record_of(network()))
    assert not advice.findings and advice.quiet > 20
    assert verdict(advice, "fp16").startswith("with loss scale 2^")
    assert not advice.window.is_empty


def test_findings_beyond_the_most_that_are_told_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 1 / 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    with lowp.profile(model, optimizer, max_overhead=None, title="mine") as profile:
        model(torch.full((3, 4), 1e6)).sum().backward()
        optimizer.step()
    assert profile.record.header["title"] == "mine"
    found = advise(profile.record).findings
    assert len(found) == 1 and advise(profile.record).more == 0
    monkeypatch.setattr("lowp.numerics.advice.MOST_FINDINGS", 0)
    told = advise(profile.record)
    assert told.findings == () and told.more == 1
    assert _judged(profile.record, "fp16")[1] == 2, "the inputs of both layers"


def test_the_advice_of_an_alarm_is_brief_where_its_finding_says_so_in_a_line() -> None:
    assert {bool(kind.brief) for kind in FINDINGS.values()} == {True, False}
    assert all(kind.advice == (kind.brief if kind.brief else kind.change) != "" for kind in FINDINGS.values())


def test_products_are_counted_of_layers_and_of_convolutions_both_ways() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 5, 2), nn.Flatten(), nn.Linear(5 * 7 * 7, 2, bias=False)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lowp.profile(model, optimizer, max_overhead=None) as profile:
        model(torch.randn(2, 3, 8, 8)).sum().backward()
        optimizer.step()
    counted = [seen.multiplications for seen in profile.record.ops.values() if seen.op_class == "contraction"]
    down, up, full = 2 * 8 * 6 * 6 * (3 * 3 * 3), 2 * 5 * 7 * 7 * (8 * 2 * 2), 2 * 2 * (5 * 7 * 7)
    assert counted == [down, up, full]


class Keywords(nn.Conv2d):
    """Calls products as torch allows, too: of operands by their names, and of one tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = nn.functional.conv2d(input=x, weight=self.weight, bias=self.bias)
        return torch.einsum("bchw->b", images) + torch.einsum(",b->b", images.mean(), x[:, 0, 0, 0])


def test_products_of_operands_by_their_names_are_counted_and_sums_of_one_tensor_are_not() -> None:
    model = Keywords(3, 8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lowp.profile(model, optimizer, max_overhead=None) as profile:
        model(torch.randn(2, 3, 8, 8)).sum().backward()
        optimizer.step()
    counted = {
        op: seen.multiplications for (_, op), seen in profile.record.ops.items() if seen.op_class == "contraction"
    }
    assert counted == {"conv2d": 2 * 8 * 6 * 6 * (3 * 3 * 3), "einsum": 0}


def test_what_was_not_looked_at_gets_no_verdict() -> None:
    whole = record_of(network())
    forward = Record(whole.header, Part(ops=whole.ops))
    forward.part.tensors = {key: seen for key, seen in whole.tensors.items() if key.phase == "forward"}
    advice = advise(forward)
    assert advice.window.is_unknown and advice.policy.rules == PRESETS["bf16"].policy.rules
    assert verdict(advice, "fp16") == "not judged: no gradient was recorded"
    assert verdict(advice, "pure bf16") == "not judged: no update was recorded"
    assert not any(one.usable for one in advice.verdicts if one.format in ("fp16", "pure bf16"))
    forward.part.tensors = {key: seen for key, seen in whole.tensors.items() if key.op == "layer_norm"}
    advice = advise(forward)
    assert not advice.verdicts and "no product of the model" in recommendation(forward, advice)
    assert "no product of the model" in page(forward, advice)


def test_updates_that_bf16_would_lose_are_found() -> None:
    record = record_of(network(), rate=1e-4)
    advice = advise(record)
    (finding,) = advice.findings
    assert advice.quiet == len(record.tensors) - 3 * len(finding.modules), "weight, gradient and update of each"
    assert finding.id == "N101" and finding.change == "keep master weights" and "2.weight" in finding.modules
    assert verdict(advice, "pure bf16") == "WILL STALL"


@pytest.mark.parametrize("rate", [1e-4, 1e-3, 5e-3, 2e-2, 5e-2, 0.1])
def test_where_pure_bf16_stalls_a_finding_says_so_and_its_tensors_are_not_among_those_that_need_no_change(
    rate: float,
) -> None:
    record = record_of(network(), rate=rate)
    advice = advise(record)
    stalls = "STALL" in verdict(advice, "pure bf16")
    assert stalls == (rate < 5e-2)
    assert stalls == ("N101" in [one.id for one in advice.findings])
    assert ("Nothing needs a change" in page(record, advice)) == (not stalls)
    if rate == 5e-3:
        (finding,) = advice.findings
        assert finding.summary == "4 of 6 parameters: 56% of the updates are lost in pure bf16", "one of them wholly"


def test_they_are_an_error_where_the_weights_are_in_16_bits() -> None:
    record = record_of(network(), rate=1e-4)
    record.header["dtypes"] = ["bfloat16"]
    assert advise(record).findings[0].severity == "error"


class Wide(nn.Module):
    """A network with a layer whose results overflow fp16 and whose gradients are far smaller than the other's."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = network(), factor
        self.large = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x) + self.large(x[:, :4] * self.factor) / self.factor
        return found


def test_a_layer_that_is_too_large_for_fp16_is_kept_in_bf16() -> None:
    advice = advise(record_of(Wide(1e6)))
    finding = next(one for one in advice.findings if one.id == "N205")
    assert finding.modules == ("large",) and "65504" in finding.evidence
    rule = advice.policy.rules[0]
    assert rule.where == "large" and str(rule.input) == "bf16"
    assert "1 layer in bf16" in verdict(advice, "fp16")


def test_a_layer_that_no_loss_scale_fits_is_kept_in_bf16() -> None:
    class Far(Wide):
        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.inner(x) * 2.0**-40 + self.large(x[:, :4]) * 2.0**5
            return found * 2.0**5

    advice = advise(record_of(Far(1.0), rate=0.0, loss=lambda output, y: (output * output).sum()))
    assert "N204" in [one.id for one in advice.findings]


def test_a_number_that_fp16_has_is_not_said_to_be_beyond_it() -> None:
    record = record_of(network())
    key = Key("3", "linear", "output", "forward")
    for largest, said in ((4e4, "4e+04, more than half of 65504, where fp16 ends"), (1e5, "1e+05; fp16 ends at 65504")):
        record.tensors[key] = replace(record.tensors[key], maximum=largest)
        (finding,) = (one for one in advise(record).findings if one.id == "N205")
        assert said in finding.evidence


def test_gradients_that_fit_under_no_scale_are_not_said_to_be_missing() -> None:
    record = record_of(network())
    for key, seen in list(record.tensors.items()):
        if key.phase == "backward" and seen.nonzero:
            record.tensors[key] = Spectrum.of(torch.tensor([2.0**-60, 2.0**60]))
    advice = advise(record)
    assert advice.window.is_empty and not advice.window.is_unknown
    assert verdict(advice, "fp16") == "not usable: no loss scale fits any layer" and not advice.verdicts[0].usable
    assert scale_line(advice.window) == "Scale window: no scale fits any layer"
    assert not any("fp16" in str(rule) for rule in advice.policy.rules) and advice.policy.loss_scale is None
    with pytest.raises(InvalidInput, match="no loss scale fits fp16 here"):
        initial_scale(record)


def test_what_a_format_does_decides_on_its_word() -> None:
    (fp16, bf16) = advise(record_of(network())).verdicts[:2]
    assert (fp16.grade, bf16.grade) == ("safe", "safe")
    assert replace(fp16, flushed=0.009).grade == "safe"
    assert replace(fp16, flushed=0.01).grade == "with care"
    assert replace(fp16, overflow=1).grade == "with care"
    assert replace(fp16, is_whole=False).grade == "with care"
    assert replace(fp16, usable=False).grade == "loses"
    assert replace(fp16, usable=False, verdict="not judged: no gradient").grade == "not judged"


def test_a_layer_in_whose_input_an_outlier_flushes_what_holds_the_energy_is_left_out_of_fp8() -> None:
    record, many = record_of(network()), Spectrum.of(torch.ones(1))
    assert verdict(advise(record), "fp8") == "for all layers"
    for _ in range(42):
        many = many + many
    record.tensors[Key("3", "linear", "input", "forward")] = many + Spectrum.of(torch.tensor([2.0**20]))
    assert [(one.verdict, one.grade) for one in advise(record).verdicts if one.format == "fp8"] == [
        ("for 1 of 2 layers", "with care")
    ]


def test_steps_after_a_divergence_say_nothing_of_the_formats() -> None:
    model = network()
    with lowp.profile(model, max_overhead=None) as profile:
        train(model, torch.optim.SGD(model.parameters(), lr=1e-3), 4)
        with torch.no_grad():
            next(model.parameters()).fill_(torch.inf)
        train(model, torch.optim.SGD(model.parameters(), lr=1e-3), 8)
    record = profile.record
    assert record.sampled == [0, 1, 2] and record.part.faults[0]["step"] == 4
    assert not any(seen.nonfinite for seen in record.tensors.values())
    assert all(one.usable for one in advise(record).verdicts if one.format == "fp16")
    said = recommendation(record, advise(record))
    assert said.startswith("Mend the training first: in step 4 the loss was not finite, first in ")
    printed = io.StringIO()
    print_profile(Console(file=printed, width=200), record, advise(record), "lowp run --policy policy.toml train.py")
    assert "--policy" not in printed.getvalue() and "Next: correct what made" in printed.getvalue()


class Attention(nn.Module):
    """Attention with a bias of the keys, on which the softmax does not depend: its gradient is zero up to rounding."""

    def __init__(self, together: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.together, self.last = together, nn.Linear(16, 4)
        self.qkv = nn.ModuleList(nn.Linear(16, 48 if together else 16) for _ in range(1 if together else 3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack([x, x.roll(1, 1), x.roll(2, 1)], 1)
        query, key, value = self.qkv[0](x).chunk(3, -1) if self.together else (layer(x) for layer in self.qkv)
        weights = (query @ key.mT * 2.0**-20).softmax(-1)
        found: Tensor = self.last((weights @ value).mean(1))
        return found


@pytest.mark.parametrize("together", [False, True])
def test_rounding_errors_in_the_gradient_of_a_bias_say_nothing_of_the_loss_scale(together: bool) -> None:
    record = record_of(Attention(together))
    keys = Key("qkv.0" if together else "qkv.1", "bias", "weight_grad", "backward")
    assert record.tensors[keys].below(-45), "noise that no scale brings into fp16 beside the other gradients"
    window, outside = window_of(record)
    assert not outside and not any(one.id == "N204" for one in advise(record).findings)
    record.tensors.pop(keys)
    assert window_of(record)[0] == window, "as without that gradient"


class Twice(nn.Module):
    """Two products of one kind in one module, whose weights are its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Parameter(torch.randn(shape) / 4) for shape in ((16, 16), (4, 16)))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(nn.functional.linear(x, self.first).relu(), self.second)


def test_each_weight_of_a_module_with_several_products_is_judged() -> None:
    record = record_of(Twice())
    (keys,) = modules_of_contractions(record).values()
    assert {key.op for key in keys if key.role == "weight"} == {"first", "second"}
    assert {"first", "second"} <= set(sensitivities(record, PRESETS["fp16"].policy))
    assert {key.op for key in effects(record, PRESETS["fp16"].policy) if key.phase == "step"} == {"first", "second"}
    merged = Part()
    merged.add(record.part)
    merged.add(record.part)
    assert merged.ops["", "linear"].parameters == record.ops["", "linear"].parameters


def test_the_policy_runs_where_it_was_made_for() -> None:
    model = Wide(1e6)
    advice = advise(record_of(model))
    policy = lowp.Policy.from_toml(advice.policy.to_toml())
    assert policy == advice.policy
    with lowp.autocast(policy) as region:
        assert torch.isfinite(model(torch.randn(8, 16))).all()
    assert not [rule for rule in region.report().unused if rule.where != "*" and not rule.ops]


def test_the_policy_begins_at_the_recommended_loss_scale() -> None:
    advice = advise(record_of(network()))
    assert lowp.Precision(advice.policy).scale == 2.0**advice.window.recommended
    assert f'loss_scale = "dynamic({2**advice.window.recommended})"' in advice.policy.to_toml()


def test_where_modules_were_left_out_the_first_step_finds_the_loss_scale() -> None:
    record = record_of(network())
    record.sampling.update(max_overhead=0.03, modules=4, modules_seen=2)
    advice = advise(record)
    assert advice.policy.loss_scale == LossScale.parse("dynamic") and advice.policy.loss_scale.search
    assert advice.verdicts[0].verdict == "with a dynamic loss scale"
    told = scale_line(advice.window, part_seen(record))
    assert "of 2 of 4 modules alone" in told and "recommended" not in told


def test_a_run_that_was_killed_recommends_no_loss_scale_by_number() -> None:
    record = record_of(network())
    killed = Record(record.header, record.part, {"max_overhead": 0.03}, complete=False)
    assert killed.is_partial and advise(killed).policy.loss_scale == LossScale.parse("dynamic")
    assert not Record(record.header, record.part, {"max_overhead": None}, complete=False).is_partial


def test_a_fault_is_the_first_finding() -> None:
    record = record_of(network(), loss=lambda output, y: torch.log(output * 0).sum())
    assert advise(record).findings[0].id == "N401"


def test_many_skipped_steps_are_found() -> None:
    record = record_of(network())
    record.sampling["steps"] = 20
    for one in record.steps:
        one.skipped = True
    assert "N402" in [one.id for one in advise(record).findings]


def test_a_loss_that_reads_16_bits_is_found_with_its_line() -> None:
    model = network()
    record = record_of(model, loss=lambda output, y: nn.functional.cross_entropy(output.bfloat16(), y))
    finding = next(one for one in advise(record).findings if one.id == "N310")
    assert "test_advice.py:" in finding.summary and finding.change == "call .float() first"


def test_there_are_five_findings_at_most() -> None:
    record = record_of(Wide(1e6), rate=1e-9, loss=lambda output, y: nn.functional.cross_entropy(output.bfloat16(), y))
    advice = advise(record)
    assert len(advice.findings) <= 5


def test_every_finding_is_explained() -> None:
    for name in FINDINGS:
        text = explained(name)
        assert "Why: " in text and "What to do: " in text and "  " not in text
        source = FINDINGS[name].source
        assert text.endswith(f"\n\nSource: {source}") if source else "Source:" not in text
    with pytest.raises(UnknownName, match=r"unknown finding 'N1010'; did you mean N101"):
        explained("N1010")


def test_an_empty_record_has_no_advice() -> None:
    with pytest.raises(InvalidInput, match="the profile is empty"):
        advise(Record({}))


@pytest.mark.parametrize("what", ["area", "bytes"])
def test_more_bits_make_the_cheapest_policy_dearer_and_cleaner(what: str) -> None:
    record = record_of(network())
    coarse, fine = cheapest(record, 8, what, 10.0), cheapest(record, 8, what, 30.0)
    assert coarse.share < fine.share < 1.0
    assert set(coarse.layers) == {"0", "3"}
    assert [rule.where for rule in coarse.policy.rules[:3]] == ["0", "3", "*"]
    with lowp.autocast(coarse.policy):
        assert torch.isfinite(network()(torch.randn(8, 16))).all()


def test_where_no_format_is_good_enough_a_layer_stays_in_bf16() -> None:
    assert set(cheapest(record_of(network()), 3, least_signal=40.0).layers.values()) == {"bf16"}


# -- a profile that is made by hand -----------------------------------------------------------------------------------
def spectrum(*values: float) -> Spectrum:
    return Spectrum.of(torch.tensor(values))


def by_hand(updates: dict[str, list[float]] | None = None) -> Record:
    """Two products of numbers that every format holds, with gradients of 2^-20, and updates of weights of 1."""
    part = Part()
    for name in ("a", "b"):
        part.ops[name, "linear"] = OpSeen("contraction", 2, parameters={"weight": f"{name}.weight"})
        part.tensors[Key(name, "linear", "input", "forward")] = spectrum(1.0, -2.0)
        part.tensors[Key(name, "linear", "grad", "backward")] = spectrum(*[2.0**-20] * 4)
        part.tensors[Key(name, "weight", "weight", "step")] = spectrum(1.0, 0.5)
    for name, values in (updates or {}).items():
        moved = torch.tensor(values)
        part.updates[f"{name}.weight"] = Updates.of(torch.ones_like(moved), moved, moved)
        part.tensors[Key(name, "weight", "update", "step")] = Spectrum.of(moved)
    return Record({}, part, {"steps": 30, "max_overhead": None})


def test_the_verdicts_of_a_profile_by_hand() -> None:
    record = by_hand({"a": [0.5], "b": [-0.25, 0.5]})
    found = [one.document() for one in advise(record).verdicts]
    for one in found:
        assert one["signal_to_noise"] > (30 if one["format"] == "fp8" else 1e9)
        assert (one["flushed"], one["overflow"], one["is_whole"], one["usable"]) == (0.0, 0, True, True)
    assert [(one["format"], one["verdict"], one["grade"], one["scale"], one["stalled"]) for one in found] == [
        ("fp16", "with loss scale 2^32", "safe", 32, None),
        ("bf16", "with fp32 masters", "safe", None, None),
        ("pure bf16", "works without masters", "safe", None, 0.0),
        ("fp8", "for all layers", "safe", None, None),
        ("dfp16", "with fp32 masters", "safe", None, None),
    ]
    told = advise(record).document()
    # 2^-20 is 2^-25 at 2^-5, which fp16 rounds to zero, and 65504 is between 2^15 and 2^16
    assert (told["window"], told["recommended"], told["findings"], told["more"]) == ([-4, 35], 32, [], 0)
    assert told["quiet"] == len(record.tensors) == 8


@pytest.mark.parametrize(
    ("updates", "verdict", "stalled", "summary", "modules"),
    [
        ({"a": [2.0**-20], "b": [0.5] * 9}, "STALLS in 1 of 2 parameters", 0.1, "1 of 2 parameters: all", "a"),
        ({"a": [2.0**-20], "b": [0.5] * 4}, "STALLS in 1 of 2 parameters", 0.2, "1 of 2 parameters: all", "a"),
        ({"a": [2.0**-20], "b": [0.5] * 3}, "WILL STALL", 0.25, "1 of 2 parameters: all", "a"),
        (
            {"a": [2.0**-20], "b": [0.5, 0.5, 0.5, 2.0**-20]},
            "WILL STALL",
            0.4,
            "2 of 2 parameters: 40% of the",
            "ab",
        ),
        ({"a": [0.5], "b": [0.5, 0.5, 2.0**-20]}, "WILL STALL", 0.25, "1 of 2 parameters: 25% of the", "b"),
        ({"b": [0.5] * 9 + [2.0**-20]}, "works without masters", 0.1, "", ""),
    ],
)
def test_updates_that_are_lost_are_told_by_parameter(
    updates: dict[str, list[float]], verdict: str, stalled: float, summary: str, modules: str
) -> None:
    advice = advise(by_hand(updates))
    (judged,) = (one for one in advice.verdicts if one.format == "pure bf16")
    assert (judged.verdict, judged.stalled) == (verdict, pytest.approx(stalled))
    assert judged.usable is (verdict == "works without masters")
    assert [one.id for one in advice.findings] == ["N101"] * bool(summary)
    for one in advice.findings:
        assert one.summary == f"{summary} updates are lost in pure bf16" and one.severity == "warning"
        assert one.modules == tuple(f"{name}.weight" for name in modules)
        largest = "0.5" if 0.5 in updates[modules[0]] else "9.54e-07"
        assert one.evidence == f"{modules[0]}.weight: |w| up to 1, |update| up to {largest}, needs more than 0.00195"
    assert advice.quiet == 6 + len(updates) - 2 * len(modules), "without the weight and the update of each"


def test_findings_say_what_was_seen_and_errors_come_first() -> None:
    record = by_hand({"a": [2.0**-20], "b": [0.5]})
    part = record.part
    fault = {"step": 3, "what": "gradients", "module": "a", "op": "linear", "line": "train.py:9", "nan": 2, "inf": 1}
    part.faults.append({**fault, "hint": "take less"})
    for name, seen in (("", "layer_norm"), ("c", "conv2d"), ("d", "conv2d"), ("e", "conv2d"), ("f", "conv2d")):
        part.ops[name, seen] = OpSeen("norm" if seen == "layer_norm" else "contraction")
        part.tensors[Key(name, seen, "output", "forward")] = spectrum(70000.0 if name in ("", "c") else 32768.0)
    part.ops["g", "relu"] = OpSeen("pointwise")
    part.tensors[Key("g", "relu", "output", "forward")] = spectrum(1e6)
    part.tensors[Key("b", "linear", "output", "forward")] = spectrum(32752.0)
    part.ops["", "cross_entropy"] = OpSeen("wide", 4, "train.py:3", dtypes={"input": "bf16"})
    part.ops["h", "softmax"] = OpSeen("wide", 2, dtypes={"input": "fp16"})  # under a region's rule
    part.steps = [StepSeen(step, skipped=step < 4) for step in range(6)]
    told = advise(record).document()["findings"]
    assert [(one["id"], one["severity"]) for one in told] == [
        *(("N401", "error"), ("N205", "error"), ("N402", "error"), ("N101", "warning"), ("N310", "warning")),
    ]
    assert [(one["summary"], one["evidence"]) for one in told] == [
        ("step 3: the gradients were not finite, first in linear of a", "train.py:9 2 NaN, 1 infinite."),
        (
            "the model, c, d and 2 more: too large for fp16, or nearly",
            "the model: layer_norm writes up to 7e+04; fp16 ends at 65504",
        ),
        ("4 of 30 steps were skipped", "the window of scales is 2^-4 to 2^35"),
        (
            "1 of 2 parameters: all updates are lost in pure bf16",
            "a.weight: |w| up to 1, |update| up to 9.54e-07, needs more than 0.00195",
        ),
        ("cross_entropy reads bf16 (train.py:3)", "4 calls on bf16"),
    ]
    assert [one["change"] for one in told[:3]] == ["take less", "keep in bf16", "begin with 2^32"]
    assert told[1]["modules"] == ["", "c", "d", "e", "f"]
    advice = advise(record)
    assert advice.verdicts[0].verdict == "with loss scale 2^32, 5 layers in bf16" and advice.more == 0
    assert [rule.where for rule in advice.policy.rules[:5]] == ["c", "d", "e", "f", "*"]
    assert advice.named == ("a", "", "c", "d", "e", "f", "a.weight")
    record.sampling["max_overhead"] = 0.03
    assert advise(record).verdicts[0].verdict == "with a dynamic loss scale, 5 layers in bf16"
    part.ops["i", "linear"] = OpSeen("contraction")
    record.tensors[Key("i", "linear", "grad", "backward")] = spectrum(2.0**30)
    found = advise(record)
    assert [one.id for one in found.findings] == ["N401", "N204", "N205", "N402", "N101"] and found.more == 1
    del part.ops["i", "linear"], record.tensors[Key("i", "linear", "grad", "backward")]
    part.steps[3].skipped = False  # three in thirty are not many
    part.faults[0].update(module="", op="", line="", what="loss")
    told = advise(record).document()["findings"]
    assert [one["id"] for one in told] == ["N401", "N205", "N101", "N310"]
    assert told[0]["summary"] == "step 3: the loss was not finite, first in an unknown operation"
    assert told[0]["evidence"] == "2 NaN, 1 infinite."


def test_a_gradient_apart_from_the_others_is_kept_in_bf16_with_the_scales_that_fit_it() -> None:
    record = by_hand()
    record.part.ops["c", "linear"] = OpSeen("contraction")
    record.tensors[Key("c", "linear", "grad", "backward")] = spectrum(2.0**30)
    advice = advise(record)
    (finding,) = advice.findings
    assert (finding.id, finding.summary, finding.modules) == ("N204", "c: no fp16 loss scale fits", ("c",))
    assert finding.evidence == "c: fits 2^-54 to 2^-15"
    assert advice.verdicts[0].verdict == "with loss scale 2^32, 1 layer in bf16"


def test_shares_and_ratios_are_of_the_operands_that_are_not_left_out() -> None:
    record = by_hand()
    gradients = {name: Key(name, "linear", "grad", "backward") for name in "ab"}
    record.tensors[gradients["a"]] = spectrum(*[2.0**-30] * 3, 2.0**-10)
    record.tensors[gradients["b"]] = spectrum(2.0**-10, 2.0**-10)
    record.tensors[Key("b", "linear", "input", "forward")] = spectrum(1.0 + 2.0**-11, 1e5, 0.0)
    finite = [
        found
        for key, seen in record.tensors.items()
        if math.isfinite(found := effect(seen, "fp16").signal_to_noise) and key.path != "b.weight"
    ]
    assert len(finite) == 2
    flushed, overflow, ratio = _judged(record, "fp16")
    assert (flushed, overflow, ratio) == (0.5, 1, sum(finite) / 2)
    assert _judged(record, "fp16", without=["b"])[:2] == (0.75, 0)
    assert _judged(record, "fp16", 2.0**10)[0] == 0.0, "gradients alone are scaled"
    record.tensors[gradients["a"]] = spectrum(0.0)
    assert _judged(record, "fp16", without=["b"]) == (0.0, 0, math.inf)


def test_fp16_is_judged_under_the_recommended_loss_scale() -> None:
    record = by_hand()
    for name in "ab":
        record.tensors[Key(name, "linear", "grad", "backward")] = spectrum(2.0**-40)
    fp16 = advise(record).verdicts[0]
    assert fp16.scale is not None and fp16.scale > 16 and fp16.flushed == 0


@pytest.mark.parametrize(
    ("largest", "said"),
    [
        (32752.0, ""),
        (32752.5, "linear writes up to 3.28e+04, more than half of 65504, where fp16 ends"),
        (65504.0, "linear writes up to 6.55e+04, more than half of 65504, where fp16 ends"),
        (65504.5, "linear writes up to 6.55e+04; fp16 ends at 65504"),
    ],
)
def test_results_up_to_half_of_the_largest_number_of_fp16_are_not_too_large(largest: float, said: str) -> None:
    record = by_hand()
    record.tensors[Key("a", "linear", "output", "forward")] = spectrum(largest)
    assert [one.evidence for one in advise(record).findings] == ([f"a: {said}"] if said else [])


@pytest.mark.parametrize("count", [1, 3, 4])
def test_three_modules_are_named_and_the_rest_counted(count: int) -> None:
    record = by_hand()
    for name in "cdef"[:count]:
        record.part.ops[name, "linear"] = OpSeen("contraction")
        record.tensors[Key(name, "linear", "output", "forward")] = spectrum(70000.0)
    (finding,) = advise(record).findings
    assert finding.summary.partition(":")[0] == {1: "c", 3: "c, d, e", 4: "c, d, e and 1 more"}[count]


def test_gradients_may_keep_less_of_their_signal_in_fp8_than_other_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    record, noisy = by_hand(), spectrum(*(1 + torch.rand(400)).tolist())
    inputs = effect(noisy, "e4m3fn@fp32/tensor").signal_to_noise
    gradients = effect(noisy, "e5m2@fp32/tensor").signal_to_noise
    assert 20 < gradients < inputs < 40
    record.tensors.update(dict.fromkeys(record.tensors, spectrum(0.0)))  # of which nothing is lost
    record.tensors[Key("a", "linear", "input", "forward")] = noisy
    record.tensors[Key("b", "linear", "grad", "backward")] = noisy

    def fitting(least: float, least_of_gradients: float) -> str:
        monkeypatch.setattr("lowp.numerics.advice._LEAST_SIGNAL", least)
        monkeypatch.setattr("lowp.numerics.advice._LEAST_SIGNAL_OF_GRADIENTS", least_of_gradients)
        return "".join(name for name in "ab" if fits_fp8(record, name))

    assert fitting(inputs, gradients) == "ab", "as much as is asked for is enough"
    assert fitting(inputs + 1e-9, gradients) == "b" and fitting(inputs, gradients + 1e-9) == "a"
    assert fitting(1e9, 0.0) == "b" and fitting(0.0, 1e9) == "a"
    fitting(1e9, 1e9)
    fp8 = advise(record).verdicts[3]
    assert (fp8.verdict, fp8.usable, fp8.is_whole) == ("for 0 of 2 layers", False, False)


def test_formats_stall_where_more_updates_are_lost_than_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    record = by_hand({"a": [2.0**-20] + [0.5] * 4})
    (judged,) = (one for one in advise(record).verdicts if one.format == "pure bf16")
    assert (judged.verdict, judged.stalled, judged.usable) == ("works without masters", 0.2, True)
    monkeypatch.setattr("lowp.numerics.advice._STALLS", 0.19)
    assert advise(record).findings[0].summary == "1 of 1 parameters: 20% of the updates are lost in pure bf16"
    monkeypatch.setattr("lowp.numerics.advice._LOST_WHOLLY", 0.2)  # and then `as many` are all
    assert advise(record).findings[0].summary == "1 of 1 parameters: all updates are lost in pure bf16"
    monkeypatch.setattr("lowp.numerics.advice._STALLS", 0.2)
    assert advise(record).findings[0].summary == "1 of 1 parameters: all updates are lost in pure bf16"
    (judged,) = (one for one in advise(record).verdicts if one.format == "pure bf16")
    assert judged.verdict == "STALLS in 1 of 1 parameters"
    monkeypatch.setattr("lowp.numerics.advice._LOST_WHOLLY", 0.9)
    assert not advise(record).findings, "where not more than what stalls is lost, only what is lost wholly is told"


def test_of_the_parameters_of_a_model_that_stalls_those_that_lose_as_much_as_the_bound_are_told() -> None:
    record = by_hand({"a": [2.0**-20] + [0.5] * 4, "b": [2.0**-20] * 2 + [0.5] * 3})
    (finding,) = advise(record).findings
    assert finding.summary == "2 of 2 parameters: 30% of the updates are lost in pure bf16"


def test_one_loss_in_16_bits_and_one_fault_are_told() -> None:
    record = by_hand()
    for name, line in (("", "train.py:3"), ("h", "train.py:4")):
        record.part.ops[name, "cross_entropy"] = OpSeen("wide", 4, line, dtypes={"input": "bfloat16"})
        fault = {"step": 3, "what": "loss", "module": name, "op": "linear", "line": line, "nan": 1, "inf": 0}
        record.part.faults.append({**fault, "hint": ""})
    told = [(one.id, one.summary) for one in advise(record).findings]
    assert told == [
        ("N401", "step 3: the loss was not finite, first in linear"),
        ("N310", "cross_entropy reads bf16 (train.py:3)"),
    ]
