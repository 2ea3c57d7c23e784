// Episodes and open-loop predictions, the newest first, as they come.
import { el, get, moment, number, show } from "./page.js";

const SECONDS = 5;
const FEW = 4; // Of each name, before the person asks for more.

export async function videosPage(content, id) {
  const run = await get(`api/run/${id}`);
  const names = el("select", { "aria-label": "Which videos" }, el("option", { value: "" }, "all"));
  const place = el("div");
  const empty = el("p", { class: "soft" });
  content.replaceChildren(el("h1", {}, `Videos of ${run.summary.name}`),
    el("div", { class: "bar" }, el("label", {}, "Show", names)), empty, place);
  const cards = new Map(), sections = new Map();

  async function update() {
    const videos = (await get(`api/videos/${id}`)).reverse();
    empty.textContent = videos.length ? "" : "No videos yet. Runs with images write them when episodes end and at reports, with tensorboard among --logger.outputs.";
    const tags = [...new Set(videos.map((video) => video.tag))].sort();
    for (const tag of tags) {
      if (!sections.has(tag)) {
        const grid = el("div", { class: "videos" });
        sections.set(tag, { grid, element: el("section", {}, el("h2", {}, tag), el("p", { class: "soft" }, describe(tag)), grid) });
        names.append(el("option", { value: tag }, tag));
        place.append(sections.get(tag).element);
      }
      const { grid, element } = sections.get(tag);
      element.hidden = Boolean(names.value) && names.value !== tag;
      const shown = videos.filter((video) => video.tag === tag).slice(0, names.value ? undefined : FEW);
      for (const video of shown) if (!cards.has(video.number)) cards.set(video.number, card(id, video));
      arrange(grid, shown.map((video) => cards.get(video.number)));
    }
  }

  names.addEventListener("change", () => update().catch(show));
  await update();
  const timer = setInterval(() => update().catch(show), 1000 * SECONDS);
  return () => clearInterval(timer);
}

// Leaves what is there already where it is, so that it goes on playing.
function arrange(grid, wanted) {
  const same = wanted.length === grid.children.length && wanted.every((node, i) => node === grid.children[i]);
  if (!same) grid.replaceChildren(...wanted);
}

const isOpenLoop = (tag) => tag.includes("openloop");

function describe(tag) {
  return isOpenLoop(tag)
    ? "Predictions without further observations. Rows: truth, prediction, error. Green frame: the model sees; red: it imagines."
    : "Episodes as they were played.";
}

// Moves at once, unless the person has asked their system for less of that.
function card(id, video) {
  const address = `api/video/${id}/${video.number}`;
  const what = `${video.tag} at step ${video.step}`;
  const image = el("img", { alt: `${what}. ${describe(video.tag)}`, loading: "lazy" });
  const button = el("button", { type: "button" });
  const move = (moves) => {
    image.src = moves ? address : `${address}?still`;
    button.textContent = moves ? "Pause" : "Play";
    button.setAttribute("aria-label", `${button.textContent} ${what}`);
    button.onclick = () => move(!moves);
  };
  move(!window.matchMedia("(prefers-reduced-motion: reduce)").matches);
  return el("figure", { class: `card${isOpenLoop(video.tag) ? " openloop" : ""}` }, image,
    el("figcaption", {}, `Step ${number(video.step)}, ${moment(video.time)}`), button);
}
