"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const element = (id) => document.getElementById(id);
  const [format, low, high, scale, value, totals] = ["format", "low", "high", "scale", "scale-value", "totals"].map(element);
  const make = (name, attributes, text) => {
    const one = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key in attributes) one.setAttribute(key, attributes[key]);
    if (text !== undefined) one.textContent = text;
    return one;
  };
  const percent = (share) => (share === 0 ? "0" : share < 1e-5 ? "< 0.001 %" : (100 * share).toFixed(3) + " %");
  let limits = data.formats.fp16;

  // what a format with these limits does to a row whose numbers are multiplied by 2^shift
  const judge = (row, shift) => {
    const [, first, counts, maximum, powers] = row;
    let all = 0, flushed = 0, subnormal = 0, overflow = 0;
    counts.forEach((count, place) => {
      const exponent = first + place + shift;
      all += count;
      const tied = powers && exponent === limits.smallest ? powers[place] : 0;
      flushed += exponent < limits.smallest ? count : tied;
      if (exponent >= limits.smallest && exponent < limits.normal) subnormal += count - tied;
      if (2 ** exponent > limits.maximum) overflow += count;
    });
    if (!overflow && maximum * 2 ** shift > limits.maximum) overflow = 1;
    return { all, flushed, subnormal, overflow };
  };

  const narrow = innerWidth < 700; // a telephone: most of a heat map is to be in sight beside its labels
  const shown = narrow ? 18 : 42; // characters of a label
  const cell = narrow ? 4 : 12, line = 16, glyph = 6.8, top = 18; // above the rows stands the axis, and below them once more
  const labels = Object.values(data.maps).flat().map((row) => Math.min(row[0].length, shown));
  const left = 12 + glyph * Math.max(0, ...labels); // the same for all maps, whose columns stand below each other
  const draw = (section) => {
    const name = section.dataset.map, rows = data.maps[name];
    if (!rows.length) { section.hidden = true; return () => {}; }
    const shifted = data.scaled.includes(name);
    const lowest = Math.min(...rows.map((row) => row[1])), highest = Math.max(...rows.map((row) => row[1] + row[2].length));
    const from = Math.max(lowest - 4, -64), to = Math.min(Math.max(highest, 17), 130);
    const svg = section.querySelector("svg"), bottom = top + rows.length * line + 4;
    svg.setAttribute("width", left + (to - from) * cell + 30);
    svg.setAttribute("height", bottom + 34);
    section.querySelector("h2").append(` (${rows.length})`);
    rows.forEach((row, place) => {
      const label = make("text", { x: 0, y: top + place * line + 13 }, row[0].length > shown ? "…" + row[0].slice(1 - shown) : row[0]);
      label.append(make("title", {}, row[0]));
      svg.append(label);
      const most = Math.max(...row[2]);
      row[2].forEach((count, octave) => {
        if (!count || row[1] + octave < from) return;
        const shade = 0.22 + 0.78 * Math.max(0, 1 + Math.log10(count / most) / 5);
        const box = make("rect", { x: left + (row[1] + octave - from) * cell, y: top + place * line + 2, width: cell - 1, height: line - 3, fill: `rgba(var(--cell),${shade.toFixed(2)})`, style: `fill:rgba(var(--cell),${shade.toFixed(2)})` });
        box.append(make("title", {}, `${row[0]}: ${count} numbers at 2^${row[1] + octave}`));
        svg.append(box);
      });
    });
    const apart = narrow ? 16 : 8; // octaves between two marks of the axis
    for (let exponent = Math.ceil(from / apart) * apart; exponent <= to; exponent += apart)
      for (const y of [12, bottom + 14]) svg.append(make("text", { x: left + (exponent - from) * cell, y }, "2^" + exponent));
    if (data.left_out[name]) svg.append(make("text", { x: 0, y: bottom + 30 }, `and ${data.left_out[name]} more layers`));
    const marks = [["limit", "smallest"], ["normal", "normal"], ["limit", "largest"]].map(([kind, what]) => {
      const mark = make("line", { class: kind, y1: top, y2: bottom, "data-limit": what });
      svg.append(mark);
      return mark;
    });
    const body = section.querySelector("tbody");
    return () => {
      const shift = shifted ? Number(scale.value) : 0;
      const places = [limits.smallest, limits.normal, Math.floor(Math.log2(limits.maximum)) + 1];
      marks.forEach((mark, place) => {
        const x = left + (Math.min(Math.max(places[place] - shift, from), to) - from) * cell;
        mark.setAttribute("x1", x);
        mark.setAttribute("x2", x);
        mark.style.display = places[place] - shift < from || places[place] - shift > to ? "none" : "";
      });
      const sum = { all: 0, flushed: 0, overflow: 0, rows: 0 };
      body.replaceChildren(...rows.map((row) => {
        const found = judge(row, shift), tr = document.createElement("tr"), head = document.createElement("th");
        head.scope = "row";
        head.textContent = row[0];
        tr.append(head);
        const cells = [found.all, `2^${row[1]} .. 2^${row[1] + row[2].length - 1}`, percent(found.flushed / found.all), percent(found.subnormal / found.all), percent(found.overflow / found.all)];
        for (const text of cells) tr.insertCell().textContent = text;
        sum.all += found.all;
        sum.flushed += found.flushed;
        sum.rows += found.overflow > 0;
        return tr;
      }));
      return { name, ...sum };
    };
  };

  const sections = [...document.querySelectorAll(".map")].map(draw);
  const update = () => {
    value.textContent = "2^" + scale.value;
    scale.setAttribute("aria-valuetext", "2 to the power of " + scale.value);
    const found = sections.map((one) => one()).filter((one) => one && data.scaled.includes(one.name));
    const all = found.reduce((sum, one) => sum + one.all, 0), flushed = found.reduce((sum, one) => sum + one.flushed, 0);
    const overflow = found.reduce((sum, one) => sum + one.rows, 0);
    totals.textContent = `At this scale: ${percent(all ? flushed / all : 0)} of the gradients of activations and weights flushed, ${overflow} of their tensors overflow`;
  };
  const choose = () => {
    limits = { ...data.formats[format.value] };
    low.value = limits.smallest;
    high.value = Math.floor(Math.log2(limits.maximum));
    update();
  };
  const move = () => {
    const smallest = Number(low.value), largest = Number(high.value);
    limits = { smallest, normal: smallest + (limits.normal - limits.smallest), maximum: 2 ** (largest + 1) };
    update();
  };
  format.addEventListener("change", choose);
  low.addEventListener("input", move);
  high.addEventListener("input", move);
  scale.addEventListener("input", update);
  scale.value = data.scale;
  for (const button of document.querySelectorAll("[data-copy]"))
    button.addEventListener("click", async () => {
      const source = element(button.dataset.copy);
      try {
        await navigator.clipboard.writeText(source.textContent);
        button.textContent = "Copied";
      } catch { // browsers refuse it to some pages: the text is selected for the user's own keys
        getSelection().selectAllChildren(source);
        button.textContent = "Selected: press Ctrl-C";
      }
    });
  choose();
})();
