// Owns what a reload keeps: the form in the tab's session storage, its images in IndexedDB.

import { token } from "./random.js";

const FORM = "svdpp-form";
const TAB = "svdpp-tab"; // images of other tabs are in the same database
const FORGOTTEN = "svdpp-forgotten"; // ids: a reload may stop the database before it deletes an image
const OLD_SECONDS = 86400; // of images that no tab came back for

/** The form as it was; null if there is none. */
export function keptForm() {
  try { return JSON.parse(sessionStorage.getItem(FORM)); } catch { return null; }
}

export function keepForm(values) {
  try {
    sessionStorage.setItem(FORM, JSON.stringify(values));
  } catch { // storage is full, and an older form would be the wrong one, or it is forbidden
    try { sessionStorage.removeItem(FORM); } catch { /* there is none */ }
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

let opened = null; // once, so that a change just before a reload is still begun

function open() {
  const opening = indexedDB.open("svdpp", 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore("photos", { keyPath: "id" });
  return answerOf(opening);
}

/** Does something with the stored images; a browser that forbids it keeps none. */
async function withPhotos(work) {
  try {
    opened ??= open();
    return await work((await opened).transaction("photos", "readwrite").objectStore("photos"));
  } catch (error) {
    console.info(`Images are not kept: ${error.message}`);
    return [];
  }
}

let numKept = 0; // orders those of one millisecond

export function keepPhoto({ id, file }) {
  const photo = { id, file, tab: tabName(), at: Date.now(), index: numKept++ };
  return withPhotos((photos) => answerOf(photos.put(photo)));
}

function forgottenIds() {
  try { return JSON.parse(sessionStorage.getItem(FORGOTTEN)) ?? []; } catch { return []; }
}

export function forgetPhoto(id) {
  try {
    sessionStorage.setItem(FORGOTTEN, JSON.stringify([...forgottenIds(), id]));
  } catch { /* storage is full or forbidden: the database alone forgets the image */ }
  return withPhotos((photos) => answerOf(photos.delete(id)));
}

/** The images that this tab had, in their order; forgets those that no tab came back for. */
export function keptPhotos() {
  return withPhotos(async (photos) => {
    const all = await answerOf(photos.getAll());
    const isOld = ({ at }) => Date.now() - at > 1000 * OLD_SECONDS;
    const forgotten = new Set(forgottenIds());
    const isGone = (photo) => isOld(photo) || forgotten.has(photo.id);
    await Promise.all(all.filter(isGone).map(({ id }) => answerOf(photos.delete(id))));
    sessionStorage.removeItem(FORGOTTEN);
    const own = all.filter((photo) => photo.tab === tabName() && !isGone(photo));
    return own.sort((a, b) => a.at - b.at || a.index - b.index);
  });
}
