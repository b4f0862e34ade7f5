// The tensors of the moment, one a row: searched, sorted, filtered, and found in the picture.
const PAGE = 20;
let shownRows = PAGE;
const COLUMNS = [
  ["name", "Tensor", false, (run, row) => run.name(row)],
  ["bytes", "Bytes", true, (run, row) => sizeNow(run, row)],
  ["category", "Kind", false, (run, row) => run.tensors.categories[run.tensors.category[row]]],
  ["idle", "Idle", true, (run, row) => run.tensors.idle[row]],
  ["again", "To recompute", true, (run, row) => run.tensors.again[row]],
  ["swap", "To swap", true, (run, row) => run.tensors.swap[row]],
  ["plan", "Plan", false, (run, row) => (run.away.get(row) || { does: "" }).does],
  ["line", "Line", false, (run, row) => run.text(run.tensors.line[row])],
];
const TITLES = { idle: "For so long nobody but autograd holds it", again: "Time to make it again from what is kept", swap: "Time to copy it out and back, before any of it is hidden" };

function sizeNow(run, row) { const each = isAway(run, row, momentOp(run)); return each ? each.left : run.tensors.bytes[row]; }
function columns(run) { return COLUMNS.filter(([id]) => (!["idle", "again", "swap"].includes(id) || run.tensors[id].some((value) => value !== null)) && (id !== "plan" || run.away.size) && (id !== "line" || run.tensors.line.some((place) => run.text(place)))); }

function matching(run) {
  const words = state.q.toLowerCase().split(/\s+/).filter(Boolean), off = new Set(state.off.split(",").filter(Boolean));
  const t = run.tensors, descending = state.sort.startsWith("-"), key = state.sort.replace(/^-/, "");
  const rows = aliveAt(run, momentOp(run)).filter((row) => {
    if (off.has(t.categories[t.category[row]])) return false;
    if (!words.length) return true;
    const text = [run.name(row), run.text(t.module[row]), run.text(t.line[row]), (run.away.get(row) || { does: "" }).does].join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  });
  const column = COLUMNS.find(([id]) => id === key) || COLUMNS[1], value = (row) => column[3](run, row);
  rows.sort((a, b) => {
    const x = value(a), y = value(b), none = (v) => v === null || v === "";
    if (none(x) || none(y)) return none(x) - none(y) || a - b;
    const order = typeof x === "number" ? x - y : x.localeCompare(y, "en", { numeric: true });
    return (descending ? -order : order) || a - b;
  });
  return rows;
}

function drawTable(run) {
  const body = $("rows");
  if (!body || !run.n) return;
  const rows = matching(run), op = momentOp(run), used = columns(run), total = highShown(run)[op];
  $("heads").replaceChildren(...used.map(([id, title, number]) => {
    const sorted = state.sort.replace(/^-/, "") === id;
    return el("th", { class: number ? "n" : ["category", "plan", "line"].includes(id) ? "after" : null, scope: "col", title: TITLES[id], "aria-sort": sorted ? (state.sort.startsWith("-") ? "descending" : "ascending") : "none" }, el("button", { type: "button", onclick: () => sortBy(id, number) }, title));
  }));
  const place = rows.findIndex((row) => String(run.tensors.storage[row]) === state.sel);
  const most = Math.max(shownRows, place + 1), biggest = rows.reduce((found, row) => Math.max(found, sizeNow(run, row)), 1);
  body.replaceChildren(...rows.slice(0, most).flatMap((row) => rowOf(run, row, used, total, biggest)));
  const sum = rows.reduce((found, row) => found + sizeNow(run, row), 0);
  $("table-note").textContent = rows.length ? `${rows.length} tensors, ${bytes(sum)}: ${percent(sum, total)} of what is on the device ${run.n > 1 ? `at op ${op}` : "when it ended"}.` : "No tensor matches.";
  $("table-more").hidden = rows.length <= most;
  $("table-more").textContent = `Show ${Math.min(200, rows.length - most)} more`;
}

