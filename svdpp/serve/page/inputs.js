// Images or videos that the user has chosen, but not sent yet.

import { $, iconButton, make, renderList, toast, setAttribute, setText } from "./dom.js";
import { model } from "./form.js";
import { inputWord } from "./format.js";
import { forgetPhoto, keepPhoto, keptPhotos } from "./keep.js";
import { token } from "./random.js";
import { emit, on } from "./signals.js";
import { state } from "./state.js";
import { fileSize, withArticle } from "./text.js";
import { shrink } from "./thumbs.js";

export function addPhotos(files) {
  if (!files.length) return;
  if (model()?.inputs.input_reference === "refused") {
    toast("This model makes clips from text alone.");
    return;
  }
  for (const file of files) keepPhoto(takePhoto({ id: token(), file }));
  renderPhotos();
  emit("photos");
}

function takePhoto({ id, file }) {
  const photo = { id, file, thumb: shrink(file), src: null, error: faultOf(file) };
  state.photos.push(photo);
  photo.thumb.then((src) => { photo.src = src; renderPhotos(); });
  return photo;
}

/** Restores the images that were chosen before a reload of the page. */
async function restorePhotos() {
  if (model()?.inputs.input_reference === "refused") return;
  for (const photo of await keptPhotos()) if (!state.photos.some(({ id }) => id === photo.id)) takePhoto(photo);
  renderPhotos();
  emit("photos");
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

export function removePhoto(photo) {
  state.photos = state.photos.filter((each) => each !== photo);
  forgetPhoto(photo.id);
  renderPhotos();
  emit("photos");
}

export function renderPhotos() {
  $("photos").hidden = !state.photos.length;
  renderList($("photos"), state.photos, (photo) => photo.id, createPhoto, updatePhoto);
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
  let isRestored = false;
  on("models", () => { if (!isRestored) restorePhotos(); isRestored = true; });
}
