// Draws the parts of the page in order. A part that fails must not hide the others.
for (const [name, show] of [["curves", showCharts], ["responses", showSamples], ["tokens", showConversations], ["timeline", showTimelines]]) {
  try {
    show();
  } catch (error) {
    document.getElementById(name).append(element("p", { class: "empty" }, `This part cannot be shown: ${error}`));
  }
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  document.getElementById("timelines").replaceChildren();
  showTimelines();
  document.getElementById("conversations").replaceChildren();
  showConversations();
});
// While a run goes on, `rljob view --watch` replaces this page.
const reloadSeconds = Number(document.documentElement.dataset.reloadSeconds);
if (reloadSeconds) setTimeout(() => location.reload(), 1000 * reloadSeconds);
document.documentElement.dataset.ready = String(Math.round(performance.now()));
