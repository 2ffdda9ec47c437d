"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const element = (id) => document.getElementById(id);
  const [format, scale, scaleValue, step, stepValue, totals] = ["format", "scale", "scale-value", "step", "step-value", "totals"].map(element);
  const [from, to] = data.axis, isDouble = Object.values(data.maps).flat().some((row) => row.length > 7);
  const make = (name, type, text = "") => {
    const one = document.createElement(name);
    one.className = type;
    one.textContent = text;
    return one;
  };
  const power = (exponent) => "2" + String(exponent).replace(/./g, (sign) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(sign)]);
  const size = (number) => (number >= 1e-3 && number < 1e6 ? Number(number.toPrecision(number < 1 ? 4 : 5)) : "about " + power(Math.round(Math.log2(number))));
  const percent = (share) => (share < 1e-5 ? "< 0.001 %" : `${Number((100 * share).toPrecision(2))} %`);
  const at = (exponent) => (100 * (Math.min(Math.max(exponent, from), to) - from)) / (to - from); // of the width
  const add = (one, other) => {
    if (!one || !other) return one || other;
    const first = Math.min(one.first, other.first), end = Math.max(one.first + one.counts.length, other.first + other.counts.length);
    const counts = Array(end - first).fill(0);
    for (const part of [one, other]) part.counts.forEach((count, place) => (counts[part.first - first + place] += count));
    return { first, counts };
  };
  const decoded = (pair) => pair && { first: pair[0], counts: [...pair[1]].map((sign) => (sign === "#" ? 0 : 2 ** ((sign.charCodeAt(0) - 36) / 2))) };
  const tensor = ([block, label, first, counts, maximum, powers = [], steps = [], other = 0]) => ({
    block, label, maximum, all: { first, counts }, steps: steps.map(decoded), other: other && { first: other[0], counts: other[1] },
    powers: new Map(powers.filter((_, place) => place % 2 === 0).map((exponent, place) => [exponent, powers[2 * place + 1]])),
  });
  const united = (rows) => ({
    block: rows[0].block, label: rows[0].block, maximum: Math.max(...rows.map((row) => row.maximum)),
    all: rows.map((row) => row.all).reduce(add), other: rows.map((row) => row.other).reduce(add),
    steps: rows[0].steps.map((_, place) => rows.map((row) => row.steps[place]).reduce(add)),
    powers: rows.reduce((sum, row) => (row.powers.forEach((count, exponent) => sum.set(exponent, (sum.get(exponent) || 0) + count)), sum), new Map()),
  });

  // how many numbers a format with these limits makes zero, keeps with fewer digits, and overflows
  const judge = (row, numbers, limits, shift, isAll) => {
    let all = 0, zero = 0, few = 0, overflow = 0;
    numbers.counts.forEach((count, place) => {
      const exponent = numbers.first + place + shift;
      const tied = isAll && exponent === limits.smallest ? row.powers.get(numbers.first + place) || 0 : 0;
      all += count;
      zero += exponent < limits.smallest ? count : tied;
      if (exponent >= limits.smallest && exponent < limits.normal) few += count - tied;
      if (2 ** exponent > limits.maximum) overflow += count;
    });
    if (isAll && !overflow && row.maximum * 2 ** shift > limits.maximum) overflow = 1;
    return { all, zero, few, overflow };
  };
  const words = (found, isRatio) => {
    if (isRatio) return found.zero ? [`${percent(found.zero / found.all)} lost`, found.zero / found.all >= 0.2 ? "lost" : "some"] : ["all arrive", ""];
    if (found.overflow) return [`${percent(found.overflow / found.all)} overflow`, "lost"];
    if (found.zero / found.all >= 1e-5) return [`${percent(found.zero / found.all)} become zero`, found.zero / found.all >= 1e-3 ? "lost" : "some"];
    return found.few / found.all >= 0.01 ? [`fits, ${percent(found.few / found.all)} with fewer digits`, ""] : ["fits", ""];
  };
  const bits = (numbers, colour) => {
    if (!numbers) return "none";
    const most = Math.max(...numbers.counts), stops = [];
    numbers.counts.forEach((count, place) => {
      if (!count) return;
      const shade = Math.round(100 * (0.18 + 0.82 * Math.max(0, 1 + Math.log10(count / most) / 5)));
      const [a, b] = [at(numbers.first + place), at(numbers.first + place + 1)].map((one) => one.toFixed(2));
      stops.push(`transparent ${a}%,color-mix(in srgb,var(--${colour}) ${shade}%,transparent) ${a}% ${b}%,transparent ${b}%`);
    });
    return stops.length ? `linear-gradient(90deg,${stops.join()})` : "none";
  };

  const views = []; // of rows: each is told when the controls move
  const view = (row, map, name, tag) => {
    const isRatio = map === "ratios";
    const line = make(tag, "row"), strips = make("div", "strips"), effect = make("span", "effect");
    const [first, second] = [make("div", "strip"), make("div", "strip")];
    line.append(make("span", "name", name), strips, effect);
    strips.append(first);
    strips.setAttribute("role", "img");
    strips.setAttribute("aria-label", `from ${power(row.all.first)} to ${power(row.all.first + row.all.counts.length)}`);
    strips.title = strips.getAttribute("aria-label");
    if (isDouble && row.other) {
      strips.classList.add("both");
      strips.append(second);
      second.style.setProperty("--bits", bits(row.other, "second"));
    }
    let drawn = -1;
    const draw = () => { // only what can be seen: a block's layers when it is opened
      if (drawn === step.value || line.checkVisibility?.() === false) return;
      drawn = step.value;
      first.style.setProperty("--bits", bits(shown(row, isRatio), "first"));
    };
    const one = { draw, row, isRatio, isScaled: data.scaled.includes(map), tell: (text, kind) => { effect.textContent = text; effect.className = "effect " + kind; } };
    views.push(one);
    return line;
  };
  const shown = (row, isRatio) => (isRatio || step.value === "0" ? row.all : row.steps[step.value - 1]);

  const sections = [...document.querySelectorAll(".map")].map((section) => {
    const name = section.dataset.map, isRatio = name === "ratios", rows = data.maps[name].map(tensor);
    section.hidden = !rows.length;
    const body = section.querySelector(".rows"), blocks = new Map();
    for (const row of rows) {
      const block = row.block || " " + row.label;
      blocks.set(block, [...(blocks.get(block) || []), row]);
    }
    for (const [block, parts] of blocks) {
      if (parts.length === 1) {
        const [row] = parts, label = [row.block, ...(row.label === row.block ? [] : [row.label])].filter(Boolean).join(" · ");
        body.append(view(row, name, label, "div"));
        continue;
      }
      const details = make("details", "block");
      details.append(view(united(parts), name, block, "summary"), ...parts.map((row) => view(row, name, row.label, "div")));
      details.addEventListener("toggle", () => views.forEach((one) => one.draw()));
      body.append(details);
    }
    if (data.left_out[name]) body.append(make("p", "", `and ${data.left_out[name]} more`));
    return { section, name, isRatio, rows, ruler: section.querySelector(".ruler") };
  });

  const flag = (exponent, text, kind) => {
    const place = at(exponent), one = make("div", "flag " + kind, text), isEnd = place > 50;
    one.classList.toggle("end", isEnd);
    one.style.marginLeft = isEnd ? "auto" : place + "%";
    one.style.marginRight = isEnd ? 100 - place + "%" : "0";
    one.style.maxWidth = (isEnd ? place : 100 - place) + "%";
    return one;
  };
  const zone = (a, b, colour, share) => `color-mix(in srgb,var(--${colour}) ${share}%,transparent) ${a}% ${b}%`;
  const rule = ({ section, name, isRatio, ruler }, limits, shift) => {
    const lost = -limits.precision - 1, edge = Math.log2(limits.maximum) - shift, [smallest, normal] = [limits.smallest - shift, limits.normal - shift];
    const box = make("div", ""), ticks = make("div", "ticks"), flags = [], zones = [];
    const why = shift ? ` at loss scale ${power(shift)}` : "";
    if (isRatio) {
      flags.push(flag(lost, `an update below ${power(lost)} of its weight does not move a weight stored in ${format.value}`, ""));
      zones.push(zone(0, at(lost), "loses", 15), `transparent ${at(lost)}%`);
    } else {
      if (smallest > from) flags.push(flag(smallest, `below ${power(smallest)} ${format.value} writes 0${why}`, ""));
      if (normal > from) flags.push(flag(normal, `below ${power(normal)} it keeps fewer digits`, "care"));
      if (edge < to) flags.push(flag(edge, `above ${size(limits.maximum / 2 ** shift)} it overflows`, ""));
      zones.push(zone(0, at(smallest), "loses", 15), zone(at(smallest), at(normal), "with-care", 14), `transparent ${at(normal)}% ${at(edge)}%`, zone(at(edge), 100, "loses", 15));
    }
    for (let exponent = Math.ceil(from / 8) * 8; exponent < to - 5; exponent += 8) {
      const tick = make("span", "", power(exponent));
      tick.style.left = at(exponent) + "%";
      ticks.append(tick);
    }
    box.append(...(flags.length ? flags : [make("div", "", `all that the axis shows fits ${format.value}`)]), ticks);
    ruler.replaceChildren(box);
    section.style.setProperty("--zones", `linear-gradient(90deg,${zones.join()})`);
  };

  const update = () => {
    const limits = data.formats[format.value], isAll = step.value === "0", sum = { all: 0, zero: 0, overflow: 0 };
    for (const one of sections) {
      const isScaled = data.scaled.includes(one.name), shift = isScaled ? Number(scale.value) : 0;
      rule(one, limits, shift);
      if (!isScaled) continue;
      for (const row of one.rows) {
        const numbers = shown(row, false), found = numbers && judge(row, numbers, limits, shift, isAll);
        if (found) sum.all += found.all, sum.zero += found.zero, sum.overflow += found.overflow > 0;
      }
    }
    for (const one of views) {
      const shift = one.isScaled ? Number(scale.value) : 0, numbers = shown(one.row, one.isRatio);
      const bounds = one.isRatio ? { smallest: -limits.precision - 1, normal: -limits.precision - 1, maximum: Infinity } : limits;
      one.tell(...(numbers ? words(judge(one.row, numbers, bounds, shift, isAll && !one.isRatio), one.isRatio) : ["not recorded in this step", ""]));
      one.draw();
    }
    scaleValue.textContent = power(scale.value);
    scale.setAttribute("aria-valuetext", "2 to the power of " + scale.value);
    const chosen = data.steps[step.value - 1];
    stepValue.textContent = chosen ? chosen.words : "all recorded steps";
    step.setAttribute("aria-valuetext", stepValue.textContent);
    for (const now of document.querySelectorAll(".now")) {
      const x = chosen ? (100 * chosen.step) / now.parentElement.dataset.last : -1;
      now.setAttribute("x1", x);
      now.setAttribute("x2", x);
    }
    const when = chosen ? ` in step ${chosen.step}, about` : "", zero = sum.zero ? `${percent(sum.zero / sum.all)} of all gradients become zero` : "no gradient becomes zero";
    totals.textContent = `${format.value} at loss scale ${power(scale.value)}${when}: ${zero}, ${sum.overflow || "none"} of their tensors overflow${sum.overflow === 1 ? "s" : ""}.`;
  };
  step.max = data.steps.length;
  step.parentElement.hidden = data.steps.length < 2;
  for (const one of [format, scale, step]) one.addEventListener("input", update);
  element("controls").addEventListener("submit", (event) => event.preventDefault());
  for (const button of document.querySelectorAll("[data-copy]"))
    button.addEventListener("click", async () => {
      const source = element(button.dataset.copy);
      try {
        await navigator.clipboard.writeText(source.textContent);
        button.textContent = "Copied";
      } catch { // browsers refuse it to some pages: the text is selected for the user's own keys
        const folded = source.closest("details");
        if (folded) folded.open = true;
        getSelection().selectAllChildren(source);
        button.textContent = "Selected: press Ctrl-C";
      }
    });
  update();
})();