function rowOf(run, row, used, total, biggest) {
  const t = run.tensors, id = String(t.storage[row]), on = id === state.sel, size = sizeNow(run, row), color = run.colors[t.categories[t.category[row]]];
  const bar = paint(el("i", { class: "bar100" }), color);
  bar.style.width = `${Math.max(2, Math.round((72 * size) / biggest))}px`;
  const cells = {
    name: () => el("td", { class: "name" }, el("button", { class: "link", type: "button", "aria-expanded": on ? "true" : "false" }, run.name(row)), t.module[row] >= 0 && run.text(t.module[row]) && !run.name(row).includes(run.text(t.module[row])) ? el("small", {}, run.text(t.module[row])) : null),
    category: () => el("td", { class: "after" }, el("span", { class: "kind" }, paint(el("i", { class: "dot" }), color), t.categories[t.category[row]])),
    bytes: () => el("td", { class: "n" }, bytes(size), el("span", { class: "share" }, percent(size, total)), bar),
    line: () => el("td", { class: "after" }, el("code", {}, run.text(t.line[row]))),
    plan: () => el("td", { class: "after does" }, run.away.has(row) ? run.away.get(row).does : el("span", { class: "quiet" }, "keep")),
  };
  const tr = el("tr", { class: on ? "row on" : "row", onclick: () => select(on ? "" : id, false) }, ...used.map(([name, , , value]) => (cells[name] ? cells[name]() : el("td", { class: "n" }, ms(value(run, row))))));
  return on ? [tr, el("tr", { class: "detail" }, el("td", { colspan: String(used.length) }, detail(run, row)))] : [tr];
}

function detail(run, row) {
  const t = run.tensors, each = run.away.get(row), born = t.birth[row], died = t.death[row];
  const life = `${born < 0 ? "There before the iteration" : `Born at op ${born} (${phaseOf(run, born)}, ${run.text(run.ops.name[born])})`}, ${died >= run.n ? "alive when it ended" : `freed after op ${died} (${phaseOf(run, died)}, ${run.text(run.ops.name[died])})`}.`;
  const plan = each ? ` Plan: ${each.does}; ${each.why}. It takes ${bytes(each.saved)} off the peak.` : run.away.size ? " The plan keeps it." : "";
  return `${t.bytes[row].toLocaleString("en")} bytes. ${life}${plan}`;
}

function sortBy(id, number) {
  const first = number ? `-${id}` : id, other = number ? id : `-${id}`;
  state.sort = state.sort === first ? other : first;
  shownRows = PAGE;
  writeAddress();
  drawTable(current());
  const head = [...$("heads").children].find((th) => th.getAttribute("aria-sort") !== "none");
  if (head) head.firstElementChild.focus();
}

function select(storage, scroll) {
  state.sel = storage;
  writeAddress();
  drawTable(current());
  drawStrip(current());
  const on = document.querySelector("#rows tr.on");
  if (on && scroll) on.scrollIntoView({ block: "center" });
  else if (on) on.querySelector("button").focus({ preventScroll: true });
}

function chips(run) {
  const off = new Set(state.off.split(",").filter(Boolean)), present = new Set(run.tensors.category);
  $("chips").replaceChildren(...run.tensors.categories.filter((_, i) => present.has(i)).map((name) => el("button", { class: "chip", type: "button", "aria-pressed": off.has(name) ? "false" : "true", onclick: () => {
    if (off.has(name)) off.delete(name); else off.add(name);
    state.off = [...off].sort().join(",");
    writeAddress(); chips(run); drawTable(run);
  } }, paint(el("i", { class: "dot" }), run.colors[name]), name)));
}

// --- what is taken along
function csv(run) {
  const quote = (value) => { const text = String(value ?? ""); const safe = /^[=+\-@\t\r]/.test(text) && isNaN(Number(text)) ? `'${text}` : text; return /[",\n\r]/.test(safe) ? `"${safe.replace(/"/g, '""')}"` : safe; };
  const t = run.tensors, lines = ["storage,tensor,kind,bytes,module,line,birth_op,death_op,idle_ms,recompute_ms,swap_ms,plan"];
  for (const row of matching(run)) lines.push([t.storage[row], run.name(row), t.categories[t.category[row]], t.bytes[row], run.text(t.module[row]), run.text(t.line[row]), t.birth[row], t.death[row], t.idle[row], t.again[row], t.swap[row], (run.away.get(row) || { does: "" }).does].map(quote).join(","));
  return lines.join("\n") + "\n";
}

function rowsAsJson(run) {
  const t = run.tensors;
  return JSON.stringify(matching(run).map((row) => ({ storage: t.storage[row], tensor: run.name(row), kind: t.categories[t.category[row]], bytes: t.bytes[row], module: run.text(t.module[row]), line: run.text(t.line[row]), birth_op: t.birth[row], death_op: t.death[row], idle_ms: t.idle[row], recompute_ms: t.again[row], swap_ms: t.swap[row], plan: (run.away.get(row) || { does: "" }).does })), null, 1);
}

function save(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type })), link = el("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
