// Numbers as people read them, and elements that are never made from markup in a string.

const report = JSON.parse(document.getElementById("data").textContent);

function byId(id) { return document.getElementById(id); }

/** An element with attributes (those of value null left out) and children, strings among them as text. */
function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

function fixed(value, digits) {
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** Three significant digits, at least those before the point: 4.56, 45.6, 456, 4,560. */
function significant(value) {
  const size = Math.abs(value);
  return fixed(value, size === 0 || size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2);
}

function scaled(value, units, base) {
  let i = 0;
  while (Math.abs(value) >= base * 0.9995 && i < units.length - 1) { value /= base; i += 1; }
  return i === 0 && Number.isInteger(value) ? `${value} ${units[0]}`.trim() : `${significant(value)} ${units[i]}`.trim();
}

function bytesText(count) { return scaled(count, ["B", "KiB", "MiB", "GiB", "TiB"], 1024); }
/** `8.03B`, `15T`. */
function countText(count) {
  const units = ["", "K", "M", "B", "T"];
  let i = 0;
  while (Math.abs(count) >= 999.5 && i < units.length - 1) { count /= 1000; i += 1; }
  return `${Number(count.toPrecision(3)).toLocaleString("en-US")}${units[i]}`;
}

function flopsText(count) { return scaled(count, ["", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"], 1000); }

function secondsText(seconds) {
  if (seconds === 0) return "0";
  const size = Math.abs(seconds);
  if (size >= 0.9995) return `${significant(seconds)} s`;
  if (size >= 0.9995e-3) return `${significant(seconds * 1e3)} ms`;
  if (size >= 0.9995e-6) return `${significant(seconds * 1e6)} µs`;
  return `${significant(seconds * 1e9)} ns`;
}

function percentText(share, digits = null) {
  const value = 100 * share;
  return `${fixed(value, digits ?? (value !== 0 && Math.abs(value) < 9.95 ? 1 : 0))} %`;
}

function sum(values) { return values.reduce((total, value) => total + value, 0); }

/** `host_stall` as words. */
function words(name) { return name.replaceAll("_", " "); }

function plural(count, word) { return `${count.toLocaleString("en-US")} ${word}${count === 1 ? "" : "s"}`; }

function swatch(kind, extra = "") {
  return element("span", { class: `swatch ${extra}`, style: `background-color: var(--${kind}, var(--other))` });
}
