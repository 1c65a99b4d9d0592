"use strict";
// Sorts the table by a clicked heading, filters it, and draws the curves of the chosen entries with their bands.
(() => {
  const Z = 1.9599639845400536; // normal quantile of 0.975
  const SVG = "http://www.w3.org/2000/svg";
  const HUES = [210, 25, 140, 285, 350, 60, 180, 320, 100, 240];
  const DASHES = ["", "7 3", "2 3", "9 3 2 3"];
  const section = document.getElementById("curves"), chart = document.getElementById("chart");
  const table = document.getElementById("entries"), legend = document.getElementById("legend");
  const rows = table ? [...table.tBodies[0].rows] : [];

  function make(tag, attributes, text) {
    const made = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function wilson(k, n) {
    const centre = (k + Z * Z / 2) / (n + Z * Z), half = Z / (n + Z * Z) * Math.sqrt(k * (n - k) / n + Z * Z / 4);
    return [Math.max(0, centre - half), Math.min(1, centre + half)];
  }

  // The colour and dash of an entry, by its place; dark pages get lighter lines.
  const style = (place) => ({
    stroke: `hsl(${HUES[place % HUES.length]} 70% ${matchMedia("(prefers-color-scheme: dark)").matches ? 65 : 38}%)`,
    dash: DASHES[Math.floor(place / HUES.length) % DASHES.length],
  });

  function draw(entries) {
    const width = Math.max(300, chart.clientWidth), height = Math.min(420, Math.max(260, width * 0.45));
    const box = { left: 44, right: 14, top: 14, bottom: 42 };
    const tops = entries.flatMap(({ curve, n }) => curve.map(([, , k]) => wilson(k, n)[1]));
    const highest = Math.max(0.02, ...tops), step = [0.01, 0.02, 0.05, 0.1, 0.2].find((size) => 6 * size >= highest) || 0.2;
    const most = Math.min(1, step * Math.ceil(highest / step - 1e-9));
    const x = (v) => box.left + v * (width - box.left - box.right);
    const y = (v) => height - box.bottom - v / most * (height - box.top - box.bottom);
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
    for (let v = 0; v <= 1.001; v += 0.2) svg.append(make("text", { x: x(v), y: height - box.bottom + 17, "text-anchor": "middle" }, `${Math.round(100 * v)}`));
    for (let v = 0; v <= most + 0.001; v += step) {
      svg.append(make("path", { class: "axis", d: `M${x(0)} ${y(v)}H${x(1)}` }));
      svg.append(make("text", { x: box.left - 6, y: y(v) + 4, "text-anchor": "end" }, `${Math.round(1000 * v) / 10}`));
    }
    svg.append(make("text", { x: x(0.5), y: height - 7, "text-anchor": "middle" }, "clean coverage, %"));
    svg.append(make("text", { x: -y(most / 2), y: 12, "text-anchor": "middle", transform: "rotate(-90)" }, "accepted errors, % of images"));
    const path = (points) => points.map(([a, b]) => `${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("L");
    for (const { curve, n, place } of entries) {
      const { stroke, dash } = style(place), bands = curve.map(([c, , k]) => [c, ...wilson(k, n)]);
      const outline = [...bands.map(([c, lo]) => [c, lo]), ...bands.map(([c, , hi]) => [c, hi]).reverse()];
      svg.append(make("path", { d: `M${path(outline)}Z`, fill: stroke, opacity: 0.12 }));
      const line = curve.map(([c, , k]) => [c, k / n]);
      svg.append(make("path", { class: "line", d: `M${path(line)}`, stroke, "stroke-dasharray": dash }));
      if (line.length === 1) svg.append(make("circle", { cx: x(line[0][0]), cy: y(line[0][1]), r: 4, fill: stroke }));
    }
    chart.replaceChildren(svg);
  }

  const entryOf = (data, place) => ({ curve: JSON.parse(data.curve), n: Number(data.n), title: data.title, place });

  function show() {
    if (!table) return draw([entryOf(section.dataset, 0)]);
    const chosen = rows.filter((row) => !row.hidden && row.querySelector("input").checked);
    const entries = chosen.map((row) => entryOf(row.dataset, Number(row.dataset.place)));
    draw(entries);
    legend.replaceChildren(...entries.map(({ title, place }) => {
      const item = document.createElement("li"), { stroke, dash } = style(place);
      const mark = make("svg", { width: 28, height: 8, "aria-hidden": "true" });
      mark.append(make("path", { d: "M0 4H28", stroke, "stroke-width": 3, "stroke-dasharray": dash }));
      item.append(mark, title);
      return item;
    }));
  }

  function filter() {
    const form = document.getElementById("filters");
    for (const row of rows) row.hidden = ["data", "norm"].some((key) => form[key].value && row.dataset[key] !== form[key].value);
    show();
  }

  function sort(head) {
    const place = head.cellIndex, numeric = head.dataset.sort === "number";
    const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
    const value = (row) => row.cells[place].dataset.value;
    const compare = numeric ? (a, b) => value(a) - value(b) : (a, b) => value(a).localeCompare(value(b));
    table.tBodies[0].append(...[...rows].sort((a, b) => sign * compare(a, b)));
  }

  function start() {
    rows.forEach((row, place) => {
      const box = row.querySelector("input");
      row.dataset.place = place;
      box.hidden = false;
      box.checked = place < 4;
      box.addEventListener("change", show);
    });
    for (const head of table.tHead.rows[0].cells) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      button.addEventListener("click", () => sort(head));
      head.replaceChildren(button);
    }
    const form = document.getElementById("filters");
    for (const key of ["data", "norm"]) {
      for (const value of new Set(rows.map((row) => row.dataset[key]))) form[key].append(new Option(value, value));
      form[key].addEventListener("change", filter);
    }
    document.getElementById("none").addEventListener("click", () => {
      for (const row of rows) row.querySelector("input").checked = false;
      show();
    });
  }

  section.hidden = false;
  if (table) start();
  show();
  addEventListener("resize", show);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
})();
