// A histogram of scores; the groups with a score in the chosen bar; the responses of the chosen group side by side.
const KINDS = { __proto__: null, train: "training", eval_greedy: "greedy", eval_sampled: "sampled" };
const NEWLINE = "\n";

// Training, or the kind of responses of one evaluation.
function originOf(sample) {
  return sample.evaluation ? sample.kind + NEWLINE + sample.evaluation : sample.kind;
}

function originName(origin) {
  const [kind, evaluation] = origin.split(NEWLINE);
  return (evaluation ? visible(evaluation) + ", " : "") + (KINDS[kind] || visible(kind));
}
const MAX_BARS = 12;
const MAX_GROUPS = 400;

// Bars: {label, holds(score), isNone, number of responses}. One for each score if there are few, else equal ranges; the
// last one includes its end.
function barsOf(samples) {
  const scores = samples.map((sample) => sample.score).filter((score) => score !== null);
  const values = [...new Set(scores)].sort((a, b) => a - b);
  const bars = [];
  if (values.length && values.length <= MAX_BARS) {
    for (const value of values) bars.push({ label: number(value, 3), holds: (score) => score === value });
  } else if (values.length) {
    const low = values[0], size = (values[values.length - 1] - low) / MAX_BARS;
    for (let place = 0; place < MAX_BARS; place++) {
      const from = low + place * size, isLast = place === MAX_BARS - 1;
      bars.push({
        label: `${number(from, 2)} to ${number(from + size, 2)}`,
        holds: (score) => score !== null && score >= from && (isLast || score < from + size),
      });
    }
  }
  if (scores.length < samples.length) bars.push({ label: "no score", isNone: true, holds: (score) => score === null });
  for (const bar of bars) bar.number = samples.filter((sample) => bar.holds(sample.score)).length;
  return bars;
}

function groupsOf(samples) {
  const groups = new Map();
  for (const sample of samples) {
    const key = sample.step + NEWLINE + originOf(sample) + NEWLINE + sample.group;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(sample);
  }
  return [...groups.values()];
}

function showSamples() {
  const place = document.getElementById("samples");
  if (!DATA.samples.length) {
    place.append(element("p", { class: "empty" }, "No responses are recorded yet. The trainer records some in every step, and all in every evaluation."));
    return;
  }
  const steps = new Map();
  for (const sample of DATA.samples) {
    if (!steps.has(originOf(sample))) steps.set(originOf(sample), new Set());
    steps.get(originOf(sample)).add(sample.step);
  }
  const kinds = [...steps.keys()].sort((a, b) => (a === "train" ? -1 : b === "train" ? 1 : 0));
  const controls = element("div", { class: "controls" });
  const body = element("div");
  place.append(controls, body);
  let kind = kinds.includes(chosen.kind) ? chosen.kind : kinds.includes("train") ? "train" : kinds[0];
  const show = (step) => {
    remember({ kind, step });
    const of = DATA.samples.filter((sample) => originOf(sample) === kind && String(sample.step) === String(step));
    body.replaceChildren();
    showHistogram(body, of);
  };
  const showControls = () => {
    const found = [...steps.get(kind)].sort((a, b) => b - a);
    const step = found.map(String).includes(chosen.step) ? chosen.step : String(found[0]);
    controls.replaceChildren(
      choice("Responses of", kinds.map((each) => [each, originName(each)]), kind, (value) => { kind = value; showControls(); }),
      dropDown("Step", found.map((each) => [each, String(each)]), step, show),
    );
    show(step);
  };
  showControls();
}

