// Images or videos that the user has chosen, but not sent yet.

import { $, iconButton, make, renderList, toast, setAttribute, setText } from "./dom.js";
import { model } from "./form.js";
import { inputWord } from "./format.js";
import { forgetInput, keepInput, keptInputs } from "./keep.js";
import { token } from "./random.js";
import { emit, on } from "./signals.js";
import { state } from "./state.js";
import { fileSize, withArticle } from "./text.js";
import { shrink } from "./thumbs.js";

export function addInputs(files) {
  if (!files.length) return;
  if (model()?.inputs.input_reference === "refused") {
    toast("This model makes clips from text alone.");
    return;
  }
  for (const file of files) keepInput(takeInput({ id: token(), file }));
  renderInputs();
  emit("inputs");
}

function takeInput({ id, file }) {
  const input = { id, file, thumb: shrink(file), src: null, error: faultOf(file) };
  state.inputs.push(input);
  input.thumb.then((src) => { input.src = src; renderInputs(); });
  return input;
}

/** Restores the images that were chosen before a reload of the page. */
async function restoreInputs() {
  if (model()?.inputs.input_reference === "refused") return;
  for (const input of await keptInputs()) if (!state.inputs.some(({ id }) => id === input.id)) takeInput(input);
  renderInputs();
  emit("inputs");
}

/** Returns why the server would refuse a file; empty if no reason is known. */
function faultOf(file) {
  const takesVideo = inputWord(model()) === "video" && file.type.startsWith("video/");
  const word = inputWord(model());
  if (file.type && !file.type.startsWith("image/") && !takesVideo) return `This is not ${withArticle(word)}.`;
  const most = model()?.limits.max_upload_bytes ?? Infinity;
  if (file.size <= most) return "";
  return `The ${word} has ${fileSize(file.size)}; this server takes ${fileSize(most)} at most.`;
}

export function removeInput(input) {
  state.inputs = state.inputs.filter((each) => each !== input);
  forgetInput(input.id);
  renderInputs();
  emit("inputs");
}

export function renderInputs() {
  $("inputs").hidden = !state.inputs.length;
  renderList($("inputs"), state.inputs, (input) => input.id, createInput, updateInput);
}

function createInput(input) {
  const { name } = input.file;
  const parts = {
    picture: make("span", { className: "blank" }),
    note: make("span", { className: "note number" }),
    button: iconButton("close", `Leave out ${name}`, () => removeInput(input)),
    error: make("p", { className: "error", id: `input-${input.id}`, hidden: true }),
  };
  const node = make("li", { className: "input" }, parts.picture,
    make("div", {}, make("span", { className: "name", title: name, textContent: name }), parts.note),
    parts.button, parts.error);
  return Object.assign(node, { parts });
}

function updateInput(node, input) {
  const { picture, note, error, button } = node.parts;
  if (input.src && picture.tagName !== "IMG") {
    node.parts.picture = make("img", { src: input.src, alt: `Preview of ${input.file.name}` });
    picture.replaceWith(node.parts.picture);
  }
  setText(note, input.sending ? "sending…" : fileSize(input.file.size));
  setText(error, input.error);
  error.hidden = !input.error;
  node.classList.toggle("refused", Boolean(input.error));
  setAttribute(button, "aria-describedby", input.error ? error.id : "");
  button.disabled = Boolean(input.sending);
}

export function listenToInputs() {
  let isRestored = false;
  on("models", () => { if (!isRestored) restoreInputs(); isRestored = true; });
}
