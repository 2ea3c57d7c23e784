// Chooses the page by the address: #/runs, #/run/ID, #/videos/ID, #/dream/ID.
import { el, show } from "./page.js";
import { dreamPage } from "./dream.js";
import { runPage } from "./run.js";
import { runsPage } from "./runs.js";
import { videosPage } from "./videos.js";

const PAGES = { runs: runsPage, run: runPage, videos: videosPage, dream: dreamPage };
let leave = null;
let visit = 0;

async function go() {
  const [name, id] = location.hash.replace(/^#\//, "").split("/");
  if (location.hash === "#content") return;
  const page = PAGES[name] ?? runsPage;
  const mine = ++visit;
  leave?.();
  leave = null;
  const content = document.getElementById("content");
  content.replaceChildren(el("p", { class: "soft" }, "Loading …"));
  navigate(PAGES[name] ? name : "runs", id);
  try {
    const left = await page(content, id);
    if (mine === visit) leave = left;
    else left?.();
  } catch (problem) {
    if (mine === visit) content.replaceChildren(el("p", {}, String(problem.message ?? problem)));
  }
}

function navigate(name, id) {
  const links = [["runs", "Runs", "#/runs"]];
  if (id) links.push(["run", "Run", `#/run/${id}`], ["videos", "Videos", `#/videos/${id}`], ["dream", "Dream", `#/dream/${id}`]);
  document.getElementById("nav").replaceChildren(...links.map(([key, text, href]) =>
    el("a", { href, "aria-current": key === name ? "page" : null }, text)));
  document.title = `${links.find(([key]) => key === name)?.[1] ?? "Runs"} · DreamerV3`;
}

const system = window.matchMedia("(prefers-color-scheme: dark)");
const changed = () => window.dispatchEvent(new Event("theme"));

document.getElementById("theme").addEventListener("click", () => {
  const { dataset } = document.documentElement;
  const dark = dataset.theme ? dataset.theme === "dark" : system.matches;
  dataset.theme = dark ? "light" : "dark";
  sessionStorage.setItem("theme", dataset.theme);
  changed();
});
system.addEventListener("change", changed);
if (sessionStorage.getItem("theme")) document.documentElement.dataset.theme = sessionStorage.getItem("theme");
window.addEventListener("hashchange", go);
window.addEventListener("unhandledrejection", (event) => { show(event.reason); event.preventDefault(); });
go();
