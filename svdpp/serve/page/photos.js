// Owns the chosen images or videos, up to the press of the button; tables that are dropped go to theirs.

import { $, iconButton, make, renderList, toast, setAttribute, setText } from "./dom.js";
import { model } from "./form.js";
import { inputWord } from "./format.js";
import { forgetPhoto, keepPhoto, keptPhotos } from "./keep.js";
import { token } from "./random.js";
import { looksLikeTable, takeTable, takeTableFile } from "./rows.js";
import { emit, on } from "./signals.js";
import { state } from "./state.js";
import { isTableFile } from "./table.js";
import { fileSize, withArticle } from "./text.js";
import { shrink } from "./thumbs.js";

function addFiles(files) {
  const tables = files.filter(isTableFile);
  if (tables.length) takeTableFile(tables[0]);
  addPhotos(files.filter((file) => !tables.includes(file)));
}

/** The files of a drop, with those that are in dropped folders. */
async function filesOf({ items, files }) {
  // Entries are known only until this function waits.
  const entries = [...items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  if (!entries.some((entry) => entry.isDirectory)) return [...files];
  return (await Promise.all(entries.map(filesIn))).flat();
}

async function filesIn(entry) {
  if (entry.isFile) return [await new Promise((resolve, reject) => entry.file(resolve, reject))];
  const reader = entry.createReader(), entries = [];
  for (;;) { // it answers a hundred at a time
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!some.length) break;
    entries.push(...some);
  }
  entries.sort((a, b) => a.name.localeCompare(b.name, undefined, { numeric: true }));
  const found = (await Promise.all(entries.map(filesIn))).flat();
  return found.filter((file) => isTableFile(file) || /^(image|video)\//.test(file.type)); // a folder has others, too
}

function addPhotos(files) {
  if (!files.length) return;
  if (model()?.inputs.input_reference === "refused") {
    toast("This model makes clips from text alone.");
    return;
  }
  for (const file of files) {
    keepPhoto(takePhoto({ id: token(), file }));
  }
  renderPhotos();
  emit("photos");
}

function takePhoto({ id, file }) {
  const photo = { id, file, thumb: shrink(file), src: null, error: faultOf(file) };
  state.photos.push(photo);
  photo.thumb.then((src) => { photo.src = src; renderPhotos(); });
  return photo;
}

/** Brings back the images that were chosen before the page was loaded again. */
async function restorePhotos() {
  if (model()?.inputs.input_reference === "refused") return;
  for (const photo of await keptPhotos()) if (!state.photos.some(({ id }) => id === photo.id)) takePhoto(photo);
  renderPhotos();
  emit("photos");
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
  $("files").addEventListener("change", () => { addFiles([...$("files").files]); $("files").value = ""; });
  document.addEventListener("paste", (event) => {
    const files = [...(event.clipboardData?.files ?? [])].filter((file) => /^(image|video)\//.test(file.type));
    const text = event.clipboardData?.getData("text") ?? "";
    const isTyped = event.target.closest?.("input, textarea");
    // A spreadsheet puts a picture of its cells beside them.
    if (!isTyped && looksLikeTable(text)) { event.preventDefault(); takeTable(text); }
    else if (files.length) { event.preventDefault(); addPhotos(files); }
  });
  // Files dropped beside the field must not replace the page.
  for (const name of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(name, (event) => {
      event.preventDefault();
      $("drop").classList.toggle("over", name === "dragover");
      if (name === "drop" && event.dataTransfer?.files.length) filesOf(event.dataTransfer).then(addFiles);
    });
  }
}
