// The tensors of one moment: each a bar from its birth to its death, as high as it is large, stacked up to the bytes that are there.
const MOST_BARS = 1500;
const HATCH = { swap: "/", recompute: "x", compress: ".", drop: "\\" };
const ACTION = { swap: "#2a8fd0", recompute: "#c78500", compress: "#b45c91", drop: "#8a8a8a" };

function bars(run, op) {
  const t = run.tensors, rows = aliveAt(run, op), total = rows.reduce((sum, row) => sum + t.bytes[row], 0);
  const large = rows.filter((row) => t.bytes[row] * 1200 >= total).slice(0, MOST_BARS);
  const drawnRows = new Set(large);
  large.sort((a, b) => t.category[a] - t.category[b] || t.birth[a] - t.birth[b] || a - b);
  const rest = rows.filter((row) => !drawnRows.has(row));
  return { large, rest, restBytes: rest.reduce((sum, row) => sum + t.bytes[row], 0), total };
}

function drawStrip(run) {
  const node = $("strip");
  if (!node || run.n < 2) return;
  const t = run.tensors, op = momentOp(run), { large, rest, restBytes, total } = bars(run, op);
  const byCategory = new Map(), away = new Map();
  let below = 0, marked = null;
  scale = total;
  const [from, to] = window_(run), span = xOf(run, to) - xOf(run, from), room = node.clientWidth - 92;
  if (rest.length) below = restBytes;
  for (const row of large) {
    const size = t.bytes[row], name = t.categories[t.category[row]];
    if (!byCategory.has(name)) byCategory.set(name, emptyBars(name, run.colors[name]));
    const start = xOf(run, Math.max(0, t.birth[row])), end = xOf(run, Math.min(run.n, t.death[row] + 1));
    push(byCategory.get(name), start, end, below, size, row, labelled(size, total) && !run.away.has(row) ? inside(`${run.name(row)}  ${bytes(size)}`, ((end - start) / span) * room) : "");
    const each = run.away.get(row);
    if (each && each.from >= 0) {
      if (!away.has(each.kind)) away.set(each.kind, hatched(each.kind));
      push(away.get(each.kind), xOf(run, each.from), xOf(run, each.to), below, size, row, "");
    }
    if (String(t.storage[row]) === state.sel) marked = [start, end, below, below + size];
    below += size;
  }
  const traces = [...byCategory.values(), ...away.values()];
  if (rest.length) traces.push(restBar(run, rest.length, restBytes));
  draw(node, traces, stripLayout(run, op, total, marked), {});
  $("strip-note").textContent = `${large.length + rest.length} tensors are alive at op ${op}, ${bytes(total)} together` + (rest.length ? `; the ${rest.length} smallest (${bytes(restBytes)}) are the grey band at the bottom.` : ".") + hidden(run, op, total);
  if (!node.dataset.wired) {
    node.dataset.wired = "1";
    node.on("plotly_click", (event) => { const row = event.points[0].customdata; if (row >= 0) select(String(current().tensors.storage[row]), true); });
  }
}

// Whether a line of text is no higher than its bar.
function labelled(size, total) { return ((stripHeight() - 48) * size) / (1.1 * total) >= 11; }
let printing = false;
function stripHeight() { return printing ? 330 : $("strip").clientWidth < 560 ? 360 : 460; }

// As much of `text` as there is room for; nothing where that would tell nothing.
function inside(text, pixels) {
  const most = Math.floor(pixels / 6.4) - 1;
  if (text.length <= most) return escaped(text);
  return most < 14 ? "" : escaped(text.slice(0, most - 1)) + "…";
}

function hidden(run, op, listed) {
  const series = run.series;
  let named = 0;
  for (const name of Object.keys(series)) if (name !== "workspace") named += series[name][op];
  return named - listed > 1 ? ` ${bytes(named - listed)} are of tensors too small to be listed in this file.` : "";
}

function emptyBars(name, color) {
  return { type: "bar", orientation: "h", name, x: [], base: [], y: [], width: [], customdata: [], text: [], textposition: "inside", insidetextanchor: "start", constraintext: "none", textangle: 0, insidetextfont: { size: [], color: ["parameter"].includes(name) ? "#fff" : "#14171a" }, cliponaxis: true, marker: { color, line: { width: [], color: token("--card") } }, hovertemplate: [] };
}

function hatched(kind) {
  return { ...emptyBars(kind, token("--card")), name: kind, marker: { color: token("--card"), opacity: 0.93, line: { width: 0.8, color: ACTION[kind] }, pattern: { shape: HATCH[kind] || "/", fgcolor: ACTION[kind], bgcolor: token("--card"), size: 7, solidity: 0.22 } } };
}

