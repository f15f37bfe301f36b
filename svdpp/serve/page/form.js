// Settings of new clips in the form: defaults and limits of the model, and errors beside the fields.

import { $, make, toast, setAttribute, setText } from "./dom.js";
import { field, namesFor, showModelFields, videosOf } from "./fields.js";
import { keptForm } from "./keep.js";
import { emit, on } from "./signals.js";
import { state } from "./state.js";
import { sentence } from "./text.js";
import { TOY_MODELS } from "./header.js";

export const model = () => state.models?.find((each) => each.id === field("model").value) ?? state.models?.[0];

const option = (value, textContent = value) => make("option", { value, textContent });

function fillModels() {
  const select = field("model");
  const before = select.value;
  select.replaceChildren(...state.models.map((each) => option(each.id)));
  select.closest("label").hidden = state.models.length < 2;
  $("settings").disabled = false;
  if (model()) showModelFields(model());
  if (before && state.models.some((each) => each.id === before)) select.value = before; // the user's values stay
  else restoreForm();
}

/** Fills the form with the values that it had before a reload of the page, or else with the model's defaults. */
function restoreForm() {
  const kept = keptForm();
  if (kept && state.models.some((each) => each.id === kept.values.model)) field("model").value = kept.values.model;
  fillDefaults();
  if (!kept || kept.values.model !== field("model").value) return;
  fillSettings(kept.values);
  field("lines").checked = kept.lines;
  field("variations").value = kept.variations;
  $("settings").querySelector("details").open = kept.isOpen;
}

/** Returns the values of the form that are kept for a reload of the page. */
export const formValues = () => ({
  values: settings(), lines: field("lines").checked, variations: field("variations").value,
  isOpen: $("settings").querySelector("details").open,
});

function fillDefaults() {
  if (!model()) return;
  setText($("toy"), TOY_MODELS[model().id] ?? "");
  $("toy").hidden = !TOY_MODELS[model().id];
  showModelFields(model());
  const { defaults, sizes } = model();
  field("size").replaceChildren(...sizes.map((each) => option(each, each.replace("x", " × "))));
  const priorities = Array.from({ length: 10 }, (_, value) => option(value));
  priorities[0].textContent = "0 (usual)";
  priorities[9].textContent = "9 (first)";
  field("priority").replaceChildren(...priorities);
  field("variations").value = 1;
  fillSettings({ ...defaults, lora: "", seed: "", priority: 0 });
}

function fillSettings(values) {
  clearErrors();
  for (const name of namesFor(model())) {
    const input = field(name), value = values[name];
    const isOffered = input.tagName !== "SELECT" || [...input.options].some((each) => each.value === String(value));
    if (value !== undefined && isOffered) input.value = value ?? "";
  }
}

export function settings() {
  const values = Object.fromEntries(namesFor(model()).map((name) => [name, field(name).value.trim()]));
  return { model: field("model").value, ...values };
}

/**
 * Checks the fields of the form, and shows an error beside each invalid one. `others` are names of fields that are not
 * checked, because the rows of the table may have their values.
 */
export function fieldsAreValid(others = []) {
  const names = [...namesFor(model()), "variations", ...videosOf(model())];
  const inputs = names.filter((name) => !others.includes(name)).map(field);
  const wrong = inputs.filter((input) => !input.checkValidity() || isPromptMissing(input));
  for (const input of wrong) showFieldError(input.name, limitText(input));
  wrong[0]?.focus();
  return !wrong.length;
}

const isPromptMissing = (input) => model().inputs[input.name] === "needed" && !input.value.trim();

function limitText(input) {
  if (input.type === "file") return "Choose a file.";
  if (isPromptMissing(input)) return "Say what happens in the clip.";
  if (input.name === "seed") return "A whole number, or empty.";
  const [unit, least] = [Number(input.step), Number(input.min)];
  if (unit > 1) {
    const first = `${least}, ${least + unit}, ${least + 2 * unit}`;
    return `A multiple of ${unit} plus ${least}: ${first}, up to ${input.max}.`;
  }
  const whole = input.step === "1" ? "A whole number" : "A number";
  if (input.max) return `${whole} from ${input.min} to ${input.max}.`;
  return `${whole} of ${input.min} or more.`;
}

/** Returns [name of the field, message] for each field of the form that an error of the API is about. */
export function fieldErrorsOf(error) {
  const known = (name) => (name === "seconds" ? "frames" : name);
  const has = (name) => [...namesFor(model()), ...videosOf(model()), "model"].includes(known(name));
  const faults = (error.details.faults ?? []).filter((fault) => has(fault.field));
  if (faults.length) return faults.map((fault) => [known(fault.field), sentence(fault.reason)]);
  const name = error.details.field;
  return has(name) && error.status < 429 ? [[known(name), error.words]] : [];
}

export function showFieldError(name, words) {
  const input = field(name);
  const label = input.closest("label");
  const id = `error-${name}`;
  const old = $(id);
  if (old) { setText(old, words); return; }
  label.append(make("span", { className: "error", id, role: "alert", textContent: words }));
  setAttribute(input, "aria-invalid", "true");
  setAttribute(input, "aria-describedby", id);
  const folded = label.closest("details");
  if (folded) folded.open = true;
}

function clearFieldError(input) {
  $(`error-${input.name}`)?.remove();
  input.removeAttribute("aria-invalid");
  input.removeAttribute("aria-describedby");
}

export function clearErrors() {
  $("form-error").hidden = true;
  for (const input of $("new").querySelectorAll("[aria-invalid]")) clearFieldError(input);
}

export function showFormError(words) {
  setText($("form-error"), words);
  $("form-error").hidden = false;
}

export function listenToForm() {
  on("models", fillModels);
  $("new").addEventListener("input", (event) => { clearFieldError(event.target); emit("form"); });
  field("model").addEventListener("change", () => { fillDefaults(); emit("form"); });
  $("reset").addEventListener("click", () => {
    fillDefaults();
    emit("form");
    toast("Settings are the model's defaults again.");
  });
  document.addEventListener("keydown", submitByKey);
}

/** Submits the form on Ctrl+Enter or Cmd+Enter if the focus is in the form, in the table, or on no element. */
function submitByKey(event) {
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey) || event.repeat) return;
  const { target } = event;
  const isHere = target === document.body || $("new").contains(target) || $("table").contains(target);
  if (!isHere || document.querySelector("dialog[open]") || $("main").hidden) return;
  event.preventDefault();
  if (!$("make").disabled) $("new").requestSubmit();
}
