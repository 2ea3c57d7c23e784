// One run: scores, the system alive, events, all metrics, the configuration.
import { Chart } from "./chart.js";
import { canvas, duration, el, follow, get, moment, number, redrawn, show, tone } from "./page.js";
import { System } from "./system.js";

const SCORE = "episode/score";
// Shown before the person searches, in this order.
const FIRST = [/^train\/loss\//, /^train\/(ret|val|rew)/, /^train\/(ent|rand)/, /^fps\//, /^epstats\/(?!policy)/, /^train\/adv/];
const MANY = 100, FEW = 10; // From so many episodes on, a mean of so few is drawn over them.
const SHOWN = 12;
const REFRESH_SECONDS = 5;
const TONES = { restart: "bad", failed: "bad", fault: "bad", warning: "warn", save: "good", start: "accent", end: "accent", host: "accent" };

export async function runPage(content, id) {
  const run = await get(`api/run/${id}`);
  const state = { axis: "step", smooth: 1, range: null, live: run.live };
  const charts = new Charts(id, run, state);
  const system = new System();
  const strip = new Strip();
  const facts = el("div", { class: "facts", id: "facts" });
  content.replaceChildren(
    el("h1", {}, run.summary.name),
    facts,
    charts.controls(),
    charts.score.element,
    el("h2", {}, "The system"), system.element,
    el("h2", {}, "Events"), strip.element,
    el("h2", {}, "Metrics"), charts.element,
    el("h2", {}, "Configuration"), configuration(run.config));

  function update(summary, live) {
    facts.replaceChildren(...figures(summary, live, run));
    system.set(live, summary.state);
  }

  update(run.summary, run.live);
  strip.set(await get(`api/events/${id}`));
  await charts.load();
  let latest = null;
  const stop = follow(`api/stream?run=${id}`, "run", (news) => {
    update(news.summary, news.live);
    strip.add(news.events);
    const now = JSON.stringify(news.latest);
    if (now !== latest) { latest = now; charts.loadScore().catch(show); }
    charts.refreshSoon();
  });
  const redraw = () => strip.draw();
  window.addEventListener("resize", redraw);
  return () => { stop(); charts.close(); window.removeEventListener("resize", redraw); };
}

function figures(summary, live, run) {
  const pairs = [
    ["State", el("span", { class: `state ${summary.state}`, id: "state" }, summary.state)],
    ["Task", summary.task || "–"],
    ["Model", run.config.size ?? "–"],
    ["Seed", summary.seed || "–"],
    ["Step", number(summary.step)],
    ["Time", duration(summary.seconds)],
    ["Steps/s", number(live.rates?.env)],
    ["Newest score", el("span", { id: "score" }, number(summary.score))],
  ];
  return pairs.map(([key, value]) => el("div", {}, el("span", { class: "key" }, key), el("span", { class: "value" }, value)));
}

// The chart of scores, and those of the metrics that the search field finds.
class Charts {
  constructor(id, run, state) {
    Object.assign(this, { id, run, state, shown: new Map(), limit: SHOWN });
    const zoomed = (range) => { this.state.range = range; this.load().catch(show); };
    this.zoomed = zoomed;
    this.score = new Chart(run.published ? "Score, and what was published" : "Score", { large: true, zoomed });
    this.search = el("input", { type: "search", placeholder: "Search, such as loss|fps", "aria-label": "Search metrics", id: "search" });
    this.grid = el("div", { class: "charts" });
    this.more = el("button", { type: "button" }, "More");
    this.count = el("span", { class: "soft", role: "status" });
    this.search.addEventListener("input", () => { this.limit = SHOWN; this.arrange().catch(show); });
    this.more.addEventListener("click", () => { this.limit += SHOWN; this.arrange().catch(show); });
    this.element = el("div", {}, el("div", { class: "bar" }, this.search, this.count), this.grid, el("div", { class: "bar" }, this.more));
  }

  controls() {
    const axis = el("select", { "aria-label": "Axis" }, el("option", { value: "step" }, "steps"),
      el("option", { value: "time", disabled: !this.run.timed }, "wall time"));
    axis.addEventListener("change", () => { Object.assign(this.state, { axis: axis.value, range: null }); this.load().catch(show); });
    const smooth = el("input", { type: "range", min: 0, max: 10, value: 0, "aria-label": "Smoothing" });
    const value = el("output", {}, "1");
    smooth.addEventListener("input", () => {
      this.state.smooth = 2 ** smooth.value;
      value.textContent = this.state.smooth;
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.load().catch(show), 150);
    });
    const all = el("button", { type: "button" }, "Whole range");
    all.addEventListener("click", () => this.zoomed(null));
    return el("div", { class: "bar" }, el("label", {}, "Over", axis),
      el("label", {}, "Mean of", smooth, value), all,
      el("span", { class: "soft" }, "Drag over a chart to zoom; with the keyboard + − 0 and arrows."));
  }

  async load() {
    await Promise.all([this.loadScore(), this.arrange()]);
    await this.refresh();
  }

  async fetch(name, smooth = this.state.smooth) {
    const { axis, range } = this.state;
    const limits = range ? `&from=${range[0]}&to=${range[1]}` : "";
    const path = `api/series?run=${this.id}&name=${encodeURIComponent(name)}&axis=${axis}&smooth=${smooth}&points=1000${limits}`;
    return (await get(path))[0];
  }

  async loadScore() {
    const all = await this.fetch(SCORE);
    const smooth = Math.max(this.state.smooth, all.total >= MANY ? FEW : 1);
    const series = [{ label: "this run", x: all.x, y: all.y }];
    if (smooth > this.state.smooth) {
      const { x, y } = await this.fetch(SCORE, smooth);
      series.unshift({ label: `mean of ${smooth} episodes`, x, y });
      Object.assign(series[1], { label: "episodes", colour: 0, faint: true });
    }
    const published = this.run.published;
    if (published && this.state.axis === "step")
      series.push({ label: "published: mean and range of seeds", colour: 1, x: published.steps, y: published.mean, low: published.low, high: published.high, dashed: true });
    this.score.set(series, { time: this.state.axis === "time", range: this.state.range });
  }

  found() {
    const names = this.run.metrics.filter((name) => name !== SCORE);
    const text = this.search.value.trim();
    if (!text) return FIRST.flatMap((test) => names.filter((name) => test.test(name)));
    let test = null;
    try { test = new RegExp(text, "i"); } catch { /* Half typed. */ }
    return names.filter((name) => test ? test.test(name) : name.includes(text));
  }

  async arrange() {
    const names = this.found();
    const chosen = names.slice(0, this.limit);
    this.count.textContent = `${names.length} of ${this.run.metrics.length} metrics`;
    this.more.hidden = names.length <= this.limit;
    for (const [name, chart] of this.shown)
      if (!chosen.includes(name)) { chart.close(); this.shown.delete(name); }
    const fresh = chosen.filter((name) => !this.shown.has(name));
    for (const name of fresh) this.shown.set(name, new Chart(name, { zoomed: this.zoomed }));
    this.grid.replaceChildren(...chosen.map((name) => this.shown.get(name).element));
    await Promise.all(fresh.map((name) => this.draw(name)));
  }

  async draw(name) {
    const { x, y } = await this.fetch(name);
    this.shown.get(name)?.set([{ label: name, x, y }], { time: this.state.axis === "time", range: this.state.range });
  }

  async refresh() {
    const run = await get(`api/run/${this.id}`);
    const news = run.metrics.length !== this.run.metrics.length;
    this.run = run;
    if (news) await this.arrange();
    await Promise.all([...this.shown.keys()].map((name) => this.draw(name)));
  }

  // Metrics come now and then, and news every second.
  refreshSoon() {
    this.waiting ??= setTimeout(() => {
      this.waiting = null;
      this.refresh().catch(show);
    }, 1000 * REFRESH_SECONDS);
  }

  close() {
    clearTimeout(this.timer);
    clearTimeout(this.waiting);
    this.score.close();
    for (const chart of this.shown.values()) chart.close();
  }
}

