// The system alive: roles as boxes, the hops between them as lines, as in
// docs/architecture.md.
import { bytes, count, el, number } from "./page.js";

const TITLES = { env: "Environments", actor: "Actor", learner: "Learner", replay: "Replay", logger: "Logger" };
// Role under which a supervisor knows what a box shows.
const ROLES = { env: "env", actor: "agent", learner: "agent", replay: "replay", logger: "logger" };
// By place: hops with their ends and the connection whose figures they have.
const HOPS = {
  h12: [{ name: "act, action", from: "env", to: "actor", way: "both", end: "server/actor", size: "received_bytes", queue: "batch_waiting" }],
  h3: [{ name: "add_batch", from: "actor", to: "replay", way: "right", end: "client/actor_replay", size: "sent_bytes", queue: "inflight" }],
  h47: [
    { name: "tran", from: "actor", to: "logger", way: "left", end: "client/actor_logger", size: "sent_bytes", queue: "inflight" },
    { name: "add", from: "learner", to: "logger", way: "left", end: "client/learner_logger", size: "sent_bytes", queue: "inflight" }],
  h56: [
    { name: "sample", from: "replay", to: "learner", way: "left", end: "client/learner_samples", size: "received_bytes", queue: "inflight" },
    { name: "update", from: "learner", to: "replay", way: "right", end: "client/learner_replay", size: "sent_bytes", queue: "inflight" }],
};
const SPEEDS = [0.05, 2, 20, 200]; // Calls a second, from which on a line moves faster.

export class System {
  constructor() {
    this.boxes = Object.fromEntries(Object.keys(TITLES).map((name) =>
      [name, el("div", { class: `box at-${name}`, id: `box-${name}`, role: "group", "aria-label": TITLES[name] })]));
    this.hops = Object.fromEntries(Object.values(HOPS).flat().map((hop) => [hop.end, new Hop(hop)]));
    this.line = el("p", { class: "soft", role: "status", id: "system-line" });
    const places = Object.entries(HOPS).map(([place, hops]) =>
      el("div", { class: `hops at-${place}` }, hops.map((hop) => this.hops[hop.end].element)));
    this.grid = el("div", { class: "system" },
      el("div", { class: "frame", "aria-hidden": "true" }), ...Object.values(this.boxes), ...places);
    this.element = el("div", {}, this.line, this.grid);
  }

  set(live, state) {
    const metrics = live.metrics ?? {}, hops = live.hops ?? {};
    const roles = merge(live.hosts ?? {});
    const told = Object.keys(roles).length || Object.keys(hops).length || "server/logger/calls" in metrics;
    this.grid.hidden = !live.time;
    this.grid.classList.toggle("alone", !told);
    this.grid.classList.toggle("still", state !== "live");
    const slow = (live.bottleneck ?? "").split(":")[0];
    const marked = slow === "transfer" ? "learner" : slow;
    for (const [name, box] of Object.entries(this.boxes)) {
      const role = roles[ROLES[name]] ?? {};
      const away = state === "live" ? role.away ?? [] : [];
      const starts = (text) => text.endsWith(": starting"); // Which is no trouble.
      box.classList.toggle("bottleneck", marked === name);
      box.classList.toggle("away", !away.every(starts));
      const [figure, ...rest] = facts(name, live, metrics, role);
      box.replaceChildren(el("h3", {}, TITLES[name]), el("p", { class: "figure" }, figure ?? ""),
        ...rest.map((text) => el("p", {}, text)),
        ...away.map((text) => el("p", { class: starts(text) ? "soft" : "trouble" }, text)));
    }
    for (const [end, hop] of Object.entries(this.hops)) hop.set(hops[end] ?? logged(hop.of, metrics));
    this.line.textContent = this.tell(live, state, told).join(" ");
  }

  tell(live, state, told) {
    if (!live.time) return ["This run has left nothing about its roles."];
    const texts = [];
    const hosts = Object.keys(live.hosts ?? {});
    if (state !== "live") texts.push("As it was last.");
    if (!told) texts.push("All in one process.");
    if (hosts.length > 1) texts.push(`${hosts.length} hosts: ${hosts.join(", ")}.`);
    if (live.bottleneck) texts.push(`Bottleneck: ${live.bottleneck}.`);
    return texts;
  }
}

