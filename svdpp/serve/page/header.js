// Header of the page: state of the server, and a banner with important messages.

import { apiKey } from "./api.js";
import { isOpen } from "./clips.js";
import { $, setAttribute, setText } from "./dom.js";
import { state } from "./state.js";
import { now } from "./text.js";
import { titleOf } from "./format.js";

const STATES = { loading: "Loading", gone: "Server gone", locked: "Locked", starting: "Starting", ready: "Ready",
  restarting: "Restarting", closing: "Shutting down" };

/** Notes on the built-in models, which only serve to try out a server. */
export const TOY_MODELS = {
  demo: "demo is a toy model: it shows how the server works, not what Stable Video Diffusion makes.",
  "demo-text": "demo-text is a toy model: it moves one coloured shape. Try: a red circle moves right on a blue background",
  dummy: "dummy is no model: it only takes time, and its clips have no files.",
};

export function renderHeader() {
  const shown = state.connection === "online" ? state.engine.state : state.connection;
  setText($("state"), STATES[shown] ?? shown);
  setAttribute($("state"), "data-state", shown);
  setText($("model"), state.models?.map(({ id }) => (TOY_MODELS[id] ? `${id}, a toy` : id)).join(", ") ?? "");
  const open = [...state.videos.values()].filter(isOpen);
  setText($("summary"), summaryText(open));
  document.title = open.length ? `(${open.length}) svdpp` : "svdpp";
}

/** Returns the number of open clips in each state as text. A held clip, which no server can make, is not "waiting". */
export function summaryText(open) {
  const running = open.filter((video) => video.status === "in_progress").length;
  const held = open.filter((video) => video.held).length;
  const waiting = numberWaiting(open.length - running - held, running);
  return [[running, "running"], [waiting, "waiting"], [held, "held"]]
    .filter(([number]) => number).map((part) => part.join(" ")).join(" · ");
}

/**
 * Returns the number of waiting clips. If the list does not have all of them, the server's count is returned. But with
 * API keys, that count includes the clips of other keys, so "N or more" is returned instead.
 */
function numberWaiting(listed, running) {
  if (!state.moreWaiting) return listed;
  const { queued, in_progress: taken } = state.engine.queue;
  return apiKey() ? `${listed} or more` : queued + taken - running;
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
    return [`${different.map(titleOf).join("; ")}: not bitwise equal to diffusers on one device. Do not use `
      + "this server's clips until you know why: the log has the details.", "bad", ""];
  }
  const restarts = state.engine.restarts ? ` Restarts so far: ${state.engine.restarts}.` : "";
  return {
    starting: ["The ranks load the model. Clips can be requested already; they wait in the queue.", "", ""],
    restarting: ["A rank died; all ranks restart. Unfinished clips go on from their latest latent checkpoint, or begin again."
      + restarts, "", ""],
    closing: ["The server shuts down. Clips in the queue stay, and go on when it starts again.", "", ""],
  }[state.engine.state] ?? ["", "", ""];
}
