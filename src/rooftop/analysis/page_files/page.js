"use strict";
// Charts and table of a rooftop report. The data is the JSON in #data; the page already contains all text.

const report = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
root.classList.add("scripted");

// ---- theme: the system's, until the button is pressed ------------------------------------------------------------
const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
const setTheme = (dark) => { root.dataset.theme = dark ? "dark" : "light"; drawCharts(); };
const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();

// Plotly layout that follows the page's colours.
function layout(extra) {
  const axis = { gridcolor: colour("--line"), zerolinecolor: colour("--line"), linecolor: colour("--line") };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: colour("--text"), size: 13 },
    margin: { l: 64, r: 12, t: 8, b: 52 }, hoverlabel: { align: "left" }, ...extra,
    xaxis: { ...axis, ...extra.xaxis }, yaxis: { ...axis, ...extra.yaxis },
  };
}
const config = { responsive: true, displaylogo: false, displayModeBar: false };

const escapeText = (text) => text.replace(/[&<>]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[c]);
const percentText = (value) => (value === null ? "no roof to compare with" : `${value < 10 ? value.toFixed(1) : value.toFixed(0)}% of roof`);
const boundText = (op) => (report.predicted ? `its roof, bound by ${op.bound}` : percentText(op.percent_of_roof));
const fusedText = (node) => (report.predicted ? "" : `<br>${percentText(node.percent_of_roof)}`);
const msText = (ms) => `${ms >= 999.5 ? Math.round(ms).toLocaleString("en") : ms.toPrecision(3)} ms`;
const shapesText = (shapes) => shapes.slice(0, 6).map((s) => s.join("×")).join(", ") + (shapes.length > 6 ? ", …" : "");
const SCALE = [[0, "#7b1e5a"], [0.25, "#c4496a"], [0.5, "#ee8f58"], [0.75, "#f4c95d"], [1, "#3fa796"]];

// ---- roofline ----------------------------------------------------------------------------------------------------
function roofline() {
  const ops = report.ops.filter((op) => op.flops > 0 && op.bytes > 0 && op.measured_ms > 0);
  const intensity = ops.map((op) => op.flops / op.bytes);
  const largest = Math.max(...ops.map((op) => op.measured_ms), 1e-9);
  const points = {
    type: "scatter", mode: "markers", name: "operators", showlegend: false, x: intensity,
    y: ops.map((op) => op.flops / op.measured_ms * 1e3),
    text: ops.map((op) => `<b>${escapeText(op.name)}</b> (${op.phase})<br>${shapesText(op.shapes)}` +
      ` ${op.dtype}<br>${msText(op.measured_ms)} in ${op.calls} calls, ${boundText(op)}`),
    hovertemplate: "%{text}<extra></extra>",
    marker: { size: ops.map((op) => 6 + 34 * Math.sqrt(op.measured_ms / largest)), line: { width: 1, color: colour("--panel") },
      opacity: 0.85, ...(report.predicted ? { color: colour("--part2") } : {
        color: ops.map((op) => op.percent_of_roof), colorscale: SCALE, cmin: 0, cmax: 100,
        colorbar: { title: { text: "% of roof" }, thickness: 12, len: 0.9 } }) },
  };
  const left = Math.min(...intensity, 0.1) / 2, right = Math.max(...intensity, 100) * 2;
  const used = new Set(report.ops.flatMap((op) => Object.keys(op.flops_by_precision)));
  const peaks = Object.entries(report.ceilings.flops).filter(([precision]) => used.has(precision));
  const top = Math.max(...peaks.map(([, rate]) => rate), 1);
  const diagonals = report.ceilings.levels.map((level, i) => line(
    `${level.name} ${prefixed(level.rate)}B/s`, [left, top / level.rate], [left * level.rate, top], i));
  const fastest = Math.max(...report.ceilings.levels.map((level) => level.rate));
  const flats = peaks.map(([precision, rate], i) => line(
    `${precision} ${prefixed(rate)}FLOP/s`, [rate / fastest, right], [rate, rate], diagonals.length + i));
  const labels = [
    ...report.ceilings.levels.map((level, i) => label(
      level.name, left, left * level.rate, { xanchor: "left", yanchor: i % 2 ? "top" : "bottom" })),
    ...peaks.map(([precision, rate]) => label(precision, right, rate, { xanchor: "right", yanchor: "bottom" })),
  ];
  const powers = { type: "log", exponentformat: "power", dtick: 1 };
  const shape = layout({ xaxis: { ...powers, title: { text: "flop / byte" } }, yaxis: { ...powers, title: { text: "flop / s" } },
    annotations: labels, legend: { orientation: "h", y: -0.2 } });
  Plotly.react("roofline", [...diagonals, ...flats, points], shape, config);
}

// "7.49 T": three significant digits and a decimal prefix.
function prefixed(value) {
  const [limit, prefix] = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"]].find(([at]) => value >= 0.9995 * at) ?? [1, ""];
  return `${(value / limit).toPrecision(3)} ${prefix}`;
}

// Each line of the roofline has its own dash and colour, and its name is written at its end.
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "12px,3px,3px,3px,3px,3px", "2px,6px"];
const COLOURS = ["--part2", "--part1", "--part3", "--part4"];
function line(name, x, y, which) {
  const dash = DASHES[which % DASHES.length], shade = COLOURS[which % COLOURS.length];
  return { type: "scatter", mode: "lines", name, x, y, line: { dash, width: 2, color: colour(shade) }, hoverinfo: "name" };
}

