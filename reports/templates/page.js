// Wiring: the parts above are drawn from `state`, and every control changes `state` and draws again.
let runs = [];
const current = () => runs[Math.min(Math.max(0, Number(state.run) || 0), runs.length - 1)];

function drawRun() {
  const run = current();
  if (!run) return;
  const many = $("moment-slider");
  if (many) { many.value = String(slide(run, momentOp(run))); many.setAttribute("aria-valuetext", `op ${momentOp(run)}, ${bytes(highShown(run)[momentOp(run)] || 0)}`); }
  if ($("dotted")) $("dotted").textContent = run.after ? `Dotted: ${state.view === "plan" ? "without" : "with"} the plan.` : "";
  document.documentElement.toggleAttribute("data-one", run.n < 2);
  drawArea(run); tell(run, momentOp(run)); drawStrip(run); chips(run); drawTable(run); drawModules(run); pressed();
  const where = run.n === 1 ? "when it ended" : run.n ? (momentOp(run) === peakOf(highShown(run)) ? "at the peak" : momentOp(run) === run.at && run.partial ? "when it ended" : `at op ${momentOp(run)}`) : "";
  for (const node of document.querySelectorAll("[data-moment]")) node.textContent = where;
}

// The slider lies under the picture: its place is the place in the window, its steps by key are ops.
function slide(run, op) { const [from, to] = window_(run).map((each) => xOf(run, each)); return Math.round((2000 * (xOf(run, op) - from)) / (to - from)); }
function slid(run, value) { const [from, to] = window_(run).map((each) => xOf(run, each)); return opAt(run, from + ((to - from) * value) / 2000); }

function slideByKey(event) {
  const run = current(), far = Math.max(1, Math.round(run.n / 20));
  const by = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -far, PageUp: far, Home: -run.n, End: run.n }[event.key];
  if (by === undefined) return;
  event.preventDefault();
  pin(Math.min(Math.max(momentOp(run) + by, 0), run.n - 1));
}

function pin(op) {
  state.op = op === current().at ? "" : String(op);
  shownRows = PAGE;
  writeAddress();
  drawRun();
}

function pressed() {
  for (const button of document.querySelectorAll("[data-set]")) {
    const [name, value] = button.dataset.set.split("=");
    button.setAttribute("aria-pressed", state[name] === value ? "true" : "false");
  }
  if ($("search") && document.activeElement !== $("search")) $("search").value = state.q;
}

function setTheme(theme, kept) {
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = theme === "dark" ? "Light" : "Dark";
  $("theme").setAttribute("aria-pressed", theme === "dark" ? "true" : "false");
  if (kept) { try { localStorage.setItem("memopt-theme", theme); } catch (error) { /* a page that may keep nothing still changes its colours */ } }
}

function repaint() { if (runs.length) drawRun(); drawFigures(); }

function drawFigures() {
  for (const node of document.querySelectorAll("[data-figure]")) {
    const figure = page.figures[node.dataset.figure];
    if (figure) draw(node, figure.data, figure.layout, {});
  }
}

