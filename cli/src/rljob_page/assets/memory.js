// The memory of a worker at each boundary of the step: bytes by owner (stacked), and the peak since the boundary before.
const OWNER_COLORS = { parameters: "c0", gradients: "c1", optimizer: "c2", rollout_weights: "c3", kv_cache: "c5", reference: "c4", critic: "c6", reward_model: "c7", other: "c7" };

function showMemory(timeline) {
  const place = document.getElementById("memories");
  const processes = timeline === null ? [] : timeline.processes.filter((process) => process.memory.length);
  if (!processes.length) {
    place.replaceChildren(element("p", { class: "empty" }, "No timeline with memory is recorded; the curve of the memory is above."));
    return;
  }
  const body = element("div");
  const show = (index) => drawMemory(body, processes[Number(index)]);
  const list = processes.length > 1 ? [element("div", { class: "controls" }, dropDown("Worker", processes.map((process, index) => [index, oneLine(process.name, 60)]), 0, show))] : [];
  place.replaceChildren(...list, body);
  show(0);
}

function memorySize(mebibytes) {
  return mebibytes >= 1024 ? number(mebibytes / 1024, 3) + " GiB" : number(mebibytes, 3) + " MiB";
}

function drawMemory(place, process) {
  const marks = process.memory;
  const totals = marks.map((mark) => Object.values(mark.owners).reduce((sum, each) => sum + each, 0));
  const peaks = marks.map((mark) => mark.peak || 0);
  const top = Math.max(...totals, ...peaks, 0.001) * 1.08;
  const owners = [...new Set(marks.flatMap((mark) => Object.keys(mark.owners)))];
  const [left, height, base] = [62, 250, 200];
  const width = Math.max(left + 46 * marks.length, Math.min(900, document.getElementById("memories").clientWidth));
  const size = (width - left) / marks.length;
  const y = (value) => base - (value / top) * (base - 8);
  const drawing = svgElement("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `Memory of ${oneLine(process.name, 80)}, largest ${memorySize(Math.max(...totals, ...peaks))}` });
  drawing.style.width = width + "px";
  for (const tick of ticksOf(0, top, 5)) {
    drawing.append(svgElement("line", { class: "rule", x1: left, x2: width, y1: y(tick), y2: y(tick) }), svgElement("text", { class: "dim", x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, memorySize(tick)));
  }
  marks.forEach((mark, index) => {
    const x = left + index * size;
    let below = 0;
    for (const owner of owners) {
      const value = mark.owners[owner] || 0;
      if (!value) continue;
      const box = svgElement("rect", { x: x + size * 0.14, width: size * 0.72, y: y(below + value), height: Math.max(0.5, y(below) - y(below + value)), fill: color(OWNER_COLORS[owner] || "c7") });
      explain(box, () => `after ${visible(mark.after)}: ${owner.replace(/_/g, " ")} ${memorySize(value)} of ${memorySize(totals[index])}; peak since the boundary before ${memorySize(peaks[index])}` + (mark.process ? `; process ${memorySize(mark.process)}` : ""));
      drawing.append(box);
      below += value;
    }
    drawing.append(svgElement("line", { x1: x + size * 0.06, x2: x + size * 0.94, y1: y(peaks[index]), y2: y(peaks[index]), stroke: color("text"), "stroke-width": 2 }));
    mark.after.split("_").forEach((word, line) => drawing.append(svgElement("text", { class: "dim", x: x + size / 2, y: base + 14 + 12 * line, "text-anchor": "middle" }, oneLine(word, 12))));
  });
  drawing.append(svgElement("line", { class: "base", x1: left, x2: width, y1: base, y2: base }));
  const legend = element("div", { class: "legend" });
  for (const owner of owners) {
    const sign = element("i");
    sign.style.backgroundColor = color(OWNER_COLORS[owner] || "c7");
    legend.append(element("span", {}, sign, oneLine(owner.replace(/_/g, " "), 40)));
  }
  legend.append(element("span", {}, "— peak since the boundary before"));
  place.replaceChildren(element("p", { class: "hint" }, `${oneLine(process.name, 80)}: memory after each phase of the step`), element("div", { class: "scroll" }, drawing), legend);
}
