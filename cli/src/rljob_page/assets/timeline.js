// What each process did during a step. A part of the time is shown; the buttons zoom and move.
const FIXED_COLORS = { generate: "c0", rollout: "c0", hybrid: "c5", update_actor: "c1", actor: "c4", forward_backward: "c1", optimizer_step: "c3", reward: "c2", weight_sync: "c6", update_critic: "c3", critic: "c3", ref: "c4", old_logprob: "c4" };
const ROW = 17;
const MAX_SHOWN = 8;

function spanColor(name) {
  const first = name.split(".")[0];
  return FIXED_COLORS[name] || FIXED_COLORS[first] || "c7";
}

function milliseconds(value) {
  return value >= 1000 ? number(value / 1000, 3) + " s" : number(value, 3) + " ms";
}

// The list is in the order of the steps. The timeline that was chosen before is shown first, else the newest.
function showTimelines() {
  const place = document.getElementById("timelines");
  const names = Object.keys(DATA.timelines);
  if (!names.length) {
    place.append(element("p", { class: "empty" }, "No timeline is recorded yet. The newest step and the steps in training.timelineSteps are recorded."));
    showMemory(null);
    return;
  }
  const label = (name) => (name === "newest" ? "newest step" : "step " + Number(name.replace("step-", ""))) + (DATA.timelines[name].step && name === "newest" ? ` (${DATA.timelines[name].step})` : "");
  const body = element("div");
  const controls = element("div", { class: "controls" });
  place.append(controls, body);
  const show = (name) => {
    remember({ timeline: name });
    showTimeline(body, controls, DATA.timelines[name], dropDown("Timeline of", names.map((each) => [each, label(each)]), name, show));
    showMemory(DATA.timelines[name]);
  };
  show(names.includes(chosen.timeline) ? chosen.timeline : names[names.length - 1]);
}

function showTimeline(place, controls, timeline, list) {
  let [from, to] = [0, timeline.milliseconds];
  const draw = () => {
    place.replaceChildren(...timeline.processes.slice(0, MAX_SHOWN).map((process) => processRow(process, timeline, from, to)));
    const hidden = timeline.omittedProcesses + Math.max(0, timeline.processes.length - MAX_SHOWN);
    if (hidden) place.append(element("p", { class: "hint" }, `${hidden} more processes are not drawn. The whole timeline is in the folder timelines/, for ui.perfetto.dev.`));
    place.append(idleTable(timeline));
  };
  const zoom = (factor) => {
    // In a shorter part, the times of the ticks would be equal.
    if ((to - from) * factor < timeline.milliseconds / 1e6) return;
    const [middle, half] = [(from + to) / 2, Math.min(timeline.milliseconds, (to - from) * factor) / 2];
    move(middle - half, 2 * half);
  };
  const move = (start, length) => {
    from = Math.max(0, Math.min(start, timeline.milliseconds - length));
    to = from + length;
    draw();
  };
  const button = (text, name, act) => {
    const node = element("button", { type: "button", "aria-label": name, title: name }, text);
    node.addEventListener("click", act);
    return node;
  };
  controls.replaceChildren(list, element("span", { class: "choice" },
    button("+", "zoom in", () => zoom(0.5)), button("−", "zoom out", () => zoom(2)),
    button("◀", "earlier", () => move(from - (to - from) / 3, to - from)), button("▶", "later", () => move(from + (to - from) / 3, to - from)),
    button("whole step", "the whole step", () => move(0, timeline.milliseconds))));
  draw();
}

function processRow(process, timeline, from, to) {
  const idle = Object.values(process.idle).reduce((sum, each) => sum + each, 0);
  const numRows = 1 + Math.max(0, ...process.spans.map((span) => span[3]));
  const width = Math.max(280, document.getElementById("timelines").clientWidth);
  const isController = !Object.keys(process.idle).length && process.name === "controller";
  const height = numRows * ROW + 18;
  const drawing = svgElement("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `Timeline of ${oneLine(process.name, 80)}` });
  const x = (time) => ((time - from) / (to - from)) * width;
  for (const tick of ticksOf(from, to, width < 500 ? 4 : 8)) {
    drawing.append(svgElement("line", { class: "rule", x1: x(tick), x2: x(tick), y1: 0, y2: numRows * ROW }), svgElement("text", { class: "dim", x: Math.min(x(tick) + 2, width - 44), y: height - 5 }, milliseconds(tick)));
  }
  const hatch = `hatch-${timeline.processes.indexOf(process)}`;
  drawing.append(svgElement("defs", {}, svgElement("pattern", { id: hatch, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, svgElement("rect", { width: 2, height: 6, fill: color("c7"), opacity: 0.55 }))));
  for (const [cause, begin, length] of process.idleSpans) drawing.append(...spanBox(`idle, waits for ${cause}`, begin, length, 0, numRows, `url(#${hatch})`, x, width, from, to, true));
  for (const [name, begin, length, row] of process.spans) drawing.append(...spanBox(name, begin, length, row, 1, color(spanColor(name)), x, width, from, to, false));
  const summary = isController ? `step of ${milliseconds(timeline.milliseconds)}` : `idle ${Math.round((100 * idle) / timeline.milliseconds)} % (hatched)`;
  const left = process.omittedSpans ? `; the ${process.omittedSpans} shortest spans are not drawn` : "";
  return element("div", { class: "process" }, element("h3", {}, oneLine(process.name, 80), " ", element("small", {}, summary + left)), drawing);
}

function spanBox(name, begin, length, row, rows, fill, x, width, from, to, isIdle) {
  if (begin + length < from || begin > to) return [];
  const [left, right] = [Math.max(0, x(begin)), Math.min(width, x(begin + length))];
  const size = Math.max(right - left, 0.6);
  const box = svgElement("rect", { x: left, y: row * ROW + 1, width: size, height: rows * ROW - 2, fill, rx: isIdle ? 0 : 2, "fill-opacity": isIdle ? 1 : 0.85 });
  explain(box, () => `${visible(name)}: ${milliseconds(length)}, from ${milliseconds(begin)}`);
  const label = oneLine(name, 60);
  const fits = size > label.length * 6.2 + 6 && !isIdle;
  if (!fits) return [box];
  const text = svgElement("text", { x: left + 4, y: row * ROW + 12.5, "pointer-events": "none" }, label);
  text.style.fill = matchMedia("(prefers-color-scheme: dark)").matches ? "#0b0f14" : "#ffffff";
  return [box, text];
}

function ticksOf(from, to, most) {
  const rough = (to - from) / most || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const ticks = [];
  for (let tick = Math.ceil(from / size) * size; tick <= to; tick += size) ticks.push(tick);
  return ticks;
}

function idleTable(timeline) {
  const rows = timeline.processes.flatMap((process) => Object.entries(process.idle).map(([cause, time]) => [process.name, cause, time]));
  if (!rows.length) return element("p", { class: "hint" }, "No worker was idle.");
  rows.sort((a, b) => b[2] - a[2]);
  const cells = rows.slice(0, 10).map(([name, cause, time]) => element("tr", {}, element("th", { scope: "row" }, oneLine(name, 60)), element("td", {}, oneLine(cause, 80)), element("td", { class: "number" }, milliseconds(time)), element("td", { class: "number" }, ((100 * time) / timeline.milliseconds).toFixed(1) + " %")));
  return element("div", { class: "scroll" }, element("h3", {}, "Idle time of the workers, by what they wait for"), element("table", {}, element("thead", {}, element("tr", {}, ...["worker", "waits for", "time", "of the step"].map((head) => element("th", { scope: "col" }, head)))), element("tbody", {}, ...cells)));
}
