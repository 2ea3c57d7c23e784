// A person plays inside the world model, beside the truth where there is one.
import { canvas, colour, decimal, el, get, number, percent, post, redrawn, show, tone } from "./page.js";

const FRAMES = 10; // Each second, while the policy plays.
const KEYS = "1234567890qwertyuiopasdfghjklzxcvbnm";
const MOST_BUTTONS = 64, MOST_OPTIONS = 256, MOST_BARS = 36;
const ARROWS = { ArrowLeft: 0, ArrowRight: 1, ArrowUp: 2, ArrowDown: 3 };

export async function dreamPage(content, id) {
  const run = await get(`api/run/${id}`);
  const dream = new Dream(id);
  content.replaceChildren(el("h1", {}, `Dream of ${run.summary.name}`), dream.element);
  return () => dream.close();
}

class Dream {
  constructor(id) {
    Object.assign(this, { id, session: null, busy: false, playing: "", screens: new Map(), rewards: [], leaving: new AbortController() });
    this.source = el("select", { "aria-label": "Where it begins", id: "source" },
      el("option", { value: "replay" }, "at a moment of the replay"),
      el("option", { value: "episode" }, "in an episode that the policy plays now"));
    this.moment = el("input", { type: "range", min: 0, max: 1, step: 0.005, value: 0.8, "aria-label": "Moment of the replay, from the oldest to the newest" });
    this.begin = el("button", { type: "button", class: "main", id: "begin", onclick: () => this.start() }, "Begin");
    this.status = el("p", { class: "soft", role: "status", id: "status" }, "The model is shown what happened until then. From there on you play in its imagination.");
    this.stage = el("div", { class: "dream", hidden: true });
    this.element = el("div", {}, el("div", { class: "bar" },
      el("label", {}, "Begin", this.source), el("label", {}, "oldest", this.moment, "newest"), this.begin), this.status, this.stage);
    this.source.addEventListener("change", () => { this.moment.disabled = this.source.value !== "replay"; });
    this.listener = (event) => this.key(event);
    window.addEventListener("keydown", this.listener);
    window.addEventListener("pagehide", () => this.close());
  }

  async start() {
    this.begin.disabled = true;
    this.stop();
    this.status.textContent = "The model is loaded and compiled, which may take a minute …";
    try {
      const options = { do: "start", source: this.source.value, moment: Number(this.moment.value) };
      const first = this.session ? await post(`api/dream/${this.session}`, options)
        : await post("api/dream", { run: this.id, ...options });
      this.session = first.session ?? this.session;
      if (this.left) { this.close(); return; }
      this.episode = options.source === "episode";
      this.build(first);
      this.take(first);
      this.status.textContent = `The model of step ${number(first.step)}. Its context has ended: you play now.`;
    } catch (problem) {
      this.fail(problem);
    } finally {
      this.begin.disabled = false;
    }
  }

  build(first) {
    this.actions = first.spaces.actions;
    this.screens.clear();
    this.rewards = [];
    const screens = el("div", { class: "screens" });
    for (const space of first.spaces.observations) {
      for (const side of ["dream", "truth"]) {
        const image = space.shape.length === 3;
        const node = el("canvas", { class: image ? "" : "vector", role: "img", "aria-label": `${space.key}, ${side}` });
        if (image) [node.height, node.width] = space.shape;
        this.screens.set(`${side}/${space.key}`, node);
        screens.append(el("figure", {}, el("figcaption", {}, el("b", {}, side === "dream" ? "Dream" : "Truth"), ` ${space.key}`), node));
      }
    }
    this.meters = el("div", { class: "card", id: "meters" });
    this.policy = el("div", { class: "card", "aria-label": "Probabilities of the policy" });
    this.curve = redrawn(el("canvas", { class: "vector", role: "img", "aria-label": "Predicted rewards" }), () => this.plot());
    this.stage.replaceChildren(el("div", { class: "card" }, screens, this.controls()),
      el("div", { class: "side" }, this.meters, this.policy, el("div", { class: "card strip" },
        el("h3", {}, "Rewards"), this.curve,
        el("div", { class: "legend" }, el("span", { class: "key0" }, "predicted"), el("span", { class: "key1" }, "true")))));
    this.stage.hidden = false;
  }

  controls() {
    const mode = (name, text) => el("button", { type: "button", id: `play-${name}`, "aria-pressed": "false", onclick: () => this.play(name) }, text);
    this.bound = new Map();
    this.values = Object.fromEntries(this.actions.map((space) => [space.key, neutral(space)]));
    const single = this.actions.length === 1 && this.actions[0].variables?.length === 1;
    const actions = el("div", { class: "actions", role: "group", "aria-label": "Actions" },
      single ? this.choices(this.actions[0]) : this.variables());
    return el("div", {}, actions, el("div", { class: "keys" },
      mode("policy", "Policy plays"), mode("recorded", "As recorded"),
      el("button", { type: "button", id: "again", onclick: () => this.again() }, "Again from the context"),
      el("span", { class: "soft" }, "Keys act; space lets the policy play.")));
  }