function showHistogram(place, samples) {
  const bars = barsOf(samples);
  const highest = Math.max(...bars.map((bar) => bar.number), 1);
  const scores = samples.map((sample) => sample.score).filter((score) => score !== null);
  const mean = scores.length ? `, mean score ${number(scores.reduce((a, b) => a + b, 0) / scores.length, 3)}` : "";
  const row = element("div", { class: "bars", role: "group", "aria-label": "Number of responses by score" });
  const groups = element("div");
  let pressed = null;
  bars.forEach((bar, index) => {
    const fill = element("span", { class: "bar" });
    fill.style.height = (88 * bar.number) / highest + "%";
    const button = toggle("", false, () => {
      pressed = pressed === index ? null : index;
      [...row.children].forEach((each, other) => each.setAttribute("aria-pressed", String(other === pressed)));
      showGroups(groups, samples, pressed === null ? null : bars[pressed]);
    });
    if (bar.isNone) button.classList.add("none");
    button.append(element("span", {}, String(bar.number)), fill);
    button.setAttribute("aria-label", `${bar.number} responses with ${bar.isNone ? "no score" : "score " + bar.label}`);
    explain(button, () => `score ${bar.label}: ${bar.number} of ${samples.length} responses (${Math.round((100 * bar.number) / samples.length)} %)`);
    row.append(button);
  });
  place.append(
    element("p", { class: "hint" }, `${samples.length} recorded responses${mean}. Choose a bar to see the groups with such a score.`),
    element("div", { class: "histogram" }, row,
      element("div", { class: "ticks", "aria-hidden": "true" }, ...bars.map((bar) => element("span", {}, bar.label))),
      element("div", { class: "axis" }, "score (height: number of responses)")),
    groups,
  );
  showGroups(groups, samples, null);
}

// `bar`: only groups with a score in this bar; null for all.
function showGroups(place, samples, bar) {
  const found = groupsOf(samples).filter((group) => bar === null || group.some((sample) => bar.holds(sample.score)));
  const list = element("div", { class: "groups", role: "group", "aria-label": "Groups" });
  const responses = element("div");
  found.slice(0, MAX_GROUPS).forEach((group) => {
    const button = toggle("", false, () => {
      for (const each of list.children) each.setAttribute("aria-pressed", "false");
      button.setAttribute("aria-pressed", "true");
      remember({ group: group[0].group.slice(0, 200) });
      showResponses(responses, group, bar);
    });
    const scores = group.map((sample) => number(sample.score, 3)).join("  ");
    button.append(element("span", { class: "prompt", dir: "auto" }, oneLine(group[0].prompt, 160) || "(empty prompt)"),
      element("span", { class: "scores" }, (group.length > 1 ? `${group.length} scores: ` : "score ") + scores));
    list.append(button);
  });
  const what = bar === null ? "All groups" : `Groups with ${bar.isNone ? "a response without a score" : "score " + bar.label}`;
  const more = found.length > MAX_GROUPS ? `, the first ${MAX_GROUPS} shown` : "";
  place.replaceChildren(element("h3", {}, `${what} (${found.length}${more})`), list, responses);
  if (!found.length) return;
  const again = found.findIndex((group) => group[0].group.slice(0, 200) === chosen.group);
  list.children[Math.max(0, Math.min(again, MAX_GROUPS - 1))].click();
}

function showResponses(place, group, bar) {
  const first = group[0];
  const side = element("div", { class: "side", tabindex: 0, "aria-label": "Responses side by side" });
  for (const sample of group) {
    const head = element("header", {}, element("strong", {}, sample.score === null ? "no score" : "score " + number(sample.score, 3)), element("span", {}, visible(sample.outcome).toLowerCase().replace(/_/g, " ")));
    const card = element("article", { class: "response" }, head);
    if (sample.messages) card.append(...sample.messages.flatMap((message) => [element("div", { class: "role" }, oneLine(message.role, 40)), element("div", { class: "text" }, visible(message.content))]));
    else card.append(element("div", { class: "text" }, visible(sample.response) || "(empty)"));
    card.append(factsOf(sample));
    if (bar !== null && bar.holds(sample.score)) head.firstChild.prepend("▸ ");
    side.append(card);
  }
  place.replaceChildren(
    element("div", { class: "prompt-box" }, element("div", { class: "role" }, "prompt"), element("div", { class: "text" }, visible(first.prompt) || "(empty)")),
    side,
  );
}

function factsOf(sample) {
  const list = element("dl");
  const add = (name, value) => { if (value !== "") list.append(element("dt", {}, oneLine(name, 40)), element("dd", {}, oneLine(value, 400))); };
  add("answer", sample.answer);
  for (const [name, value] of Object.entries(sample.found || {})) add("found by " + name, value);
  const rewards = Object.entries(sample.rewards || {});
  if (rewards.length > 1) for (const [name, value] of rewards) add(name, value === "" || value === null ? "none" : typeof value === "number" ? number(value) : value);
  for (const [name, value] of Object.entries(sample.statuses || {})) if (value !== "OK") add(name, value);
  return list;
}
