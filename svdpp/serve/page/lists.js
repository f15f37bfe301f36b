// List of clips: when it is read again, and how its pages are merged.

import { get } from "./api.js";
import { drop, forget, isOpen, takeVideo } from "./clips.js";
import { state } from "./state.js";
import { now } from "./text.js";

const LIST_SECONDS = 10; // maximum age of the list while clips are queued or in progress
const VERIFYING_SECONDS = 3; // maximum age of the list while a clip is being verified
const PAGE_CLIPS = 100;

export function listIsOld() {
  const counts = JSON.stringify(state.engine.queue) + state.engine.state;
  const hasChanged = counts !== state.counts;
  state.counts = counts;
  return hasChanged || now() - state.listAt > maxAge([...state.videos.values()]);
}

function maxAge(videos) {
  if (videos.some((video) => video.proof === "running")) return VERIFYING_SECONDS;
  return videos.some(isOpen) ? LIST_SECONDS : 6 * LIST_SECONDS;
}

const readPage = (query) => get(`/v1/videos?limit=${PAGE_CLIPS}&${query}`);

/** Reads the newest clips. If the server has more clips, also reads those that are queued or in progress. */
export async function readList() {
  const newest = await readPage("order=desc");
  const open = newest.has_more ? ["queued", "in_progress"].map((status) => readPage(`order=asc&status=${status}`)) : [];
  const [waiting, running] = await Promise.all(open);
  const videos = [newest, waiting, running].flatMap((answer) => answer?.data ?? []);
  const found = new Map(videos.map((video) => [video.id, video]));
  const unclear = dropMissing(found, newest, waiting);
  // Clips get their colours in the order of their requests, so that neighbours differ in colour.
  for (const video of [...found.values()].reverse().sort((a, b) => a.created_at - b.created_at)) {
    takeVideo(video, { quietly: !state.listed });
  }
  for (const id of unclear.slice(0, 10)) await readVideo(id);
  state.lastId ??= newest.last_id;
  state.hasOlder = newest.has_more && !state.allRead;
  state.moreWaiting = Boolean(waiting?.has_more);
  state.listed = true;
  state.listAt = now();
}

/** Forgets clips that the server no longer has; returns the ids of clips that may be on a page that was not read. */
function dropMissing(found, newest, waiting) {
  const oldest = newest.data.at(-1)?.created_at ?? 0;
  const unclear = [];
  for (const video of state.videos.values()) {
    if (found.has(video.id) || state.removals.has(video.id)) continue;
    if (!newest.has_more || video.created_at > oldest) forget(video.id);
    else if (video.status === "in_progress" || (isOpen(video) && !waiting.has_more)) unclear.push(video.id);
  }
  return unclear;
}

async function readVideo(id) {
  try {
    takeVideo(await get(`/v1/videos/${id}`));
  } catch (error) {
    if (error.status !== 404) throw error;
    drop(id);
  }
}

export async function readOlder() {
  const answer = await readPage(`order=desc&after=${state.lastId}`);
  state.lastId = answer.last_id ?? state.lastId;
  for (const video of answer.data.reverse()) takeVideo(video, { quietly: true });
  state.allRead = !answer.has_more;
  state.hasOlder = answer.has_more;
}
