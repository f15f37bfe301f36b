// Server-sent events, which report each step of the running clips.

import { parse, request } from "./api.js";
import { byStart, drop, isOpen, takeVideo } from "./clips.js";
import { emit } from "./signals.js";
import { state } from "./state.js";

// Over HTTP/1.1, a browser opens at most six connections to a server, for all tabs together.
const MAX_STREAMS = 2;

const streams = new Map(); // id of a clip -> AbortController

export const isFollowed = (id) => streams.has(id);

/** Opens event streams of the `MAX_STREAMS` longest-running clips. The list of clips updates the others. */
export function follow() {
  const running = [...state.videos.values()].filter((video) => video.status === "in_progress");
  running.sort(byStart);
  const wanted = new Set(document.hidden ? [] : running.slice(0, MAX_STREAMS).map((video) => video.id));
  for (const id of streams.keys()) if (!wanted.has(id)) endStream(id);
  for (const id of wanted) if (!streams.has(id)) readEvents(id);
}

async function readEvents(id) {
  const control = new AbortController();
  streams.set(id, control);
  try {
    const answer = await request(`/v1/videos/${id}/events`, {
      signal: control.signal, headers: { Accept: "text/event-stream" },
    });
    for await (const event of eventsOf(answer.body)) takeEvent(event);
  } catch {
    // The next request for /v1/engine shows whether the server is gone, and the list shows the clip's state.
  }
  // The clip is followed again only after 2 s: a stream that ends before its clip means that the server restarts.
  setTimeout(() => { if (streams.get(id) === control) streams.delete(id); }, 2000);
}

/** Yields the text of each event of a stream. An empty line ends an event. */
async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (text + value).split(/\r?\n\r?\n/);
    text = events.pop();
    yield* events;
  }
}

function takeEvent(text) {
  const data = text.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim());
  if (!data.length) return; // a comment that keeps the connection open
  const video = parse(data.join("\n"));
  if (video.deleted) drop(video.id); // another client has removed the clip
  else takeVideo(video);
  if (video.deleted || !isOpen(video)) state.listAt = 0; // the other clips have moved up in the queue
  emit("change");
}

function endStream(id) {
  streams.get(id)?.abort();
  streams.delete(id);
}

export const stopStreams = () => [...streams.keys()].forEach(endStream);
