// A roofline with two sliders, tokens and keys of a sequence: the dot is the fast end of the bracket
// of a workload of such sequences, the line below it reaches to the slow end. Data: widgets.roofline.
"use strict";
(() => {
  const box = document.currentScript.previousElementSibling;
  const data = JSON.parse(box.querySelector("script").textContent);
  const WIDTH = 680, HEIGHT = 380, LEFT = 56, TOP = 12, BOTTOM = 44, RIGHT = 14;
  const X = [8, 2048], Y = [20, 1200]; // FLOP per byte, TFLOP/s
  const NS = "http://www.w3.org/2000/svg";
  const number = (value, digits = 0) =>
    value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  const along = (value, [low, high], from, to) =>
    from + ((to - from) * Math.log(value / low)) / Math.log(high / low);
  const x = (intensity) => along(intensity, X, LEFT, WIDTH - RIGHT);
  const y = (tflops) => along(tflops, Y, HEIGHT - BOTTOM, TOP);

  function add(parent, tag, attributes = {}, text = "") {
    const made = document.createElementNS(NS, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.textContent = text;
    parent.append(made);
    return made;
  }

  // GB/s of a copy with so many bytes read for each one written: linear between measured mixes.
  function copyRate(mix) {
    const above = data.copies.findIndex(([at]) => at > mix);
    if (above === 0) return data.copies[0][1];
    if (above < 0) return data.copies.at(-1)[1];
    const [[a, low], [b, high]] = data.copies.slice(above - 1, above + 1);
    return low + ((high - low) * (mix - a)) / (b - a);
  }

  // The bracket of a batch: FLOP per byte, and microseconds of both floors.
  function bracket(queries, keys) {
    const rows = data.batch * data.heads * data.head_dim;
    const flops = 4 * rows * queries * keys;
    const read = 2 * rows * (queries + 2 * keys), written = 2 * rows * queries;
    const memory = (read + written) / copyRate(read / written) / 1e3;
    return { flops, intensity: flops / (read + written), compute: flops / data.tflops / 1e6, memory };
  }

  function slider(name, label, value) {
    const row = document.createElement("label"), input = document.createElement("input");
    const out = document.createElement("output");
    Object.assign(input, { type: "range", min: 16, max: 52, name, value: 4 * Math.log2(value) });
    row.append(label, input, out);
    input.addEventListener("input", show);
    return { row, input, out, value: () => Math.round(2 ** (input.value / 4)) };
  }

  const queries = slider("queries", "Tokens (queries)", data.queries);
  const keys = slider("keys", "Keys", data.keys);
  const svg = add(box, "svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
  const told = document.createElement("p");
  told.setAttribute("aria-live", "polite");
  const note = document.createElement("p");
  note.className = "note";
  note.textContent = data.note;
  box.prepend(queries.row, keys.row);
  box.append(told, note);

  add(svg, "title", {}, "The roofline, the kernels of a record under it, and the chosen shape");
  for (const at of [10, 100, 1000]) {
    add(svg, "path", { class: "grid", d: `M${x(at)} ${TOP}V${HEIGHT - BOTTOM}` });
    add(svg, "text", { x: x(at), y: HEIGHT - BOTTOM + 16, "text-anchor": "middle" }, number(at));
  }
  for (const at of [20, 50, 100, 200, 500, 1000]) {
    add(svg, "path", { class: "grid", d: `M${LEFT} ${y(at)}H${WIDTH - RIGHT}` });
    add(svg, "text", { x: LEFT - 8, y: y(at) + 4, "text-anchor": "end" }, number(at));
  }
  add(svg, "text", { x: WIDTH - RIGHT, y: HEIGHT - 8, "text-anchor": "end" },
    "useful FLOP per byte, TFLOP/s upwards");
  for (const [, rate] of [data.copies[0], data.copies.at(-1)]) {
    const ridge = (data.tflops * 1e3) / rate, low = Math.max(X[0], (Y[0] * 1e3) / rate);
    add(svg, "path", { class: "roof",
      d: `M${x(low)} ${y((low * rate) / 1e3)}L${x(ridge)} ${y(data.tflops)}H${WIDTH - RIGHT}` });
  }
  const kinds = [...new Set(data.kernels.map((one) => one.impl))];
  const ghosts = data.kernels.map((one) => {
    const kind = `ghost kind-${kinds.indexOf(one.impl)}`;
    const made = add(svg, "circle", { class: kind, r: 5, cx: x(one.intensity), cy: y(one.tflops) });
    add(made, "title", {}, `${one.impl}, ${one.workload}: ${number(one.tflops)} TFLOP/s`);
    return made;
  });
  kinds.forEach((kind, i) => {
    const top = TOP + 16 + 18 * i;
    add(svg, "circle", { class: `ghost kind-${i}`, r: 5, cx: LEFT + 14, cy: top - 4 });
    add(svg, "text", { x: LEFT + 26, y: top }, kind);
  });
  const bar = add(svg, "path", { class: "bracket" });
  const dot = add(svg, "circle", { class: "dot", r: 7 });

  function show() {
    const n = queries.value(), m = keys.value(), made = bracket(n, m);
    const fast = Math.max(made.compute, made.memory), slow = made.compute + made.memory;
    const [high, low] = [fast, slow].map((us) => made.flops / us / 1e6);
    queries.out.textContent = number(n);
    keys.out.textContent = number(m);
    dot.setAttribute("cx", x(made.intensity));
    dot.setAttribute("cy", y(high));
    bar.setAttribute("d", `M${x(made.intensity)} ${y(high)}V${y(Math.max(low, Y[0]))}`);
    data.kernels.forEach((one, i) =>
      ghosts[i].classList.toggle("here", one.queries === n && one.keys === m));
    const [a, b] = [fast, slow].map((us) => number(us / 1e3, 2));
    const bound = made.compute > made.memory ? "compute-bound" : "memory-bound";
    told.textContent = `${number(made.intensity, 1)} FLOP per byte: ${bound}. ${number(data.batch)} ` +
      `sequences with ${data.heads} heads of ${data.head_dim} take at least ${a} ms ` +
      `(${number(high)} TFLOP/s), and ${b} ms if nothing overlaps.`;
  }
  show();
})();
