// Episodes and open-loop predictions, the newest first, as they come.
import { clock, el, get, number, show } from "./page.js";

const SECONDS = 5;
const FEW = 4; // Of each name, before the person asks for more.

export async function videosPage(content, id) {
  const names = el("select", { "aria-label": "Which videos" }, el("option", { value: "" }, "all"));
  const grid = el("div", { class: "videos" });
  const empty = el("p", { class: "soft" });
  content.replaceChildren(el("h1", {}, "Videos"),
    el("div", { class: "bar" }, el("label", {}, "Show", names)), empty, grid);
  const cards = new Map();
  const known = new Set();

  async function update() {
    const videos = await get(`api/videos/${id}`);
    empty.textContent = videos.length ? "" : "No videos yet. Runs write them with tensorboard among --logger.outputs, when episodes end and at reports.";
    for (const tag of new Set(videos.map((video) => video.tag))) {
      if (known.has(tag)) continue;
      known.add(tag);
      names.append(el("option", { value: tag }, tag));
    }
    const counts = new Map();
    const shown = [...videos].reverse().filter((video) => {
      if (names.value) return video.tag === names.value;
      counts.set(video.tag, (counts.get(video.tag) ?? 0) + 1);
      return counts.get(video.tag) <= FEW;
    });
    for (const video of shown) if (!cards.has(video.number)) cards.set(video.number, card(id, video));
    const wanted = shown.map((video) => cards.get(video.number));
    const same = wanted.length === grid.children.length && wanted.every((node, i) => node === grid.children[i]);
    if (!same) grid.replaceChildren(...wanted);
  }

  names.addEventListener("change", () => update().catch(show));
  await update();
  const timer = setInterval(() => update().catch(show), 1000 * SECONDS);
  return () => clearInterval(timer);
}

function card(id, video) {
  const loop = video.tag.includes("openloop");
  const what = loop ? "Rows: truth, prediction, error. Green frame: the model sees; red: it imagines." : "An episode.";
  return el("figure", { class: `card${loop ? " openloop" : ""}` },
    el("img", { src: `api/video/${id}/${video.number}`, alt: `${video.tag} at step ${video.step}. ${what}`, loading: "lazy", class: loop ? "wide" : "" }),
    el("figcaption", {}, `${video.tag}, step ${number(video.step)}, ${clock(video.time)}. ${what}`));
}
