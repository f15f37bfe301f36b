// Texts that describe a clip: names, states, times.

import { make } from "./dom.js";
import { state } from "./state.js";
import { duration, now, plural, sentence } from "./text.js";

const FIRST = ["prompt", "negative_prompt", "size", "steps", "frames", "fps", "seed"];
const LAST = ["lora", "fit", "priority"];
// Request fields that the page does not show: `frames` implies `seconds`, and `callback_url` does not affect the clip.
const OTHERS = ["seconds", "callback_url"];

/** Returns the names of a model's parameters that not all models have, in the server's order. */
export const ownParameters = (model) =>
  Object.keys(model.fields).filter((name) => ![...FIRST, ...LAST, ...OTHERS].includes(name));

/** Returns the names of the parameters of all models, in the order in which the page shows them. */
export const parameterNames = () => [...FIRST, ...new Set((state.models ?? []).flatMap(ownParameters)), ...LAST];

/** Returns the names of the parameters that have a value in a clip. */
export const parametersOf = (video) =>
  parameterNames().filter((name) => (video[name] ?? null) !== null && (name !== "fit" || video.input));

/** Returns the kind of a model's input file: "image" or "video". */
export const inputWord = (model) => model?.input_kind ?? "image";

/** Returns a clip's LoRAs in the form that a request needs, without hashes. */
const lorasOf = ({ lora }) => lora?.map(({ name, scale, expert }) => ({ name, scale, ...(expert ? { expert } : {}) }));

/** Returns the fields of a request for the same clip, by name. */
export const requestOf = (video) =>
  Object.fromEntries(parametersOf(video).map((name) => [name, name === "lora" ? lorasOf(video) : video[name]]));

/** Returns the value of a clip's parameter as text. */
export function parameterText(video, name) {
  if (name !== "lora") return String(video[name] ?? "");
  return (video.lora ?? []).map(({ name: lora, scale, expert }) => [lora, scale, expert].filter(Boolean).join(" ")).join(", ");
}

const VERIFICATIONS = {
  none: "not verified",
  asked: "to be verified when the ranks are idle",
  running: "being verified on one device",
  equal: "bitwise equal to diffusers on one device",
  different: "different from diffusers on one device",
  failed: "could not be verified",
};

const NAME_LETTERS = 60;

/** Returns the beginning of a clip's prompt, or else the name of its image or video. */
export function nameOf({ prompt, input }) {
  const text = prompt?.trim().replace(/\s+/g, " ") || input?.name || "clip";
  return text.length > NAME_LETTERS && prompt ? `${text.slice(0, NAME_LETTERS - 1).trimEnd()}…` : text;
}

export const stemOf = (video) => (video.prompt ? nameOf(video) : nameOf(video).replace(/\.\w+$/, ""));

export const titleOf = (video) => `${nameOf(video)}, seed ${video.seed}`;
export const shapeOf = ({ size, frames, steps }) =>
  `${size.replace("x", "×")} · ${plural(frames, "frame")} · ${plural(steps, "step")}`;

/** Returns the state of a clip's verification. "asked": it begins once the ranks have no more clips to make. */
export function verificationOf(video) {
  const { queued = 0, in_progress: running = 0 } = state.engine?.queue ?? {};
  return video.proof === "running" && queued + running > 0 ? "asked" : video.proof;
}

export function verificationText(video) {
  const words = VERIFICATIONS[verificationOf(video)];
  return video.proof_reason ? `${words}: ${video.proof_reason}` : words;
}

/** Creates a line with the server's remarks on a clip's input, such as that it is stretched; hidden without remarks. */
export function remarksOf({ remarks = [] }) {
  const text = remarks.map(sentence).join(" ");
  return make("span", { className: "note remarks", textContent: text, title: text, hidden: !text });
}

/**
 * Returns the position of a waiting clip as text. `index` is the clip's index in the page's list of waiting clips. The
 * position that the server reported may be outdated, so the larger of the two is shown.
 */
export function placeText(video, index) {
  if (video.held) return `Waits: ${video.held}`;
  const place = Math.max(video.place ?? 0, index);
  const text = place === 0 ? "Next" : `${plural(place, "clip")} before it`;
  return video.step ? `${text}; goes on after step ${video.step}` : text;
}

/** Returns the stage of a clip in progress as text, such as "Step 3 of 25". `done` is the number of finished steps. */
export function stepText(video, done = video.step) {
  if (done >= video.steps) return "Decoding";
  return done || video.rank !== null ? `Step ${done + 1} of ${video.steps}` : "Begins";
}

/** Returns the seconds until a clip is finished: the server's last ETA minus the time since then; null if unknown. */
export function etaOf(video) {
  if (video.eta_seconds === null || video.eta_seconds === undefined) return null;
  return Math.max(0, video.eta_seconds - (now() - video.eta_at));
}

export function etaText(video) {
  if (video.held) return ""; // no running server can make the clip, so its time is unknown
  const left = etaOf(video);
  if (left === null) return state.engine?.state === "ready" ? "time is known after the first step" : "";
  return left < 1 ? "ready now" : `ready in ${duration(left)}`;
}

/** Returns a text with the time until all open clips are finished; empty while the ETA of a clip is unknown. */
export function allText(open) {
  const etas = open.map(etaOf);
  return etas.length > 1 && !etas.includes(null) ? `all finished in about ${duration(Math.max(...etas))}` : "";
}

export function ago(seconds) {
  const past = now() + state.clockOffset - seconds;
  if (past < 60) return "just now";
  if (past < 86400) return `${duration(past).replace(/ min \d\d s$/, " min")} ago`;
  return new Date(seconds * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
}
