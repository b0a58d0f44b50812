// Curves, drawn by uPlot.
const PALETTE = ["c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7"];
const HEIGHT = 210;
const drawn = [];

// Joins curves to the format of uPlot: a list of all steps, then a list of values for each curve. A step without a value
// is undefined, and the line continues; a value that is not finite is null, which is a gap.
function joined(curves) {
  const steps = [...new Set(curves.flatMap((curve) => curve.index))].sort((a, b) => a - b);
  const places = new Map(steps.map((step, place) => [step, place]));
  return [steps, ...curves.map((curve) => {
    const values = new Array(steps.length).fill(undefined);
    curve.index.forEach((step, place) => { values[places.get(step)] = curve.data[place]; });
    return values;
  })];
}

function axes(unitSize) {
  const axis = { stroke: color("dim"), grid: { stroke: color("grid"), width: 1 }, ticks: { stroke: color("grid"), width: 1 }, font: "11px system-ui, sans-serif" };
  return [
    { ...axis, label: "training step", labelFont: "11px system-ui, sans-serif", labelSize: 18, size: 34, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 1e6] },
    { ...axis, size: unitSize, values: (_, values) => values.map((value) => number(value, 3)) },
  ];
}

// Draws one chart into `parent`. `lines`: {label, curve, color, dash, width, alpha, fill, values}.
// `options`: {data, bands, isShare, fromZero}.
function drawChart(parent, title, unit, lines, options = {}) {
  const data = options.data || joined(lines.map((line) => line.curve));
  const summary = lines.filter((line) => line.curve && line.curve.data.length).map((line) =>
    `${line.label}: first ${number(line.curve.data[0])}, last ${number(line.curve.data[line.curve.data.length - 1])}`).join("; ");
  const box = element("div", { class: "chart", tabindex: 0, role: "img", "aria-label": `${title} (${unit}). ${summary}` },
    element("h3", {}, title, " ", element("small", {}, unit)));
  parent.append(box);
  const few = data[0].length <= 40;
  const build = () => new uPlot({
    width: Math.max(200, box.clientWidth), height: HEIGHT,
    scales: { x: { time: false }, y: { range: (_, low, high) => rangeOf(low, high, options) } },
    axes: axes(56),
    // `dataIdx`: a curve without a value in this step shows none instead of the nearest one.
    cursor: { sync: { key: "steps" }, drag: { x: true, y: false }, points: { size: 6 }, dataIdx: (_, __, place) => place },
    legend: { markers: { width: 2, dash: (_, place) => (place && lines[place - 1].dash ? "dashed" : "solid") } },
    hooks: { setCursor: [showNewest], ready: [showNewest] },
    bands: options.bands,
    series: [
      { label: "step", value: (_, value) => (value === null ? "–" : String(value)) },
      ...lines.map((line) => ({
        label: line.label, stroke: color(line.color) + (line.alpha || ""), width: line.width || 1.75, dash: line.dash,
        fill: line.fill ? color(line.color) + line.fill : undefined, spanGaps: false,
        points: { show: few && !line.dash, size: 5, fill: color("card") },
        value: line.values ? (_, __, ___, place) => (place === null ? "–" : number(line.values[place], 3)) : (_, value) => number(value),
      })),
    ],
  }, data, box);
  const chart = { box, build, plot: build() };
  drawn.push(chart);
  moveByKeys(chart, data[0]);
  sizes.observe(box);
}

// Without a cursor, the legend shows the newest value of each line.
function showNewest(plot) {
  if (plot.cursor.left >= 0 && plot.cursor.idx !== null && plot.cursor.idx !== undefined) return;
  plot.setLegend({ idxs: plot.data.map((values) => {
    let place = values.length - 1;
    while (place > 0 && values[place] === undefined) place--;
    return place;
  }) });
}

function rangeOf(low, high, options) {
  if (low === null || high === null) return [0, 1];
  if (options.isShare) return [0, Math.max(0.05, Math.min(1, high * 1.1))];
  if (options.fromZero) return [0, high > 0 ? high * 1.08 : 1];
  // Values that hardly differ are not enlarged: their labels would be the same.
  const room = Math.max((high - low) * 0.06, Math.abs(high) * 0.02) || 0.5;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

// The arrow keys move the cursor of all charts; Escape removes it.
function moveByKeys(chart, steps) {
  const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -1e9, End: 1e9 };
  chart.box.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return showStep(null);
    if (!(event.key in moves) || !steps.length) return undefined;
    event.preventDefault();
    const cursor = chart.plot.cursor;
    const from = cursor.left >= 0 && cursor.idx !== null ? cursor.idx : event.key === "ArrowRight" ? -1 : steps.length;
    return showStep(steps[Math.max(0, Math.min(steps.length - 1, from + moves[event.key]))]);
  });
}

