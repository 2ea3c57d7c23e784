// Line charts on a canvas: axes, bands, zoom, a reading under the cursor.
import { canvas, clock, colour, el, moment, number, redrawn, tone } from "./page.js";

const DAY_SECONDS = 86400;
const LEFT = 52, RIGHT = 8, TOP = 8, BOTTOM = 22;

export class Chart {
  // `zoomed` is called with [from, to], or null for all, when the person zooms.
  constructor(title, { large = false, zoomed = null } = {}) {
    this.title = title;
    this.zoomed = zoomed;
    this.series = [];
    this.time = false;
    this.cursor = null;
    this.drag = null;
    this.canvas = el("canvas", { role: "img", tabindex: 0, "aria-label": title });
    this.reading = el("div", { class: "reading", "aria-live": "polite" });
    this.legend = el("div", { class: "legend" });
    this.element = el("section", { class: `card chart${large ? " large" : ""}` },
      el("div", { class: "charthead" }, el("h3", {}, title), this.reading), this.canvas, this.legend);
    this.listen();
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.canvas);
    redrawn(this.canvas, () => this.draw());
  }

  // Each series has label, x, y, and perhaps colour, dashed, faint, low and high.
  set(series, { time = false, range = null } = {}) {
    this.known = true;
    this.series = series;
    this.time = time;
    this.range = range;
    this.legend.replaceChildren(...(series.length > 1 || series[0]?.low ? series.map((item, index) =>
      el("span", { class: `key${(item.colour ?? index) % 8}` }, item.label)) : []));
    const last = series.map((item) => {
      const end = item.y.length - 1;
      return end < 0 ? `${item.label}: no values`
        : `${item.label}: ${number(item.y[end])} at ${this.place(item.x[end])}`;
    });
    this.canvas.setAttribute("aria-label", `${this.title}. ${last.join("; ")}`);
    this.draw();
  }

  place(x) { return this.time ? new Date(x * 1000).toLocaleString() : `step ${number(x)}`; }

  close() { this.observer.disconnect(); }

  bounds() {
    let [left, right, low, high] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const item of this.series) {
      for (const x of item.x) { if (x < left) left = x; if (x > right) right = x; }
      for (const values of [item.y, item.low ?? [], item.high ?? []])
        for (const y of values) { if (y < low) low = y; if (y > high) high = y; }
    }
    if (this.range) [left, right] = this.range;
    if (!(right > left)) { left = (Number.isFinite(left) ? left : 0) - 0.5; right = left + 1; }
    if (!Number.isFinite(low)) [low, high] = [0, 1];
    if (!(high > low)) { low -= Math.abs(low) * 0.1 || 0.5; high += Math.abs(high) * 0.1 || 0.5; }
    const room = (high - low) * 0.06;
    return { left, right, low: low - room, high: high + room };
  }

  draw() {
    const { context, width, height } = canvas(this.canvas);
    const view = this.bounds();
    this.view = view;
    this.size = { width, height };
    const x = (value) => LEFT + (value - view.left) / (view.right - view.left) * (width - LEFT - RIGHT);
    const y = (value) => height - BOTTOM - (value - view.low) / (view.high - view.low) * (height - TOP - BOTTOM);
    const empty = this.series.every((item) => !item.x.length);
    if (!empty) this.axes(context, width, height, view, x, y);
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, width - LEFT - RIGHT, height - BOTTOM);
    context.clip();
    if (empty) {
      context.fillStyle = tone("soft");
      context.font = "13px system-ui, sans-serif";
      context.textAlign = "center";
      context.fillText(this.known ? "no values yet" : "loading …", (width + LEFT) / 2, height / 2 - BOTTOM);
    }
    for (const faint of [true, false]) // What is faint lies below.
      this.series.forEach((item, index) => { if (Boolean(item.faint) === faint) this.line(context, item, item.colour ?? index, x, y); });
    context.restore();
    if (this.drag) {
      context.fillStyle = tone("accent");
      context.globalAlpha = 0.15;
      context.fillRect(this.drag[0], TOP, this.drag[1] - this.drag[0], height - TOP - BOTTOM);
      context.globalAlpha = 1;
    }
    if (this.cursor != null) this.mark(context, height, x, y);
  }

  line(context, item, index, x, y) {
    context.fillStyle = context.strokeStyle = colour(index);
    if (item.low) {
      context.globalAlpha = 0.18;
      context.beginPath();
      item.x.forEach((at, i) => context.lineTo(x(at), y(item.high[i])));
      for (let i = item.x.length - 1; i >= 0; i--) context.lineTo(x(item.x[i]), y(item.low[i]));
      context.fill();
      context.globalAlpha = 1;
    }
    if (item.faint) { this.dots(context, item, 1.3, 0.35, x, y); return; }
    context.lineWidth = 1.8;
    context.lineJoin = "round";
    context.setLineDash(item.dashed ? [5, 4] : []);
    context.beginPath();
    item.x.forEach((at, i) => context.lineTo(x(at), y(item.y[i])));
    context.stroke();
    context.setLineDash([]);
    if (item.x.length < 40) this.dots(context, item, 2, 1, x, y);
  }

  dots(context, item, radius, alpha, x, y) {
    context.globalAlpha = alpha;
    item.x.forEach((at, i) => {
      context.beginPath();
      context.arc(x(at), y(item.y[i]), radius, 0, 7);
      context.fill();
    });
    context.globalAlpha = 1;
  }

  axes(context, width, height, view, x, y) {
    context.font = "11px system-ui, sans-serif";
    context.strokeStyle = tone("line");
    context.fillStyle = tone("soft");
    context.lineWidth = 1;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const value of ticks(view.low, view.high, 4)) {
      context.beginPath();
      context.moveTo(LEFT, y(value));
      context.lineTo(width - RIGHT, y(value));
      context.stroke();
      context.fillText(number(value), LEFT - 5, y(value));
    }
    context.textBaseline = "top";
    for (const value of ticks(view.left, view.right, Math.max(2, Math.floor(width / 110)))) {
      const text = this.time ? (view.right - view.left > DAY_SECONDS ? moment : clock)(value) : number(value);
      const half = context.measureText(text).width / 2;
      const at = Math.min(Math.max(x(value), LEFT + half), width - half - 2);
      context.textAlign = "center";
      context.fillText(text, at, height - BOTTOM + 6);
    }
  }

  mark(context, height, x, y) {
    const texts = [];
    context.strokeStyle = tone("soft");
    context.beginPath();
    context.moveTo(x(this.cursor), TOP);
    context.lineTo(x(this.cursor), height - BOTTOM);
    context.stroke();
    this.series.forEach((item, index) => {
      const i = nearest(item.x, this.cursor);
      if (i < 0) return;
      context.fillStyle = colour(item.colour ?? index);
      context.beginPath();
      context.arc(x(item.x[i]), y(item.y[i]), 3.5, 0, 7);
      context.fill();
      texts.push(`${this.series.length > 1 ? `${item.label} ` : ""}${number(item.y[i])}`);
    });
    this.reading.textContent = `${this.place(this.cursor)}: ${texts.join(" · ")}`;
  }

  value(pixel) {
    const share = (pixel - LEFT) / (this.size.width - LEFT - RIGHT);
    return this.view.left + Math.min(1, Math.max(0, share)) * (this.view.right - this.view.left);
  }

  listen() {
    const node = this.canvas;
    const redraw = () => requestAnimationFrame(() => this.draw());
    node.addEventListener("pointermove", (event) => {
      this.cursor = this.value(event.offsetX);
      if (this.drag) this.drag[1] = event.offsetX;
      redraw();
    });
    node.addEventListener("pointerleave", () => { this.cursor = this.drag = null; this.reading.textContent = ""; redraw(); });
    node.addEventListener("pointerdown", (event) => { if (this.zoomed && event.pointerType !== "touch") this.drag = [event.offsetX, event.offsetX]; });
    node.addEventListener("pointerup", () => {
      const drag = this.drag;
      this.drag = null;
      if (drag && Math.abs(drag[1] - drag[0]) > 8) this.zoomed(drag.map((p) => this.value(p)).sort((a, b) => a - b));
      redraw();
    });
    node.addEventListener("dblclick", () => this.zoomed?.(null));
    node.addEventListener("keydown", (event) => this.key(event, redraw));
  }

  key(event, redraw) {
    const { left, right } = this.view ?? this.bounds();
    const moves = { ArrowLeft: -0.02, ArrowRight: 0.02 };
    if (event.key in moves) {
      this.cursor = Math.min(right, Math.max(left, (this.cursor ?? left) + moves[event.key] * (right - left)));
    } else if (["+", "-"].includes(event.key) && this.zoomed) {
      const middle = this.cursor ?? (left + right) / 2;
      const half = (right - left) * (event.key === "+" ? 0.25 : 1);
      this.zoomed([middle - half, middle + half]);
    } else if (event.key === "0") this.zoomed?.(null);
    else return;
    event.preventDefault();
    redraw();
  }
}

