// Fields of the form that depend on the model. The server lists them for each model.

import { $, make, setText } from "./dom.js";
import { inputWord, ownParameters, parameterNames } from "./format.js";
import { capital } from "./text.js";

export const field = (name) => $("new").elements[name];

/** Returns the names of the parameters that the form shows for a model. */
export const namesFor = (model) =>
  parameterNames().filter((name) => model?.fields[name] || (model?.inputs[name] ?? "refused") !== "refused"
    || (name === "lora" && model?.loras?.length > 0));

/** Returns the names of a model's file fields besides the input: last image, references, and further videos. */
export const videosOf = (model) =>
  Object.entries(model?.inputs ?? {}).filter(([name, use]) =>
    use !== "refused" && !["input_reference", "prompt", "negative_prompt"].includes(name)).map(([name]) => name);

/** Shows the fields of a model in the form, and hides the others. */
export function showModelFields(model) {
  const names = namesFor(model);
  for (const name of ["prompt", "negative_prompt", "lora", "fit"]) field(name).closest("label").hidden = !names.includes(name);
  showInputField(model.inputs.input_reference);
  const word = inputWord(model);
  $("files").accept = word === "video" ? "video/*,image/*" : "image/*";
  setText($("drop").querySelector("strong"), `Choose ${word}s`);
  $("inputs").setAttribute("aria-label", `Chosen ${word}s`);
  setText(field("fit").closest("label").querySelector("span"), `Fit of the ${word}`);
  showVideoFields(videosOf(model), model.inputs);
  $("loras").replaceChildren(...(model.loras ?? []).map((lora) => make("option", { value: lora.name })));
  const modelFields = ownParameters(model);
  if (modelFields.join() !== $("model-fields").dataset.names) {
    for (const old of [...$("model-fields").querySelectorAll(".model-field")]) old.remove();
    $("model-fields").prepend(...modelFields.map(makeField));
    $("model-fields").dataset.names = modelFields.join();
  }
  for (const name of names) limit(field(name), model.fields[name]);
  field("frames").step = model.limits.frames_unit;
  field("frames").min = model.limits.frames_remainder;
}

function showInputField(use) {
  $("drop").hidden = use === "refused";
  setText($("drop-note"), use === "optional" ? "or none, for clips from the prompt alone" : "or drop or paste them here");
}

function showVideoFields(names, uses) {
  if (names.join() === $("videos").dataset.names) return;
  $("videos").dataset.names = names.join();
  $("videos").replaceChildren(...names.map((name) => make("label", { className: "field" },
    make("span", { textContent: label(name) }),
    make("input", { name, type: "file", multiple: name === "references", required: uses[name] === "needed",
      accept: ["last_image", "references"].includes(name) ? "image/*" : "video/*,image/*" }))));
}

function makeField(name) {
  const input = make("input", { name, type: "number", inputMode: "decimal", step: "any", placeholder: "default" });
  return make("label", { className: "field model-field" }, make("span", { textContent: label(name) }), input);
}

const label = (name) => capital(name.replaceAll("_", " "));

function limit(input, about) {
  if (input.type !== "number") return;
  if (about.type === "integer") Object.assign(input, { step: "1", inputMode: "numeric" });
  input.min = about.minimum ?? 0;
  if (about.maximum !== null) input.max = about.maximum;
  input.title = about.description;
}
