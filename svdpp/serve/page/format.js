// Owns how a clip is described: names, states, times.

import { make } from "./dom.js";
import { state } from "./state.js";
import { duration, now, plural, sentence } from "./text.js";

const FIRST = ["prompt", "negative_prompt", "size", "steps", "frames", "fps", "seed"];
const LAST = ["lora", "fit", "priority"];
// Fields of requests that say nothing of a clip which `FIRST` does not.
const OTHERS = ["seconds", "callback_url"];

/** The names of the parameters that only some models have, in the server's order. */
export const ownParameters = (model) =>
  Object.keys(model.fields).filter((name) => ![...FIRST, ...LAST, ...OTHERS].includes(name));

/** The names of all models' parameters, in the order in which they are shown. */
export const parameterNames = () => [...FIRST, ...new Set((state.models ?? []).flatMap(ownParameters)), ...LAST];

/** The parameters that a clip has a value for. */
export const parametersOf = (video) =>
  parameterNames().filter((name) => (video[name] ?? null) !== null && (name !== "fit" || video.input));

/** What a model makes clips from besides a prompt, in one word: "image" or "video". */
export const inputWord = (model) => model?.input_kind ?? "image";

/** A clip's LoRAs as a request names them: without their hashes. */
const lorasOf = ({ lora }) => lora?.map(({ name, scale, expert }) => ({ name, scale, ...(expert ? { expert } : {}) }));

/** The parameters of a clip as a request for the same clip has them, by name. */
export const requestOf = (video) =>
  Object.fromEntries(parametersOf(video).map((name) => [name, name === "lora" ? lorasOf(video) : video[name]]));

/** A parameter of a clip as text. */
export function parameterText(video, name) {
  if (name !== "lora") return String(video[name] ?? "");
  return (video.lora ?? []).map(({ name: lora, scale, expert }) => [lora, scale, expert].filter(Boolean).join(" ")).join(", ");
}

const PROOFS = {
  none: "not verified",
  asked: "to be verified when the ranks are idle",
  running: "being verified on one device",
  equal: "bitwise equal to diffusers on one device",
  different: "different from diffusers on one device",
  failed: "could not be verified",
};

const NAME_LETTERS = 60;

/** The beginning of a clip's prompt, or the name of its image or video. */
export function nameOf({ prompt, input }) {
  const text = prompt?.trim().replace(/\s+/g, " ") || input?.name || "clip";
  return text.length > NAME_LETTERS && prompt ? `${text.slice(0, NAME_LETTERS - 1).trimEnd()}…` : text;
}

export const stemOf = (video) => (video.prompt ? nameOf(video) : nameOf(video).replace(/\.\w+$/, ""));

export const titleOf = (video) => `${nameOf(video)}, seed ${video.seed}`;
export const shapeOf = ({ size, frames, steps }) =>
  `${size.replace("x", "×")} · ${plural(frames, "frame")} · ${plural(steps, "step")}`;

/** A clip's proof; what is to be verified waits as long as the ranks have work. */
export function proofOf(video) {
  const { queued = 0, in_progress: running = 0 } = state.engine?.queue ?? {};
  return video.proof === "running" && queued + running > 0 ? "asked" : video.proof;
}

export function proofText(video) {
  const words = PROOFS[proofOf(video)];
  return video.proof_reason ? `${words}: ${video.proof_reason}` : words;
}

/** A line with what becomes of a clip's input that a person may not expect; hidden if there is nothing. */
export function remarksOf({ remarks = [] }) {
  const text = remarks.map(sentence).join(" ");
  return make("span", { className: "note remarks", textContent: text, title: text, hidden: !text });
}

/** `index` of a clip among the waiting ones of this page, whose places may be of different moments. */
export function placeText(video, index) {
  if (video.held) return `Waits: ${video.held}`;
  const place = Math.max(video.place ?? 0, index);
  const text = place === 0 ? "Next" : `${plural(place, "clip")} before it`;
  return video.step ? `${text}; goes on after step ${video.step}` : text;
}

/** The step that is computed now, counted from 1. */
export function stepText(video, done = video.step) {
  if (done >= video.steps) return "Decoding";
  return done || video.rank !== null ? `Step ${done + 1} of ${video.steps}` : "Begins";
}

/** Seconds until a clip is finished, counted down between two answers. */
export function etaOf(video) {
  if (video.eta_seconds === null || video.eta_seconds === undefined) return null;
  return Math.max(0, video.eta_seconds - (now() - video.eta_at));
}

export function etaText(video) {
  if (video.held) return ""; // nobody knows when such a server is started
  const left = etaOf(video);
  if (left === null) return state.engine?.state === "ready" ? "time known after a first step" : "";
  return left < 1 ? "ready now" : `ready in ${duration(left)}`;
}

/** When all open clips are finished, once that is known of each. */
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
