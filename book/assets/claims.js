// Over the list of claims a search and buttons for those of one status; the address keeps both, as in
// #status=open&q=fig. 8. Without scripts all are shown.
"use strict";
for (const table of document.querySelectorAll(".tag_ledger table")) {
  const rows = [...table.querySelectorAll("tbody tr")].map((row) => ({
    row,
    status: row.cells[0].textContent.trim(),
    claims: row.cells[1].querySelectorAll("br").length + 1,
    text: row.textContent.toLowerCase(),
  }));
  const bar = document.createElement("div");
  bar.className = "filter";
  bar.setAttribute("role", "search");
  bar.setAttribute("aria-label", "Claims by words and status");
  const search = document.createElement("input");
  Object.assign(search, { type: "search", placeholder: "Search the claims" });
  search.setAttribute("aria-label", "Search the claims");
  const asked = () => new URLSearchParams(location.hash.slice(1));

  function keep(name, value) {
    const state = asked();
    if (value) state.set(name, value);
    else state.delete(name);
    history.replaceState(null, "", `#${state}`);
    show();
  }

  const buttons = ["", ...new Set(rows.map((one) => one.status))].map((status) => {
    const button = document.createElement("button");
    button.type = "button";
    button.addEventListener("click", () => keep("status", status));
    return { button, status };
  });

  // A button counts the claims that it would show.
  function show() {
    const state = asked(), status = state.get("status") ?? "", q = state.get("q") ?? "";
    const words = q.toLowerCase().split(/\s+/);
    const matching = rows.filter((one) => words.every((word) => one.text.includes(word)));
    if (search.value.trim() !== q) search.value = q;
    for (const one of buttons) {
      const meant = matching.filter((row) => !one.status || row.status === one.status);
      const count = meant.reduce((sum, row) => sum + row.claims, 0);
      one.button.textContent = `${one.status || "all"} (${count})`;
      one.button.setAttribute("aria-pressed", one.status === status);
    }
    for (const one of rows)
      one.row.hidden = !matching.includes(one) || (status !== "" && one.status !== status);
  }

  search.addEventListener("input", () => keep("q", search.value.trim()));
  addEventListener("hashchange", show);
  bar.append(search, ...buttons.map((one) => one.button));
  table.before(bar);
  show();
}
