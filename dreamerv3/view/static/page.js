// Parts that all pages use: elements, numbers, requests. Names of runs and metrics only
// ever become text, never markup.

export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child != null));
  return node;
}

export async function get(path) {
  return answer(await fetch(path));
}

export async function post(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  return answer(await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal }));
}

async function answer(response) {
  let content = null;
  try { content = await response.json(); } catch { /* Not from our server. */ }
  if (!response.ok) throw new Error(content?.error ?? `The server answered ${response.status}.`);
  return content;
}

export function show(problem) {
  const place = document.getElementById("problem");
  place.textContent = problem ? String(problem.message ?? problem) : "";
  if (problem) setTimeout(() => { place.textContent = ""; }, 8000);
}

const SHORT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

export function number(value) {
  if (value == null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e15)) return value.toExponential(2);
  return SHORT.format(value);
}

// "1 restart", "2 restarts"; large ones are shortened.
export function count(value, noun) {
  return `${number(value)} ${noun}${value === 1 ? "" : "s"}`;
}

export function percent(share) {
  return `${(100 * share).toFixed(share > 0.0005 && share < 0.0995 ? 1 : 0)}%`;
}

// As many places as a person compares at a glance.
export function decimal(value) {
  if (value == null || !Number.isFinite(value)) return "–";
  return Math.abs(value) < 1000 ? value.toFixed(3).replace(/^-(0\.000)$/, "$1") : number(value);
}

export function bytes(value) {
  if (value == null || !Number.isFinite(value)) return "–";
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (value < 1000) return `${value.toPrecision(3)} ${unit}`.replace(/\.0+ /, " ");
    value /= 1000;
  }
  return `${value.toPrecision(3)} TB`;
}

export function duration(seconds) {
  if (!(seconds >= 1)) return "–";
  const days = Math.floor(seconds / 86400);
  const parts = [Math.floor(seconds / 3600) % 24, Math.floor(seconds / 60) % 60, Math.floor(seconds) % 60];
  const clock = parts.map((part) => String(part).padStart(2, "0")).join(":");
  return days ? `${days}d ${clock}` : clock;
}

const CLOCK = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const DAY = new Intl.DateTimeFormat("en", { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hourCycle: "h23" });

export function clock(time) {
  return CLOCK.format(time * 1000);
}

// With the day, unless it is today.
export function moment(time) {
  const today = new Date().toDateString() === new Date(time * 1000).toDateString();
  return (today ? CLOCK : DAY).format(time * 1000);
}

export function colour(index) {
  const style = getComputedStyle(document.documentElement);
  return style.getPropertyValue(`--c${index % 8}`).trim();
}

export function tone(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// Draws a canvas again when colours change, as long as it is on the page.
const drawings = new WeakMap();
window.addEventListener("theme", () => {
  for (const node of document.querySelectorAll("canvas")) drawings.get(node)?.();
});
export function redrawn(node, draw) { drawings.set(node, draw); return node; }

// Sends what a stream brings to a function, until the page is left.
export function follow(path, name, take) {
  const source = new EventSource(path);
  const status = document.getElementById("link");
  source.addEventListener(name, (message) => {
    status.textContent = "";
    take(JSON.parse(message.data));
  });
  source.onerror = () => { status.textContent = "Not connected, trying again …"; };
  return () => { source.close(); status.textContent = ""; };
}

// Prepares a canvas for sharp lines; returns its context and size in CSS pixels.
export function canvas(node) {
  const ratio = window.devicePixelRatio || 1;
  const width = node.clientWidth || 300, height = node.clientHeight || 150;
  if (node.width !== Math.round(width * ratio) || node.height !== Math.round(height * ratio)) {
    node.width = Math.round(width * ratio);
    node.height = Math.round(height * ratio);
  }
  const context = node.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}
