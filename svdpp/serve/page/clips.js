// Clips that the page knows: updates of their states, their order, and their colours.

import { toast } from "./dom.js";
import { state } from "./state.js";
import { now, sentence } from "./text.js";
import { verificationText, titleOf } from "./format.js";

const NUM_TINTS = 8;

export const isOpen = (video) => video.status === "queued" || video.status === "in_progress";
export const isNewer = (a, b) => (a.created_at - b.created_at || a.index - b.index) > 0;
export const byStart = (a, b) => a.started_at - b.started_at || (isNewer(a, b) ? 1 : -1);
export const newestFirst = (videos) => videos.sort((a, b) => (isNewer(a, b) ? -1 : 1));

/** Stores a clip's newest state; unless `quietly`, shows a toast if the clip or its verification has ended. */
export function takeVideo(video, { quietly = false } = {}) {
  if (state.removed.has(video.id)) return;
  const old = state.videos.get(video.id);
  if (old && !isOpen(old) && isOpen(video)) return; // a response that is older than the known final state
  video.eta_at = now();
  video.index = old?.index ?? state.numSeen++; // orders clips that were requested in the same second
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
    toast(`${title}: ${verificationText(video)}.`);
  }
}

export function forget(id) {
  if (state.lastId === id) state.lastId = null; // the next page of older clips begins again after the newest ones
  state.videos.delete(id);
  state.tints.delete(id);
  state.picked = state.picked.filter((each) => each !== id);
}

/** Forgets a clip, and ignores it in later responses. */
export function drop(id) {
  state.removed.add(id);
  forget(id);
}

/** Returns the number of a clip's colour, which is the same in the chart, in the queue and on its card. */
export function tintOf(id) {
  if (!state.tints.has(id)) state.tints.set(id, state.tints.size % NUM_TINTS);
  return state.tints.get(id);
}
