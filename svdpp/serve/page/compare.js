// Comparison of two clips, which play side by side and at the same time.

import { mediaOf, release, errorText } from "./api.js";
import { tintOf } from "./clips.js";
import { $, icon, make, toast, setAttribute, setText } from "./dom.js";
import { emit } from "./signals.js";
import { state } from "./state.js";
import { parameterNames, parameterText, parametersOf, verificationText, titleOf } from "./format.js";

const shown = { leader: null, players: [...document.querySelectorAll("#compare video")], origin: null, addresses: [] };

export function pick(id) {
  state.picked = state.picked.includes(id) ? state.picked.filter((each) => each !== id) : [...state.picked, id];
  if (state.picked.length === 1) toast("Choose a second clip to compare.");
  if (state.picked.length === 2) openCompare(...state.picked.map((each) => state.videos.get(each)));
  emit("change");
}

async function openCompare(...videos) {
  shown.videos = videos;
  shown.origin = document.activeElement;
  for (const [index, figure] of document.querySelectorAll("#compare figure").entries()) {
    const video = videos[index];
    setAttribute(figure, "data-tint", tintOf(video.id));
    figure.querySelector("figcaption").replaceChildren(make("span", { className: "dot" }), titleOf(video));
    setAttribute(shown.players[index], "aria-label", `${index ? "Second" : "First"} clip: ${titleOf(video)}`);
  }
  fillCompareTable(videos);
  $("compare").showModal();
  try {
    shown.addresses = await Promise.all(videos.map((video) => mediaOf(video.id)));
  } catch (error) {
    $("compare").close();
    toast(errorText(error));
    return;
  }
  const lengths = videos.map((video) => video.frames / video.fps);
  shown.players.forEach((player, index) => { player.src = shown.addresses[index]; });
  // The longer clip leads; the shorter one stays on its last frame until both begin again.
  shown.leader = shown.players[lengths[1] > lengths[0] ? 1 : 0];
  if (!state.paused) playCompare();
  showCompare();
  requestAnimationFrame(syncCompare);
}

function fillCompareTable(videos) {
  const row = (name, [first, second]) => make("tr", { className: first === second ? "" : "differs" },
    make("th", { scope: "row", textContent: name }),
    make("td", { textContent: first }), make("td", { textContent: second }));
  const names = [...parameterNames().filter((name) => videos.some((video) => parametersOf(video).includes(name))), "seconds"];
  const rows = names.map((name) => row(name, videos.map((video) => parameterText(video, name))));
  const verifications = row("verified", videos.map(verificationText));
  $("compare-table").tBodies[0].replaceChildren(...rows, verifications);
}

function playCompare() {
  for (const player of shown.players) if (!player.ended) player.play().catch(() => {});
}

function pauseCompare() {
  for (const player of shown.players) player.pause();
  seekCompare(shown.leader.currentTime);
}

function seekCompare(time) {
  for (const player of shown.players) {
    // At exactly its end, a video would be "ended": it shows the last frame, but would play on from the first.
    player.currentTime = Math.max(0, Math.min(time, (player.duration || 0) - 0.001));
  }
}

/** Keeps two playing clips in sync: moves the following one if it is off by more than half a frame and 0.05 s. */
function syncCompare() {
  if (!$("compare").open) return;
  const { leader, players } = shown;
  const other = players.find((player) => player !== leader);
  if (leader.ended) {
    seekCompare(0);
    playCompare();
  } else if (!leader.paused && !other.ended && !other.seeking && other.readyState > 2) {
    const target = Math.min(leader.currentTime, other.duration - 0.001);
    const rate = shown.videos[0].fps;
    if (Math.abs(other.currentTime - target) > Math.max(0.05, 0.5 / rate)) other.currentTime = target;
  }
  showCompare();
  requestAnimationFrame(syncCompare);
}

function showCompare() {
  const { leader } = shown;
  const length = leader.duration || 1;
  const label = leader.paused ? "Play both" : "Pause both";
  if ($("compare-play").getAttribute("aria-label") !== label) {
    $("compare-play").replaceChildren(icon(leader.paused ? "play" : "pause"));
    setAttribute($("compare-play"), "aria-label", label);
  }
  const isHeld = document.activeElement === $("compare-time") && leader.paused;
  if (!isHeld) $("compare-time").value = leader.currentTime / length;
  setText($("compare-at"), `${leader.currentTime.toFixed(2)} / ${length.toFixed(2)} s`);
  setAttribute($("compare-time"), "aria-valuetext", `${leader.currentTime.toFixed(1)} s`);
}

function stepCompare(direction) {
  const { fps } = shown.videos[shown.players.indexOf(shown.leader)];
  pauseCompare();
  // The time is set to the middle of a frame, where rounding cannot select a neighbouring frame.
  const frame = Math.floor(shown.leader.currentTime * fps + 1e-6) + direction;
  const last = Math.round((shown.leader.duration || 0) * fps) - 1;
  seekCompare((Math.min(last, Math.max(0, frame)) + 0.5) / fps);
}

function closeCompare() {
  for (const player of shown.players) { player.pause(); player.removeAttribute("src"); player.load(); }
  shown.addresses.forEach(release);
  shown.addresses = [];
  state.picked = [];
  emit("change");
  shown.origin?.focus();
}

export function listenToCompare() {
  $("compare-close").addEventListener("click", () => $("compare").close());
  $("compare").addEventListener("close", closeCompare);
  $("compare-play").addEventListener("click", () => (shown.leader.paused ? playCompare() : pauseCompare()));
  $("compare-back").addEventListener("click", () => stepCompare(-1));
  $("compare-forth").addEventListener("click", () => stepCompare(1));
  $("compare-time").addEventListener("input", () => {
    for (const player of shown.players) player.pause();
    seekCompare($("compare-time").value * (shown.leader.duration || 0));
  });
}
