// One run, decoded: what is alive at an op, and how many bytes there are of each category at each op.
function decodeRun(data) {
  const run = { ...data, series: {}, high: summed(data.high), start: summed(data.ops.start_us), after: data.after ? summed(data.after) : null };
  for (const [name, deltas] of Object.entries(data.series)) run.series[name] = summed(deltas);
  const t = data.tensors;
  run.count = t.bytes.length;
  run.away = new Map(t.away.map(([row, kind, does, saved, from, to, left, why]) => [row, { kind, does, saved, from, to, left, why }]));
  run.text = (place) => data.strings[place];
  run.name = (row) => data.strings[t.label[row]];
  if (run.after) run.planned = plannedSeries(run);
  return run;
}

// With the plan: what is away is not there; replays, copies and decode buffers are what the simulator counts above the rest.
function plannedSeries(run) {
  const found = {};
  for (const [name, row] of Object.entries(run.series)) found[name] = Float64Array.from(row);
  const t = run.tensors;
  for (const [row, each] of run.away) {
    const series = found[t.categories[t.category[row]]];
    for (let op = Math.max(0, each.from); op < Math.min(each.to, run.n); op++) series[op] -= t.bytes[row] - each.left;
  }
  const rest = found.workspace || new Float64Array(run.n);
  for (let op = 0; op < run.n; op++) {
    let named = 0;
    for (const [name, row] of Object.entries(found)) if (name !== "workspace") named += row[op];
    rest[op] = Math.max(0, run.after[op] - named);
  }
  found.workspace = rest;
  return found;
}

const seriesShown = (run) => (state.view === "plan" && run.planned ? run.planned : run.series);
const highShown = (run) => (state.view === "plan" && run.after ? run.after : run.high);

function isAway(run, row, op) {
  if (state.view !== "plan") return null;
  const each = run.away.get(row);
  return each && each.from <= op && op < each.to ? each : null;
}

function aliveAt(run, op) {
  const t = run.tensors, rows = [];
  for (let row = 0; row < run.count; row++) if (t.birth[row] <= op && op <= t.death[row]) rows.push(row);
  return rows;
}

function momentOp(run) {
  const op = state.op === "" ? run.at : Number(state.op);
  return Number.isInteger(op) ? Math.min(Math.max(op, 0), Math.max(0, run.n - 1)) : run.at;
}

function phaseOf(run, op) {
  const found = run.phases.find(([from, to]) => from <= op && op < to);
  return found ? found[2] : "before the iteration";
}

const xOf = (run, op) => (state.x === "time" ? (op < 0 ? 0 : op >= run.n ? endMs(run) : run.start[op] / 1000) : op);
const endMs = (run) => (run.n ? run.start[run.n - 1] / 1000 + Math.max(0.001, (run.start[run.n - 1] - (run.start[run.n - 2] || 0)) / 1000) : 1);

function opAt(run, x) {
  if (state.x !== "time") return Math.min(Math.max(Math.round(x), 0), run.n - 1);
  let low = 0, high = run.n - 1;
  while (low < high) { const middle = (low + high + 1) >> 1; if (run.start[middle] / 1000 <= x) low = middle; else high = middle - 1; }
  return low;
}

function window_(run) {
  const from = state.from === "" ? 0 : Number(state.from), to = state.to === "" ? run.n : Number(state.to);
  return Number.isFinite(from) && Number.isFinite(to) && from < to ? [Math.max(0, from), Math.min(run.n, to)] : [0, run.n];
}
