// Orders of the form: one for each combination of image, prompt and variation. An order becomes a request for a clip.

import { $, setText } from "./dom.js";
import { field, videosOf } from "./fields.js";
import { formValues, model, settings } from "./form.js";
import { keepForm } from "./keep.js";
import { randomSeed, token } from "./random.js";
import { keptTable, numRows, rowOrders, rowsToMake, tableIsOpen } from "./rows.js";
import { on } from "./signals.js";
import { state } from "./state.js";
import { plural } from "./text.js";

const MAX_SEED = 2n ** 63n - 1n; // largest seed that the API accepts

// Seed and idempotency key of each order from its first try, so that a second try sends the same request.
const given = new Map(); // signature -> {seed, key, isSent}

const takesPrompt = () => (model()?.inputs.prompt ?? "refused") !== "refused";

/** Returns the prompts of the form: its whole text, or each line of the text. */
function prompts() {
  const text = field("prompt").value;
  if (!takesPrompt() || !field("lines").checked) return [text.trim()];
  const lines = text.split("\n").map((line) => line.trim()).filter(Boolean);
  return lines.length ? lines : [""];
}

export const variations = () => Math.max(1, Math.floor(Number(field("variations").value)) || 1);

/** Returns the number of clips that the button would request now. */
export function numOrders() {
  if (given.size > 0) return drafts().filter(({ signature }) => !given.get(signature)?.isSent).length;
  const number = tableIsOpen() ? rowsToMake().length : prompts().length * (state.inputs.length || 1);
  return number * variations();
}

/** Returns the orders that are not sent yet. Orders of an earlier press that was stopped keep their seeds. */
export function ordersToSend() {
  return drafts().map(({ signature, index, ...draft }) => {
    const { values } = draft;
    if (!given.has(signature)) given.set(signature, { seed: values.seed || randomSeed(), key: token(), isSent: false });
    const order = given.get(signature);
    const seed = values.seed ? String(BigInt(values.seed) + BigInt(index)) : order.seed;
    return { ...draft, values: { ...values, seed }, given: order };
  }).filter((order) => !order.given.isSent);
}

/** Returns a draft for each variation of each order. Drafts of the same request have the same `signature`. */
function drafts() {
  const files = videosOf(model()).flatMap((name) => [...field(name).files].map((file) => [name, file]));
  return (tableIsOpen() ? rowOrders(settings()) : formOrders()).flatMap((each) => {
    const own = each.files ?? [], names = own.map(([name]) => name);
    const draft = { ...each, files: [...files.filter(([name]) => !names.includes(name)), ...own] };
    const { input, row, line, values } = draft;
    const same = JSON.stringify([input?.id, row?.id, line, values,
      draft.files.map(([name, file]) => [name, file.name, file.size, file.lastModified])]);
    return Array.from({ length: variations() }, (_, index) => ({ ...draft, index, signature: `${index} ${same}` }));
  });
}

function formOrders() {
  const values = settings();
  const inputs = state.inputs.length ? state.inputs : [null];
  return inputs.flatMap((input) => prompts().map((prompt, line) => (
    { input, line, values: takesPrompt() ? { ...values, prompt } : values })));
}

/** Whether the seed of the last variation is still in the API's range; each variation adds 1 to the typed seed. */
export const seedsAreInRange = (seed) => !seed || BigInt(seed) + BigInt(variations() - 1) <= MAX_SEED;

/** Forgets which orders were sent, so that the same form makes new clips from now on. */
export const forgetOrders = () => given.clear();

/** Shows on the button and above it which clips a press would request. */
export function renderOrders() {
  const number = numOrders();
  const { sending } = state;
  $("make").disabled = Boolean(sending);
  setText($("make"), sending ? `Sending ${Math.min(sending.done + 1, sending.total)} of ${sending.total}` : makeText(number));
  $("stop").hidden = !sending;
  $("reset").hidden = Boolean(sending);
  setText($("plan"), sending?.waits || planText(number));
  $("lines-field").hidden = !takesPrompt() || tableIsOpen();
  $("make-rows").hidden = !tableIsOpen() || !number || Boolean(sending);
  setText($("make-rows"), makeText(number));
}

const makeText = (number) => (number > 1 ? `Make ${number} clips` : number ? "Make clip" : "Make clips");

function rowsText() {
  const [ready, all] = [rowsToMake().length, numRows()];
  return ready < all ? `${ready} of ${plural(all, "row")}` : plural(all, "row");
}

function planText(number) {
  const [frames, fps] = [Number(field("frames").value), Number(field("fps").value)];
  const length = frames > 0 && fps > 0 && !tableIsOpen() ? `${(frames / fps).toFixed(2)} s long` : "";
  const parts = tableIsOpen() ? [rowsText()] : [
    state.inputs.length > 1 ? `${state.inputs.length} images` : "",
    prompts().length > 1 ? `${prompts().length} prompts` : ""];
  parts.push(variations() > 1 ? `${variations()} variations` : "");
  const product = number > 1 || tableIsOpen() ? parts.filter(Boolean).join(" × ") : "";
  return [product, product && length ? `each ${length}` : length].filter(Boolean).join(", ");
}

/** Renders the orders after each change, and stores changes of the form for a reload. */
export function listenToOrders() {
  on("inputs", renderOrders);
  on("form", () => {
    renderOrders();
    keepOrders();
  });
}

export const keepOrders = () => keepForm({ ...formValues(), table: keptTable() });
