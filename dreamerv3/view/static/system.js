// The system alive: roles as boxes, the hops between them as lines, as in
// docs/architecture.md.
import { bytes, el, number } from "./page.js";

const BOXES = ["env", "actor", "learner", "replay", "logger"];
const TITLES = { env: "Environments", actor: "Actor", learner: "Learner", replay: "Replay", logger: "Logger" };
// Role under which a supervisor knows what a box shows.
const ROLES = { env: "env", actor: "agent", learner: "agent", replay: "replay", logger: "logger" };
const HOPS = {
  h12: [["→ act, ← action", "server/actor", "received_bytes", "batch_waiting"]],
  h3: [["→ add_batch", "client/actor_replay", "sent_bytes", "inflight"]],
  h47: [["← tran", "client/actor_logger", "sent_bytes", "inflight"], ["← add", "client/learner_logger", "sent_bytes", "inflight"]],
  h56: [["← sample", "client/learner_samples", "received_bytes", "inflight"], ["→ update", "client/learner_replay", "sent_bytes", "inflight"]],
};

export class System {
  constructor() {
    this.boxes = Object.fromEntries(BOXES.map((name) => [name, el("div", { class: "box", id: `box-${name}`, role: "group", "aria-label": TITLES[name] })]));
    this.hops = Object.fromEntries(Object.keys(HOPS).map((name) => [name, el("div", { class: "hops" })]));
    this.line = el("p", { class: "soft", role: "status" });
    const grid = el("div", { class: "system" }, ...Object.entries({ ...this.boxes, ...this.hops }).map(([name, node]) => {
      node.style.gridArea = name;
      return node;
    }));
    this.element = el("div", {}, this.line, grid);
  }

  set(live, state) {
    const metrics = live.metrics ?? {};
    const roles = merge(live.hosts ?? {});
    const alone = !Object.keys(roles).length && !("server/logger/calls" in metrics);
    const slow = (live.bottleneck ?? "").split(":")[0];
    const marked = slow === "transfer" ? "learner" : slow;
    for (const name of BOXES) {
      const role = roles[ROLES[name]] ?? {};
      const away = state === "live" ? role.away ?? [] : [];
      const box = this.boxes[name];
      box.className = `box${marked === name ? " bottleneck" : ""}${away.length ? " away" : ""}`;
      box.replaceChildren(el("h3", {}, TITLES[name]),
        ...facts(name, live, metrics, role).map((text) => el("p", {}, text)),
        ...away.map((text) => el("p", { class: "trouble" }, text)));
    }
    for (const [name, hops] of Object.entries(HOPS))
      this.hops[name].replaceChildren(...hops.map((hop) => line(hop, metrics)));
    const age = live.reported ? Math.max(0, live.time - live.reported) : null;
    const texts = [];
    if (state !== "live") texts.push("As it was last.");
    if (alone) texts.push("All in one process.");
    if (live.bottleneck) texts.push(`Bottleneck: ${live.bottleneck}.`);
    if (age != null && !alone) texts.push(`Hops as reported ${age.toFixed(0)} s before.`);
    this.line.textContent = texts.join(" ");
  }
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

function facts(name, live, metrics, role) {
  const lines = [];
  const usage = { env: "env", actor: "agent", learner: "agent", replay: "replay", logger: "logger" }[name];
  const cores = role.cpu || metrics[`usage/${usage}/psutil/proc_cpu_usage`];
  const memory = role.memory_gb || metrics[`usage/${usage}/psutil/proc_ram_gb`];
  if (name === "env") {
    lines.push(`${number(live.rates?.env)} steps/s`);
    if (role.workers) lines.push(`${role.running} of ${role.workers} workers run`);
  } else if (name === "actor" && metrics["fps/policy"] != null) {
    lines.push(`${number(metrics["fps/policy"])} policy steps/s`);
  } else if (name === "learner") {
    const updates = live.rates?.train ?? metrics["parallel/updates_per_second"];
    if (updates != null) lines.push(`${number(updates)} updates/s`);
    if (metrics["timer/learner/wait"] != null) lines.push(`waits ${number(100 * metrics["timer/learner/wait"])}%`);
  } else if (name === "replay" && metrics["replay/items"] != null) {
    lines.push(`${number(metrics["replay/items"])} sequences`);
    if (metrics["replay/bytes"] != null) lines.push(bytes(metrics["replay/bytes"]));
  } else if (name === "logger") {
    lines.push(`${number(live.episodes)} episodes`);
  }
  if (cores != null && name !== "learner") lines.push(`${number(cores)} cores, ${number(memory)} GB`);
  if (role.workers && name !== "learner") lines.push(`${role.restarts} restarts`);
  return lines;
}

function line([title, prefix, size, queue], metrics) {
  const value = (key) => metrics[`${prefix}/${key}`];
  const rate = value("call_rate");
  const node = el("div", { class: "hop" }, el("b", {}, title));
  if (rate == null) return node;
  const perCall = value("calls") ? value(size) / value("calls") : 0;
  const latency = value("latency_p50");
  node.append(el("br"), `${number(rate)} calls/s, ${bytes(perCall * rate)}/s`, el("br"),
    `${latency >= 1 ? `${number(latency)} s` : `${number(1000 * latency)} ms`}, queue ${number(value(queue))}`);
  return node;
}
