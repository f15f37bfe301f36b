// Table of jobs: its rows and their faults, and how a user sees and corrects them.

import { pressTwice } from "./actions.js";
import { $, iconButton, make, renderList, toast, setAttribute, setText } from "./dom.js";
import { field } from "./fields.js";
import { model } from "./form.js";
import { keptForm } from "./keep.js";
import { emit, on } from "./signals.js";
import { state } from "./state.js";
import { plural } from "./text.js";
import { faultOfCell, fieldsOf, isFileKind, missingText, namesIn, plainSize, readTable, shownName, textOf } from "./table.js";

const SHOWN_ROWS = 100;

const view = { isOpen: false, columns: [], rows: [], onlyFaults: false, all: false, nextId: 1 };

/** Whether the button makes the clips of the table instead of those of the form. */
export const tableIsOpen = () => view.rows.length > 0;

// `faults` are found by the page, `refusals` by the server. Both map the index of a column to a message. The index -1
// stands for the whole row.
const isFaulty = (row) => row.faults.size > 0 || row.refusals.size > 0;
export const numRows = () => view.rows.length;
export const rowsToMake = () => (columnsAreKnown() ? view.rows.filter((row) => !row.faults.size) : []);
const columnsAreKnown = () => view.columns.every(({ fault }) => !fault);

/** Returns the table's data that is stored for a reload of the page; null without a table. */
export const keptTable = () => (tableIsOpen()
  ? { names: view.columns.map(({ name }) => name), rows: view.rows.map(({ cells }) => cells) } : null);

/** Returns an order for each row without faults. Values that a row leaves out are those of the form. */
export function rowOrders(settings) {
  const known = fieldsOf(model()), byName = inputsByName();
  return rowsToMake().map((row) => {
    const values = { ...settings }, files = [], inputs = [];
    let input = null, width = "", height = "";
    view.columns.forEach(({ field: name }, index) => {
      const value = row.cells[index];
      if (!value) return;
      if (name === "width") width = value;
      else if (name === "height") height = value;
      else if (isFileKind(known.get(name))) {
        const found = inputsNamed(value, known.get(name), byName).inputs;
        inputs.push(...found);
        if (name === "input_reference") [input] = found;
        else files.push(...found.map(({ file }) => [name, file]));
      } else values[name] = name === "size" ? plainSize(value) : value;
    });
    if (width || height) values.size = `${width}x${height}`;
    return { row, input, inputs, values, files };
  });
}

/** Returns the chosen files that are named in rows of the table. */
export function inputsInUse() {
  const known = fieldsOf(model()), byName = inputsByName();
  const inUse = new Set();
  for (const { cells } of view.rows) {
    view.columns.forEach(({ field: name, isFile }, index) => {
      if (!isFile || !cells[index]) return;
      for (const input of inputsNamed(cells[index], known.get(name), byName).inputs) inUse.add(input);
    });
  }
  return inUse;
}

/** Returns a function that finds the chosen files with a name: first with the same case, then ignoring case. */
function inputsByName() {
  const exact = Map.groupBy(state.inputs, ({ file }) => file.name.normalize());
  const folded = Map.groupBy(state.inputs, ({ file }) => file.name.normalize().toLowerCase());
  return (name) => exact.get(name) ?? folded.get(name.toLowerCase()) ?? [];
}

/** Returns the chosen files that a cell names, and the first fault of the cell; `fault` is empty if there is none. */
function inputsNamed(text, about, byName) {
  const names = namesIn(text, about);
  if (names === null) return { inputs: [], fault: 'Not a list of files, such as ["a.jpg", "b.jpg"].' };
  if (names.length > about.maximum) return { inputs: [], fault: `${plural(about.maximum, "file")} at most.` };
  const found = names.map((name) => inputNamed(name, byName));
  const inputs = found.map(({ input }) => input).filter(Boolean);
  return { inputs, fault: found.map(({ fault }) => fault).find(Boolean) ?? "" };
}

/** Returns the chosen file with the name in a cell, ignoring folders in the cell; or else the fault of the cell. */
function inputNamed(text, byName) {
  const name = text.split(/[/\\]/).at(-1).normalize();
  const found = byName(name);
  if (found.length === 1) return { input: found[0], fault: found[0].error };
  return { input: null, fault: found.length ? "Several chosen files have this name." : "Drop this file here, too." };
}

/** Checks all cells again after a change of the model, the form, the table or the chosen files. */
export function checkRows() {
  if (!model()) return;
  const known = fieldsOf(model()), byName = inputsByName();
  for (const row of view.rows) {
    row.faults = new Map();
    view.columns.forEach(({ field: name }, index) => {
      const fault = faultOf(row, name, row.cells[index], known.get(name), byName);
      if (fault) row.faults.set(index, fault);
    });
    for (const [name, about] of known) {
      if (about.use !== "needed" || hasValue(row, name)) continue;
      const index = view.columns.findIndex((column) => column.field === name);
      row.faults.set(index, missingText(about, model())); // index -1: the fault is about the whole row
    }
  }
}

