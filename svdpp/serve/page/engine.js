// Owns what the server says about its ranks, each second.

import { toast } from "./dom.js";
import { isFollowed } from "./events.js";
import { state } from "./state.js";
import { now } from "./text.js";

export const WINDOW_SECONDS = 60; // of the chart

export function takeEngine(engine) {
  if (engine.state === "restarting" && state.engine && state.engine.state !== "restarting") {
    toast("The ranks restart. Unfinished clips go on from their latest latent checkpoint, or begin again.");
  }
  // What a rank does now ends now, by the server's clock.
  if (engine.ranks.some((rank) => rank.doing === "compute") && engine.spans.length) {
    state.clockOffset = Math.max(...engine.spans.map((span) => span.end)) - now();
  }
  state.engine = engine;
  for (const rank of engine.ranks) {
    noteWait(rank);
    noteStep(rank);
  }
}

/** Remembers when a rank waited: the spans say only what it computed. */
function noteWait(rank) {
  const time = now() + state.clockOffset;
  const waits = state.waits.get(rank.rank) ?? [];
  if (rank.doing === "wait") waits.push(time);
  state.waits.set(rank.rank, waits.filter((each) => each > time - WINDOW_SECONDS));
}

/** A rank's step is newer than that of the list. */
function noteStep(rank) {
  const video = state.videos.get(rank.video);
  if (!video || rank.doing !== "compute") return; // others wait for a clip that is elsewhere
  if (video.status === "queued") state.listAt = 0; // it has begun
  if (video.status !== "in_progress" || rank.step === null || isFollowed(video.id)) return;
  video.step = Math.max(video.step, rank.step);
  video.rank = rank.rank;
}
