// Cards of the finished clips, with buttons for the actions on each clip.

import { copyParameters, download, verify } from "./actions.js";
import { get, errorText } from "./api.js";
import { tintOf } from "./clips.js";
import { pick } from "./compare.js";
import { $, icon, iconButton, make, renderList, setAttribute, setText } from "./dom.js";
import { model } from "./form.js";
import { Player } from "./player.js";
import { randomSeed } from "./random.js";
import { addRemoval, isRemoved, removeButton, showRemoval } from "./remove.js";
import { requestAgain } from "./send.js";
import { emit } from "./signals.js";
import { state } from "./state.js";
import { capital, duration, plural, withArticle } from "./text.js";
import { thumbOf } from "./thumbs.js";
import { ago, inputWord, nameOf, parameterText, parametersOf, remarksOf, shapeOf, titleOf, verificationOf, verificationText,
} from "./format.js";

export function renderClips(videos) {
  renderList($("clip-list"), videos, (video) => video.id, createCard, updateCard);
  const number = videos.filter((video) => !isRemoved(video)).length;
  $("clips-empty").hidden = videos.length > 0;
  setText($("clips-empty"), emptyText());
  setText($("clips-note"), number ? plural(number, "clip") + (state.hasOlder ? " and older ones" : "") : "");
  $("older").hidden = !state.hasOlder;
  $("play-all").hidden = $("download-all").hidden = !number;
  renderPlayAll();
  renderPicked();
}

function emptyText() {
  if (state.connection === "gone" && !state.listed) return "Unknown while the server is gone.";
  if (!state.listed) return "Loading.";
  if (!state.models) return "";
  const isNeeded = model()?.inputs.input_reference === "needed";
  const what = isNeeded ? `Choose ${withArticle(inputWord(model()))}` : "Write a prompt";
  return `Nothing here yet. ${what}, and its clip appears here.`;
}

function renderPlayAll() {
  const button = $("play-all");
  if (button.dataset.paused === String(state.paused)) return;
  button.dataset.paused = state.paused;
  button.replaceChildren(icon(state.paused ? "play" : "pause"), state.paused ? "Play all" : "Pause all");
}

export function playAll() {
  state.paused = !state.paused;
  for (const card of $("clip-list").children) card.player.play(!state.paused);
  emit("change");
}

/** Loads again the clips that could not be loaded. */
export function retryCards() {
  for (const card of $("clip-list").children) card.player.retry();
}

function renderPicked() {
  const isPicking = state.picked.length === 1;
  $("picked").hidden = !isPicking;
  document.body.classList.toggle("picking", isPicking);
  if (!isPicking) return;
  const first = state.videos.get(state.picked[0]);
  setText($("picked-text"), `${titleOf(first)}: choose a clip to compare it with`);
}

function createCard(video) {
  const { id } = video;
  const title = titleOf(video);
  const player = new Player(video);
  const parts = {
    made: make("span", { className: "note" }),
    verification: make("span"),
    verify: make("button", { type: "button", className: "link", textContent: "Verify",
      "aria-label": `Verify ${title} against diffusers on one device`, onclick: () => verify(id) }),
    compare: iconButton("compare", `Compare ${title} with another clip`, () => pick(id), "Compare"),
    download: make("button", { type: "button", className: "button small primary", "aria-label": `Download ${title}`,
      onclick: () => download(id) }, icon("download"), "Download"),
    remove: removeButton(video),
  };
  const about = make("div", { className: "about" },
    make("div", { className: "head" }, thumbOf(video),
      make("span", { className: `title${video.prompt ? " prompt" : ""}`, title, textContent: nameOf(video) }),
      make("span", { className: "note", textContent: `seed ${video.seed}` })),
    make("span", { className: "note", textContent: `${shapeOf(video)} · ${video.seconds} s` }),
    parts.made,
    remarksOf(video),
    make("span", { className: "verification" }, parts.verification, parts.verify));
  const actions = make("div", { className: "actions" }, parts.download, make("span", { className: "push" }),
    parts.compare,
    iconButton("again", `Make ${nameOf(video)} again with another seed`, () => requestAgain(id, { seed: randomSeed() }), "Again"),
    parts.remove);
  const card = make("li", { className: "card" }, player.screen, about, actions, make("div", { className: "foot" }, details(id, title),
    iconButton("copy", `Copy the parameters of ${title}`, () => copyParameters(id))));
  setAttribute(card, "data-tint", tintOf(id));
  addRemoval(card, video);
  return Object.assign(card, { parts, player, forget: () => player.forget() });
}

function updateCard(card, video) {
  showRemoval(card, video);
  const { made, compare } = card.parts;
  setText(made, madeText(video));
  showVerification(card, video);
  const isPicked = state.picked.includes(video.id);
  setAttribute(compare, "aria-pressed", isPicked);
  card.classList.toggle("chosen", isPicked);
}

function madeText(video) {
  if (!video.completed_at) return "";
  return `finished ${ago(video.completed_at)}, after ${duration(video.completed_at - video.created_at)}`;
}

function showVerification({ parts: { verification, verify: button } }, video) {
  const verdict = verificationOf(video);
  const asked = state.busy.get(video.id);
  setText(verification, asked ?? capital(verificationText(video)));
  setAttribute(verification.parentNode, "data-verification", verdict);
  button.hidden = !["none", "failed"].includes(verdict) || Boolean(asked);
}

function details(id, title) {
  const body = make("tbody");
  const caption = make("caption", { className: "hidden", textContent: `Parameters of ${title}` });
  const node = make("details", {}, make("summary", { textContent: "Parameters and hashes" }),
    make("table", { className: "table" }, caption, body));
  node.addEventListener("toggle", () => { if (node.open) fillDetails(body, state.videos.get(id)); });
  return node;
}

const HASHES = ["model", "dtype", "device", "latents_sha256", "frames_sha256", "file_sha256", "input_sha256"];

async function fillDetails(body, video) {
  const line = (name, value) =>
    make("tr", { className: name.endsWith("prompt") ? "text" : "" }, make("th", { scope: "row", textContent: name }), make("td", { textContent: value }));
  body.replaceChildren(...parametersOf(video).map((name) => line(name, parameterText(video, name))));
  try {
    const metadata = await get(`/v1/videos/${video.id}/metadata`);
    body.append(...HASHES.filter((name) => metadata[name]).map((name) => line(name, metadata[name])));
  } catch (error) {
    body.append(line("hashes", errorText(error)));
  }
}
