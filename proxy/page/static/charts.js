// The last five minutes since the page was opened, a point for each snapshot.

import { element, rate, setText } from "./format.js";

const SHOWN_S = 300;
const HEIGHT = 150;
const DRAWING_S = 4; // drawing is most of what an open page costs; the figures beside follow every point
const times = [];
const charts = [];
let drawnAt = 0;

const KINDS = [
  { id: "ttft", scale: 1e3, lines: [["p50", (w) => w.ttft_p50_s], ["p99", (w) => w.ttft_p99_s]] },
  { id: "itl", scale: 1e3, lines: [["p50", (w) => w.itl_p50_s], ["p99", (w) => w.itl_p99_s]] },
  { id: "tokens", scale: 1, lines: [["output", (w) => w.output_tokens_per_s], ["prompt", (w) => w.prompt_tokens_per_s]] },
  { id: "links", scale: 1e-6, lines: [["all links", (_, snapshot) => flow(snapshot)]] },
];

const clock = (at) => new Date(1e3 * at).toLocaleTimeString("en-GB");

// The values under the cursor, or the latest.
function tell({ kind, series }, index) {
  const legend = document.getElementById(`legend-${kind.id}`);
  kind.lines.forEach(([label], number) => {
    const entry = legend.children[number] ?? legend.appendChild(element("span"));
    entry.dataset.line = String(number);
    setText(entry, `${label} ${rate(series[number][index ?? series[number].length - 1])}`);
  });
}

function flow(snapshot) {
  return snapshot.links.reduce((sum, link) => sum + (link.bytes_per_s ?? 0), 0);
}

export function push(snapshot, span) {
  if (!charts.length) KINDS.forEach(open);
  times.push(snapshot.at);
  for (const chart of charts) {
    chart.kind.lines.forEach(([, read], number) => {
      const value = read(snapshot.windows[span], snapshot);
      chart.series[number].push(value === null || value === undefined ? null : value * chart.kind.scale);
    });
  }
  while (times[0] < snapshot.at - SHOWN_S) {
    times.shift();
    for (const chart of charts) chart.series.forEach((values) => values.shift());
  }
  if (!document.hidden && snapshot.at - drawnAt >= DRAWING_S) redraw();
  charts.forEach((chart) => tell(chart, chart.plot.cursor.idx));
}

export function redraw() {
  drawnAt = times.at(-1) ?? 0;
  for (const chart of charts) chart.plot.setData([times, ...chart.series]);
}

// Colours come from the style sheet: a change of theme draws everything anew.
export function restyle() {
  for (const chart of charts) {
    chart.plot.destroy();
    chart.plot = plotOf(chart.kind, chart.series);
  }
}

function open(kind) {
  const series = kind.lines.map(() => []);
  const chart = { kind, series, plot: plotOf(kind, series) };
  charts.push(chart);
  const box = document.getElementById(`chart-${kind.id}`);
  new ResizeObserver(() => chart.plot.setSize({ width: box.clientWidth, height: HEIGHT })).observe(box);
}

// What a colour of the style sheet is now.
function colour(name) {
  const probe = document.body.appendChild(element("i"));
  probe.style.color = `var(${name})`;
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

function plotOf(kind, data) {
  const box = document.getElementById(`chart-${kind.id}`);
  const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
  const strokes = [colour("--decode"), colour("--prefill")];
  const series = kind.lines.map(([label], number) => ({
    label, stroke: strokes[number], width: 1.75, points: { show: false }, spanGaps: false,
    fill: kind.lines.length === 1 ? strokes[0].replace("rgb(", "rgba(").replace(")", ", 0.12)") : undefined,
  }));
  const options = {
    width: box.clientWidth || 300, height: HEIGHT, padding: [8, 8, 0, 0], cursor: { y: false },
    legend: { show: false }, series: [{}, ...series],
    hooks: { setCursor: [(plot) => tell({ kind, series: data }, plot.cursor.idx)] },
    scales: { y: { range: (_, low, high) => [0, Math.max(high ?? 0, 1e-3) * 1.15] } },
    axes: [{ ...axis, size: 26, space: 70, values: (_, at) => at.map(clock) }, { ...axis, size: 44 }],
  };
  return new uPlot(options, [times, ...data], box);
}