// A line between two boxes. Kept, so that what moves on it goes on moving.
class Hop {
  constructor(hop) {
    this.of = hop;
    this.figures = el("div", { class: "figures" });
    this.wire = el("div", { class: `wire ${hop.way}`, "aria-hidden": "true" });
    this.element = el("div", { class: "hop", role: "group", "aria-label": `${hop.name}, ${TITLES[hop.from]} to ${TITLES[hop.to]}` },
      el("div", { class: "hopname" }, hop.name,
        el("span", { class: "ends" }, ` ${TITLES[hop.from]} ${hop.way === "both" ? "⇄" : "→"} ${TITLES[hop.to]}`)),
      this.wire, this.figures);
  }

  set(figures) {
    if (!figures) { this.wire.dataset.speed = 0; this.figures.replaceChildren(); return; }
    const { calls, size, latency, queue } = { ...figures, size: figures.size ?? figures[this.of.size] };
    this.wire.dataset.speed = SPEEDS.filter((least) => calls >= least).length;
    const time = latency >= 1 ? `${number(latency)} s` : `${number(1000 * latency)} ms`;
    this.figures.replaceChildren(`${number(calls)} calls/s · ${bytes(size)}/s`, el("br"), `${time} · queue ${number(queue)}`);
  }
}

// Figures of a run that did not tell of hops by the second, from its metrics.
function logged(hop, metrics) {
  const value = (key) => metrics[`${hop.end}/${key}`];
  if (value("call_rate") == null) return null;
  const calls = value("call_rate");
  return { calls, size: value("calls") ? value(hop.size) / value("calls") * calls : 0, latency: value("latency_p50"), queue: value(hop.queue) };
}

// Adds up what the supervisors of several hosts tell of a role.
function merge(hosts) {
  const roles = {};
  for (const host of Object.values(hosts)) {
    for (const [name, told] of Object.entries(host.roles ?? {})) {
      const role = roles[name] ??= { away: [], workers: 0, running: 0, restarts: 0, cpu: 0, memory_gb: 0 };
      role.away.push(...(told.away ?? []).map(String));
      for (const key of ["workers", "running", "restarts", "cpu", "memory_gb"]) role[key] += Number(told[key] ?? 0);
    }
  }
  return roles;
}

// Texts for a box; the first is the figure that matters.
function facts(name, live, metrics, role) {
  const lines = [];
  const rates = live.rates ?? {};
  const usage = ROLES[name];
  const cores = role.cpu || metrics[`usage/${usage}/psutil/proc_cpu_usage`];
  const memory = role.memory_gb || metrics[`usage/${usage}/psutil/proc_ram_gb`];
  if (name === "env") {
    lines.push(`${number(rates.env)} steps/s`);
    if (role.workers) lines.push(`${role.running} of ${count(role.workers, "worker")} running`);
  } else if (name === "actor") {
    const steps = rates.policy ?? metrics["fps/policy"] ?? rates.env;
    lines.push(`${number(steps)} policy steps/s`);
  } else if (name === "learner") {
    lines.push(`${number(rates.train ?? metrics["parallel/updates_per_second"])} updates/s`);
    if (metrics["timer/learner/wait"] != null) lines.push(`waits ${number(100 * metrics["timer/learner/wait"])}% of the time`);
  } else if (name === "replay") {
    lines.push(`${number(metrics["replay/items"])} sequences`);
    if (metrics["replay/bytes"] != null) lines.push(bytes(metrics["replay/bytes"]));
  } else {
    lines.push(count(live.episodes ?? 0, "episode"));
  }
  if (cores != null && name !== "learner") lines.push(`${number(cores)} cores, ${bytes(1e9 * memory)}`);
  if (role.workers && name !== "learner") lines.push(count(role.restarts, "restart"));
  return lines;
}
