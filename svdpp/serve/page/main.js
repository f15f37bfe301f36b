// Start of the page, and rendering of the whole page after each change.
//
// The page is a client of the JSON API. It never builds HTML from strings, so text such as a file name cannot become
// markup.

import { apiKey, errorText } from "./api.js";
import { playAll, renderClips, retryCards } from "./cards.js";
import { downloadAll } from "./actions.js";
import { listenToRanks, renderRanks } from "./chart.js";
import { isOpen, newestFirst } from "./clips.js";
import { listenToCompare } from "./compare.js";
import { $, make, toast } from "./dom.js";
import { listenToDrops } from "./drops.js";
import { stopStreams } from "./events.js";
import { renderFailed } from "./failed.js";
import { listenToForm } from "./form.js";
import { listenToLock } from "./key.js";
import { readOlder } from "./lists.js";
import { loop, retry } from "./loop.js";
import { listenToOrders, renderOrders } from "./orders.js";
import { listenToInputs } from "./inputs.js";
import { listenToQueue, renderQueue } from "./queue.js";
import { closeGaps, listenToRemovals } from "./remove.js";
import { listenToTable } from "./rows.js";
import { listenToSending } from "./send.js";
import { renderServers } from "./servers.js";
import { on, emit } from "./signals.js";
import { state } from "./state.js";
import { listenToTheme } from "./theme.js";
import { renderBanner, renderHeader } from "./header.js";

function render() {
  document.body.classList.toggle("gone", state.connection === "gone");
  $("lock").hidden = state.connection !== "locked" && !$("lock").dataset.open;
  $("main").hidden = state.connection === "locked";
  $("key-button").hidden = !apiKey();
  closeGaps();
  const videos = newestFirst([...state.videos.values()]);
  renderHeader();
  renderBanner();
  if (state.models) renderOrders();
  renderRanks();
  renderServers();
  renderQueue(videos.filter(isOpen));
  renderFailed(videos.filter((video) => ["failed", "cancelled"].includes(video.status)));
  renderClips(videos.filter((video) => video.status === "completed"));
}

function listen() {
  on("change", render);
  on("online", retryCards);
  $("queue-more").addEventListener("click", () => { state.wholeQueue = !state.wholeQueue; render(); });
  $("older").addEventListener("click", () => readOlder().catch((error) => toast(errorText(error))).finally(render));
  $("play-all").addEventListener("click", playAll);
  $("download-all").addEventListener("click", downloadAll);
  $("picked-cancel").addEventListener("click", () => { state.picked = []; render(); });
  $("banner-button").addEventListener("click", retry);
  document.addEventListener("visibilitychange", () => (document.hidden ? stopStreams() : emit("stale")));
  addEventListener("online", retry);
}

/** Sets the icon of the tab. It is drawn here, because a file would need another request. */
function drawIcon() {
  const drawing = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32">'
    + '<rect width="32" height="32" rx="7" fill="#3350c4"/>'
    + '<path d="M6 9h9v4H6zM11 14.5h9v4h-9zM16 20h10v4H16z" fill="#fff"/></svg>';
  const address = URL.createObjectURL(new Blob([drawing], { type: "image/svg+xml" }));
  document.head.append(make("link", { rel: "icon", href: address }));
}

drawIcon();
for (const start of [listenToTheme, listenToLock, listenToForm, listenToTable, listenToOrders, listenToInputs, listenToDrops,
  listenToSending, listenToCompare, listenToQueue, listenToRanks, listenToRemovals, listen]) start();
render();
// While the server is gone, the banner counts down the seconds until the next try.
setInterval(() => { if (!document.hidden && state.connection === "gone") renderBanner(); }, 1000);
loop();
