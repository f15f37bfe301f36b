// Owns what a person can do with a clip: cancel, verify, download, copy its parameters.

import { apiKey, fileNameOf, get, release, request, errorText } from "./api.js";
import { drop, isOpen, takeVideo } from "./clips.js";
import { $, make, toast, setAttribute } from "./dom.js";
import { emit } from "./signals.js";
import { state } from "./state.js";
import { plural } from "./text.js";
import { requestOf, titleOf } from "./format.js";

const MAX_IDS = 100;

/** Does what a person asked for with a clip, and shows that it is under way, and why it failed. */
async function act(id, words, work) {
  if (state.busy.has(id)) return;
  state.busy.set(id, `${words}…`);
  emit("change");
  try {
    await work();
  } catch (error) {
    if (error.status === 404) drop(id);
    toast(errorText(error));
  } finally {
    state.busy.delete(id);
    emit("change");
    emit("stale");
  }
}

export async function cancel(id) {
  await act(id, "Cancelling", async () => {
    takeVideo(await get(`/v1/videos/${id}/cancel`, { method: "POST" }));
    state.listAt = 0;
  });
}

/** Cancels all clips in the queue; those that wait first, so that none of them begins meanwhile. */
export async function cancelAll() {
  const tried = new Set();
  for (const status of ["queued", "in_progress"]) {
    for (;;) {
      const { data } = await get(`/v1/videos?limit=100&order=desc&status=${status}`);
      const left = data.filter((video) => !tried.has(video.id));
      if (!left.length) break;
      for (const video of left) {
        tried.add(video.id);
        takeVideo(video, { quietly: true });
        await cancel(video.id);
      }
    }
  }
  // Running ones end a little later; the list says when.
  while ([...tried].some((id) => state.videos.has(id) && isOpen(state.videos.get(id)))) {
    await new Promise((resolve) => setTimeout(resolve, 300));
  }
  toast(`${plural(tried.size, "clip")} cancelled.`);
}

/** Has a button do its work only at the second press, so that a slip loses nothing. */
export function pressTwice(button, question, label, work) {
  const [before, labelBefore] = [[...button.childNodes], button.getAttribute("aria-label")];
  const reset = () => {
    button.classList.remove("danger");
    button.replaceChildren(...before);
    setAttribute(button, "aria-label", labelBefore);
  };
  button.addEventListener("click", () => {
    if (button.classList.contains("danger")) {
      reset();
      Promise.resolve(work()).catch((error) => toast(errorText(error)));
      return;
    }
    button.classList.add("danger");
    button.replaceChildren(question);
    setAttribute(button, "aria-label", label);
    setTimeout(reset, 5000);
  });
  button.addEventListener("blur", reset);
}

export async function verify(id) {
  await act(id, "Asking for the verification", async () => {
    const video = await get(`/v1/videos/${id}/verify`, { method: "POST" });
    takeVideo(video);
    if (video.proof !== "running") return; // it says why
    toast("The clip is made again on one device, once the ranks are idle, and compared bit by bit.");
  });
}

export async function download(id) {
  const path = `/v1/videos/${id}/content`;
  try {
    // With a key, which a link cannot send, the file is read here; without one only its name is.
    const answer = await request(path, { method: apiKey() ? "GET" : "HEAD" });
    save(apiKey() ? URL.createObjectURL(await answer.blob()) : path, fileNameOf(answer));
  } catch (error) {
    toast(errorText(error));
  }
}

function save(address, name) {
  const link = make("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => release(address), 60000);
}

/** Saves all finished clips as one zip, which the browser writes to the disk as it arrives. */
export async function downloadAll() {
  const shown = [...state.videos.values()].filter((video) => video.status === "completed" && !state.removals.has(video.id));
  // Those that are being removed are no longer wanted; a long list of ids has no room in an address.
  const isPart = state.removals.size > 0 && !state.hasOlder && shown.length <= MAX_IDS;
  const path = `/v1/videos/archive${isPart ? `?${shown.map(({ id }) => `ids=${id}`).join("&")}` : ""}`;
  if (!apiKey()) {
    save(path, "");
    return;
  }
  $("download-all").disabled = true;
  toast("The clips are being read; the browser saves them when they are complete.");
  try {
    const answer = await request(path);
    save(URL.createObjectURL(await answer.blob()), fileNameOf(answer));
  } catch (error) {
    toast(errorText(error));
  } finally {
    $("download-all").disabled = false;
  }
}

export async function copyParameters(id) {
  const video = state.videos.get(id);
  const pairs = Object.entries({ model: video.model, ...requestOf(video) }).map(([name, value]) => {
    // A seed above 2^53 is text here, and a number for every other program.
    return `  "${name}": ${name === "seed" ? value : JSON.stringify(value)}`;
  });
  const copied = await copyText(`{\n${pairs.join(",\n")}\n}\n`);
  toast(copied ? "Parameters copied." : "The browser did not allow to copy.");
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Without HTTPS, browsers have the clipboard's interface only on localhost.
    const area = make("textarea", { value: text, className: "hidden", "aria-hidden": "true" });
    const before = document.activeElement;
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    before?.focus();
    return copied;
  }
}
