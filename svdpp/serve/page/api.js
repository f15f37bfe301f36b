// Requests to the API: API key, errors, and JSON.

import { emit } from "./signals.js";
import { duration, sentence } from "./text.js";

/** Error response of the API, with the server's message and hint. */
export class ApiError extends Error {
  constructor(status, error, retryAfter) {
    super(error.message || `the server responded with status ${status}`);
    Object.assign(this, { status, code: error.code, hint: error.hint, details: error.details ?? {}, retryAfter });
  }

  /** Message and hint as sentences, and when to try again if the server says so. */
  get words() {
    const wait = this.retryAfter ? `Try again in about ${duration(this.retryAfter)}.` : "";
    return [sentence(this.message), sentence(this.hint), wait].filter(Boolean).join(" ");
  }
}

/** Error for a request without a response from the server. */
export class ServerUnreachable extends Error {
  get words() { return "The server does not answer. Nothing is lost: try again."; }
}

/** Returns the text that the page shows for any error. */
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
  // If the server is down, a proxy in front of it may respond instead, without the API's JSON error.
  if (!body.error && [502, 503, 504].includes(answer.status)) throw new ServerUnreachable();
  throw new ApiError(answer.status, body.error ?? {}, Number(answer.headers.get("Retry-After")) || null);
}

/** Parses JSON. Seeds above 2^53 become strings, because a JavaScript number would lose digits. */
export function parse(text) {
  return JSON.parse(text, (name, value, context) =>
    (name === "seed" && !Number.isSafeInteger(value) && context?.source ? context.source : value));
}

export const get = async (path, options) => parse(await (await request(path, options)).text());

export const getBlob = async (path) => (await request(path)).blob();

/** Returns the URL of a clip. A video element cannot send an API key, so with a key it is a blob URL of a copy. */
export async function mediaOf(id) {
  const path = `/v1/videos/${id}/content`;
  return apiKey() ? URL.createObjectURL(await getBlob(path)) : path;
}

/** Returns the file name in a response's Content-Disposition header (RFC 6266). */
export function fileNameOf(answer) {
  const [, name] = (answer.headers.get("Content-Disposition") ?? "").match(/filename\*=UTF-8''([^;]+)/) ?? [];
  return name ? decodeURIComponent(name) : "clip.mp4";
}

export const release = (address) => { if (address?.startsWith("blob:")) URL.revokeObjectURL(address); };
