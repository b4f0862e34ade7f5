// The stacked picture over the iteration, its minimap, and the line that says what a moment is made of.
const OUTSIDE = 500, INSIDE = 1600;

// Of each stretch of ops the one with the most bytes: coarse outside of the window, fine within, and no peak is ever lost.
function thinned(high, from, to) {
  const found = [];
  const take = (a, b, most) => {
    const parts = Math.min(most, b - a);
    for (let part = 0; part < parts; part++) {
      const begin = a + Math.floor(((b - a) * part) / parts), end = a + Math.floor(((b - a) * (part + 1)) / parts);
      let best = begin;
      for (let op = begin + 1; op < end; op++) if (high[op] > high[best]) best = op;
      found.push(best);
    }
  };
  take(0, from, OUTSIDE); take(from, to, INSIDE); take(to, high.length, OUTSIDE);
  return found;
}

function drawArea(run) {
  const node = $("area");
  if (!node || run.n < 2) return;
  const [from, to] = window_(run), series = seriesShown(run), high = highShown(run);
  const at = thinned(high, from, to), x = [...at.map((op) => xOf(run, op)), xOf(run, run.n)];
  at.push(run.n - 1); // the last step has its width too
  const traces = Object.keys(run.colors).filter((name) => series[name]).map((name) => ({
    x, y: at.map((op) => series[name][op]), name, stackgroup: "bytes", mode: "lines", hoverinfo: "none",
    line: { width: 0.5, color: run.colors[name], shape: "hv" }, fillcolor: run.colors[name] + "d0",
  }));
  traces.sort((a, b) => run.tensors.categories.indexOf(a.name) - run.tensors.categories.indexOf(b.name));
  if (run.after) {
    const other = state.view === "plan" ? run.high : run.after;
    traces.push({ x, y: at.map((op) => other[op]), name: state.view === "plan" ? "without the plan" : "with the plan", mode: "lines", hoverinfo: "none", line: { width: 1.6, dash: "dot", shape: "hv", color: token("--ink") } });
  }
  draw(node, traces, areaLayout(run, from, to, high), {});
  if (!node.dataset.wired) wireArea(node);
}

