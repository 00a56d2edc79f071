"use strict";
// A click, or a key, on a column's name sorts its table: upwards, then downwards. What has no value stays last.
document.addEventListener("click", (event) => {
  const button = event.target.closest("th button");
  if (!button) return;
  const head = button.closest("th"), body = head.closest("table").tBodies[0];
  const place = head.cellIndex, down = head.getAttribute("aria-sort") === "ascending";
  for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const numeric = head.classList.contains("number");
  const key = (row) => {
    const cell = row.cells[place];
    return numeric ? Number(cell.dataset.value ?? NaN) : cell.textContent.trim();
  };
  const missing = (value) => (numeric ? Number.isNaN(value) : value === "-");
  const compare = (a, b) => {
    if (missing(a) || missing(b)) return missing(a) - missing(b);
    const order = numeric ? a - b : a.localeCompare(b, undefined, { numeric: true });
    return down ? -order : order;
  };
  body.append(...[...body.rows].sort((a, b) => compare(key(a), key(b))));
});