// Events as marks along time, and as a list.
class Strip {
  constructor() {
    this.events = [];
    this.canvas = el("canvas", { role: "img", "aria-label": "Events along time" });
    redrawn(this.canvas, () => this.draw());
    this.list = el("ol", { class: "log", id: "events", "aria-label": "Events, the newest first", tabindex: 0 });
    this.element = el("div", { class: "card strip" }, this.canvas, this.list);
  }

  set(events) {
    this.events = events;
    this.list.replaceChildren(...events.slice(-200).reverse().map(entry));
    this.canvas.hidden = !events.length;
    if (!events.length) this.list.append(el("li", { class: "soft" }, "None were recorded."));
    this.canvas.setAttribute("aria-label", `${events.length} events along time`);
    this.draw();
  }

  add(events) {
    const last = this.events.at(-1);
    const fresh = events.filter((event) => !last || event.time > last.time);
    if (!fresh.length) return;
    this.set([...this.events, ...fresh].slice(-1000));
  }

  draw() {
    const { context, width, height } = canvas(this.canvas);
    context.fillStyle = tone("line");
    context.fillRect(0, height - 16, width, 1);
    if (!this.events.length) return;
    const first = this.events[0].time, last = Math.max(this.events.at(-1).time, first + 1);
    for (const event of this.events) {
      const x = 4 + (event.time - first) / (last - first) * (width - 8);
      context.fillStyle = tone(TONES[event.kind] ?? "soft");
      const tall = TONES[event.kind] === "bad" ? 24 : 14;
      context.fillRect(x - 1, height - 16 - tall, 2.5, tall);
    }
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = tone("soft");
    context.textAlign = "left";
    context.fillText(moment(first), 2, height - 3);
    context.textAlign = "right";
    context.fillText(moment(last), width - 2, height - 3);
  }
}

function entry(event) {
  const kind = String(event.kind ?? "");
  return el("li", {}, el("time", {}, moment(event.time)),
    el("span", { class: `kind ${kind in TONES ? kind : ""}` }, kind), String(event.text ?? ""));
}

function configuration(config) {
  if (config.error) return el("p", {}, config.error);
  const row = (key, ...values) => el("tr", {}, el("th", { scope: "row" }, key), values.map((value) => el("td", {}, value)));
  const changed = Object.entries(config.changed);
  return el("div", { class: "card scroll" },
    el("table", { "aria-label": "Keys that differ from the defaults" },
      el("thead", {}, el("tr", {}, ["Key", "Default", "This run"].map((text) => el("th", { scope: "col" }, text)))),
      el("tbody", {}, changed.map(([key, [before, now]]) => row(key, before, now)))),
    el("details", {}, el("summary", {}, `All ${Object.keys(config.values).length} keys`),
      el("table", {}, el("tbody", {}, Object.entries(config.values).map(([key, value]) => row(key, value))))));
}
