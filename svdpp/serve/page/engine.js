// State of the server's ranks, which the page requests every second.

import { toast } from "./dom.js";
import { isFollowed } from "./events.js";
import { state } from "./state.js";
import { now } from "./text.js";

export const WINDOW_SECONDS = 60; // time that the chart shows

export function takeEngine(engine) {
  if (engine.state === "restarting" && state.engine && state.engine.state !== "restarting") {
    toast("The ranks restart. Unfinished clips go on from their latest latent checkpoint, or begin again.");
  }
  // The span of an action in progress ends now by the server's clock, so its end gives the offset of the clocks.
  if (engine.ranks.some((rank) => rank.doing === "compute") && engine.spans.length) {
    state.clockOffset = Math.max(...engine.spans.map((span) => span.end)) - now();
  }
  state.engine = engine;
  for (const rank of engine.ranks) {
    noteWait(rank);
    noteStep(rank);
  }
}

/** Records the time at which a rank is waiting, because the server's spans only have actions that compute. */
function noteWait(rank) {
  const time = now() + state.clockOffset;
  const waits = state.waits.get(rank.rank) ?? [];
  if (rank.doing === "wait") waits.push(time);
  state.waits.set(rank.rank, waits.filter((each) => each > time - WINDOW_SECONDS));
}

/** Updates a clip's step from a rank's report, which is newer than the list of clips. */
function noteStep(rank) {
  const video = state.videos.get(rank.video);
  if (!video || rank.doing !== "compute") return; // a waiting rank does not have the clip yet
  if (video.status === "queued") state.listAt = 0; // the clip has begun, so the list is out of date
  if (video.status !== "in_progress" || rank.step === null || isFollowed(video.id)) return;
  video.step = Math.max(video.step, rank.step);
  video.rank = rank.rank;
}
