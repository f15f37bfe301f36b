// Queue: clips in progress and waiting clips, with their progress.

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
  // In a narrow window the queue is above the form. It is moved in the DOM, so that the Tab key follows the same order.
  const narrow = matchMedia("(max-width: 700px)");
  const place = () => (narrow.matches ? $("main").prepend($("queue")) : $("ranks").before($("queue")));
  narrow.addEventListener("change", place);
  place();
}

function renderNotes(open) {
  const isUnknown = state.connection === "gone" && !state.listed;
  $("queue-empty").hidden = open.length > 0;
  setText($("queue-empty"), state.listed ? "The queue is empty." : isUnknown ? "Unknown while the server is gone." : "Loading.");
  setText($("queue-note"), allText(open.filter((video) => !busyText(video)))); // without clips that are being cancelled
  setText($("eta-error"), etaErrorText(state.engine?.eta_error));
  $("eta-error").title = "Median over the newest clips";
}

function renderMore(number, most) {
  const known = `${state.moreWaiting ? "the first " : "all "}${number}`;
  $("queue-more").hidden = number <= most;
  setText($("queue-more"), state.wholeQueue ? "Show fewer" : `Show ${known} clips`);
  setAttribute($("queue-more"), "aria-expanded", state.wholeQueue);
}

/** Returns the action in progress on a clip, such as "Cancelling…" until the ranks have dropped a running clip. */
const busyText = (video) => state.busy.get(video.id) ?? (video.cancel_requested ? "Cancelling…" : "");

/** Returns the median of (actual - promised) / promised time as text. */
function etaErrorText(error) {
  if (!error || error.clips < 3) return ""; // the first ETAs are made before any time is measured
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
  // `aria-disabled`, because `disabled` would take the focus from the button.
  setAttribute(button, "aria-disabled", Boolean(busy) || null);
  setAttribute(button, "aria-label", `Cancel ${titleOf(video)}`);
}
