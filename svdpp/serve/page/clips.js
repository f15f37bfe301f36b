// Owns the clips that the page knows: taking their newest states, their order and colours.

import { toast } from "./dom.js";
import { state } from "./state.js";
import { now, sentence } from "./text.js";
import { proofText, titleOf } from "./format.js";

const NUM_TINTS = 8;

export const isOpen = (video) => video.status === "queued" || video.status === "in_progress";
export const isNewer = (a, b) => (a.created_at - b.created_at || a.index - b.index) > 0;
export const byStart = (a, b) => a.started_at - b.started_at || (isNewer(a, b) ? 1 : -1);
export const newestFirst = (videos) => videos.sort((a, b) => (isNewer(a, b) ? -1 : 1));

/** Takes a clip's newest state; says what its owner waits for. */
export function takeVideo(video, { quietly = false } = {}) {
  if (state.removed.has(video.id)) return;
  const old = state.videos.get(video.id);
  if (old && !isOpen(old) && isOpen(video)) return; // an answer that was overtaken
  video.eta_at = now();
  video.index = old?.index ?? state.numSeen++; // orders those of one second
  state.videos.set(video.id, video);
  tintOf(video.id);
  if (!quietly) announceChanges(old, video);
}

function announceChanges(old, video) {
  const title = titleOf(video);
  if (old?.status !== video.status) {
    if (video.status === "completed") toast(`${title}: finished.`);
    if (video.status === "failed") toast(`${title}: failed. ${sentence(video.error?.message)}`);
    if (video.status === "cancelled") toast(`${title}: cancelled.`);
  }
  if (old && old.proof !== video.proof && video.proof !== "running") {
    toast(`${title}: ${proofText(video)}.`);
  }
}

export function forget(id) {
  if (state.lastId === id) state.lastId = null; // the next list begins again from the newest ones
  state.videos.delete(id);
  state.tints.delete(id);
  state.picked = state.picked.filter((each) => each !== id);
}

/** Forgets a clip for good. */
export function drop(id) {
  state.removed.add(id);
  forget(id);
}

/** A clip has one colour in the chart, in the queue and on its card. */
export function tintOf(id) {
  if (!state.tints.has(id)) state.tints.set(id, state.tints.size % NUM_TINTS);
  return state.tints.get(id);
}
