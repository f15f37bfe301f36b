// Files that a user drops, pastes or chooses: images, videos, tables, and text files with prompts.

import { $, toast } from "./dom.js";
import { field } from "./fields.js";
import { model } from "./form.js";
import { addInputs } from "./inputs.js";
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
  addInputs(others);
  if (table) await takeTableFile(table);
  else if (texts.length) await addTexts(texts, others);
}

/**
 * Takes prompts from text files. A text with the name of an image (a.txt for a.png) is the prompt of that image. If no
 * text has such a name, each line of the first text is a prompt.
 */
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

/** Returns the dropped files, including the files in dropped folders. */
async function filesOf({ items, files }) {
  // The browser clears `items` at the first `await`, so all entries are read before it.
  const entries = [...items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  if (!entries.some((entry) => entry.isDirectory)) return [...files];
  return (await Promise.all(entries.map(filesIn))).flat();
}

async function filesIn(entry) {
  if (entry.isFile) return [await new Promise((resolve, reject) => entry.file(resolve, reject))];
  const reader = entry.createReader(), entries = [];
  for (;;) { // one call returns at most 100 entries
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!some.length) break;
    entries.push(...some);
  }
  entries.sort((a, b) => a.name.localeCompare(b.name, undefined, { numeric: true }));
  const found = (await Promise.all(entries.map(filesIn))).flat();
  // A folder may also have files of other types, which are ignored.
  return found.filter((file) => isTableFile(file) || isTextFile(file) || isMedia(file));
}

function paste(event) {
  const files = [...(event.clipboardData?.files ?? [])].filter(isMedia);
  const text = event.clipboardData?.getData("text") ?? "";
  const isTyped = event.target.closest?.("input, textarea");
  // Cells that were copied from a spreadsheet come as text and as a picture. The text is taken.
  if (!isTyped && looksLikeTable(text)) takeTable(text);
  else if (files.length) addInputs(files);
  else return;
  event.preventDefault();
}

export function listenToDrops() {
  $("files").addEventListener("change", () => { addFiles([...$("files").files]); $("files").value = ""; });
  document.addEventListener("paste", paste);
  // Without `preventDefault`, the browser would open a file that is dropped outside the field, instead of this page.
  for (const name of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(name, (event) => {
      event.preventDefault();
      $("drop").classList.toggle("over", name === "dragover");
      if (name === "drop" && event.dataTransfer?.files.length) filesOf(event.dataTransfer).then(addFiles);
    });
  }
}
