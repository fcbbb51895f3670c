"use strict";

// Sort a table by a column: numbers by value, missing ones last, text by alphabet; again for the other way round.
function sortBy(head) {
  const table = head.closest("table"), body = table.tBodies[0], column = head.cellIndex;
  const text = head.classList.contains("text");
  const first = text ? "ascending" : "descending";
  const other = text ? "descending" : "ascending";
  const order = head.getAttribute("aria-sort") === first ? other : first;
  const sign = order === "ascending" ? 1 : -1;
  for (const th of table.tHead.rows[0].cells) th.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", order);
  const key = (row) => {
    const cell = row.cells[column];
    if (text) return cell.textContent.trim();
    const value = parseFloat(cell.dataset.v ?? cell.textContent);
    return Number.isNaN(value) ? null : value;
  };
  const rows = Array.from(body.rows, (row) => [key(row), row]);
  rows.sort(([a], [b]) => {
    if (a === null || b === null) return (a === null) - (b === null);
    return sign * (text ? a.localeCompare(b, "en", { numeric: true }) : a - b);
  });
  body.append(...rows.map(([, row]) => row));
}

for (const button of document.querySelectorAll(".sortable thead button")) {
  button.addEventListener("click", () => sortBy(button.closest("th")));
}

for (const select of document.querySelectorAll(".all select")) {
  select.addEventListener("change", () => {
    for (const row of select.closest(".all").querySelectorAll("tbody tr")) {
      row.hidden = select.value !== "" && row.dataset.task !== select.value;
    }
  });
}

// A method under the pointer, or with the focus, in the legend stands out in its chart.
for (const item of document.querySelectorAll(".legend li[data-series]")) {
  const chart = item.closest(".chart");
  const mark = (on) => {
    chart.classList.toggle("focus", on);
    for (const part of chart.querySelectorAll(`[data-series="${item.dataset.series}"]`)) part.classList.toggle("on", on);
  };
  for (const event of ["pointerenter", "focus"]) item.addEventListener(event, () => mark(true));
  for (const event of ["pointerleave", "blur"]) item.addEventListener(event, () => mark(false));
}
