// Owns the chosen images or videos, up to the press of the button.

import { $, iconButton, make, renderList, toast, setAttribute, setText } from "./dom.js";
import { model } from "./form.js";
import { inputWord } from "./format.js";
import { state } from "./state.js";
import { fileSize, withArticle } from "./text.js";
import { shrink } from "./thumbs.js";

/** Six digits: short enough to read out. */
export const randomSeed = () => String(crypto.getRandomValues(new Uint32Array(1))[0] % 1e6);

// crypto.randomUUID exists only on HTTPS and localhost.
export const token = () =>
  [...crypto.getRandomValues(new Uint32Array(4))].map((part) => part.toString(16).padStart(8, "0")).join("");

function addPhotos(files) {
  if (model()?.inputs.input_reference === "refused") {
    toast("This model makes clips from text alone.");
    return;
  }
  for (const file of files) {
    const photo = { id: token(), file, seed: randomSeed(), thumb: shrink(file), src: null, error: faultOf(file) };
    state.photos.push(photo);
    photo.thumb.then((src) => { photo.src = src; renderPhotos(); });
  }
  renderPhotos();
}

/** Why the server would refuse a file; empty if that is not known. */
function faultOf(file) {
  const takesVideo = inputWord(model()) === "video" && file.type.startsWith("video/");
  const word = inputWord(model());
  if (file.type && !file.type.startsWith("image/") && !takesVideo) return `This is not ${withArticle(word)}.`;
  const most = model()?.limits.max_upload_bytes ?? Infinity;
  if (file.size <= most) return "";
  return `The ${word} has ${fileSize(file.size)}; this server takes ${fileSize(most)} at most.`;
}

export function removePhoto(photo) {
  state.photos = state.photos.filter((each) => each !== photo);
  renderPhotos();
}

export function renderPhotos() {
  $("photos").hidden = !state.photos.length;
  renderList($("photos"), state.photos, (photo) => photo.id, createPhoto, updatePhoto);
  const number = state.photos.length;
  const isSending = state.photos.some((photo) => photo.sending);
  setText($("make"), isSending ? "Sending…" : number > 1 ? `Make ${number} clips` : "Make clip");
}

function createPhoto(photo) {
  const { name } = photo.file;
  const parts = {
    picture: make("span", { className: "blank" }),
    note: make("span", { className: "note number" }),
    button: iconButton("close", `Leave out ${name}`, () => removePhoto(photo)),
    error: make("p", { className: "error", id: `photo-${photo.id}`, hidden: true }),
  };
  const node = make("li", { className: "photo" }, parts.picture,
    make("div", {}, make("span", { className: "name", title: name, textContent: name }), parts.note),
    parts.button, parts.error);
  return Object.assign(node, { parts });
}

function updatePhoto(node, photo) {
  const { picture, note, error, button } = node.parts;
  if (photo.src && picture.tagName !== "IMG") {
    node.parts.picture = make("img", { src: photo.src, alt: `Preview of ${photo.file.name}` });
    picture.replaceWith(node.parts.picture);
  }
  setText(note, photo.sending ? "sending…" : fileSize(photo.file.size));
  setText(error, photo.error);
  error.hidden = !photo.error;
  node.classList.toggle("refused", Boolean(photo.error));
  setAttribute(button, "aria-describedby", photo.error ? error.id : "");
  button.disabled = Boolean(photo.sending);
}

export function listenToPhotos() {
  $("files").addEventListener("change", () => { addPhotos([...$("files").files]); $("files").value = ""; });
  document.addEventListener("paste", (event) => {
    const files = [...(event.clipboardData?.files ?? [])].filter((file) => /^(image|video)\//.test(file.type));
    if (files.length) { event.preventDefault(); addPhotos(files); }
  });
  // Files dropped beside the field must not replace the page.
  for (const name of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(name, (event) => {
      event.preventDefault();
      $("drop").classList.toggle("over", name === "dragover");
      if (name === "drop" && event.dataTransfer?.files.length) addPhotos([...event.dataTransfer.files]);
    });
  }
}
