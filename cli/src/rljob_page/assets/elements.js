// Builds elements. Text is only ever set as text, so that nothing in it is interpreted as markup.
const DATA = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";

// element("p", {class: "hint", title: "..."}, "text", child, ...)
function element(name, attributes, ...children) {
  return filled(document.createElement(name), attributes, children);
}

function svgElement(name, attributes, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children) if (child !== null && child !== undefined) node.append(child);
  return node;
}

// The text with a picture for each control character, so that they are seen and have no effect. Marks that change the
// direction of the text are shown by their code; unpaired surrogates as the replacement character.
function visible(text) {
  return String(text)
    .replace(/\r\n/g, "\n")
    .replace(/[\u0000-\u0008\u000b-\u001f]/g, (letter) => String.fromCharCode(0x2400 + letter.charCodeAt(0)))
    .replace(/[\u007f-\u009f\u00ad\u061c\u115f\u1160\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2069\u3164\ufeff\uffa0\u{e0000}-\u{e0fff}]/gu,
      (letter) => "⟨" + letter.codePointAt(0).toString(16).toUpperCase().padStart(4, "0") + "⟩")
    .replace(/[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g, "\ufffd");
}

function oneLine(text, limit) {
  const line = visible(text).replace(/\s+/g, " ").trim();
  return line.length > limit ? line.slice(0, limit - 1) + "…" : line;
}

function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(Math.min(2, digits - 1)).replace(/\.?0*e/, "e");
  return String(Number(value.toPrecision(size >= 1000 ? 6 : digits)));
}

// A button that is pressed or not.
function toggle(label, isPressed, onClick) {
  const button = element("button", { type: "button", "aria-pressed": String(isPressed) }, label);
  button.addEventListener("click", onClick);
  return button;
}

// A row of buttons of which one is pressed. `options`: [value, label] pairs. `onChoose` is called with the value.
function choice(label, options, chosen, onChoose) {
  const group = element("span", { class: "choice", role: "group", "aria-label": label });
  for (const [value, text] of options) {
    group.append(toggle(text, value === chosen, () => {
      for (const each of group.children) each.setAttribute("aria-pressed", "false");
      group.children[options.findIndex((option) => option[0] === value)].setAttribute("aria-pressed", "true");
      onChoose(value);
    }));
  }
  return element("span", {}, element("label", {}, label + " "), group);
}

// A drop-down list. `options`: [value, label] pairs.
function dropDown(label, options, chosen, onChoose) {
  const list = element("select", { "aria-label": label });
  for (const [value, text] of options) {
    list.append(element("option", { value, selected: String(value) === String(chosen) }, text));
  }
  list.addEventListener("change", () => onChoose(list.value));
  return element("label", {}, label + " ", list);
}

const tooltip = document.getElementById("tooltip");

// Shows `text()` beside the pointer while it is over the node, and while the node has the focus.
function explain(node, text) {
  const show = (x, y) => {
    tooltip.textContent = text();
    tooltip.hidden = false;
    const box = tooltip.getBoundingClientRect();
    tooltip.style.left = Math.max(4, Math.min(x + 12, innerWidth - box.width - 8)) + "px";
    tooltip.style.top = (y + 18 + box.height > innerHeight ? Math.max(4, y - box.height - 10) : y + 18) + "px";
  };
  const hide = () => { tooltip.hidden = true; };
  node.addEventListener("pointermove", (event) => show(event.clientX, event.clientY));
  node.addEventListener("pointerleave", hide);
  node.addEventListener("focus", () => { const box = node.getBoundingClientRect(); show(box.left, box.top); });
  node.addEventListener("blur", hide);
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

// What was chosen on the page, stored in the fragment of its URL: a page that reloads itself shows the same again.
const chosen = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));

function remember(values) {
  Object.assign(chosen, values);
  try { history.replaceState(null, "", "#" + new URLSearchParams(chosen)); } catch { /* some browsers refuse it for files */ }
}