  act(key, index, value) {
    if (Array.isArray(this.values[key])) this.values[key][index] = value;
    else this.values[key] = value;
    this.stop();
    this.step({ action: this.values });
  }

  // One action of several classes: a button and a key for each.
  choices(space) {
    const [{ low, classes }] = space.variables;
    return el("div", { class: "keys" }, Array.from({ length: Math.min(classes, MOST_BUTTONS) }, (_, index) => {
      const value = low + index, key = KEYS[index];
      const act = () => this.act(space.key, 0, value);
      const arrow = Object.keys(ARROWS).find((name) => ARROWS[name] === index);
      for (const name of [key, arrow]) if (name) this.bound.set(name, act);
      return el("button", { type: "button", onclick: act, "aria-label": `${space.key} ${value}` }, el("kbd", {}, key ?? "–"), ` ${space.key} ${value}`);
    }));
  }

  // Several variables: a row for each, with a key for less and one for more. Every
  // change is a step with the present values of all.
  variables() {
    const rows = [];
    for (const space of this.actions) {
      const size = space.variables?.length ?? space.shape.reduce((a, b) => a * b, 1);
      for (let index = 0; index < size; index++) {
        const [less, more] = [KEYS[2 * rows.length], KEYS[2 * rows.length + 1]];
        const name = size > 1 ? `${space.key} ${index}` : space.key;
        const { node, change } = space.variables ? this.select(space, index, name) : this.slider(space, index, name);
        if (less) this.bound.set(less, () => change(-1));
        if (more) this.bound.set(more, () => change(1));
        const keys = more ? [el("kbd", {}, less), " ", el("kbd", {}, more)] : [];
        rows.push(el("label", { class: "variable" }, el("span", {}, name), node, el("span", {}, keys)));
      }
    }
    return [...rows, el("button", { type: "button", onclick: () => { this.stop(); this.step({ action: this.values }); } }, "Step")];
  }

  select(space, index, name) {
    const { low, classes } = space.variables[index];
    const node = el("select", { "aria-label": name }, Array.from({ length: Math.min(classes, MOST_OPTIONS) }, (_, i) => el("option", { value: low + i }, String(low + i))));
    const act = () => this.act(space.key, index, Number(node.value));
    node.addEventListener("change", act);
    const change = (by) => { node.selectedIndex = Math.min(node.length - 1, Math.max(0, node.selectedIndex + by)); act(); };
    return { node, change };
  }

  slider(space, index, name) {
    const low = Math.max(space.low, -10), high = Math.min(space.high, 10);
    const node = el("input", { type: "range", min: low, max: high, step: (high - low) / 40, value: 0, "aria-label": name });
    const act = () => this.act(space.key, index, Number(node.value));
    node.addEventListener("input", act);
    const change = (by) => { node.value = Number(node.value) + by * (high - low) / 8; act(); };
    return { node, change };
  }

  key(event) {
    if (!this.session || this.stage.hidden || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest?.("select")) return; // Its own keys choose in it.
    if (event.target.closest?.("input") && event.key.startsWith("Arrow")) return;
    if (event.key === " ") {
      if (event.target.closest?.("button")) return;
      this.play("policy");
    } else if (this.bound?.has(event.key)) {
      this.stop();
      this.bound.get(event.key)();
    } else return;
    event.preventDefault();
  }

  // Lets somebody else choose the actions, until the same button or a key is pressed.
  play(name) {
    const same = this.playing === name;
    this.stop();
    if (same) return;
    this.playing = name;
    document.getElementById(`play-${name}`)?.setAttribute("aria-pressed", "true");
    this.timer = setInterval(() => this.step({ [name]: true }), 1000 / FRAMES);
  }

  stop() {
    clearInterval(this.timer);
    this.playing = "";
    for (const button of this.stage.querySelectorAll("[aria-pressed]")) button.setAttribute("aria-pressed", "false");
  }

  async step(choice) {
    if (this.busy || !this.session) return;
    this.busy = true;
    try {
      this.take(await post(`api/dream/${this.session}`, { do: "step", ...choice }, this.leaving.signal));
    } catch (problem) {
      if (this.left) return;
      this.stop();
      this.fail(problem);
    } finally {
      this.busy = false;
    }
  }

  fail(problem) {
    this.status.textContent = String(problem.message ?? problem);
    if (/ended|longer/.test(this.status.textContent)) this.session = null;
  }

  async again() {
    this.stop();
    try {
      this.rewards = [];
      this.take(await post(`api/dream/${this.session}`, { do: "restart" }));
    } catch (problem) { this.fail(problem); }
  }

