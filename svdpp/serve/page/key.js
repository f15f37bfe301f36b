// Panel for the API key: asks for a key, and reloads everything when the key changes.

import { apiKey, storeKey } from "./api.js";
import { forget } from "./clips.js";
import { $, setText } from "./dom.js";
import { stopStreams } from "./events.js";
import { on, emit } from "./signals.js";
import { state } from "./state.js";

function lock(message) {
  if (state.connection === "locked") return;
  state.connection = "locked";
  stopStreams();
  const refused = `The server refuses this key: ${message ?? "the key is unknown"}.`;
  setText($("lock-text"), apiKey() ? refused : "This server needs an API key.");
  openLock();
}

function openLock() {
  $("lock").dataset.open = "yes";
  $("key-forget").hidden = !apiKey();
  $("key-cancel").hidden = state.connection === "locked";
  emit("change");
  $("key").focus();
}

function closeLock() {
  delete $("lock").dataset.open;
  $("key").value = "";
  emit("change");
}

/** Starts again with another key, and forgets the clips of the previous key. */
function useKey(value) {
  storeKey(value);
  stopStreams();
  [...state.videos.keys()].forEach(forget);
  state.removals.clear();
  Object.assign(state, { connection: "loading", engine: null, listed: false, counts: "", models: null });
  closeLock();
  emit("stale");
}

export function listenToLock() {
  on("refused", lock);
  $("lock").addEventListener("submit", (event) => { event.preventDefault(); useKey($("key").value.trim()); });
  $("key-button").addEventListener("click", openLock);
  $("key-forget").addEventListener("click", () => useKey(""));
  $("key-cancel").addEventListener("click", closeLock);
}
