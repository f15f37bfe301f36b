// Loop that requests /v1/engine every second. The response also shows when the list of clips is out of date.

import { get, ServerUnreachable, ApiError } from "./api.js";
import { toast } from "./dom.js";
import { takeEngine } from "./engine.js";
import { follow, stopStreams } from "./events.js";
import { listIsOld, readList } from "./lists.js";
import { readServers } from "./servers.js";
import { on, emit } from "./signals.js";
import { state } from "./state.js";
import { now } from "./text.js";

const MAX_BACKOFF_SECONDS = 30;
const ANSWER_SECONDS = 15; // a server that takes longer to respond to /v1/engine counts as gone

let wake = () => {};
on("stale", () => wake());

const sleep = (seconds) => new Promise((resolve) => { wake = resolve; setTimeout(resolve, seconds * 1000); });

export async function loop() {
  for (;;) {
    try {
      const signal = AbortSignal.timeout(ANSWER_SECONDS * 1000);
      takeEngine(await get("/v1/engine", { signal }));
      if (state.connection !== "online") await reconnect();
      if (listIsOld()) await Promise.all([readList(), readServers()]);
      follow();
    } catch (error) {
      handleDisconnect(error);
    }
    emit("change");
    await sleep(pauseSeconds());
  }
}

function pauseSeconds() {
  if (state.connection === "locked") return 3600;
  if (state.connection === "gone") return Math.max(0.2, state.retryAt - now());
  return document.hidden ? 5 : 1;
}

function handleDisconnect(error) {
  if (state.connection === "locked") return;
  state.failures += 1;
  state.problem = "";
  if (error instanceof ApiError) state.problem = error.words;
  else if (!(error instanceof ServerUnreachable || error.name === "TimeoutError")) {
    console.error(error);
    state.problem = `The page cannot read the server's response: ${error.message}.`;
  }
  state.retryAt = now() + Math.min(MAX_BACKOFF_SECONDS, 2 ** (state.failures - 1));
  if (state.connection !== "gone") toast("The server does not answer. The page tries again by itself.");
  state.connection = "gone";
  stopStreams();
}

async function reconnect() {
  const was = state.connection;
  if (!state.models || was === "gone") await readModels();
  state.connection = "online";
  state.failures = 0;
  await readList();
  emit("online");
  if (was === "gone") toast("The server is back.");
}

async function readModels() {
  state.models = (await get("/v1/models")).data;
  emit("models");
}

/** Makes the loop try again now, without waiting for the end of the pause. */
export function retry() {
  state.retryAt = 0;
  emit("stale");
}
