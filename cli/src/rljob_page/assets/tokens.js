// One conversation with a color for each token: by mask, by the difference of log-probabilities, by age or by advantage.
const MODES = [["mask", "mask"], ["difference", "log-probability difference"], ["age", "age"], ["advantage", "advantage"]];
const FULL_DIFFERENCE = 1; // nats with the strongest color
const FULL_AGE = 4; // steps with the strongest color

function logprobDifference(tokens, place) {
  const [rollout, trainer] = [tokens.rolloutLogprob[place], tokens.trainerLogprob[place]];
  return rollout === null || trainer === null ? null : trainer - rollout;
}

// The color of a value from -1 (cool) to 1 (warm).
function shade(value) {
  const strength = Math.min(1, Math.abs(value));
  return strength < 0.02 ? "" : `rgba(${color(value < 0 ? "cool" : "warm")}, ${(0.12 + 0.6 * strength).toFixed(2)})`;
}

function paint(span, tokens, place, mode, fullAdvantage) {
  span.className = "";
  span.style.backgroundColor = "";
  if (mode === "mask") {
    span.className = tokens.isTrained[place] ? "mask-trained" : tokens.isSampled[place] ? "mask-sampled" : "";
  } else if (mode === "difference") {
    const difference = logprobDifference(tokens, place);
    if (difference !== null) span.style.backgroundColor = shade(difference / FULL_DIFFERENCE);
  } else if (mode === "age") {
    const age = tokens.age[place];
    if (age !== null) span.style.backgroundColor = `rgba(${color("old")}, ${(0.1 + 0.65 * Math.min(1, age / FULL_AGE)).toFixed(2)})`;
  } else if (tokens.advantage[place] !== null && fullAdvantage) {
    span.style.backgroundColor = shade(-tokens.advantage[place] / fullAdvantage);
  }
}

function modeLegend(mode, fullAdvantage) {
  const legend = element("div", { class: "legend" });
  const add = (text, style, background) => {
    const sign = element("i", { class: style });
    if (background) sign.style.backgroundColor = background;
    legend.append(element("span", {}, sign, text));
  };
  if (mode === "mask") {
    add("trained on", "mask-trained"); add("sampled, not trained on", "mask-sampled"); add("prompt, messages of the environment", "");
  } else if (mode === "difference") {
    add(`trainer gives it less probability than the rollout engine (${-FULL_DIFFERENCE} nat or more)`, "", shade(-1));
    add("the same", ""); add(`more (+${FULL_DIFFERENCE} nat or more)`, "", shade(1));
  } else if (mode === "age") {
    for (const age of [0, 1, 2, FULL_AGE]) add(age === 0 ? "sampled with the newest weights" : `${age} step${age === 1 ? "" : "s"} older` + (age === FULL_AGE ? " or more" : ""), "", `rgba(${color("old")}, ${0.1 + 0.65 * age / FULL_AGE})`);
  } else {
    add(`negative (${number(-fullAdvantage, 3)})`, "", shade(1)); add("0", ""); add(`positive (${number(fullAdvantage, 3)})`, "", shade(-1));
  }
  return legend;
}

function tokenDetail(tokens, place) {
  const parts = [`token ${place + 1} of ${tokens.text.length}: ${JSON.stringify(visible(tokens.text[place]))}`,
    tokens.isTrained[place] ? "trained on" : tokens.isSampled[place] ? "sampled, not trained on" : "not sampled"];
  const add = (name, value) => { if (value !== null) parts.push(`${name} ${number(value)}`); };
  add("log-probability in the rollout engine", tokens.rolloutLogprob[place]);
  add("in the trainer", tokens.trainerLogprob[place]);
  add("log-probability difference", logprobDifference(tokens, place));
  add("age (steps)", tokens.age[place]);
  add("advantage", tokens.advantage[place]);
  return parts.join(" · ");
}

function showConversations() {
  const place = document.getElementById("conversations");
  const sets = Object.entries(DATA.conversations).filter(([, set]) => set.conversations.length).sort(([a], [b]) => (a === "training" ? -1 : b === "training" ? 1 : 0));
  if (!sets.length) {
    place.append(element("p", { class: "empty" }, "No conversation with tokens is recorded. Trainers record up to 32 of the newest step and of the newest evaluation."));
    return;
  }
  const controls = element("div", { class: "controls" });
  const body = element("div");
  let name = sets.some(([each]) => each === chosen.set) ? chosen.set : sets[0][0];
  let index = Math.max(0, Number(chosen.conversation) || 0);
  let mode = MODES.some(([each]) => each === chosen.mode) ? chosen.mode : "mask";
  const show = () => {
    const list = DATA.conversations[name].conversations;
    index = Math.min(index, list.length - 1);
    remember({ set: name, conversation: index, mode });
    controls.replaceChildren(
      choice("Show", sets.map(([each, set]) => [each, `${visible(each)}, step ${set.step}`]), name, (value) => { name = value; index = 0; show(); }),
      dropDown("Conversation", list.map((each, number_) => [number_, `${number_ + 1}: ${oneLine(each.prompt, 40)} (${each.score === null ? "no score" : "score " + number(each.score, 3)})`]), index, (value) => { index = Number(value); show(); }),
      choice("Color by", MODES, mode, (value) => { mode = value; remember({ mode }); showTokens(body, list[index], DATA.conversations[name].step, mode); }),
    );
    showTokens(body, list[index], DATA.conversations[name].step, mode);
  };
  place.append(controls, body);
  show();
}

function showTokens(place, conversation, step, mode) {
  const tokens = conversation.tokens;
  const fullAdvantage = tokens.advantage.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
  const text = element("div", { class: "token-text", tabindex: 0, role: "textbox", "aria-readonly": "true", "aria-multiline": "true", "aria-label": "Tokens; the arrow keys choose one" });
  const detail = element("p", { class: "detail", "aria-live": "polite" }, "Point at a token, or choose one with the arrow keys.");
  const spans = tokens.text.map((each, index) => {
    const shown = visible(each).replace(/\n/g, "⏎\n").replace(/\t/g, "→\t");
    const span = element("span", { "data-place": index }, shown);
    paint(span, tokens, index, mode, fullAdvantage);
    return span;
  });
  text.append(...spans);
  let current = -1;
  const choose = (index) => {
    if (current >= 0) spans[current].classList.remove("current");
    current = index;
    spans[index].classList.add("current");
    detail.textContent = tokenDetail(tokens, index);
  };
  text.addEventListener("pointerover", (event) => { if (event.target.dataset.place !== undefined) choose(Number(event.target.dataset.place)); });
  text.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move || !spans.length) return;
    event.preventDefault();
    choose(Math.max(0, Math.min(spans.length - 1, current + move)));
    spans[current].scrollIntoView({ block: "nearest" });
  });
  const known = conversation.omittedTokens ? [element("p", { class: "hint" }, `${conversation.omittedTokens} more tokens are not recorded.`)] : [];
  const others = DATA.samples.filter((sample) => sample.group === conversation.group && sample.kind === conversation.kind && sample.evaluation === conversation.evaluation && sample.step === step);
  const group = others.length > 1 ? [element("p", { class: "hint" }, `Scores of its group: ${others.map((sample) => number(sample.score, 3)).join("  ")}`)] : [];
  place.replaceChildren(
    element("p", {}, `${conversation.score === null ? "No score" : "Score " + number(conversation.score)}, ${visible(conversation.outcome).toLowerCase().replace(/_/g, " ")}, ${tokens.text.length} tokens`),
    modeLegend(mode, fullAdvantage), text, ...known, detail, ...group);
}