// A text label at the point (x, y) of a plot with logarithmic axes.
function label(text, x, y, anchors) {
  return { text: escapeText(text), x: Math.log10(x), y: Math.log10(y), showarrow: false, ...anchors,
    font: { size: 11, color: colour("--text") }, bgcolor: colour("--panel") };
}

// ---- modules -----------------------------------------------------------------------------------------------------
function modules() {
  const ids = [], labels = [], parents = [], values = [], colours = [], texts = [];
  const visit = (node, path, parent) => {
    const id = path || "(model)";
    ids.push(id); parents.push(parent); values.push(node.measured_ms); colours.push(node.percent_of_roof);
    labels.push(escapeText(node.name || node.type));
    const measured = report.predicted ? "" : `${msText(node.measured_ms)}, `;
    texts.push(`<b>${escapeText(id)}</b> ${escapeText(node.type)}<br>${measured}` +
      `op roof ${msText(node.op_roof_ms)}, fused roof ${msText(node.fused_roof_ms)}${fusedText(node)}`);
    const own = values.length - 1;  // rounding must not make the children's sum larger than their parent
    let inside = 0;
    for (const child of node.children) inside += visit(child, path ? `${path}.${child.name}` : child.name, id);
    values[own] = Math.max(values[own], inside);
    return values[own];
  };
  visit(report.modules, "", "");
  const known = colours.map((value) => (value === null ? colour("--line") : scaleColour(Math.min(value, 100) / 100)));
  const tree = { type: "icicle", ids, labels, parents, values, branchvalues: "total", tiling: { orientation: "v" },
    text: texts, hovertemplate: "%{text}<extra></extra>", textinfo: "label", maxdepth: 4, sort: false,
    leaf: { opacity: 1 }, textfont: { color: known.map(readableOn) },
    marker: { colors: known, line: { width: 1, color: colour("--panel") } }, pathbar: { visible: true } };
  Plotly.react("modules", [tree], layout({ margin: { l: 0, r: 0, t: 26, b: 0 } }), config);
}

// A colour of SCALE at a fraction from 0 to 1.
function scaleColour(fraction) {
  const next = SCALE.findIndex(([at]) => at >= fraction);
  if (next <= 0) return SCALE[0][1];
  const [[from, a], [to, b]] = [SCALE[next - 1], SCALE[next]];
  const mix = (fraction - from) / (to - from);
  const parts = [1, 3, 5].map((i) => Math.round(
    parseInt(a.slice(i, i + 2), 16) * (1 - mix) + parseInt(b.slice(i, i + 2), 16) * mix));
  return `rgb(${parts.join(",")})`;
}

// Black or white, whichever is easier to read on a background colour given as #rrggbb or rgb(...).
function readableOn(background) {
  const hex = background.startsWith("#");
  const [r, g, b] = hex ? [1, 3, 5].map((i) => parseInt(background.slice(i, i + 2), 16)) : background.match(/\d+/g).map(Number);
  return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#15181b" : "#ffffff";
}

// ---- memory ------------------------------------------------------------------------------------------------------
function memory() {
  if (!document.getElementById("memory")) return;
  const curve = report.memory.timeline;
  const trace = { type: "scatter", mode: "lines", fill: "tozeroy", x: curve.map(([ms]) => ms), y: curve.map(([, bytes]) => bytes),
    line: { shape: "hv", color: colour("--part2"), width: 1.5 }, hovertemplate: "%{x:.3g} ms: %{y:.4s}B<extra></extra>" };
  const shape = layout({ xaxis: { title: { text: "ms" } }, yaxis: { tickformat: ".3s", ticksuffix: "B", rangemode: "tozero" } });
  Plotly.react("memory", [trace], shape, config);
}

function drawCharts() { roofline(); modules(); memory(); }

// ---- operator table ----------------------------------------------------------------------------------------------
const table = document.getElementById("operators"), body = table.tBodies[0];
const rows = [...body.rows];
const cellValue = (row, column) => {
  const cell = row.cells[column];
  return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
};

function sortBy(header) {
  const column = header.cellIndex, falling = header.getAttribute("aria-sort") !== "descending";
  for (const other of table.tHead.rows[0].cells) other.setAttribute("aria-sort", "none");
  header.setAttribute("aria-sort", falling ? "descending" : "ascending");
  const order = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
  rows.sort((a, b) => (falling ? -1 : 1) * order(cellValue(a, column), cellValue(b, column)));
  body.append(...rows);
}
for (const header of table.tHead.rows[0].cells) header.querySelector("button").addEventListener("click", () => sortBy(header));

const [text, bound, phase] = ["filter", "bound", "phase"].map((id) => document.getElementById(id));
const contents = new Map(rows.map((row) => [row, `${row.textContent} ${row.dataset.modules}`.toLowerCase()]));
function filterRows() {
  const plain = text.value.trim().toLowerCase(), wanted = plain.replaceAll("x", "×");
  let shown = 0;
  for (const row of rows) {
    const content = contents.get(row);
    const match = (content.includes(plain) || content.includes(wanted)) &&
      (!bound.value || row.dataset.bound === bound.value) && (!phase.value || row.dataset.phase === phase.value);
    row.hidden = !match;
    shown += match;
  }
  document.getElementById("count").textContent = `${shown} rows`;
}
for (const control of [text, bound, phase]) control.addEventListener("input", filterRows);

document.getElementById("theme").addEventListener("click", () => setTheme(root.dataset.theme !== "dark"));
prefersDark.addEventListener("change", (event) => setTheme(event.matches));
window.addEventListener("beforeprint", () => setTheme(false));
setTheme(prefersDark.matches);