function wire() {
  for (const button of document.querySelectorAll("[data-set]")) button.addEventListener("click", () => {
    const [name, value] = button.dataset.set.split("=");
    state[name] = value;
    if (name === "run") { state.op = ""; state.sel = ""; state.from = ""; state.to = ""; }
    writeAddress();
    drawRun();
  });
  for (const button of document.querySelectorAll("[data-do]")) button.addEventListener("click", () => act(button.dataset.do));
  for (const link of document.querySelectorAll("nav a")) link.addEventListener("click", (event) => {
    event.preventDefault();
    state.at = link.getAttribute("href").slice(1);
    writeAddress();
    const target = $(state.at);
    if (target) { target.scrollIntoView(); target.focus({ preventScroll: true }); }
  });
  if ($("moment-slider")) $("moment-slider").addEventListener("input", (event) => pin(slid(current(), Number(event.target.value))));
  if ($("moment-slider")) $("moment-slider").addEventListener("keydown", slideByKey);
  if ($("search")) $("search").addEventListener("input", (event) => { state.q = event.target.value; shownRows = PAGE; writeAddress(); drawTable(current()); });
  $("theme").addEventListener("click", () => { setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark", true); repaint(); });
  document.addEventListener("keydown", keys);
  addEventListener("hashchange", () => { readAddress(); drawRun(); });
  wireStaticTables();
  wirePrint();
}

function act(what) {
  const run = current();
  if (what === "peak") pin(peakOf(highShown(run)));
  if (what === "earlier") pin(Math.max(0, momentOp(run) - 1));
  if (what === "later") pin(Math.min(run.n - 1, momentOp(run) + 1));
  if (what === "whole") zoom(0, run.n);
  if (what === "more") { shownRows += 200; drawTable(run); }
  if (what === "png") Plotly.downloadImage($("area"), { format: "png", scale: 2, width: 1200, height: 460, filename: "memopt-iteration" });
  if (what === "csv") save("memopt-tensors.csv", "text/csv", csv(run));
  if (what === "json") save("memopt-tensors.json", "application/json", rowsAsJson(run));
}

function keys(event) {
  const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName) && event.target.type !== "range";
  if (typing || event.ctrlKey || event.metaKey || event.altKey || !runs.length) return;
  const known = { "/": () => $("search").focus(), p: () => act("peak"), 0: () => act("whole"), "[": () => act("earlier"), "]": () => act("later"), Escape: () => select("", false) };
  if (known[event.key]) { event.preventDefault(); known[event.key](); }
}

// A table that Python wrote is sorted by what its cells say in `data-v`.
function wireStaticTables() {
  for (const button of document.querySelectorAll("table.static th button")) button.addEventListener("click", () => {
    const th = button.parentElement, place = [...th.parentElement.children].indexOf(th), body = th.closest("table").tBodies[0];
    const down = th.getAttribute("aria-sort") !== "descending", value = (tr) => tr.children[place].dataset.v ?? tr.children[place].textContent;
    const rows = [...body.rows].sort((a, b) => { const x = value(a), y = value(b), n = Number(x) - Number(y); return (Number.isNaN(n) ? x.localeCompare(y) : n) * (down ? -1 : 1); });
    for (const other of th.parentElement.children) other.setAttribute("aria-sort", "none");
    th.setAttribute("aria-sort", down ? "descending" : "ascending");
    body.append(...rows);
  });
}

function wirePrint() {
  let before = null;
  addEventListener("beforeprint", () => {
    before = document.documentElement.dataset.theme;
    document.documentElement.dataset.theme = "light";
    printing = true;
    repaint();
    for (const node of drawn.keys()) Plotly.relayout(node, { width: 660, height: Math.min(node.id === "strip" ? 330 : 300, node.clientHeight) });
  });
  addEventListener("afterprint", () => {
    document.documentElement.dataset.theme = before;
    printing = false;
    for (const node of drawn.keys()) Plotly.relayout(node, { width: null, height: null, autosize: true });
    repaint();
  });
}

async function unpacked() {
  const node = $("data");
  const text = node.textContent;
  if (!text.startsWith("gzip:")) return JSON.parse(text);
  const raw = Uint8Array.from(atob(text.slice(5)), (c) => c.charCodeAt(0));
  return JSON.parse(await new Response(new Blob([raw]).stream().pipeThrough(new DecompressionStream("gzip"))).text());
}

let page = { runs: [], figures: {} };
unpacked().then((data) => {
  page = data;
  readAddress();
  setTheme(document.documentElement.dataset.theme, false);
  runs = data.runs.map(decodeRun);
  if (runs.some((run) => !run.start[run.n - 1])) { DEFAULTS.x = "op"; readAddress(); }
  wire();
  repaint();
  if (state.at && $(state.at)) $(state.at).scrollIntoView();
  document.documentElement.dataset.ready = "1";
});
