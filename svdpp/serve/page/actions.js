// Actions on clips: cancel, verify, download, and copy the parameters.

import { apiKey, fileNameOf, get, release, request, errorText } from "./api.js";
import { drop, isOpen, takeVideo } from "./clips.js";
import { $, make, toast, setAttribute } from "./dom.js";
import { emit } from "./signals.js";
import { state } from "./state.js";
import { plural } from "./text.js";
import { requestOf, titleOf } from "./format.js";

const MAX_IDS = 100;

/** Runs an action on a clip. Meanwhile, the clip shows `words`, such as "Cancelling…"; an error becomes a toast. */
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

/** Cancels all clips in the queue: first the waiting ones, so that none of them begins while others are cancelled. */
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
  // Clips that were running end a little later, when their ranks drop them.
  while ([...tried].some((id) => state.videos.has(id) && isOpen(state.videos.get(id)))) {
    await new Promise((resolve) => setTimeout(resolve, 300));
  }
  toast(`${plural(tried.size, "clip")} cancelled.`);
}

/** Makes a button ask at the first press and act at the second, so that one accidental press does no harm. */
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
  await act(id, "Requesting the verification", async () => {
    const video = await get(`/v1/videos/${id}/verify`, { method: "POST" });
    takeVideo(video);
    if (video.proof !== "running") return; // no verification began: the clip's card shows why
    toast("The clip is made again on one device, once the ranks are idle, and compared bit by bit.");
  });
}

export async function download(id) {
  const path = `/v1/videos/${id}/content`;
  try {
    // A link cannot send an API key. So with a key, the page reads the whole file, and otherwise only the file's name.
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

/** Saves all finished clips as one zip. Without an API key, the browser writes the zip to disk while it arrives. */
export async function downloadAll() {
  const shown = [...state.videos.values()].filter((video) => video.status === "completed" && !state.removals.has(video.id));
  // While clips are being removed, the request lists the ids of the others. But if the page does not know all clips, or
  // the ids would make the URL too long, the request has no ids, and the zip has all clips.
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
    // A seed above 2^53 is a string on this page (see `parse`), but is copied as a JSON number.
    return `  "${name}": ${name === "seed" ? value : JSON.stringify(value)}`;
  });
  const copied = await copyText(`{\n${pairs.join(",\n")}\n}\n`);
  toast(copied ? "Parameters copied." : "The browser did not allow copying.");
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Without HTTPS, browsers offer `navigator.clipboard` only on localhost. Elsewhere, a selected text is copied.
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
