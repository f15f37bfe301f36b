// Requests for clips: from the form, from the table, and for the same clip again.

import { get, getBlob, ApiError, ServerUnreachable, errorText } from "./api.js";
import { takeVideo } from "./clips.js";
import { $, toast } from "./dom.js";
import {
  clearErrors, fieldErrorsOf, fieldsAreValid, model, settings, showFieldError, showFormError,
} from "./form.js";
import { videosOf } from "./fields.js";
import { forgetOrders, keepOrders, numOrders, ordersToSend, renderOrders, seedsAreInRange } from "./orders.js";
import { removeInput, renderInputs } from "./inputs.js";
import { token } from "./random.js";
import { inputsInUse, removeRow, renderTable, showRowFaults, tableIsOpen } from "./rows.js";
import { emit } from "./signals.js";
import { state } from "./state.js";
import { duration, plural, withArticle } from "./text.js";
import { keepThumb } from "./thumbs.js";
import { inputWord, requestOf, titleOf } from "./format.js";

const MAX_CLIPS = 10000; // maximum for one press of the button: more clips are probably a mistake
const RETRY_SECONDS = 3; // used if the server sends no Retry-After header
const MAX_RETRY_SECONDS = 30;

/** Requests one clip. If a second try has the same idempotency key, the server does not make a second clip. */
async function send({ file, thumb, values, files, key }) {
  const form = new FormData();
  if (file) form.append("input_reference", file, file.name || "image");
  for (const [name, each] of files) form.append(name, each, each.name || name);
  for (const [name, value] of Object.entries(values)) if (String(value) !== "") form.append(name, value);
  const video = await get("/v1/videos", { method: "POST", body: form, headers: { "Idempotency-Key": key } });
  if (thumb) keepThumb(video.input.sha256, thumb);
  takeVideo(video, { quietly: true });
  return video;
}

export async function submit(event) {
  event.preventDefault();
  if (state.sending) return;
  clearErrors();
  if (!formIsComplete()) return;
  const made = await sendAll(ordersToSend());
  renderInputs();
  renderTable();
  renderOrders();
  emit("change");
  if (made.length) {
    const eta = Math.max(...made.map((video) => video.eta_seconds ?? -1));
    toast(`${plural(made.length, "clip")} in the queue${eta < 0 ? "" : `, finished in about ${duration(eta)}`}.`);
  }
  emit("stale");
}

function formIsComplete() {
  const isTable = tableIsOpen();
  const isInputMissing = !state.inputs.length && (model()?.inputs.input_reference ?? "needed") === "needed";
  if (!isTable && isInputMissing) {
    showFormError(`Choose ${withArticle(inputWord(model()))} first.`);
    $("files").focus();
    return false;
  }
  if (!fieldsAreValid(isTable ? ["prompt", ...videosOf(model())] : [])) return false;
  if (!seedsAreInRange(settings().seed)) {
    showFieldError("seed", "Each variation adds 1 to the seed, so the last seed would be too large.");
    return false;
  }
  if (numOrders() > MAX_CLIPS)
    showFormError(`These are ${numOrders()} clips; the page sends at most ${MAX_CLIPS} at once.`);
  else if (numOrders() === 0) showFormError("No clip can be made from the table: correct its faults first.");
  return numOrders() > 0 && numOrders() <= MAX_CLIPS;
}

/** Sends orders one after another. Images and rows of refused orders stay in the form or in the table. */
async function sendAll(orders) {
  const made = [];
  const control = new AbortController();
  state.sending = { done: 0, total: orders.length, waits: "", hasToldWhy: false, control };
  for (const [index, order] of orders.entries()) {
    if (control.signal.aborted) break;
    state.sending.done = index;
    mark(order, true);
    try {
      made.push(await sendPatiently(order, control.signal));
      order.given.isSent = true;
      state.sending.waits = "";
      if (!orders.slice(index + 1).some((later) => isOfSame(order, later))) leave(order);
      emit("change");
    } catch (error) {
      if (control.signal.aborted) break;
      if (showRefusal(error, order)) break;
    } finally {
      mark(order, false);
    }
  }
  state.sending = null;
  // An image that was sent for a row is removed only if no remaining row of the table names it.
  const inUse = inputsInUse();
  const sent = new Set(orders.filter(({ row, given }) => row && given.isSent).flatMap(({ inputs }) => inputs));
  for (const input of sent) if (!inUse.has(input)) removeInput(input);
  if (orders.every(({ given }) => given.isSent)) forgetOrders();
  return made;
}

