// Owns the queue: the clips that run and wait, with their progress.

import { cancel, cancelAll, pressTwice } from "./actions.js";
import { byStart, isNewer, tintOf } from "./clips.js";
import { $, make, renderList, setAttribute, setText } from "./dom.js";
import { state } from "./state.js";
import { thumbOf } from "./thumbs.js";
import { allText, etaText, nameOf, placeText, remarksOf, shapeOf, stepText, titleOf } from "./format.js";

const SHOWN_IN_QUEUE = 8;

export function renderQueue(open) {
  const running = open.filter((video) => video.status === "in_progress").sort(byStart);
  const waiting = open.filter((video) => video.status === "queued");
  waiting.sort((a, b) => (a.place ?? Infinity) - (b.place ?? Infinity) || (isNewer(a, b) ? 1 : -1));
  waiting.forEach((video, index) => { video.turn = index; });
  const most = Math.max(SHOWN_IN_QUEUE, running.length);
  const shown = [...running, ...waiting].slice(0, state.wholeQueue ? Infinity : most);
  renderList($("queue-list"), shown, (video) => video.id, createRow, updateRow);
  renderNotes(open);
  renderMore(open.length, most);
  $("cancel-all").hidden = open.length < 2;
}

export function listenToQueue() {
  pressTwice($("cancel-all"), "Cancel all?", "Really cancel all clips in the queue?", cancelAll);
  // On a narrow window the queue comes before the form, for the eye and for the keyboard.
  const narrow = matchMedia("(max-width: 700px)");
  const place = () => (narrow.matches ? $("main").prepend($("queue")) : $("ranks").before($("queue")));
  narrow.addEventListener("change", place);
  place();
}

function renderNotes(open) {
  const isUnknown = state.connection === "gone" && !state.listed;
  $("queue-empty").hidden = open.length > 0;
  setText($("queue-empty"), state.listed ? "The queue is empty." : isUnknown ? "Unknown while the server is gone." : "Loading.");
  setText($("queue-note"), allText(open.filter((video) => !busyText(video)))); // not of cancelled ones
  setText($("eta-error"), etaErrorText(state.engine?.eta_error));
  $("eta-error").title = "The median of the newest clips";
}

function renderMore(number, most) {
  const known = `${state.moreWaiting ? "the first " : "all "}${number}`;
  $("queue-more").hidden = number <= most;
  setText($("queue-more"), state.wholeQueue ? "Show fewer" : `Show ${known} clips`);
  setAttribute($("queue-more"), "aria-expanded", state.wholeQueue);
}

/** What is being done with a clip; a running one is cancelled when its ranks let go of it. */
const busyText = (video) => state.busy.get(video.id) ?? (video.cancel_requested ? "Cancelling…" : "");

/** The median of (actual - promised) / promised, in words. */
function etaErrorText(error) {
  if (!error || error.clips < 3) return ""; // the first promises know no measured times
  const percent = Math.round(100 * error.median);
  if (percent === 0) return "clips finish as promised";
  if (percent > 100) return `clips take ${Math.round(1 + error.median)} times as long as promised`;
  return `clips finish ${Math.abs(percent)}% ${percent > 0 ? "later" : "earlier"} than promised`;
}

function createRow(video) {
  const parts = {
    thumb: thumbOf(video),
    title: make("span", { className: "title" }),
    about: make("span", { className: "note" }),
    bar: make("progress", { max: 100 }),
    status: make("span"),
    eta: make("span", { className: "note" }),
    button: make("button", { type: "button", className: "button small", textContent: "Cancel",
      onclick: () => cancel(video.id) }),
  };
  const node = make("li", { className: "row" }, parts.thumb,
    make("div", { className: "what" }, parts.title, parts.about, remarksOf(video)),
    make("div", { className: "meter" }, parts.bar),
    make("div", { className: "status" }, parts.status, " ", parts.eta),
    make("div", { className: "actions" }, parts.button));
  setAttribute(node, "data-tint", tintOf(video.id));
  return Object.assign(node, { parts });
}

function updateRow(node, video) {
  const { title, about, bar, status, eta, button } = node.parts;
  setText(title, nameOf(video));
  title.title = titleOf(video);
  setText(about, `seed ${video.seed} · ${shapeOf(video)}`);
  const isWaiting = video.status === "queued";
  const now = isWaiting ? placeText(video, video.turn) : stepText(video);
  node.classList.toggle("waiting", isWaiting);
  bar.value = isWaiting ? 0 : Math.min(99, Math.max(video.progress, Math.floor(100 * video.step / video.steps)));
  setAttribute(bar, "aria-label", `Progress of ${titleOf(video)}`);
  setAttribute(bar, "aria-valuetext", now);
  const busy = busyText(video);
  setText(status, busy || now);
  const rank = isWaiting || video.rank === null ? "" : `rank ${video.rank}`;
  setText(eta, busy ? "" : [rank, etaText(video)].filter(Boolean).join(" · "));
  setAttribute(button, "aria-disabled", Boolean(busy) || null); // `disabled` would lose the focus
  setAttribute(button, "aria-label", `Cancel ${titleOf(video)}`);
}
