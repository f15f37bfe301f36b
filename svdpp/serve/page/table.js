// Parser of a table of jobs (CSV, TSV or JSONL), and checks of its fields and cells.

import { namesFor, videosOf } from "./fields.js";
import { inputWord } from "./format.js";
import { withArticle } from "./text.js";

const MAX_ROWS = 10000;
const DELIMITERS = ["\t", ",", ";"];
// Other names of fields, which the API or `svdpp run --jobs` also accepts.
const ALIASES = { image: "input_reference", image_reference: "input_reference", video: "input_reference",
  num_frames: "frames", num_inference_steps: "steps", max_sequence_length: "max_prompt_tokens" };

export const isTableFile = (file) => /\.(csv|tsv|jsonl|ndjson)$/i.test(file.name);

/** Returns the text of a file. Besides UTF-8, spreadsheets write UTF-16 with a byte order mark, or Windows-1252. */
export async function textOf(file) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  const mark = bytes[0] === 0xff && bytes[1] === 0xfe ? "utf-16le" : "utf-8";
  try {
    return new TextDecoder(mark, { fatal: true }).decode(bytes);
  } catch {
    return new TextDecoder("windows-1252").decode(bytes);
  }
}

/** Returns the columns and rows of a text; throws an Error with a message for the user if the text is not a table. */
export function readTable(text, model) {
  const isJson = /^\s*[{[]/.test(text);
  const { names, rows } = isJson ? readJson(text) : readLines(text);
  const known = fieldsOf(model);
  const columns = names.map((name) => columnOf(name, known));
  const places = new Map();
  for (const column of columns) {
    if (column.field && places.has(column.field)) column.fault = `“${column.name}” repeats another column's field.`;
    places.set(column.field, column);
  }
  if (!columns.some(({ field }) => field)) {
    const first = names.slice(0, 3).map((name) => `“${name.slice(0, 40)}”`).join(", ");
    throw new Error(`The first line must name the fields: ${[...known.keys()].slice(0, 4).map(shownName).join(", ")} … It has ${first || "nothing"}.`);
  }
  if (!rows.length) throw new Error("The table has no rows below its first line.");
  if (rows.length > MAX_ROWS) throw new Error(`The table has ${rows.length} rows; the page takes at most ${MAX_ROWS}.`);
  return { columns, rows };
}

function readJson(text) {
  const isList = /^\s*\[/.test(text);
  const lines = isList ? [text] : text.split("\n");
  const objects = lines.flatMap((line, index) => {
    if (!line.trim()) return [];
    // Numbers are kept as text, because a seed may have more digits than a JavaScript number.
    const keep = (name, value, context) => {
      if (typeof value !== "number") return value;
      if (context?.source) return context.source;
      if (Number.isSafeInteger(value) || !Number.isInteger(value)) return String(value);
      throw new Error(`this browser cannot read the large number of ${name} exactly; write the number in quotes`);
    };
    let value;
    try {
      value = JSON.parse(line, keep);
    } catch (error) {
      const subject = isList ? "The text" : `Line ${index + 1}`;
      // Other errors come from `keep`: the text is JSON, but has a number that cannot be read.
      throw new Error(`${subject}${error instanceof SyntaxError ? " is not JSON" : ""}: ${error.message}.`);
    }
    const found = isList ? value : [value];
    if (found.some((each) => typeof each !== "object" || each === null || Array.isArray(each))) {
      throw new Error(`${isList ? "The list" : `Line ${index + 1}`} must have JSON objects only.`);
    }
    return found;
  });
  const names = [...new Set(objects.flatMap(Object.keys))];
  const cell = (value) => (value === null || value === undefined ? "" : typeof value === "object" ? JSON.stringify(value) : String(value));
  return { names, rows: objects.map((object) => names.map((name) => cell(object[name]))) };
}

function readLines(text) {
  const plain = text.replace(/^\ufeff/, "");
  const [first] = plain.split(/\r?\n/, 1);
  const counts = DELIMITERS.map((each) => first.split(each).length);
  const records = recordsOf(plain, DELIMITERS[counts.indexOf(Math.max(...counts))]);
  const [names = [], ...rows] = records.filter((record) => record.some((value) => value.trim()));
  const width = Math.max(names.length, ...rows.slice(0, MAX_ROWS).map((row) => row.length));
  const all = Array.from({ length: width }, (_, index) => names[index]?.trim() ?? "");
  // Columns without name and values are dropped: spreadsheets may write empty cells at the end of each line.
  const used = all.map((name, index) => (name || rows.some((row) => row[index]?.trim()) ? index : -1)).filter((index) => index >= 0);
  return { names: used.map((index) => all[index]), rows: rows.map((row) => used.map((index) => (row[index] ?? "").trim())) };
}

/** Returns the records of a CSV (RFC 4180). A quoted value may contain delimiters, doubled quotes and line ends. */
function recordsOf(text, delimiter) {
  const records = [];
  let record = [], value = "", isQuoted = false;
  for (let at = 0; at < text.length; at += 1) {
    const letter = text[at];
    if (isQuoted) {
      if (letter !== '"') value += letter;
      else if (text[at + 1] === '"') { value += '"'; at += 1; }
      else isQuoted = false;
    } else if (letter === '"' && value === "") isQuoted = true;
    else if (letter === delimiter) { record.push(value); value = ""; }
    else if (letter === "\n") { records.push([...record, value.replace(/\r$/, "")]); record = []; value = ""; }
    else value += letter;
  }
  if (value || record.length) records.push([...record, value]);
  return records;
}

/** Returns the fields that a row may have, by name, each with the kind of its values. */
export function fieldsOf(model) {
  const fields = new Map();
  const use = (name) => model.inputs[name] ?? "refused";
  if (use("input_reference") !== "refused") fields.set("input_reference", { kind: "file", use: use("input_reference") });
  for (const name of videosOf(model)) {
    if (name === "references") fields.set(name, { kind: "files", use: use(name), maximum: model.limits.max_references });
    else fields.set(name, { kind: "file", use: use(name) });
  }
  for (const name of namesFor(model)) {
    const about = model.fields[name];
    if (name === "lora") fields.set(name, { kind: "lora" });
    else if (name.endsWith("prompt")) fields.set(name, { kind: "text", use: use(name) });
    else if (name === "size") fields.set(name, { kind: "size" });
    else fields.set(name, { ...about, kind: about.choices ? "choice" : about.type });
  }
  return fields;
}

/** Whether the cells of a field name chosen files: one, or for the kind "files" also several. */
export const isFileKind = (about) => ["file", "files"].includes(about?.kind);

/**
 * Returns the file names in a cell: one name, or a JSON list of names for the kind "files", as in jobs of the command
 * line. Returns null if the list is malformed.
 */
export function namesIn(value, about) {
  if (about.kind !== "files" || !value.startsWith("[")) return [value];
  try {
    const names = JSON.parse(value);
    return Array.isArray(names) && names.every((name) => typeof name === "string") ? names : null;
  } catch {
    return null;
  }
}

/** Returns the name of a field on the page; `image` is also its name in jobs of the command line. */
export const shownName = (name) => (name === "input_reference" ? "image" : name);

/** Returns the column for a name in the first line of a table. */
function columnOf(name, known) {
  const plain = name.trim().toLowerCase().replace(/[\s-]+/g, "_");
  const field = ALIASES[plain] ?? plain;
  if (known.has(field) || ["width", "height"].includes(field)) return { name, field, fault: "", isFile: isFileKind(known.get(field)) };
  const near = [...known.keys()].find((each) => isNear(each, field));
  return { name: name || "(no name)", field: "",
    fault: `No field of this model${near ? `; did you mean ${near}?` : "."}` };
}

/** Whether two names differ only in one or two adjacent letters, as after a typing error (frmaes for frames). */
function isNear(a, b) {
  if (Math.abs(a.length - b.length) > 1) return false;
  let start = 0, end = 0;
  while (start < a.length && a[start] === b[start]) start += 1;
  while (end < Math.min(a.length, b.length) - start && a.at(-1 - end) === b.at(-1 - end)) end += 1;
  return Math.max(a.length, b.length) - start - end <= 2;
}

/** Returns why a cell's value is refused; empty if it is valid. For an empty cell, the form has the value. */
export function faultOfCell(value, about, model) {
  if (!value) return "";
  if (about.kind === "size") return model.sizes.includes(plainSize(value)) ? "" : `One of ${model.sizes.join(", ")}.`;
  if (about.kind === "choice") return about.choices.includes(value) ? "" : `One of ${about.choices.join(", ")}.`;
  if (about.kind === "integer") return faultOfInteger(value, about);
  if (about.kind === "number") {
    const number = Number(value);
    if (!/^[-+]?[\d.]+(e[-+]?\d+)?$/i.test(value) || !Number.isFinite(number)) return "Not a number.";
    return faultOfRange(number, about);
  }
  return "";
}

function faultOfInteger(value, about) {
  if (!/^-?\d+$/.test(value)) return "Not a whole number.";
  return faultOfRange(BigInt(value), about);
}

function faultOfRange(number, { minimum, maximum }) {
  if (minimum !== null && number < minimum) return `${minimum} or more.`;
  // Limits above 2^53 are rounded in JavaScript, so a value near such a limit is checked exactly only by the server.
  return maximum !== null && number > maximum ? `${maximum} or less.` : "";
}

export const plainSize = (value) => value.toLowerCase().replace(/\s*[×x*]\s*/, "x");

/** Returns the message for a row without a needed value. */
export const missingText = (about, model) =>
  (about.kind === "file" ? `It needs ${withArticle(inputWord(model))}.` : "It needs a prompt.");
