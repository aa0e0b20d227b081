"use strict";
// Charts of a training. Data: the JSON in #data, a list of {id, axes, series}; text was rendered into the page already.

const charts = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
root.classList.add("scripted");

// ---- theme: the system's, until the button is pressed ------------------------------------------------------------
const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
const setTheme = (dark) => { root.dataset.theme = dark ? "dark" : "light"; charts.forEach(draw); };
const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
const COLOURS = ["--part2", "--part3", "--part1", "--part4"];

function draw(chart) {
  const axis = { gridcolor: colour("--line"), zerolinecolor: colour("--line"), linecolor: colour("--line"), automargin: true };
  const series = chart.series.map((each, i) => {
    const shade = colour(COLOURS[(each.colour ?? i) % COLOURS.length]);
    const bars = each.error && { error_x: { type: "data", array: each.error, color: shade, thickness: 2 } };
    return { type: "scatter", mode: each.mode, name: each.name, x: each.x, y: each.y, ...bars,
      line: { color: shade, width: each.mode === "lines" ? 1.5 : 2 }, marker: { color: shade, size: each.mode === "markers" ? 10 : 5 },
      hovertemplate: chart.sideways ? "%{y}: %{x:.4g}<extra></extra>" : "%{x:.4g}: %{y:.4g}<extra></extra>" };
  });
  const layout = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: colour("--text"), size: 13 },
    margin: { l: 60, r: 12, t: 8, b: 44 }, showlegend: series.length > 1, legend: { orientation: "h", y: 1.14 },
    xaxis: { ...axis, title: { text: chart.across } },
    yaxis: { ...axis, type: chart.log ? "log" : undefined, rangemode: chart.zero ? "tozero" : undefined,
      autorange: chart.sideways ? "reversed" : undefined, tickformat: chart.percent ? ".0%" : undefined },
  };
  Plotly.react(chart.id, series, layout, { responsive: true, displaylogo: false, displayModeBar: false });
}

document.getElementById("theme").addEventListener("click", () => setTheme(root.dataset.theme !== "dark"));
prefersDark.addEventListener("change", (event) => setTheme(event.matches));
window.addEventListener("beforeprint", () => setTheme(false));
setTheme(prefersDark.matches);