// A small curve without axes: means of neighbours, since single scores jump.
export function spark(points, label) {
  const node = el("canvas", { class: "spark", role: "img", "aria-label": label });
  const wide = Math.max(1, Math.round(points.length / 12));
  const means = points.map((_, i) => {
    const part = points.slice(Math.max(0, i - wide + 1), i + 1);
    return part.reduce((sum, point) => sum + point[1], 0) / part.length;
  });
  const draw = () => {
    const { context, width, height } = canvas(node);
    if (points.length < 2) return;
    const xs = points.map((p) => p[0]);
    const [left, right, low, high] = [Math.min(...xs), Math.max(...xs), Math.min(...means), Math.max(...means)];
    context.strokeStyle = colour(0);
    context.lineWidth = 1.5;
    context.lineJoin = "round";
    context.beginPath();
    means.forEach((y, i) => context.lineTo(
      1 + (xs[i] - left) / (right - left || 1) * (width - 2),
      high > low ? height - 3 - (y - low) / (high - low) * (height - 6) : height / 2));
    context.stroke();
  };
  requestAnimationFrame(draw);
  return redrawn(node, draw);
}

// Mean and range of several curves, over the steps that all of them have.
export function band(curves, points = 200) {
  const whole = curves.filter((curve) => curve.x.length > 1);
  if (!whole.length) return { x: [], y: [], low: [], high: [] };
  const left = Math.max(...whole.map((curve) => curve.x[0]));
  const right = Math.min(...whole.map((curve) => curve.x.at(-1)));
  const x = Array.from({ length: points }, (_, i) => left + (right - left) * i / (points - 1));
  const rows = whole.map((curve) => x.map((at) => between(curve, at)));
  const column = (i) => rows.map((row) => row[i]);
  return {
    x,
    y: x.map((_, i) => column(i).reduce((a, b) => a + b, 0) / rows.length),
    low: x.map((_, i) => Math.min(...column(i))),
    high: x.map((_, i) => Math.max(...column(i))),
  };
}

function between(curve, at) {
  let i = nearest(curve.x, at);
  if (curve.x[i] > at) i -= 1;
  if (i < 0) return curve.y[0];
  if (i >= curve.x.length - 1) return curve.y.at(-1);
  const share = (at - curve.x[i]) / (curve.x[i + 1] - curve.x[i] || 1);
  return curve.y[i] + share * (curve.y[i + 1] - curve.y[i]);
}

function nearest(sorted, value) {
  let low = 0, high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1; else high = middle;
  }
  if (low > 0 && value - sorted[low - 1] < sorted[low] - value) return low - 1;
  return high < 0 ? -1 : low;
}

function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high && found.length < 20; value += step)
    found.push(Math.abs(value) < step * 1e-9 ? 0 : value);
  return found;
}