function faultOf(row, name, value, about, byName) {
  if (!name || !value) return "";
  if (name === "width" || name === "height") return faultOfSides(row);
  return isFileKind(about) ? inputsNamed(value, about, byName).fault : faultOfCell(value, about, model());
}

function faultOfSides(row) {
  const of = (name) => row.cells[view.columns.findIndex((column) => column.field === name)] ?? "";
  return faultOfCell(`${of("width")}x${of("height")}`, { kind: "size" }, model());
}

function hasValue(row, name) {
  const index = view.columns.findIndex((column) => column.field === name);
  const input = field(name); // a value that the row leaves out is taken from the form
  return Boolean(row.cells[index] || (input?.files ? input.files.length : input?.value.trim()));
}

export function openTable() {
  view.isOpen = true;
  renderTable();
  (tableIsOpen() ? $("table") : $("table-text")).focus();
}

/** Replaces the table by the rows in a text; shows an error if the text is not a table. */
export function takeTable(text) {
  try {
    const { columns, rows } = readTable(text, model());
    Object.assign(view, { isOpen: true, columns, rows: rows.map(newRow), onlyFaults: false, all: false });
  } catch (error) {
    view.isOpen = true;
    renderTable();
    setText($("table-error"), error.message);
    $("table-error").hidden = false;
    return;
  }
  $("table-text").value = "";
  changed();
  const faults = view.rows.filter(isFaulty).length;
  toast(`${plural(view.rows.length, "row")}${faults ? `, ${faults} with faults` : ""}.`);
  $("table").focus({ preventScroll: true });
  $("table").scrollIntoView({ block: "nearest" });
}

export const takeTableFile = async (file) => takeTable(await textOf(file));

