// Chart of the ranks over time: current action of each rank, and its actions in the last minute.

import { tintOf } from "./clips.js";
import { $, make, makeSvg, renderList, setAttribute, setText } from "./dom.js";
import { WINDOW_SECONDS } from "./engine.js";
import { state } from "./state.js";
import { now, plural } from "./text.js";
import { nameOf, stemOf, stepText, titleOf } from "./format.js";

const FOLD = "svdpp-ranks";

const ACTIONS = { encode: "encoding", denoise: "denoising", decode: "decoding", send: "sending", recv: "receiving" };

export function renderRanks() {
  const ranks = state.engine?.ranks ?? [];
  $("ranks-empty").hidden = ranks.length > 0;
  $("rank-axis").hidden = !ranks.length;
  setText($("ranks-empty"), state.engine ? "No rank is up yet." : "Waiting for the server.");
  setText($("ranks-note"), noteOf(ranks));
  if (state.connection === "gone" || !$("ranks-fold").open) return; // without new reports, the chart stays
  renderList($("rank-list"), ranks, (rank) => rank.rank, createRank, updateRank);
}

function noteOf(ranks) {
  if (!ranks.length) return "";
  const working = ranks.filter((rank) => rank.doing === "compute").length;
  return `${plural(ranks.length, "rank")}, ${working ? `${working} at work` : "idle"}`;
}

/** Restores whether the chart is open, and stores each change. It is folded until a user opens it. */
export function listenToRanks() {
  try { $("ranks-fold").open = localStorage.getItem(FOLD) === "open"; } catch { /* storage may be forbidden */ }
  $("ranks-fold").querySelector("summary").addEventListener("click", () => setTimeout(() => {
    const isOpen = $("ranks-fold").open;
    try { localStorage.setItem(FOLD, isOpen ? "open" : "folded"); } catch { /* storage may be forbidden */ }
    renderRanks();
  }));
}

function createRank(rank) {
  const strip = makeSvg("svg", { class: "strip", role: "img" });
  const device = make("span", { className: "note" });
  const parts = {
    who: make("span", { className: "who" }, make("b", { textContent: `Rank ${rank.rank}` })),
    strip,
    doing: make("span", { className: "now number" }),
    busy: make("span", { className: "busy number", title: "Share of the last minute in which this rank computed" }),
  };
  parts.who.append(" ", device);
  return Object.assign(make("li", { className: "rank" }, ...Object.values(parts)), { parts: { ...parts, device } });
}

function updateRank(node, rank) {
  const { strip, doing, busy, device } = node.parts;
  const end = now() + state.clockOffset;
  const spans = mergeSpans(state.engine.spans.filter((span) => span.rank === rank.rank), end);
  const seconds = { encode: 0, denoise: 0, decode: 0 };
  for (const span of spans) seconds[span.kind] += span.end - span.start;
  const worked = Math.min(WINDOW_SECONDS, seconds.encode + seconds.denoise + seconds.decode);
  setText(device, rank.device);
  setText(doing, rankStatus(rank));
  setText(busy, `${Math.round(percent(worked))}% busy`);
  setAttribute(strip, "aria-label", `Last minute of rank ${rank.rank}: ${describeSeconds(seconds)}`);
  const works = (time) => spans.some((span) => span.start < time && time < span.end);
  const waits = (state.waits.get(rank.rank) ?? []).filter((time) => !works(time));
  strip.replaceChildren(
    ...[20, 40].map((at) => makeSvg("rect", { class: "tick", x: `${percent(at)}%`, width: 1, height: "100%" })),
    ...waits.map((time) => drawWait(time, end)),
    ...spans.map((span) => drawSpan(span, end, strip.clientWidth)),
  );
}

const percent = (seconds) => 100 * seconds / WINDOW_SECONDS;

function describeSeconds(seconds) {
  const parts = Object.entries(seconds).filter(([, value]) => value >= 0.5);
  return parts.map(([kind, value]) => `${kind} ${Math.round(value)} s`).join(", ") || "nothing";
}

function rankStatus(rank) {
  const video = state.videos.get(rank.video);
  const name = video ? nameOf(video) : rank.video ? "a clip of another key" : "";
  if (!rank.device && state.engine.state !== "ready") return "starts";
  if (rank.doing === "idle") return "idle";
  if (rank.doing === "wait") return name ? `waits for ${name}` : "waits";
  if (rank.step === null) return `${ACTIONS[rank.action] ?? rank.action} ${name}`;
  // The clip's event stream may have reported a later step than the rank's last report.
  const done = video?.rank === rank.rank ? Math.max(rank.step, video.step) : rank.step;
  return `${video ? stepText({ ...video, rank: rank.rank }, done) : `Step ${done + 1}`} · ${name}`;
}

const positionOf = (time, end) => `${100 - percent(end - time)}%`;

/**
 * Returns the parts of the spans that are within the last minute. Adjacent spans of the same clip and kind are merged,
 * so that the chart has one rectangle for a rank's consecutive denoising steps instead of one for each step.
 */
function mergeSpans(spans, end) {
  const merged = [];
  for (const span of spans.sort((a, b) => a.start - b.start)) {
    const cut = { ...span, start: Math.max(span.start, end - WINDOW_SECONDS), end: Math.min(span.end ?? end, end) };
    if (cut.end <= cut.start) continue;
    const last = merged.at(-1);
    if (last && last.video === cut.video && last.kind === cut.kind && cut.start - last.end < 0.15) last.end = cut.end;
    else merged.push(cut);
  }
  return merged;
}

const drawWait = (time, end) =>
  makeSvg("rect", { class: "wait", x: positionOf(time - 1, end), y: 11, width: `${percent(1)}%`, height: 2 });

function drawSpan(span, end, width) {
  const video = state.videos.get(span.video);
  const seconds = span.end - span.start;
  const pixels = percent(seconds) / 100 * width;
  const group = makeSvg("svg", { x: positionOf(span.start, end), y: 0, width: `${percent(seconds)}%`, height: "100%",
    "data-kind": span.kind, "data-tint": video ? tintOf(span.video) : "none" });
  group.append(makeSvg("rect", { class: "body", width: "100%", height: "100%" }));
  if (span.kind === "encode") group.append(...stripes(pixels));
  if (span.kind === "denoise" && video && pixels > 34) group.append(label(stemOf(video), pixels));
  const who = video ? titleOf(video) : "another clip";
  group.append(makeSvg("title", {}, `${span.kind} ${who}: ${seconds.toFixed(1)} s`));
  return group;
}

const stripes = (pixels) => Array.from({ length: Math.ceil((pixels + 24) / 6) }, (_, index) =>
  makeSvg("line", { class: "stripes", x1: 6 * index - 24, y1: 24, x2: 6 * index, y2: 0 }));

function label(name, pixels) {
  const fits = Math.floor((pixels - 10) / 6.2);
  const text = name.length > fits ? `${name.slice(0, fits - 1)}…` : name;
  return makeSvg("text", { x: 6, y: "50%", "dominant-baseline": "central" }, text);
}
