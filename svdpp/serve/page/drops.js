// Owns what is dropped, pasted or chosen: images, tables, and texts with prompts.

import { $, toast } from "./dom.js";
import { field } from "./fields.js";
import { model } from "./form.js";
import { addPhotos } from "./photos.js";
import { looksLikeTable, takeTable, takeTableFile } from "./rows.js";
import { emit } from "./signals.js";
import { isTableFile, textOf } from "./table.js";

const isTextFile = (file) => /\.txt$/i.test(file.name);
const isMedia = (file) => /^(image|video)\//.test(file.type);
const stemOf = (file) => file.name.replace(/\.\w+$/, "");

async function addFiles(files) {
  const [table] = files.filter(isTableFile);
  const texts = files.filter(isTextFile);
  const others = files.filter((file) => !isTableFile(file) && !isTextFile(file));
  addPhotos(others);
  if (table) await takeTableFile(table);
  else if (texts.length) await addTexts(texts, others);
}

/** Takes texts that have the names of images as their prompts, and another text as prompts by line. */
async function addTexts(texts, images) {
  if ((model()?.inputs.prompt ?? "refused") === "refused") {
    toast("This model takes no prompt.");
    return;
  }
  const byStem = new Map(texts.map((text) => [stemOf(text), text]));
  if (images.some((image) => byStem.has(stemOf(image)))) {
    const rows = images.map(async (image) => {
      const text = byStem.get(stemOf(image));
      return JSON.stringify({ image: image.name, prompt: text ? (await textOf(text)).trim() : "" });
    });
    takeTable((await Promise.all(rows)).join("\n"));
    return;
  }
  field("prompt").value = (await textOf(texts[0])).trim();
  field("lines").checked = true;
  emit("form");
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
  return found.filter((file) => isTableFile(file) || isTextFile(file) || isMedia(file)); // a folder has others, too
}

function paste(event) {
  const files = [...(event.clipboardData?.files ?? [])].filter(isMedia);
  const text = event.clipboardData?.getData("text") ?? "";
  const isTyped = event.target.closest?.("input, textarea");
  // A spreadsheet puts a picture of its cells beside them.
  if (!isTyped && looksLikeTable(text)) takeTable(text);
  else if (files.length) addPhotos(files);
  else return;
  event.preventDefault();
}

export function listenToDrops() {
  $("files").addEventListener("change", () => { addFiles([...$("files").files]); $("files").value = ""; });
  document.addEventListener("paste", paste);
  // Files dropped beside the field must not replace the page.
  for (const name of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(name, (event) => {
      event.preventDefault();
      $("drop").classList.toggle("over", name === "dragover");
      if (name === "drop" && event.dataTransfer?.files.length) filesOf(event.dataTransfer).then(addFiles);
    });
  }
}