let scale = 1;
function push(trace, start, end, below, size, row, text) {
  const run = current(), t = run.tensors, each = run.away.get(row);
  trace.base.push(start); trace.x.push(end - start); trace.y.push(below + size / 2); trace.width.push(size); trace.customdata.push(row); trace.text.push(text); trace.insidetextfont.size.push(size * 24 >= scale ? 11.5 : 10.5);
  if (Array.isArray(trace.marker.line.width)) trace.marker.line.width.push(size * 110 >= scale ? 0.7 : 0);
  const facts = [`<b>${escaped(run.name(row))}</b>`, `${bytes(size)} · ${t.categories[t.category[row]]}`, `op ${Math.max(0, t.birth[row])} to ${t.death[row]}`];
  if (each) facts.push(`plan: ${escaped(each.does)}`);
  trace.hovertemplate.push(facts.join("<br>") + "<extra></extra>");
}

function restBar(run, count, size) {
  return { type: "bar", orientation: "h", name: "small", base: [xOf(run, 0)], x: [xOf(run, run.n) - xOf(run, 0)], y: [size / 2], width: [size], customdata: [-1], marker: { color: "rgba(128,128,128,.35)" }, hovertemplate: `${count} small tensors, ${bytes(size)}<extra></extra>` };
}

function stripLayout(run, op, total, marked) {
  const [from, to] = window_(run);
  const shapes = [{ type: "line", xref: "x", yref: "paper", x0: xOf(run, op), x1: xOf(run, op), y0: 0, y1: 1, line: { width: 1.5, color: token("--ink") } }];
  if (marked) shapes.push({ type: "rect", x0: marked[0], x1: marked[1], y0: marked[2], y1: marked[3], line: { width: 2.5, color: token("--ink") } });
  return {
    height: stripHeight(), margin: { l: 74, r: 18, t: 8, b: 40 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, barmode: "overlay", hovermode: "closest", dragmode: "pan", shapes, bargap: 0,
    xaxis: { range: [xOf(run, from), xOf(run, to)], showgrid: false, title: { text: state.x === "time" ? "ms of the step" : "op of the iteration", font: { size: 12 } } },
    yaxis: { ...byteTicks(total), fixedrange: true },
  };
}

// --- where in the model: an icicle of the bytes of the moment, by module
function drawModules(run) {
  const node = $("modules");
  if (!node || !run.n) return;
  const t = run.tensors, op = momentOp(run), totals = new Map(), main = new Map();
  for (const row of aliveAt(run, op)) {
    const each = isAway(run, row, op), size = each ? each.left : t.bytes[row];
    if (!size) continue;
    const path = run.text(t.module[row]), parts = path ? path.split(".") : ["(outside any module)"];
    let id = "";
    for (const part of ["all", ...parts].slice(0, 9)) {
      const parent = id;
      id = id ? `${id}.${part}` : part;
      const found = totals.get(id) || { size: 0, parent, label: part };
      found.size += size;
      totals.set(id, found);
      const kinds = main.get(id) || {};
      kinds[t.category[row]] = (kinds[t.category[row]] || 0) + size;
      main.set(id, kinds);
    }
  }
  const ids = [...totals.keys()].filter((id) => totals.get(id).size * 400 >= (totals.get("all") || { size: 1 }).size);
  const dominant = (id) => t.categories[Number(Object.entries(main.get(id)).sort((a, b) => b[1] - a[1])[0][0])];
  const trace = {
    type: "icicle", ids, labels: ids.map((id) => escaped(totals.get(id).label)), parents: ids.map((id) => totals.get(id).parent), values: ids.map((id) => totals.get(id).size), branchvalues: "total", tiling: { orientation: "v" }, pathbar: { thickness: 22 },
    text: ids.map((id) => bytes(totals.get(id).size)), textinfo: "label+text", maxdepth: 6, root: { color: "rgba(0,0,0,0)" },
    marker: { colors: ids.map((id) => (id === "all" ? "rgba(128,128,128,.18)" : run.colors[dominant(id)] + "cc")), line: { width: 1, color: token("--card") } },
    hovertemplate: ids.map((id) => `<b>${escaped(id.replace(/^all\.?/, "") || "everything")}</b><br>${bytes(totals.get(id).size)}, mostly ${dominant(id)}<extra></extra>`),
  };
  draw(node, [trace], { height: 340, margin: { l: 2, r: 2, t: 26, b: 2 }, paper_bgcolor: "rgba(0,0,0,0)", uniformtext: { minsize: 10, mode: "hide" } }, { displayModeBar: false });
}
