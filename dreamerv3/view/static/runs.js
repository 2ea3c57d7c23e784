// The list of runs, and a chart that compares those that are chosen.
import { band, Chart, spark } from "./chart.js";
import { duration, el, follow, get, number, show } from "./page.js";

const SCORE = "episode/score";

export async function runsPage(content) {
  const runs = new Map();
  const chosen = new Set();
  const filter = el("input", { type: "search", placeholder: "Filter by name or task", "aria-label": "Filter runs" });
  const seeds = el("input", { type: "checkbox", checked: true });
  const body = el("tbody");
  const count = el("span", { class: "soft", role: "status" });
  const place = el("div");
  const head = ["Compare", "Run", "Task", "Seed", "State", "Step", "Time", "Score", "Curve"];
  content.replaceChildren(
    el("h1", {}, "Runs"),
    el("div", { class: "bar" }, filter, count,
      el("label", {}, seeds, "seeds of one setting as a band")),
    place,
    el("div", { class: "card scroll" }, el("table", { class: "list", "aria-label": "Runs" },
      el("thead", {}, el("tr", {}, head.map((text) =>
        el("th", { scope: "col", class: ["Step", "Time", "Score"].includes(text) ? "number" : "" }, text)))),
      body)));
  const rows = new Map();
  let chart = null;

  function row(run) {
    const label = `Compare ${run.name}`;
    const box = el("input", { type: "checkbox", "aria-label": label, checked: chosen.has(run.id) });
    box.addEventListener("change", () => {
      if (box.checked) chosen.add(run.id); else chosen.delete(run.id);
      compare().catch(show);
    });
    return el("tr", { "data-run": run.id },
      el("td", { class: "c-box" }, box),
      el("td", { class: "c-name name" }, el("a", { href: `#/run/${run.id}` }, run.name)),
      el("td", { class: "c-task" }, run.task),
      el("td", { class: "c-seed" }, run.seed),
      el("td", { class: "c-state" }, el("span", { class: `state ${run.state}` }, run.state)),
      el("td", { class: "c-step number" }, number(run.step)),
      el("td", { class: "c-time number" }, duration(run.seconds)),
      el("td", { class: "c-score number" }, number(run.score)),
      el("td", { class: "c-curve" }, spark(run.curve, `Score of ${run.name}, ${run.curve.length} points`)));
  }

  function update(changed) {
    for (const run of changed) {
      runs.set(run.id, run);
      const fresh = row(run);
      rows.get(run.id)?.replaceWith(fresh);
      rows.set(run.id, fresh);
    }
    arrange();
  }

  function arrange() {
    const text = filter.value.toLowerCase();
    const shown = [...runs.values()]
      .filter((run) => `${run.name} ${run.task}`.toLowerCase().includes(text))
      .sort((a, b) => b.changed - a.changed || a.name.localeCompare(b.name));
    const wanted = shown.map((run) => rows.get(run.id));
    const same = wanted.length === body.children.length && wanted.every((node, i) => node === body.children[i]);
    if (!same) body.replaceChildren(...wanted);
    const live = shown.filter((run) => run.state === "live").length;
    count.textContent = `${shown.length} runs, ${live} live`;
  }

  async function compare() {
    const ids = [...chosen].filter((id) => runs.has(id));
    if (!ids.length) { place.replaceChildren(); chart?.close(); chart = null; return; }
    if (!chart) {
      chart = new Chart("Score", { large: true });
      place.replaceChildren(chart.element);
    }
    const query = ids.map((id) => `run=${id}`).join("&");
    const found = await get(`api/series?${query}&name=${encodeURIComponent(SCORE)}&points=600&smooth=10`);
    chart?.set(seeds.checked ? bands(found, runs) : found.map((curve) => ({ label: runs.get(curve.run).name, x: curve.x, y: curve.y })));
  }

  filter.addEventListener("input", arrange);
  seeds.addEventListener("change", () => compare().catch(show));
  update(await get("api/runs"));
  const stop = follow("api/stream", "runs", (news) => {
    for (const id of news.gone) { runs.delete(id); rows.get(id)?.remove(); rows.delete(id); }
    update(news.runs);
    if (news.runs.some((run) => chosen.has(run.id))) compare().catch(show);
  });
  return () => { stop(); chart?.close(); };
}

// Runs that differ in nothing but their seed become one curve with a band.
function bands(curves, runs) {
  const groups = new Map();
  for (const curve of curves) {
    const key = runs.get(curve.run).setting;
    groups.set(key, [...(groups.get(key) ?? []), curve]);
  }
  return [...groups.values()].map((group) => {
    const first = runs.get(group[0].run);
    if (group.length === 1) return { label: first.name, x: group[0].x, y: group[0].y };
    return { label: `${first.task}, ${group.length} seeds`, ...band(group) };
  });
}
