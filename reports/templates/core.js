// What every part of the page needs: figures in words, elements, the state that lives in the address.
const $ = (id) => document.getElementById(id);

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function paint(node, color) { node.style.setProperty("--c", color); return node; }

function bytes(amount) {
  let value = amount;
  for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
    if (Math.abs(value) < 1024 || unit === "TiB") return unit === "B" ? `${Math.round(value)} B` : `${value.toFixed(decimals(value))} ${unit}`;
    value /= 1024;
  }
  return "";
}

function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${Math.round(value * 1000)} µs`;
  return value < 1000 ? `${value.toFixed(decimals(value))} ms` : `${(value / 1000).toFixed(decimals(value / 1000))} s`;
}

function decimals(value) { return Math.abs(value) >= 99.95 ? 0 : Math.abs(value) >= 9.995 ? 1 : 2; }
function percent(part, whole) { return whole > 0 ? `${((100 * part) / whole).toFixed(1)} %` : "–"; }
function escaped(text) { return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;"); }
function token(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

function summed(deltas) {
  const whole = new Float64Array(deltas.length);
  let sum = 0;
  for (let i = 0; i < deltas.length; i++) { sum += deltas[i]; whole[i] = sum; }
  return whole;
}

// --- the state: what is looked at, kept in the fragment of the address, so that a link shows the same picture
const DEFAULTS = { run: "0", op: "", x: "time", view: "run", from: "", to: "", q: "", off: "", sort: "-bytes", sel: "", at: "" };
const state = { ...DEFAULTS };

function readAddress() {
  Object.assign(state, DEFAULTS);
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) if (name in DEFAULTS) state[name] = value;
}

function writeAddress() {
  const kept = new URLSearchParams();
  for (const name of Object.keys(DEFAULTS)) if (state[name] !== DEFAULTS[name]) kept.set(name, state[name]);
  const text = kept.toString();
  history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search);
}

// --- figures
const drawn = new Map();
const CONFIG = {
  displaylogo: false, responsive: true, displayModeBar: "hover",
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "hoverClosestCartesian", "hoverCompareCartesian", "toggleSpikelines"],
};

function themed(layout) {
  const grid = token("--line"), ink = token("--muted");
  const axis = (given) => ({ ...given, gridcolor: grid, linecolor: grid, zerolinecolor: grid });
  const found = { ...layout, font: { ...(layout.font || {}), color: ink, family: token("--sans") }, hoverlabel: { bgcolor: token("--card"), bordercolor: grid, font: { color: token("--ink"), family: token("--sans") } } };
  found.xaxis = axis(layout.xaxis || {});
  found.yaxis = axis(layout.yaxis || {});
  found.modebar = { bgcolor: "rgba(0,0,0,0)", color: ink, activecolor: token("--accent") };
  return found;
}

function draw(node, traces, layout, config) {
  drawn.set(node, [traces, layout, config]);
  const narrow = node.clientWidth < 560;
  const { l, r } = layout.margin, fitted = narrow ? { ...layout, margin: { ...layout.margin, l: Math.min(l, 58), r: Math.min(r, 8) } } : layout;
  return Plotly.react(node, traces, themed(fitted), { ...CONFIG, ...(config || {}) });
}

function redrawAll() { for (const [node, [traces, layout, config]] of drawn) draw(node, traces, layout, config); }

function byteTicks(most) {
  let step = 1;
  while (most / step > 6) step *= 2;
  const ticks = [];
  for (let tick = 0; tick <= most * 1.12 + step / 2; tick += step) ticks.push(tick);
  return { range: [0, Math.max(1, most) * 1.1], tickvals: ticks, ticktext: ticks.map(bytes) };
}
