// A calculator of padding: lengths in, out come fill, what padding wastes, and the gap of each kernel
// by its two constants, c0 for a tile and c1 for a block of keys. Data: widgets.padding.
"use strict";
(() => {
  const box = document.currentScript.previousElementSibling;
  const data = JSON.parse(box.querySelector("script").textContent);
  const made = (tag, text = "", parent = box) => {
    const element = document.createElement(tag);
    element.textContent = text;
    parent.append(element);
    return element;
  };
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const percent = (share) => `${(100 * share).toFixed(1)} %`;
  const count = (value) => value.toLocaleString("en", { maximumFractionDigits: 0 });

  // Modelled time of one head of self-attention, for each pair of a query and a key.
  function timePerPair({ c0, c1, rows, keys }, lengths) {
    const tiles = lengths.map((n) => Math.ceil(n / rows));
    const blocks = lengths.map((n, i) => tiles[i] * Math.ceil(n / keys));
    return (c0 * sum(tiles) + c1 * sum(blocks)) / sum(lengths.map((n) => n * n));
  }

  // The gap to full sequences, split as in the chapter: what short ones cost if they are rounded up
  // to whole tiles, and what partial tiles add.
  function gap(kernel, lengths) {
    const best = timePerPair(kernel, [data.longest]);
    const whole = lengths.map((n) => data.whole * Math.ceil(n / data.whole));
    const rounded = timePerPair(kernel, whole), all = timePerPair(kernel, lengths);
    return { short: rounded / best, partial: all / rounded, gap: all / best };
  }

  const label = made("label", "Lengths of your sequences, one per sequence");
  const input = made("textarea", data.lengths.join(" "), label);
  Object.assign(input, { rows: 3, spellcheck: false });
  const told = made("p");
  told.setAttribute("aria-live", "polite");
  const table = made("table"), note = made("p", data.note);
  note.className = "note";

  function show() {
    const words = input.value.split(/[\s,;()[\]]+/).filter(Boolean), lengths = words.map(Number);
    const wrong = words.find((word) => !/^\d+$/.test(word));
    const filled = lengths.filter((n) => n > 0); // an empty sequence has no tile
    table.hidden = wrong !== undefined || !filled.length;
    if (table.hidden) {
      told.textContent = wrong === undefined
        ? "Write at least one length above 0."
        : `Lengths must be whole numbers, got “${wrong}”.`;
      return;
    }
    const longest = filled.reduce((a, b) => Math.max(a, b)), fill = sum(lengths) / lengths.length / longest;
    const pairs = sum(filled.map((n) => n * n)) / (lengths.length * longest ** 2);
    told.textContent = `${count(lengths.length)} sequences, the longest of ${count(longest)}, ` +
      `${count(sum(lengths) / lengths.length)} on average: fill ${percent(fill)}. Padded to the ` +
      `longest, ${percent(1 - fill)} of the tokens and ${percent(1 - pairs)} of the pairs of a ` +
      "query and a key would be padding.";
    table.replaceChildren();
    const head = made("tr", "", made("thead", "", table)), body = made("tbody", "", table);
    for (const title of ["kernel", "short sequences", "partial tiles", "gap"]) made("th", title, head);
    for (const kernel of data.kernels) {
      const row = made("tr", "", body), found = gap(kernel, filled);
      made("td", kernel.name, row);
      for (const value of [found.short, found.partial, found.gap]) {
        made("td", `${value.toFixed(2)}×`, row).className = "text-right";
      }
    }
  }
  input.addEventListener("input", show);
  show();
})();
