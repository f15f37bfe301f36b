// Owns the requests to the API: the key, its errors, its JSON.

import { emit } from "./signals.js";
import { duration, sentence } from "./text.js";

/** What the server refuses, in its own words. */
export class ApiError extends Error {
  constructor(status, error, retryAfter) {
    super(error.message || `the server answered ${status}`);
    Object.assign(this, { status, code: error.code, hint: error.hint, details: error.details ?? {}, retryAfter });
  }

  /** The message as a sentence, with the hint. */
  get words() {
    const wait = this.retryAfter ? `Try again in about ${duration(this.retryAfter)}.` : "";
    return [sentence(this.message), sentence(this.hint), wait].filter(Boolean).join(" ");
  }
}

/** No answer came. */
export class ServerUnreachable extends Error {
  get words() { return "The server does not answer. Nothing is lost: try again."; }
}

/** What to tell a person about any error. */
export const errorText = (error) => error.words ?? sentence(error.message);

export const apiKey = () => sessionStorage.getItem("svdpp-key");

export function storeKey(value) {
  if (value) sessionStorage.setItem("svdpp-key", value);
  else sessionStorage.removeItem("svdpp-key");
}

export async function request(path, { headers = {}, ...options } = {}) {
  if (apiKey()) headers.Authorization = `Bearer ${apiKey()}`;
  let answer;
  try {
    answer = await fetch(path, { headers, ...options });
  } catch (error) {
    if (options.signal?.aborted && options.signal.reason?.name !== "TimeoutError") throw error;
    throw new ServerUnreachable();
  }
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => ({}));
  if (answer.status === 401) emit("refused", body.error?.message);
  // A proxy in front of a server that is gone answers in its place, and not in the API's shape.
  if (!body.error && [502, 503, 504].includes(answer.status)) throw new ServerUnreachable();
  throw new ApiError(answer.status, body.error ?? {}, Number(answer.headers.get("Retry-After")) || null);
}

/** JSON whose seeds keep all of their digits: above 2^53 they stay text. */
export function parse(text) {
  return JSON.parse(text, (name, value, context) =>
    (name === "seed" && !Number.isSafeInteger(value) && context?.source ? context.source : value));
}

export const get = async (path, options) => parse(await (await request(path, options)).text());

export const getBlob = async (path) => (await request(path)).blob();

/** The address of a clip: the API's own, or, with a key, which a video element cannot send, one of a copy. */
export async function mediaOf(id) {
  const path = `/v1/videos/${id}/content`;
  return apiKey() ? URL.createObjectURL(await getBlob(path)) : path;
}

/** The name that the server gives to a file (RFC 6266). */
export function fileNameOf(answer) {
  const [, name] = (answer.headers.get("Content-Disposition") ?? "").match(/filename\*=UTF-8''([^;]+)/) ?? [];
  return name ? decodeURIComponent(name) : "clip.mp4";
}

export const release = (address) => { if (address?.startsWith("blob:")) URL.revokeObjectURL(address); };