/** Whether a pasted text looks like a table, and not like a prompt. */
export const looksLikeTable = (text) => {
  try { return Boolean(model()) && /[\t,;{]/.test(text) && readTable(text, model()).rows.length > 0; } catch { return false; }
};

export function restoreTable({ names, rows }) {
  const text = rows.map((cells) => JSON.stringify(Object.fromEntries(names.map((name, index) => [name, cells[index]])))).join("\n");
  try {
    const table = readTable(text, model());
    Object.assign(view, { isOpen: true, columns: table.columns, rows: table.rows.map(newRow) });
  } catch { /* the server now has another model, which has none of the fields */ }
}

const newRow = (cells, index) =>
  ({ id: view.nextId++, number: index + 1, cells, faults: new Map(), refusals: new Map(), isSending: false });

export function removeRow(row) {
  view.rows = view.rows.filter((each) => each !== row);
  if (!view.rows.length) view.isOpen = false;
}

function removeColumn(column) {
  const index = view.columns.indexOf(column);
  view.columns = view.columns.filter((each) => each !== column);
  for (const row of view.rows) row.cells.splice(index, 1);
  if (!view.columns.length) closeTable();
  rebuild();
  changed();
}

function closeTable() {
  Object.assign(view, { isOpen: false, columns: [], rows: [] });
  setText($("table-error"), "");
  changed();
  $("table-open").focus({ preventScroll: true });
}

const changed = () => emit("form");

/** Shows an error of the server at the cells that it is about, or else at the row. */
export function showRowFaults(row, faults, words) {
  row.refusals = new Map(faults.length ? [] : [[-1, words]]);
  for (const [name, reason] of faults) {
    const index = view.columns.findIndex((column) => column.field === name);
    row.refusals.set(index, index < 0 ? words : reason);
  }
  renderTable();
}

// --- rendering of the table -------------------------------------------------------------------------

export function renderTable() {
  const { rows, columns } = view;
  const faulty = rows.filter(isFaulty);
  $("table").hidden = !view.isOpen;
  $("table-new").hidden = rows.length > 0;
  $("table-scroll").hidden = !rows.length;
  if (!view.isOpen) return;
  setAttribute($("table-open"), "aria-expanded", view.isOpen);
  fillKnown();
  setText($("table-note"), rows.length ? plural(rows.length, "row") : "");
  renderFaultNote(faulty.length);
  $("table-inputs").replaceChildren(...state.inputs.map(({ file }) => make("option", { value: file.name })));
  if ($("table-head").columns !== columns) {
    $("table-head").columns = columns;
    rebuild();
  }
  const wanted = view.onlyFaults && faulty.length ? faulty : rows;
  const shown = view.all ? wanted : wanted.slice(0, SHOWN_ROWS);
  renderList($("table-rows"), shown, (row) => row.id, createRow, updateRow);
  $("table-more").hidden = shown.length === wanted.length;
  setText($("table-more"), `Show all ${wanted.length} rows`);
}

function renderFaultNote(number) {
  const unknown = view.columns.filter(({ fault }) => fault);
  const words = [
    unknown.length
      ? `${plural(unknown.length, "column")} with an unknown name: leave out such columns, or correct the file.` : "",
    number ? `${plural(number, "row")} with faults: correct them here. Until then, only the other rows are made.` : "",
  ].filter(Boolean).join(" ");
  if (view.rows.length) setText($("table-error"), words);
  $("table-error").hidden = !$("table-error").textContent;
  $("table-faults").hidden = !number || number === view.rows.length;
  setText($("table-faults"), view.onlyFaults ? "All rows" : "Only faults");
}

function fillKnown() {
  if (!model() || $("table-fields").dataset.model === model().id) return;
  $("table-fields").dataset.model = model().id;
  const names = [...fieldsOf(model()).keys()];
  $("table-fields").replaceChildren(...names.map((name) =>
    make("li", {}, make("code", { textContent: shownName(name) }))));
}

/** Creates head and rows of the table again after its columns have changed. */
function rebuild() {
  const heads = view.columns.map((column) => {
    const cell = make("th", { scope: "col", className: column.fault ? "fault" : "" }, make("span", { textContent: column.name }));
    if (column.fault) {
      cell.append(iconButton("close", `Leave out the column ${column.name}`, () => removeColumn(column)),
        make("span", { className: "error", textContent: column.fault }));
    }
    return cell;
  });
  $("table-head").replaceChildren(make("th", { scope: "col" }, "Row"), ...heads,
    make("th", { scope: "col" }, make("span", { className: "hidden", textContent: "Actions" })));
  renderList($("table-rows"), [], (row) => row.id);
}

function createRow(row) {
  const { number } = row;
  const cells = view.columns.map((column, index) => {
    const isText = column.field.endsWith("prompt");
    const error = make("span", { className: "error", id: `cell-${row.id}-${index}`, hidden: true });
    const input = make(isText ? "textarea" : "input", { value: row.cells[index], "aria-label": `${column.name}, row ${number}`,
      ...(isText ? { rows: 1 } : {}) });
    if (column.isFile) input.setAttribute("list", "table-inputs");
    if (column.field === "lora") input.setAttribute("list", "loras");
    input.addEventListener("input", () => { edit(row, index, input.value); });
    return make("td", { className: isText ? "wide" : "" }, input, error);
  });
  const status = make("span", { className: "note" });
  const remove = iconButton("close", `Leave out row ${number}`, () => { removeRow(row); changed(); });
  const error = make("p", { className: "error", hidden: true });
  const node = make("tr", {}, make("th", { scope: "row" }, String(number), " ", status, error), ...cells, make("td", {}, remove));
  return Object.assign(node, { fields: cells, status, rowError: error });
}

function edit(row, index, text) {
  row.cells[index] = text.trim();
  row.refusals = new Map();
  changed();
}

const faultAt = (row, index) => row.faults.get(index) ?? row.refusals.get(index) ?? "";

function updateRow(node, row) {
  node.fields.forEach((cell, index) => {
    const [input, error] = cell.children;
    const fault = faultAt(row, index);
    if (document.activeElement !== input && input.value !== row.cells[index]) input.value = row.cells[index];
    input.disabled = row.isSending;
    setAttribute(input, "aria-invalid", fault ? "true" : null);
    setAttribute(input, "aria-describedby", fault ? error.id : null);
    setText(error, fault);
    error.hidden = !fault;
  });
  const words = faultAt(row, -1);
  setText(node.rowError, words);
  node.rowError.hidden = !words;
  setText(node.status, row.isSending ? "sending…" : "");
}

export function listenToTable() {
  let kept = keptForm()?.table;
  on("models", () => {
    delete $("table-fields").dataset.model;
    if (kept) restoreTable(kept);
    kept = null;
    checkRows();
    renderTable();
  });
  for (const name of ["form", "inputs"]) on(name, () => { checkRows(); renderTable(); });
  $("table-open").addEventListener("click", openTable);
  $("table-close").addEventListener("click", closeTable);
  pressTwice($("table-clear"), "Leave out all rows?", "Really leave out all rows?", closeTable);
  $("table-use").addEventListener("click", () => takeTable($("table-text").value));
  $("table-text").addEventListener("paste", (event) => {
    const text = event.clipboardData.getData("text");
    if (looksLikeTable(text)) { event.preventDefault(); takeTable(text); }
  });
  $("table-file").addEventListener("change", async () => {
    const [file] = $("table-file").files;
    $("table-file").value = "";
    if (file) await takeTableFile(file);
  });
  $("table-faults").addEventListener("click", () => { view.onlyFaults = !view.onlyFaults; renderTable(); });
  $("table-more").addEventListener("click", () => { view.all = true; renderTable(); });
}
