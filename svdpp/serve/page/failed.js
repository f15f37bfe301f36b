// List of the clips that failed or were cancelled.

import { copyParameters } from "./actions.js";
import { tintOf } from "./clips.js";
import { $, iconButton, make, renderList, setAttribute, setText } from "./dom.js";
import { addRemoval, isRemoved, removeButton, showRemoval } from "./remove.js";
import { requestAgain } from "./send.js";
import { plural, sentence } from "./text.js";
import { thumbOf } from "./thumbs.js";
import { nameOf, shapeOf, titleOf } from "./format.js";

export function renderFailed(videos) {
  $("failed").hidden = !videos.length;
  setText($("failed-note"), plural(videos.filter((video) => !isRemoved(video)).length, "clip"));
  renderList($("failed-list"), videos, (video) => video.id, createFailed, updateFailed);
}

function createFailed(video) {
  const parts = {
    title: make("span", { className: "title" }),
    about: make("span", { className: "note" }),
    reason: make("div", { className: "reason" }),
  };
  const node = make("li", { className: "row final" }, thumbOf(video),
    make("div", { className: "what" }, parts.title, parts.about),
    make("div", { className: "status" }, parts.reason),
    make("div", { className: "actions" },
      iconButton("copy", `Copy the parameters of ${titleOf(video)}`, () => copyParameters(video.id), "Copy"),
      iconButton("again", `Make ${titleOf(video)} again`, () => requestAgain(video.id), "Again"),
      removeButton(video)));
  setAttribute(node, "data-tint", tintOf(video.id));
  addRemoval(node, video);
  return Object.assign(node, { parts });
}

function updateFailed(node, video) {
  showRemoval(node, video);
  const { title, about, reason } = node.parts;
  setText(title, nameOf(video));
  title.title = titleOf(video);
  setText(about, `seed ${video.seed} · ${shapeOf(video)}`);
  reason.className = video.status === "failed" ? "reason error" : "reason note";
  const words = [sentence(video.error?.message), sentence(video.error?.hint)].filter(Boolean).join(" ");
  setText(reason, video.status === "failed" ? `Failed. ${words}` : "Cancelled.");
}
