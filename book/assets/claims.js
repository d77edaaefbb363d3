// Buttons over the list of claims that show those of one status; without scripts all are shown.
"use strict";
for (const table of document.querySelectorAll(".tag_ledger table")) {
  const rows = [...table.querySelectorAll("tbody tr")].map((row) => ({
    row,
    status: row.cells[0].textContent.trim(),
    claims: row.cells[1].querySelectorAll("br").length + 1,
  }));
  const bar = document.createElement("div");
  bar.className = "filter";
  bar.setAttribute("role", "group");
  bar.setAttribute("aria-label", "Claims by status");
  for (const status of ["all", ...new Set(rows.map((one) => one.status))]) {
    const meant = rows.filter((one) => status === "all" || one.status === status);
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = `${status} (${meant.reduce((sum, one) => sum + one.claims, 0)})`;
    button.setAttribute("aria-pressed", status === "all");
    button.addEventListener("click", () => {
      for (const other of bar.children) other.setAttribute("aria-pressed", other === button);
      for (const one of rows) one.row.hidden = !meant.includes(one);
    });
    bar.append(button);
  }
  table.before(bar);
}