  take(frame) {
    for (const [name, node] of this.screens) {
      const [side, ...rest] = name.split("/"), key = rest.join("/");
      const content = frame[side]?.[key];
      const both = [frame.dream, frame.truth].flatMap((shown) => shown?.[key]?.vector ?? []);
      const top = Math.max(1e-6, ...both.map(Math.abs)); // Bars beside one another compare.
      const paint = () => draw(node, content, top);
      redrawn(node, paint);
      paint();
    }
    // Of an episode that is played now nothing is recorded, and it cannot be repeated.
    if (!frame.more && this.playing === "recorded") this.stop();
    document.getElementById("play-recorded").disabled = !frame.more;
    document.getElementById("again").disabled = this.episode;
    this.rewards.push([frame.reward, frame.true_reward ?? null]);
    this.element.dataset.at = frame.at;
    const pairs = [["Steps", null, String(frame.at)], ["Reward", null, decimal(frame.reward)],
      ["Sum of rewards", null, decimal(frame.total)], ["Goes on", frame.continues, percent(frame.continues)],
      ["Value", null, decimal(frame.value)]];
    if (frame.true_reward != null) pairs.push(["True reward", null, decimal(frame.true_reward)]);
    if (frame.over) this.status.textContent = "The true episode is over. The dream goes on.";
    this.meters.replaceChildren(el("h3", {}, "What the model expects"), ...pairs.map(([text, share, value]) => meter(text, share, value)));
    this.policy.replaceChildren(el("h3", {}, "What the policy would do"), ...Object.entries(frame.policy).flatMap(([key, dist]) => bars(key, dist, frame.action?.[key], this.actions.find((space) => space.key === key))));
    this.plot();
  }

  plot() {
    const { context, width, height } = canvas(this.curve);
    const points = this.rewards.slice(-100);
    const all = points.flat().filter((value) => value != null);
    const low = Math.min(0, ...all), high = Math.max(low + 0.01, ...all);
    context.fillStyle = tone("line");
    context.fillRect(0, height - 4 + low / (high - low) * (height - 8), width, 1);
    [0, 1].forEach((index) => {
      context.strokeStyle = colour(index);
      context.beginPath();
      points.forEach((pair, i) => { if (pair[index] != null) context.lineTo(2 + i * (width - 4) / 100, height - 4 - (pair[index] - low) / (high - low) * (height - 8)); });
      context.stroke();
    });
    this.curve.setAttribute("aria-label", `Predicted rewards, the last ${number(points.at(-1)?.[0])}`);
  }

  close() {
    this.left = true;
    this.leaving.abort(); // Else what is under way would be told that its dream is gone.
    this.stop();
    window.removeEventListener("keydown", this.listener);
    if (this.session) fetch(`api/dream/${this.session}/end`, { method: "POST", keepalive: true }).catch(show);
    this.session = null;
  }
}

// An action before the person has chosen any: of the shape that the server takes.
function neutral(space) {
  const start = (low) => space.variables ? low : 0;
  if (!space.shape.length) return start(space.variables?.[0].low ?? 0);
  const size = space.shape.reduce((a, b) => a * b, 1);
  return Array.from({ length: size }, (_, index) => start(space.variables?.[index].low));
}

function meter(text, share, value) {
  return el("div", { class: "meter" }, el("span", {}, text),
    share == null ? el("span") : el("progress", { max: 1, value: share, "aria-label": text }), el("span", {}, value));
}

// What the policy would do, and what was done.
function bars(key, dist, taken, space) {
  const done = [taken ?? []].flat(Infinity);
  if (!dist.probs) {
    const wide = space.high - space.low || 1;
    return dist.mean.slice(0, MOST_BARS).map((mean, index) =>
      meter(dist.mean.length > 1 ? `${key} ${index}` : key, (mean - space.low) / wide, `${decimal(mean)} ± ${decimal(dist.std[index])}`));
  }
  return dist.probs.flatMap((probs, index) => probs.map((share, i) => {
    const value = space.variables[index].low + i;
    const name = dist.probs.length > 1 ? `${key} ${index}: ${value}` : `${key} ${value}`;
    return meter(`${name}${done[index] === value ? " ◂" : ""}`, share, percent(share));
  })).slice(0, MOST_BARS);
}

function draw(node, content, top) {
  if (!content) {
    const { context, width, height } = canvas(node);
    context.fillStyle = tone("soft");
    context.font = "13px system-ui, sans-serif";
    context.fillText("not known", 8, Math.min(height, 40) / 2 + 4, width - 16);
    return;
  }
  if (content.pixels) {
    const data = Uint8Array.from(atob(content.pixels), (letter) => letter.charCodeAt(0));
    [node.width, node.height] = [content.width, content.height];
    const context = node.getContext("2d");
    const image = context.createImageData(content.width, content.height);
    for (let i = 0, j = 0; i < data.length; i += 3, j += 4) {
      image.data[j] = data[i]; image.data[j + 1] = data[i + 1]; image.data[j + 2] = data[i + 2]; image.data[j + 3] = 255;
    }
    context.putImageData(image, 0, 0);
    return;
  }
  const { context, width, height } = canvas(node);
  const values = content.vector;
  context.fillStyle = colour(0);
  values.forEach((value, i) => {
    const tall = value / top * (height / 2 - 4), wide = (width - 8) / values.length;
    context.fillRect(4 + i * wide, height / 2 - Math.max(0, tall), Math.max(1, wide - 2), Math.abs(tall));
  });
  context.fillStyle = tone("line");
  context.fillRect(0, height / 2, width, 1);
  node.setAttribute("aria-label", `${node.getAttribute("aria-label").split(":")[0]}: ${values.slice(0, 8).map(number).join(", ")}`);
}
