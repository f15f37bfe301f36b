// Data that survives a reload of the page: the form in the tab's session storage, its images in IndexedDB.

import { token } from "./random.js";

const FORM = "svdpp-form";
const TAB = "svdpp-tab"; // name of the tab: all tabs store their images in the same database
const FORGOTTEN = "svdpp-forgotten"; // ids of removed images: a reload may come before the database deletes them
const OLD_SECONDS = 86400; // age at which an image is deleted if its tab was not loaded again

/** Returns the stored values of the form; null if none are stored. */
export function keptForm() {
  try { return JSON.parse(sessionStorage.getItem(FORM)); } catch { return null; }
}

export function keepForm(values) {
  try {
    sessionStorage.setItem(FORM, JSON.stringify(values));
  } catch { // Storage is full or forbidden. An older form that is still stored would be outdated, so it is removed.
    try { sessionStorage.removeItem(FORM); } catch { /* storage is forbidden, so nothing is stored */ }
  }
}

function tabName() {
  const name = sessionStorage.getItem(TAB) ?? token();
  sessionStorage.setItem(TAB, name);
  return name;
}

const answerOf = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

// The database is opened only once, so that it is ready for an image that is added just before a reload.
let opened = null;

function open() {
  const opening = indexedDB.open("svdpp", 1);
  // The store of the images keeps the name that older pages gave it.
  opening.onupgradeneeded = () => opening.result.createObjectStore("photos", { keyPath: "id" });
  return answerOf(opening);
}

/** Calls `work` with the database's images; returns [] if the browser does not allow the database. */
async function withInputs(work) {
  try {
    opened ??= open();
    return await work((await opened).transaction("photos", "readwrite").objectStore("photos"));
  } catch (error) {
    console.info(`Images are not stored for a reload: ${error.message}`);
    return [];
  }
}

let numKept = 0; // orders images that were added in the same millisecond

export function keepInput({ id, file }) {
  const input = { id, file, tab: tabName(), at: Date.now(), index: numKept++ };
  return withInputs((inputs) => answerOf(inputs.put(input)));
}

function forgottenIds() {
  try { return JSON.parse(sessionStorage.getItem(FORGOTTEN)) ?? []; } catch { return []; }
}

export function forgetInput(id) {
  try {
    sessionStorage.setItem(FORGOTTEN, JSON.stringify([...forgottenIds(), id]));
  } catch { /* storage is full or forbidden: only the database forgets the image */ }
  return withInputs((inputs) => answerOf(inputs.delete(id)));
}

/** Returns this tab's stored images in their order; deletes removed ones, and old ones of tabs that were closed. */
export function keptInputs() {
  return withInputs(async (inputs) => {
    const all = await answerOf(inputs.getAll());
    const isOld = ({ at }) => Date.now() - at > 1000 * OLD_SECONDS;
    const forgotten = new Set(forgottenIds());
    const isGone = (input) => isOld(input) || forgotten.has(input.id);
    await Promise.all(all.filter(isGone).map(({ id }) => answerOf(inputs.delete(id))));
    sessionStorage.removeItem(FORGOTTEN);
    const own = all.filter((input) => input.tab === tabName() && !isGone(input));
    return own.sort((a, b) => a.at - b.at || a.index - b.index);
  });
}