function areaLayout(run, from, to, high) {
  let most = run.budget_bytes > 0 && run.budget_bytes < run.peak_bytes * 1.5 ? run.budget_bytes : 0;
  for (let op = from; op < to; op++) most = Math.max(most, run.high[op], run.after ? run.after[op] : 0);
  const op = momentOp(run), peak = peakOf(high), wide = [xOf(run, 0), xOf(run, run.n)];
  const narrow = $("area").clientWidth < 560;
  const shapes = run.phases.filter(([a, b, phase]) => phase === "backward" && (b - a) * 400 > run.n).map(([a, b]) => ({ type: "rect", xref: "x", yref: "paper", x0: xOf(run, a), x1: xOf(run, b), y0: 0, y1: 1, layer: "below", line: { width: 0 }, fillcolor: "rgba(128,128,128,.10)" }));
  shapes.push({ type: "line", xref: "x", yref: "paper", x0: xOf(run, op), x1: xOf(run, op), y0: 0, y1: 1, line: { width: 1.5, color: token("--ink") } });
  const notes = run.phases.filter(([a, b]) => (xOf(run, b) - xOf(run, a)) / (wide[1] - wide[0]) > (narrow ? 0.24 : 0.09)).map(([a, b, phase]) => ({ xref: "x", yref: "paper", x: (xOf(run, a) + xOf(run, b)) / 2, y: 1, yanchor: "bottom", text: phase, showarrow: false, font: { size: 12 } }));
  if (run.budget_bytes) {
    shapes.push({ type: "line", xref: "paper", yref: "y", x0: 0, x1: 1, y0: run.budget_bytes, y1: run.budget_bytes, line: { dash: "dash", width: 1.5, color: token("--bad") } });
    notes.push({ xref: "paper", yref: "y", x: 0, y: run.budget_bytes, xanchor: "left", yanchor: "bottom", text: `budget ${bytes(run.budget_bytes)}`, showarrow: false, font: { size: 12, color: token("--bad") }, bgcolor: token("--card"), borderpad: 1 });
  }
  notes.push({ xref: "x", yref: "y", x: xOf(run, peak), y: high[peak], text: `peak ${bytes(high[peak])}`, showarrow: true, arrowhead: 0, arrowwidth: 1, arrowcolor: token("--muted"), ax: peak > run.n * 0.8 ? -48 : 48, ay: -14, font: { size: 12.5, color: token("--ink") }, bgcolor: token("--card"), borderpad: 2 });
  const range = [xOf(run, from), xOf(run, to)];
  return {
    height: narrow ? 320 : 420, margin: { l: 74, r: 18, t: 26, b: 30 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "x", dragmode: "zoom", shapes, annotations: notes, uirevision: `${state.run}${state.x}`,
    xaxis: { range, showgrid: false, title: { text: state.x === "time" ? "ms of the step" : "op of the iteration", standoff: 6, font: { size: 12 } }, showspikes: true, spikemode: "across", spikethickness: 1, spikedash: "solid", spikecolor: token("--muted"), rangeslider: { visible: true, thickness: 0.09, range: wide, bgcolor: "rgba(0,0,0,0)", bordercolor: token("--line"), borderwidth: 1 } },
    yaxis: { ...byteTicks(most), fixedrange: true },
  };
}

function peakOf(high) { let best = 0; for (let op = 1; op < high.length; op++) if (high[op] > high[best]) best = op; return best; }

let zooming = 0;
function wireArea(node) {
  node.dataset.wired = "1";
  node.on("plotly_hover", (event) => { const run = current(); tell(run, opAt(run, event.points[0].x)); });
  node.on("plotly_unhover", () => tell(current(), momentOp(current())));
  node.on("plotly_click", (event) => pin(opAt(current(), event.points[0].x)));
  node.on("plotly_relayout", (event) => {
    const run = current();
    let range = event["xaxis.range"] || (event["xaxis.range[0]"] !== undefined ? [event["xaxis.range[0]"], event["xaxis.range[1]"]] : null);
    if (event["xaxis.autorange"]) range = [xOf(run, 0), xOf(run, run.n)];
    if (!range) return;
    const from = Math.max(0, opAt(run, range[0])), to = Math.min(run.n, range[1] >= xOf(run, run.n) ? run.n : opAt(run, range[1]) + 1);
    clearTimeout(zooming);
    zooming = setTimeout(() => zoom(from, Math.max(to, from + 1)), 60);
  });
}

function zoom(from, to) {
  const run = current(), whole = from <= 0 && to >= run.n;
  state.from = whole ? "" : String(from);
  state.to = whole ? "" : String(to);
  writeAddress();
  drawRun();
}

// What the moment is made of: one sentence, one bar, one key.
function tell(run, op) {
  if (!run.n) return;
  const series = seriesShown(run), total = highShown(run)[op], order = run.tensors.categories;
  const parts = Object.keys(series).map((name) => [name, series[name][op]]).filter(([, size]) => size > 0);
  parts.sort((a, b) => order.indexOf(a[0]) - order.indexOf(b[0]));
  const module = run.text(run.ops.module[op]), line = run.text(run.ops.line[op]);
  if (run.n < 2) {
    $("moment-what").replaceChildren(el("b", {}, bytes(total)), " when it ended");
    $("moment-where").replaceChildren(run.text(run.ops.line[op]));
  } else $("moment-what").replaceChildren(el("b", {}, bytes(total)), ` while op ${op} of ${run.n} runs`, op === peakOf(highShown(run)) ? ", the peak" : "");
  if (run.n > 1) $("moment-where").replaceChildren(`${phaseOf(run, op)}: `, el("code", {}, run.text(run.ops.name[op])), module ? ` in ${module}` : "", line ? " at " : "", line ? el("code", {}, line) : "");
  $("mix").replaceChildren(...parts.map(([name, size]) => { const bar = paint(el("i", { title: `${name} ${bytes(size)}` }), run.colors[name]); bar.style.flexGrow = size; return bar; }));
  $("key").replaceChildren(...parts.sort((a, b) => b[1] - a[1]).map(([name, size]) => el("li", {}, paint(el("i", { class: "dot" }), run.colors[name]), name, el("b", {}, bytes(size)), el("span", {}, percent(size, total)))));
}
