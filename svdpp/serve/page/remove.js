// Removal of clips. It can be undone for some seconds; the server gets the request only after this time.

import { request, errorText } from "./api.js";
import { forget } from "./clips.js";
import { iconButton, make, toast, setText } from "./dom.js";
import { emit } from "./signals.js";
import { state } from "./state.js";
import { titleOf } from "./format.js";

const UNDO_SECONDS = 8;

export const isRemoved = (video) => state.removals.has(video.id);

export function removeButton(video) {
  return iconButton("remove", `Remove ${titleOf(video)}`, () => remove(video), "Remove");
}

function remove(video) {
  const removal = { isFinal: false, timer: setTimeout(() => removeNow(video.id), 1000 * UNDO_SECONDS) };
  state.removals.set(video.id, removal);
  state.picked = state.picked.filter((id) => id !== video.id);
  toast(`${titleOf(video)}: removed. To undo this, press Undo where the clip was.`);
  emit("change");
}

function undo(id) {
  const removal = state.removals.get(id);
  if (!removal || removal.isFinal) return;
  clearTimeout(removal.timer);
  state.removals.delete(id);
  toast("The clip is back.");
  emit("change");
}

async function removeNow(id, options = {}) {
  const removal = state.removals.get(id);
  if (!removal || removal.isFinal) return;
  removal.isFinal = true;
  clearTimeout(removal.timer);
  try {
    await request(`/v1/videos/${id}`, { method: "DELETE", ...options });
  } catch (error) {
    if (error.status !== 404) {
      state.removals.delete(id);
      toast(errorText(error));
    }
  }
  if (state.removals.has(id)) state.removed.add(id);
  emit("change");
  emit("stale");
}

/** Removes the placeholders of removed clips, except in a list under the pointer, where nothing must move. */
export function closeGaps() {
  for (const [id, { isFinal, place }] of state.removals) {
    if (!isFinal || !state.removed.has(id) || place?.parentNode?.matches(":hover")) continue;
    state.removals.delete(id);
    forget(id);
  }
}

/** Adds a cover to a card or row, which is shown while the clip is removed. The size stays, so that nothing moves. */
export function addRemoval(node, video) {
  const button = make("button", { type: "button", className: "button small", textContent: "Undo",
    "aria-label": `Undo the removal of ${titleOf(video)}`, onclick: () => { undo(video.id); node.removal.from?.focus(); } });
  const text = make("span");
  const cover = make("div", { className: "removal", hidden: true }, text, button);
  node.append(cover);
  node.classList.add("removable");
  node.removal = { cover, text, button, from: null };
}

export function showRemoval(node, video) {
  const removal = state.removals.get(video.id);
  const { cover, text, button } = node.removal;
  if (removal) removal.place = node;
  const isShown = !cover.hidden;
  if (Boolean(removal) !== isShown) {
    const active = document.activeElement;
    cover.hidden = !removal;
    if (removal && node.contains(active)) {
      node.removal.from = active;
      button.focus({ preventScroll: true });
    }
    for (const child of node.children) if (child !== cover) child.inert = Boolean(removal);
  }
  if (!removal) return;
  setText(text, `${titleOf(video)}: removed`);
  if (removal.isFinal && document.activeElement === button) node.closest("section").focus({ preventScroll: true });
  button.hidden = removal.isFinal;
}

/** Sends all pending removals at once when the page is left, so that the clips are not back at the next visit. */
export function listenToRemovals() {
  addEventListener("pagehide", () => {
    for (const id of state.removals.keys()) removeNow(id, { keepalive: true });
  });
}