const isOfSame = (a, b) => (a.row ? a.row === b.row : a.input !== null && a.input === b.input);

function mark({ input, row }, isSending) {
  if (row) Object.assign(row, { isSending });
  if (input) Object.assign(input, { sending: isSending, ...(isSending ? { error: "" } : {}) });
  renderInputs();
  if (row) renderTable();
  renderOrders();
}

/** Removes the image or row of a sent order from the form or the table. */
function leave({ input, row }) {
  if (row) {
    removeRow(row);
    keepOrders(); // the stored table must not have the row after a reload
  } else if (input) removeInput(input);
}

/** Sends one order. While the queue is full or the server does not answer, waits and tries again. */
async function sendPatiently(order, signal) {
  const { input, values, files, given } = order;
  for (;;) {
    try {
      return await send({ file: input?.file, thumb: input?.thumb, values, files, key: given.key });
    } catch (error) {
      const isPassing = error instanceof ServerUnreachable || [429, 503].includes(error.status);
      if (!isPassing || signal.aborted) throw error;
      await waitFor(Math.min(MAX_RETRY_SECONDS, error.retryAfter ?? RETRY_SECONDS), error, signal);
    }
  }
}

async function waitFor(seconds, error, signal) {
  const { done } = state.sending;
  const reason = error instanceof ServerUnreachable ? "The server does not answer." : `${error.words.split(/[:.]/)[0]}.`;
  if (!state.sending.hasToldWhy) toast(`${reason} The other clips are sent as soon as the server accepts them.`);
  state.sending.hasToldWhy = true;
  state.sending.waits = `${done} sent. ${reason} The page goes on by itself.`;
  renderOrders();
  await new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, 1000 * seconds);
    signal.addEventListener("abort", () => { clearTimeout(timer); reject(error); }, { once: true });
  });
}

/** Shows an error where the user can correct it; returns true if the next requests would fail as well. */
function showRefusal(error, { input, row }) {
  if (row && error instanceof ApiError && error.status !== 401) {
    showRowFaults(row, fieldErrorsOf(error), error.words);
    return false;
  }
  if (!(error instanceof ApiError)) {
    showFormError(errorText(error));
    return true;
  }
  const faults = fieldErrorsOf(error);
  for (const [name, words] of faults) showFieldError(name, words);
  if (faults.length) {
    $("new").querySelector("[aria-invalid=true]").focus();
    return true;
  }
  const isAboutInput = input && (error.code === "invalid_image" || [408, 413, 415].includes(error.status));
  if (isAboutInput) input.error = error.words;
  else showFormError(error.words);
  return !isAboutInput;
}

/** Requests a clip like an existing one, except for `changes`. Its input files are read from the server. */
export async function requestAgain(id, changes = {}) {
  const video = state.videos.get(id);
  const values = { model: video.model, ...requestOf(video) };
  if (values.lora) values.lora = JSON.stringify(values.lora);
  try {
    const file = video.input && new File([await getBlob(`/v1/videos/${id}/input`)], video.input.name);
    const files = [];
    for (const name of [...(video.last_image ? ["last_image"] : []), ...Object.keys(video.videos ?? {})])
      files.push([name, new File([await getBlob(`/v1/videos/${id}/input?field=${name}`)], name)]);
    for (const index of (video.references ?? []).keys()) {
      const name = `reference_${index + 1}`;
      files.push(["references", new File([await getBlob(`/v1/videos/${id}/input?field=${name}`)], name)]);
    }
    const made = await send({ file, values: { ...values, ...changes }, files, key: token() });
    toast(`${titleOf(made)}: in the queue.`);
  } catch (error) {
    toast(errorText(error));
  }
  emit("change");
}

export function listenToSending() {
  $("new").addEventListener("submit", submit);
  $("stop").addEventListener("click", () => state.sending?.control.abort());
}
