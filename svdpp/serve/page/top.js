// Owns the top of the page: the state of the server, and what a person must know now.

import { isOpen } from "./clips.js";
import { $, setAttribute, setText } from "./dom.js";
import { state } from "./state.js";
import { now } from "./text.js";
import { titleOf } from "./words.js";

const STATES = { loading: "Loading", gone: "Server gone", locked: "Locked", starting: "Starting", ready: "Ready",
  restarting: "Restarting", closing: "Shutting down" };

export function renderTop() {
  const shown = state.connection === "online" ? state.engine.state : state.connection;
  setText($("state"), STATES[shown] ?? shown);
  setAttribute($("state"), "data-state", shown);
  setText($("model"), state.models?.map((each) => each.id).join(", ") ?? "");
  const open = [...state.videos.values()].filter(isOpen);
  const running = open.filter((video) => video.status === "in_progress").length;
  const waiting = `${open.length - running}${state.moreWaiting ? " or more" : ""}`;
  setText($("summary"), open.length ? `${running} running · ${waiting} waiting` : "");
  document.title = open.length ? `(${open.length}) svdpp` : "svdpp";
}

export function renderBanner() {
  const [text, kind, button] = bannerText();
  $("banner").hidden = !text;
  setAttribute($("banner"), "data-kind", kind);
  setText($("banner-text"), text);
  $("banner-button").hidden = !button;
  setText($("banner-button"), button);
}

function bannerText() {
  const different = [...state.videos.values()].filter((video) => video.proof === "different");
  if (state.connection === "locked" || state.connection === "loading") return ["", "", ""];
  if (state.connection === "gone") {
    const wait = Math.max(0, Math.ceil(state.retryAt - now()));
    const words = state.problem || "The server does not answer. Clips in the queue are safe on its disk.";
    return [`${words} Next try in ${wait} s; tries so far: ${state.failures}.`, "bad", "Try now"];
  }
  if (different.length) {
    return [`${different.map(titleOf).join("; ")}: not the bits that diffusers gives on one device. Do not use `
      + "this server's clips until you know why: the log has the details.", "bad", ""];
  }
  const restarts = state.engine.restarts ? ` Restarts so far: ${state.engine.restarts}.` : "";
  return {
    starting: ["The ranks load the model. Clips can be requested already; they wait in the queue.", "", ""],
    restarting: ["A rank died; all ranks restart. Unfinished clips go on from their latent checkpoints."
      + restarts, "", ""],
    closing: ["The server shuts down. Clips in the queue stay, and go on when it starts again.", "", ""],
  }[state.engine.state] ?? ["", "", ""];
}