function showStep(step) {
  for (const { plot } of drawn) {
    const left = step === null ? -10 : plot.valToPos(step, "x");
    plot.setCursor({ left, top: step === null ? -10 : plot.bbox.height / 3 / devicePixelRatio }, true, false);
  }
}

const sizes = new ResizeObserver((entries) => {
  for (const entry of entries) {
    const chart = drawn.find((each) => each.box === entry.target);
    const width = Math.max(200, entry.target.clientWidth);
    if (chart && chart.plot.width !== width) chart.plot.setSize({ width, height: chart.plot.height });
  }
});

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const chart of drawn) { chart.plot.destroy(); chart.plot = chart.build(); }
});

function scaled(curve, scale) {
  return scale === 1 ? curve : { index: curve.index, data: curve.data.map((value) => (value === null ? null : value * scale)) };
}

// The lines of one metric: the curve, its moving average, and the same of the other run.
function linesOf(line, name, scale) {
  const found = [];
  for (const [run, label] of [[DATA, line.label], [DATA.against, "other run: " + line.label]]) {
    const curve = run && run.curves[line.metric];
    if (!curve) continue;
    const average = line.is_averaged && run.averages.curves[line.metric];
    const dash = run === DATA ? undefined : [6, 4];
    if (run === DATA || !average) found.push({ label, curve: scaled(curve, scale), color: name, dash, alpha: average ? "66" : "", width: average ? 1 : 1.75 });
    if (average) found.push({ label: `${label}, mean of ${run.averages.window} steps`, curve: scaled(average, scale), color: name, dash, width: 2.25 });
  }
  return found;
}

function drawPhases(parent, run, title) {
  if (!run.phases) return;
  const names = Object.keys(run.phases.seconds);
  const seconds = Object.values(run.phases.seconds);
  const sums = run.phases.steps.map(() => 0);
  const stacked = seconds.map((values) => values.map((value, place) => (sums[place] += value)));
  const lines = names.map((name, place) => ({
    label: name, color: name === "other" ? "c7" : PALETTE[place % 7], width: 1, fill: "55", values: seconds[place],
    curve: { index: run.phases.steps, data: seconds[place] },
  }));
  const bands = names.slice(1).map((_, place) => ({ series: [place + 2, place + 1] }));
  drawChart(parent, title, "seconds (stacked)", lines, { data: [run.phases.steps, ...stacked], bands, fromZero: true });
}

function showCharts() {
  const parent = document.getElementById("charts");
  for (const chart of DATA.charts) {
    const all = chart.lines.flatMap((line, place) => linesOf(line, PALETTE[place % PALETTE.length], chart.scale));
    // Shares that are always 0 are not drawn.
    const lines = chart.is_share ? all.filter((line) => line.curve.data.some((value) => value !== 0)) : all;
    if (lines.length) drawChart(parent, chart.title, chart.unit, lines, { isShare: chart.is_share });
  }
  drawPhases(parent, DATA, "Seconds by phase");
  if (DATA.against) drawPhases(parent, DATA.against, "Seconds by phase, other run");
  if (!parent.children.length) parent.replaceWith(element("p", { class: "empty" }, "No step has finished yet, so there are no metrics."));
  showOtherMetrics();
}

function showOtherMetrics() {
  const details = document.getElementById("other-metrics");
  const names = Object.keys(DATA.curves);
  details.hidden = !names.length;
  const place = details.querySelector("div");
  const show = (metric) => {
    place.querySelectorAll(".chart").forEach((box) => {
      const index = drawn.findIndex((each) => each.box === box);
      drawn.splice(index, 1)[0].plot.destroy();
      box.remove();
    });
    drawChart(place, metric, "value", linesOf({ metric, label: "value" }, "c0", 1));
  };
  details.addEventListener("toggle", () => {
    if (!details.open || place.children.length) return;
    place.append(element("div", { class: "controls" }, dropDown("Metric", names.map((name) => [name, name]), names[0], show)));
    show(names[0]);
  });
}
