// Owns the behaviour of the page of `svdpp serve`: it shows what the JSON API says, and asks the API for clips.
//
// One loop asks for /v1/engine every second. Its answer also says when the list of clips is out of date.
// Nothing here builds HTML from text, so no name of a file can become markup.

const WINDOW_SECONDS = 60; // of the chart
const MAX_BACKOFF_SECONDS = 30;
const ANSWER_SECONDS = 15; // a server that takes longer to say what its ranks do is gone
const LIST_SECONDS = 10; // age of the list after which it is read again, with open clips
const PAGE_CLIPS = 100;
const SHOWN_IN_QUEUE = 8;
const NUM_TINTS = 8;
// A browser opens six connections to a server over HTTP/1.1, for all of its tabs together.
const MAX_STREAMS = 2;

const PARAMETERS = ["size", "steps", "frames", "fps", "seed", "motion_bucket_id", "noise_aug_strength",
  "min_guidance_scale", "max_guidance_scale", "fit", "priority"];
const PROOFS = {
  none: "not verified",
  asked: "to be verified when the ranks are idle",
  running: "being verified on one device",
  equal: "bitwise equal to diffusers on one device",
  different: "different from diffusers on one device",
};

const state = {
  connection: "loading", // loading, online, gone, locked
  failures: 0, // of the engine's answer, one after another
  retryAt: 0,
  problem: "", // the server's own words, if it refuses to say what its ranks do
  engine: null,
  clockOffset: 0, // seconds of the server's clock minus this one's
  counts: "",
  listAt: 0,
  listed: false,
  hasOlder: false,
  lastId: null, // of the oldest clip of the pages that were read
  allRead: false, // the oldest clip is shown
  wholeQueue: false, // all of its rows are shown
  moreWaiting: false, // than the list has
  models: null,
  videos: new Map(), // by id
  numSeen: 0,
  removed: new Set(), // ids, against answers that were on their way
  tints: new Map(), // by id
  busy: new Map(), // id -> what the page has asked for it and not got yet
  photos: [], // chosen, not sent
  sent: new Map(), // sha256 or id of a clip -> {file, thumb} of this tab
  waits: new Map(), // rank -> [unix seconds] at which it waited
  streams: new Map(), // id -> AbortController
  picked: [], // ids to compare
  paused: matchMedia("(prefers-reduced-motion: reduce)").matches,
};

// ---------------------------------------------------------------------------------------- small things

const $ = (id) => document.getElementById(id);
const now = () => Date.now() / 1000;
const sleep = (seconds) => new Promise((resolve) => { wakeLoop = resolve; setTimeout(resolve, seconds * 1000); });
let wakeLoop = () => {};

/** An element; `properties` are properties, attributes (aria-*, data-*, role) or listeners (on*). */
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && !name.startsWith("aria")) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function makeSvg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const icon = (name) => makeSvg("svg", { "aria-hidden": "true" }, makeSvg("use", { href: `#icon-${name}` }));

function iconButton(name, label, onclick) {
  return make("button", { type: "button", className: "icon-button", "aria-label": label, title: label, onclick },
    icon(name));
}

/** Sets a text only where it changes, so that a reader's place and a selection stay. */
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function setAttribute(element, name, value) {
  if (value === null || value === "") element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

/** Makes the children of `parent` those of `items`, reusing elements, so that focus and playback stay. */
function renderList(parent, items, keyOf, create, update) {
  const old = (parent.nodesByKey ??= new Map());
  const keys = new Set(items.map(keyOf));
  for (const [key, node] of old) {
    if (keys.has(key)) continue;
    if (node.contains(document.activeElement)) focusNear(node);
    node.forget?.();
    node.remove();
    old.delete(key);
  }
  items.forEach((item, index) => {
    const key = keyOf(item);
    let node = old.get(key);
    if (!node) old.set(key, node = create(item));
    if (parent.children[index] !== node) parent.insertBefore(node, parent.children[index] ?? null);
    update(node, item);
  });
}

/** Moves the keyboard's focus from a node that goes to its neighbour, or else to their section. */
function focusNear(node) {
  const section = node.closest("section, form");
  const neighbour = (node.nextElementSibling ?? node.previousElementSibling)?.querySelector("button");
  // In the queue, whose rows end by themselves, a key pressed too late would cancel the next clip.
  const next = section.id === "queue" ? null : neighbour;
  (next ?? (section.id === "new" ? $("files") : section)).focus({ preventScroll: true });
}

/** Shows a message for a while and has a screen reader say it. */
function say(text) {
  $("say").textContent = text;
  $("say").classList.remove("past");
  clearTimeout(say.timer);
  say.timer = setTimeout(() => $("say").classList.add("past"), 6000);
}

const plural = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  const [minutes, hours] = [Math.floor(whole / 60), Math.floor(whole / 3600)];
  const two = (value) => String(value).padStart(2, "0");
  return hours ? `${hours} h ${two(minutes % 60)} min` : `${minutes} min ${two(whole % 60)} s`;
}

function size(bytes) {
  return bytes < 1e6 ? `${Math.max(1, Math.round(bytes / 1e3))} kB` : `${(bytes / 1e6).toFixed(1)} MB`;
}

const nameOf = (video) => video.input?.name || "photograph";
const titleOf = (video) => `${nameOf(video)}, seed ${video.seed}`;
const isOpen = (video) => video.status === "queued" || video.status === "in_progress";
const shape = (video) => `${video.size.replace("x", "×")} · ${plural(video.frames, "frame")} · ${plural(video.steps, "step")}`;

/** A clip's proof; what is to be verified waits as long as the ranks have work. */
function proofOf(video) {
  const { queued = 0, in_progress: running = 0 } = state.engine?.queue ?? {};
  return video.proof === "running" && queued + running > 0 ? "asked" : video.proof;
}

function tintOf(id) {
  if (!state.tints.has(id)) state.tints.set(id, state.tints.size % NUM_TINTS);
  return state.tints.get(id);
}

// ------------------------------------------------------------------------------------------------- API

/** What the server refuses, in its own words. */
class Refusal extends Error {
  constructor(status, error, retryAfter) {
    super(error.message || `the server answered ${status}`);
    Object.assign(this, { status, code: error.code, hint: error.hint, details: error.details ?? {}, retryAfter });
  }

  /** The message as a sentence, with the hint. */
  get words() {
    const wait = this.retryAfter ? `Try again in about ${duration(this.retryAfter)}.` : "";
    return [sentence(this.message), sentence(this.hint), wait].filter(Boolean).join(" ");
  }
}

/** No answer came. */
class Gone extends Error {
  get words() { return "The server does not answer. Nothing is lost: try again."; }
}

const capital = (text) => text[0].toUpperCase() + text.slice(1);

function sentence(text) {
  if (!text) return "";
  const isName = /^[a-z]+_|^--/.test(text); // of a parameter, which keeps its small letter
  return (isName ? text : capital(text)) + (/[.!?]$/.test(text) ? "" : ".");
}

const key = () => sessionStorage.getItem("svdpp-key");

async function request(path, { headers = {}, ...options } = {}) {
  if (key()) headers.Authorization = `Bearer ${key()}`;
  let answer;
  try {
    answer = await fetch(path, { headers, ...options });
  } catch (error) {
    if (options.signal?.aborted && options.signal.reason?.name !== "TimeoutError") throw error;
    throw new Gone();
  }
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => ({}));
  if (answer.status === 401) lock(body.error?.message);
  // A proxy in front of a server that is gone answers in its place, and not in the API's shape.
  if (!body.error && [502, 503, 504].includes(answer.status)) throw new Gone();
  throw new Refusal(answer.status, body.error ?? {}, Number(answer.headers.get("Retry-After")) || null);
}

/** JSON whose seeds keep all of their digits: above 2^53 they stay text. */
function parse(text) {
  return JSON.parse(text, (name, value, context) =>
    (name === "seed" && !Number.isSafeInteger(value) && context?.source ? context.source : value));
}

const get = async (path, options) => parse(await (await request(path, options)).text());

// ------------------------------------------------------------------------------- the loop and the state

async function loop() {
  for (;;) {
    try {
      const signal = AbortSignal.timeout(ANSWER_SECONDS * 1000);
      takeEngine(await get("/v1/engine", { signal }));
      if (state.connection !== "online") await comeOnline();
      if (listIsOld()) await readList();
      follow();
    } catch (error) {
      lose(error);
    }
    try {
      render();
    } catch (error) {
      console.error(error); // the next answer may be one that can be shown
    }
    await sleep(pause());
  }
}

function pause() {
  if (state.connection === "locked") return 3600;
  if (state.connection === "gone") return Math.max(0.2, state.retryAt - now());
  return document.hidden ? 5 : 1;
}

function lose(error) {
  if (state.connection === "locked") return;
  state.failures += 1;
  state.problem = "";
  if (error instanceof Refusal) state.problem = error.words;
  else if (!(error instanceof Gone || error.name === "TimeoutError")) {
    console.error(error);
    state.problem = `The page cannot read the server's answer: ${error.message}.`;
  }
  state.retryAt = now() + Math.min(MAX_BACKOFF_SECONDS, 2 ** (state.failures - 1));
  if (state.connection !== "gone") say("The server does not answer. The page tries again by itself.");
  state.connection = "gone";
  stopStreams();
}

async function comeOnline() {
  const was = state.connection;
  if (!state.models || was === "gone") await readModels();
  state.connection = "online";
  state.failures = 0;
  await readList();
  for (const node of $("clip-list").children) node.retry?.();
  if (was === "gone") say("The server is back.");
}

function takeEngine(engine) {
  if (engine.state === "restarting" && state.engine && state.engine.state !== "restarting") {
    say("The ranks restart. Unfinished clips go on from their latent checkpoints.");
  }
  // What a rank does now ends now, by the server's clock.
  if (engine.ranks.some((rank) => rank.doing === "compute") && engine.spans.length) {
    state.clockOffset = Math.max(...engine.spans.map((span) => span.end)) - now();
  }
  state.engine = engine;
  for (const rank of engine.ranks) {
    const waits = state.waits.get(rank.rank) ?? [];
    if (rank.doing === "wait") waits.push(now() + state.clockOffset);
    state.waits.set(rank.rank, waits.filter((time) => time > now() + state.clockOffset - WINDOW_SECONDS));
    const video = state.videos.get(rank.video);
    if (video?.status === "queued" && rank.doing === "compute") state.listAt = 0; // it has begun
    const computes = rank.doing === "compute" && rank.step !== null; // others wait for a clip that is elsewhere
    if (video?.status === "in_progress" && computes && !state.streams.has(video.id)) {
      video.step = Math.max(video.step, rank.step);
      video.rank = rank.rank;
    }
  }
}

function listIsOld() {
  const counts = JSON.stringify(state.engine.queue) + state.engine.state;
  const changed = counts !== state.counts;
  state.counts = counts;
  const videos = [...state.videos.values()];
  const proving = videos.some((video) => video.proof === "running");
  const age = now() - state.listAt;
  return changed || age > (proving ? 3 : videos.some(isOpen) ? LIST_SECONDS : 6 * LIST_SECONDS);
}

async function readModels() {
  state.models = (await get("/v1/models")).data;
  fillModels();
}

/** Reads the newest clips, and the open ones if they need not be among these. */
async function readList() {
  const newest = await get(`/v1/videos?limit=${PAGE_CLIPS}&order=desc`);
  const answers = [newest];
  if (newest.has_more) {
    const open = ["queued", "in_progress"].map((status) => get(`/v1/videos?limit=${PAGE_CLIPS}&order=asc&status=${status}`));
    answers.push(...await Promise.all(open));
  }
  const found = new Map(answers.flatMap((answer) => answer.data).map((video) => [video.id, video]));
  const oldest = newest.data.at(-1)?.created_at ?? 0;
  const unclear = [];
  for (const video of state.videos.values()) {
    if (found.has(video.id)) continue;
    if (!newest.has_more || video.created_at > oldest) forget(video.id);
    else if (video.status === "in_progress" || (isOpen(video) && !answers[1].has_more)) unclear.push(video.id);
  }
  // In the order of their requests, so that neighbours have different colours.
  for (const video of [...found.values()].reverse().sort((a, b) => a.created_at - b.created_at)) {
    takeVideo(video, { quietly: !state.listed });
  }
  for (const id of unclear.slice(0, 10)) await readVideo(id);
  state.lastId ??= newest.last_id;
  state.hasOlder = newest.has_more && !state.allRead;
  state.moreWaiting = Boolean(answers[1]?.has_more);
  state.listed = true;
  state.listAt = now();
}

async function readVideo(id) {
  try {
    takeVideo(await get(`/v1/videos/${id}`));
  } catch (error) {
    if (error.status !== 404) throw error;
    drop(id);
  }
}

async function readOlder() {
  const answer = await get(`/v1/videos?limit=${PAGE_CLIPS}&order=desc&after=${state.lastId}`);
  state.lastId = answer.last_id ?? state.lastId;
  for (const video of answer.data.reverse()) takeVideo(video, { quietly: true });
  state.allRead = !answer.has_more;
  state.hasOlder = answer.has_more;
}

/** Takes a clip's newest state; says what its owner waits for. */
function takeVideo(video, { quietly = false } = {}) {
  if (state.removed.has(video.id)) return;
  const old = state.videos.get(video.id);
  if (old && !isOpen(old) && isOpen(video)) return; // an answer that was overtaken
  video.eta_at = now();
  video.index = old?.index ?? state.numSeen++; // orders those of one second
  state.videos.set(video.id, video);
  tintOf(video.id);
  if (!isOpen(video)) endStream(video.id);
  if (quietly) return;
  if (old?.status !== video.status) {
    if (video.status === "completed") say(`${titleOf(video)}: finished.`);
    if (video.status === "failed") say(`${titleOf(video)}: failed. ${sentence(video.error?.message)}`);
    if (video.status === "cancelled") say(`${titleOf(video)}: cancelled.`);
  }
  if (old && old.proof !== video.proof && video.proof !== "running") {
    const words = video.proof === "none" ? "not verified; the server's log says why" : PROOFS[video.proof];
    say(`${titleOf(video)}: ${words}.`);
  }
}

function forget(id) {
  endStream(id);
  if (state.lastId === id) state.lastId = null; // the next list begins again from the newest ones
  state.videos.delete(id);
  state.tints.delete(id);
  state.picked = state.picked.filter((each) => each !== id);
}

const isNewer = (a, b) => (a.created_at - b.created_at || a.index - b.index) > 0;
const byStart = (a, b) => a.started_at - b.started_at || (isNewer(a, b) ? 1 : -1);
const newestFirst = (videos) => videos.sort((a, b) => (isNewer(a, b) ? -1 : 1));

// -------------------------------------------------------------------------------------------- events

/** Follows the running clips by server-sent events, the longest-running first; the list has the others. */
function follow() {
  const running = [...state.videos.values()].filter((video) => video.status === "in_progress");
  running.sort(byStart);
  const wanted = new Set(document.hidden ? [] : running.slice(0, MAX_STREAMS).map((video) => video.id));
  for (const id of state.streams.keys()) if (!wanted.has(id)) endStream(id);
  for (const id of wanted) if (!state.streams.has(id)) readEvents(id);
}

async function readEvents(id) {
  const control = new AbortController();
  state.streams.set(id, control);
  try {
    const answer = await request(`/v1/videos/${id}/events`, {
      signal: control.signal, headers: { Accept: "text/event-stream" },
    });
    let text = "";
    for await (const part of chunks(answer.body)) {
      text += part;
      const events = text.split(/\r?\n\r?\n/);
      text = events.pop();
      events.forEach(takeEvent);
      render();
    }
  } catch {
    // The next answer about the engine says whether the server is gone; the list says the rest.
  }
  // Not at once again: a stream that ends without a final state is a restart.
  setTimeout(() => { if (state.streams.get(id) === control) state.streams.delete(id); }, 2000);
}

async function* chunks(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    yield value;
  }
}

function takeEvent(text) {
  const data = text.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim());
  if (!data.length) return; // a comment that keeps the connection open
  const video = parse(data.join("\n"));
  takeVideo(video);
  if (!isOpen(video)) state.listAt = 0; // the others have moved up
}

function endStream(id) {
  state.streams.get(id)?.abort();
  state.streams.delete(id);
}

const stopStreams = () => [...state.streams.keys()].forEach(endStream);

// --------------------------------------------------------------------------------------------- render

function render() {
  const gone = state.connection === "gone";
  document.body.classList.toggle("gone", gone);
  $("lock").hidden = state.connection !== "locked" && !$("lock").dataset.open;
  $("main").hidden = state.connection === "locked";
  $("key-button").hidden = !key();
  renderTop();
  renderBanner();
  renderRanks();
  const videos = newestFirst([...state.videos.values()]);
  renderQueue(videos.filter(isOpen));
  renderFailed(videos.filter((video) => ["failed", "cancelled"].includes(video.status)));
  renderClips(videos.filter((video) => video.status === "completed"));
}

const STATES = { loading: "Loading", gone: "Server gone", locked: "Locked", starting: "Starting", ready: "Ready",
  restarting: "Restarting", closing: "Shutting down" };

function renderTop() {
  const shown = state.connection === "online" ? state.engine.state : state.connection;
  setText($("state"), STATES[shown] ?? shown);
  setAttribute($("state"), "data-state", shown);
  setText($("model"), state.models?.map((model) => model.id).join(", ") ?? "");
  const open = [...state.videos.values()].filter(isOpen);
  const running = open.filter((video) => video.status === "in_progress").length;
  const waiting = `${open.length - running}${state.moreWaiting ? " or more" : ""}`;
  setText($("summary"), open.length ? `${running} running · ${waiting} waiting` : "");
  document.title = open.length ? `(${open.length}) svdpp` : "svdpp";
}

function renderBanner() {
  const [text, kind, button] = bannerText();
  $("banner").hidden = !text;
  setAttribute($("banner"), "data-kind", kind);
  setText($("banner-text"), text);
  $("banner-button").hidden = !button;
  setText($("banner-button"), button);
}

function bannerText() {
  const different = [...state.videos.values()].filter((video) => video.proof === "different");
  if (state.connection === "locked" || state.connection === "loading") return ["", "", ""];
  if (state.connection === "gone") {
    const wait = Math.max(0, Math.ceil(state.retryAt - now()));
    const words = state.problem || "The server does not answer. Clips in the queue are safe on its disk.";
    return [`${words} Next try in ${wait} s; tries so far: ${state.failures}.`, "bad", "Try now"];
  }
  if (different.length) {
    return [`${different.map(titleOf).join("; ")}: not the bits that diffusers gives on one device. Do not use `
      + "this server's clips until you know why: the log has the details.", "bad", ""];
  }
  const restarts = state.engine.restarts ? ` Restarts so far: ${state.engine.restarts}.` : "";
  return {
    starting: ["The ranks load the model. Clips can be requested already; they wait in the queue.", "", ""],
    restarting: [`A rank died; all ranks restart. Unfinished clips go on from their latent checkpoints.${restarts}`, "", ""],
    closing: ["The server shuts down. Clips in the queue stay, and go on when it starts again.", "", ""],
  }[state.engine.state] ?? ["", "", ""];
}

// ---------------------------------------------------------------------------------------------- ranks

const ACTIONS = { encode: "encoding", denoise: "denoising", decode: "decoding", send: "sending", recv: "receiving" };

function renderRanks() {
  const ranks = state.engine?.ranks ?? [];
  $("ranks-empty").hidden = ranks.length > 0;
  $("rank-axis").hidden = !ranks.length;
  setText($("ranks-empty"), state.engine ? "No rank is up yet." : "Waiting for the server.");
  if (state.connection === "gone") return; // the last minute stays as it was
  renderList($("rank-list"), ranks, (rank) => rank.rank, createRank, updateRank);
}

function createRank(rank) {
  const strip = makeSvg("svg", { class: "strip", role: "img" });
  const device = make("span", { className: "note" });
  const parts = {
    who: make("span", { className: "who" }, make("b", { textContent: `Rank ${rank.rank}` })),
    strip,
    now: make("span", { className: "now number" }),
    busy: make("span", { className: "busy number", title: "Share of the last minute in which this rank computed" }),
  };
  parts.who.append(" ", device);
  return Object.assign(make("li", { className: "rank" }, ...Object.values(parts)), { parts: { ...parts, device } });
}

function updateRank(node, rank) {
  const { strip, now: doing, busy, device } = node.parts;
  setText(device, rank.device);
  const end = now() + state.clockOffset;
  const spans = mergeSpans(state.engine.spans.filter((span) => span.rank === rank.rank), end);
  const seconds = { encode: 0, denoise: 0, decode: 0 };
  for (const span of spans) seconds[span.kind] += span.end - span.start;
  const worked = Math.min(WINDOW_SECONDS, seconds.encode + seconds.denoise + seconds.decode);
  setText(doing, rankNow(rank));
  setText(busy, `${Math.round(100 * worked / WINDOW_SECONDS)}%`);
  const said = Object.entries(seconds).filter(([, value]) => value >= 0.5).map(([kind, value]) => `${kind} ${Math.round(value)} s`);
  setAttribute(strip, "aria-label", `Last minute of rank ${rank.rank}: ${said.join(", ") || "nothing"}`);
  const waits = state.waits.get(rank.rank) ?? [];
  strip.replaceChildren(
    ...[20, 40].map((at) => makeSvg("rect", { class: "tick", x: `${100 * at / WINDOW_SECONDS}%`, width: 1, height: "100%" })),
    ...waits.filter((time) => !spans.some((span) => span.start < time && time < span.end)).map((time) =>
      makeSvg("rect", { class: "wait", x: place(time - 1, end), y: 11, width: `${100 / WINDOW_SECONDS}%`, height: 2 })),
    ...spans.map((span) => drawSpan(span, end, strip.clientWidth)),
  );
}

function rankNow(rank) {
  const video = state.videos.get(rank.video);
  const name = video ? nameOf(video) : rank.video ? "a clip of another key" : "";
  if (!rank.device && state.engine.state !== "ready") return "starts";
  if (rank.doing === "idle") return "idle";
  if (rank.doing === "wait") return name ? `waits for ${name}` : "waits";
  return rank.step === null ? `${ACTIONS[rank.action] ?? rank.action} ${name}` : `step ${rank.step} of ${name}`;
}

const place = (time, end) => `${100 * (1 - (end - time) / WINDOW_SECONDS)}%`;

/** The spans within the window, with neighbours of one clip and kind joined: one rectangle instead of one a step. */
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

function drawSpan(span, end, width) {
  const video = state.videos.get(span.video);
  const share = (span.end - span.start) / WINDOW_SECONDS;
  const group = makeSvg("svg", { x: place(span.start, end), y: 0, width: `${100 * share}%`, height: "100%",
    "data-kind": span.kind, "data-tint": video ? tintOf(span.video) : "none" });
  group.append(makeSvg("rect", { class: "body", width: "100%", height: "100%" }));
  const pixels = share * width;
  if (span.kind === "encode") {
    for (let x = -24; x < pixels; x += 6) {
      group.append(makeSvg("line", { class: "stripes", x1: x, y1: 24, x2: x + 24, y2: 0 }));
    }
  }
  const name = video ? nameOf(video).replace(/\.\w+$/, "") : "";
  if (span.kind === "denoise" && name && pixels > 34) {
    const fits = Math.floor((pixels - 10) / 6.2);
    const label = name.length > fits ? `${name.slice(0, fits - 1)}…` : name;
    group.append(makeSvg("text", { x: 6, y: "50%", "dominant-baseline": "central" }, label));
  }
  const title = `${span.kind} ${video ? titleOf(video) : "another clip"}: ${(span.end - span.start).toFixed(1)} s`;
  group.append(makeSvg("title", {}, title));
  return group;
}

// ---------------------------------------------------------------------------------------------- queue

function renderQueue(open) {
  const running = open.filter((video) => video.status === "in_progress").sort(byStart);
  const waiting = open.filter((video) => video.status === "queued");
  waiting.sort((a, b) => (a.place ?? Infinity) - (b.place ?? Infinity) || (isNewer(a, b) ? 1 : -1));
  const shown = [...running, ...waiting].slice(0, state.wholeQueue ? Infinity : Math.max(SHOWN_IN_QUEUE, running.length));
  renderList($("queue-list"), shown, (video) => video.id, createRow, updateRow);
  $("queue-empty").hidden = open.length > 0;
  setText($("queue-empty"), state.listed ? "The queue is empty." : state.connection === "gone" ? "Unknown while the server is gone." : "Loading.");
  const known = `${state.moreWaiting ? "the first " : "all "}${open.length}`;
  $("queue-more").hidden = open.length <= Math.max(SHOWN_IN_QUEUE, running.length);
  setText($("queue-more"), state.wholeQueue ? "Show fewer" : `Show ${known} clips`);
  setAttribute($("queue-more"), "aria-expanded", state.wholeQueue);
  const last = Math.max(-1, ...open.map((video) => etaOf(video) ?? -1));
  setText($("queue-note"), last >= 0 && open.length > 1 ? `all finished in about ${duration(last)}` : "");
  setText($("eta-error"), etaErrorText(state.engine?.eta_error));
  $("eta-error").title = "The median of the newest clips";
}

/** The median of (actual - promised) / promised, in words. */
function etaErrorText(error) {
  if (!error || error.clips < 3) return ""; // the first promises know no measured times
  const percent = Math.round(100 * error.median);
  if (percent === 0) return "clips finish as promised";
  if (percent > 100) return `clips take ${Math.round(1 + error.median)} times as long as promised`;
  return `clips finish ${Math.abs(percent)}% ${percent > 0 ? "later" : "earlier"} than promised`;
}

/** Seconds until a clip is finished, counted down between two answers. */
function etaOf(video) {
  if (video.eta_seconds === null || video.eta_seconds === undefined) return null;
  return Math.max(0, video.eta_seconds - (now() - video.eta_at));
}

function thumbOf(video) {
  const source = (state.sent.get(video.id) ?? state.sent.get(video.input?.sha256))?.thumb;
  return source ? make("img", { className: "thumb", src: source, alt: "" }) : make("span", { className: "thumb" });
}

function createRow(video) {
  const parts = {
    thumb: thumbOf(video),
    title: make("span", { className: "title" }),
    shape: make("span", { className: "note" }),
    bar: make("progress", { max: 100 }),
    status: make("span"),
    eta: make("span", { className: "note" }),
    cancel: make("button", { type: "button", className: "button small", onclick: () => cancel(video.id) }),
  };
  const node = make("li", { className: "row" }, parts.thumb,
    make("div", { className: "what" }, parts.title, parts.shape),
    make("div", { className: "meter" }, parts.bar),
    make("div", { className: "status" }, parts.status, " ", parts.eta),
    make("div", { className: "actions" }, parts.cancel));
  setAttribute(node, "data-tint", tintOf(video.id));
  return Object.assign(node, { parts });
}

function updateRow(node, video) {
  const { title, shape: about, bar, status, eta, cancel: button } = node.parts;
  setText(title, nameOf(video));
  title.title = titleOf(video);
  setText(about, `seed ${video.seed} · ${shape(video)}`);
  const percent = video.status === "queued" ? 0 : Math.max(video.progress, Math.floor(100 * video.step / video.steps));
  bar.value = Math.min(99, percent);
  setAttribute(bar, "aria-label", `Progress of ${titleOf(video)}`);
  setAttribute(bar, "aria-valuetext", video.status === "queued" ? placeText(video) : stepText(video));
  setText(status, state.busy.get(video.id) ?? (video.status === "queued" ? placeText(video) : stepText(video)));
  const left = etaOf(video);
  const rank = video.status === "queued" || video.rank === null ? "" : `rank ${video.rank}`;
  const end = left === null ? "" : left < 1 ? "ready now" : `ready in ${duration(left)}`;
  setText(eta, [rank, end].filter(Boolean).join(" · "));
  const asked = state.busy.has(video.id);
  button.disabled = asked;
  setText(button, "Cancel");
  setAttribute(button, "aria-label", `Cancel ${titleOf(video)}`);
}

function placeText(video) {
  if (video.place === null) return video.step ? `Continues at step ${video.step}` : "Waiting";
  return video.place === 0 ? "Next" : `${plural(video.place, "clip")} before it`;
}

function stepText(video) {
  if (video.step >= video.steps) return "Decoding";
  return video.step || video.rank !== null ? `Step ${video.step} of ${video.steps}` : "Begins";
}

async function cancel(id) {
  const video = state.videos.get(id);
  await act(id, "Cancelling", async () => {
    const answer = await get(`/v1/videos/${id}`, { method: "DELETE" });
    if (answer.deleted) drop(id);
    else if (video.status !== "cancelled") takeVideo({ ...video, status: answer.status ?? "cancelled", eta_seconds: null });
    state.listAt = 0;
  });
}

function drop(id) {
  state.removed.add(id);
  forget(id);
}

/** Does what a person asked for with a clip, and shows that it is under way, and why it failed. */
async function act(id, words, work) {
  if (state.busy.has(id)) return;
  state.busy.set(id, `${words}…`);
  render();
  try {
    await work();
  } catch (error) {
    if (error.status === 404) drop(id);
    say(error.words ?? sentence(error.message));
  } finally {
    state.busy.delete(id);
    render();
    wakeLoop();
  }
}

// ------------------------------------------------------------------------------- clips without a result

function renderFailed(videos) {
  $("failed").hidden = !videos.length;
  setText($("failed-note"), plural(videos.length, "clip"));
  renderList($("failed-list"), videos, (video) => video.id, createFailed, updateFailed);
}

function createFailed(video) {
  const parts = {
    title: make("span", { className: "title" }),
    about: make("span", { className: "note" }),
    reason: make("div", { className: "reason" }),
  };
  const node = make("li", { className: "row final" }, thumbOf(video),
    make("div", { className: "what" }, parts.title, parts.about),
    make("div", { className: "status" }, parts.reason),
    make("div", { className: "actions" },
      iconButton("copy", `Copy the parameters of ${titleOf(video)}`, () => copyParameters(video.id)),
      iconButton("again", `Make ${titleOf(video)} again`, () => makeAgain(video.id, video.seed)),
      removeButton(video)));
  setAttribute(node, "data-tint", tintOf(video.id));
  return Object.assign(node, { parts });
}

function updateFailed(node, video) {
  const { title, about, reason } = node.parts;
  setText(title, nameOf(video));
  title.title = titleOf(video);
  setText(about, `seed ${video.seed} · ${shape(video)}`);
  reason.className = video.status === "failed" ? "reason error" : "reason note";
  const words = [sentence(video.error?.message), sentence(video.error?.hint)].filter(Boolean).join(" ");
  setText(reason, video.status === "failed" ? `Failed. ${words}` : `Cancelled at step ${video.step} of ${video.steps}.`);
}

/** Removes only at the second press, so that a slip loses nothing. */
function removeButton(video) {
  const label = `Remove ${titleOf(video)}`;
  const reset = () => {
    button.classList.remove("danger");
    button.replaceChildren(icon("remove"));
    setAttribute(button, "aria-label", label);
  };
  const button = iconButton("remove", label, () => {
    if (button.classList.contains("danger")) { act(video.id, "Removing", () => remove(video.id)); return; }
    button.classList.add("danger");
    button.replaceChildren("Remove?");
    setAttribute(button, "aria-label", `Really remove ${titleOf(video)}?`);
    setTimeout(reset, 5000);
  });
  button.addEventListener("blur", reset);
  return button;
}

async function remove(id) {
  await request(`/v1/videos/${id}`, { method: "DELETE" });
  drop(id);
}

// ---------------------------------------------------------------------------------------- finished clips

// Clips outside the window neither load nor play.
const watcher = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) target.card.see(isIntersecting);
}, { rootMargin: "200px" });

function renderClips(videos) {
  renderList($("clip-list"), videos, (video) => video.id, createCard, updateCard);
  $("clips-empty").hidden = videos.length > 0;
  const empty = state.models ? "Nothing here yet. Choose a photograph, and its clip appears here." : "";
  setText($("clips-empty"), state.listed ? empty : state.connection === "gone" ? "Unknown while the server is gone." : "Loading.");
  setText($("clips-note"), videos.length ? plural(videos.length, "clip") + (state.hasOlder ? " and older ones" : "") : "");
  $("older").hidden = !state.hasOlder;
  $("play-all").hidden = !videos.length;
  if (!$("play-all").firstChild || $("play-all").dataset.paused !== String(state.paused)) {
    $("play-all").dataset.paused = state.paused;
    $("play-all").replaceChildren(icon(state.paused ? "play" : "pause"), state.paused ? "Play all" : "Pause all");
  }
  $("picked").hidden = state.picked.length !== 1;
  document.body.classList.toggle("picking", state.picked.length === 1);
  if (state.picked.length) setText($("picked-text"), `${titleOf(state.videos.get(state.picked[0]))}: choose a clip to compare it with`);
}

function createCard(video) {
  const title = titleOf(video);
  const [width, height] = video.size.split("x").map(Number);
  const player = make("video", { muted: true, loop: true, playsInline: true, preload: "auto", width, height,
    "aria-label": `Clip of ${title}` });
  const parts = {
    player,
    toggle: iconButton("pause", "", () => card.play(player.paused)),
    fault: make("p", { className: "error", hidden: true }),
    made: make("span", { className: "note" }),
    proof: make("span"),
    compare: make("button", { type: "button", className: "button small", textContent: "Compare",
      onclick: () => pick(video.id) }),
    verify: make("button", { type: "button", className: "link", textContent: "Verify",
      "aria-label": `Verify ${title} against diffusers on one device`, onclick: () => verify(video.id) }),
    details: details(video),
  };
  const screen = make("div", { className: "screen" }, player, parts.toggle, parts.fault);
  const card = make("li", { className: "card" }, screen,
    make("div", { className: "about" },
      make("div", { className: "head" }, make("span", { className: "dot" }), make("span", { className: "title", title, textContent: nameOf(video) }),
        make("span", { className: "note", textContent: `seed ${video.seed}` })),
      make("span", { className: "note", textContent: `${shape(video)} · ${video.seconds} s` }), parts.made,
      make("span", { className: "proof" }, parts.proof, parts.verify)),
    make("div", { className: "actions" }, parts.compare, make("span", { className: "push" }),
      iconButton("download", `Download ${title}`, () => download(video.id)),
      iconButton("copy", `Copy the parameters of ${title}`, () => copyParameters(video.id)),
      iconButton("again", `Make ${nameOf(video)} again with another seed`, () => makeAgain(video.id, randomSeed())),
      removeButton(video)),
    parts.details);
  setAttribute(card, "data-tint", tintOf(video.id));
  setAttribute(parts.compare, "aria-label", `Compare ${title} with another clip`);
  return Object.assign(card, { parts, ...playing(parts, screen, video.id, title) });
}

/** What a card does with its video: load, play, and let go. */
function playing({ player, toggle, fault }, screen, id, title) {
  let visible = false;
  let wanted = !state.paused;
  let loaded = null;
  const show = () => {
    const label = `${player.paused ? "Play" : "Pause"} ${title}`;
    screen.classList.toggle("paused", player.paused);
    toggle.replaceChildren(icon(player.paused ? "play" : "pause"));
    toggle.title = label;
    setAttribute(toggle, "aria-label", label);
  };
  const load = async () => {
    if (loaded) return;
    fault.hidden = true;
    loaded = await media(id).catch((error) => {
      setText(fault, error.words ?? "The clip could not be loaded.");
      fault.hidden = false;
      return null;
    });
  };
  const apply = async () => {
    if (visible) await load();
    if (visible && loaded && !player.src) player.src = loaded;
    if (visible && wanted) player.play().catch(() => {});
    else player.pause();
    if (!visible && player.src) unload();
  };
  // Browsers have a limit of some dozens of loaded videos on a page.
  const unload = () => { player.removeAttribute("src"); player.load(); };
  player.addEventListener("play", show);
  player.addEventListener("pause", show);
  player.addEventListener("error", () => {
    setText(fault, "The clip could not be loaded or played.");
    fault.hidden = false;
    unload();
    release(loaded);
    loaded = null;
  });
  player.card = { see(value) { visible = value; apply(); } };
  watcher.observe(player);
  show();
  return {
    play(value) { wanted = value; apply(); },
    retry() { if (!fault.hidden) { loaded = null; apply(); } },
    forget() { watcher.unobserve(player); unload(); release(loaded); },
  };
}

/** The address of a clip: the API's own, or, with a key, which a video element cannot send, one of a copy. */
async function media(id) {
  const path = `/v1/videos/${id}/content`;
  return key() ? URL.createObjectURL(await (await request(path)).blob()) : path;
}

const release = (address) => { if (address?.startsWith("blob:")) URL.revokeObjectURL(address); };

function updateCard(card, video) {
  const { made, proof, compare, verify: button } = card.parts;
  const took = video.completed_at && video.started_at ? `, after ${duration(video.completed_at - video.started_at)}` : "";
  setText(made, video.completed_at ? `finished ${ago(video.completed_at)}${took}` : "");
  const verdict = proofOf(video);
  setText(proof, state.busy.get(video.id) ?? capital(PROOFS[verdict]));
  setAttribute(proof.parentNode, "data-proof", verdict);
  button.hidden = verdict !== "none" || state.busy.has(video.id);
  const picked = state.picked.includes(video.id);
  setAttribute(compare, "aria-pressed", picked);
  card.classList.toggle("chosen", picked);
}

function ago(seconds) {
  const past = now() + state.clockOffset - seconds;
  if (past < 60) return "just now";
  if (past < 86400) return `${duration(past).replace(/ min \d\d s$/, " min")} ago`;
  return new Date(seconds * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
}

function details(video) {
  const body = make("tbody");
  const node = make("details", {}, make("summary", { textContent: "Parameters and hashes" }),
    make("table", { className: "table" }, make("caption", { className: "hidden", textContent: `Parameters of ${titleOf(video)}` }), body));
  node.addEventListener("toggle", async () => {
    if (!node.open || body.rows.length) return;
    const line = (name, value) => body.append(make("tr", {}, make("th", { scope: "row", textContent: name }), make("td", { textContent: value })));
    for (const name of PARAMETERS) line(name, video[name]);
    try {
      const metadata = await get(`/v1/videos/${video.id}/metadata`);
      for (const name of ["model", "dtype", "device", "latents_sha256", "frames_sha256", "file_sha256", "input_sha256"]) {
        if (metadata[name]) line(name, metadata[name]);
      }
    } catch (error) {
      line("hashes", error.words ?? sentence(error.message));
    }
  });
  return node;
}

async function verify(id) {
  await act(id, "Asking for the verification", async () => {
    const video = await get(`/v1/videos/${id}/verify`, { method: "POST" });
    takeVideo(video);
    say("The clip is made again on one device, once the ranks are idle, and compared bit by bit.");
  });
}

async function download(id) {
  const video = state.videos.get(id);
  try {
    const address = await media(id);
    const stem = nameOf(video).replace(/\.\w+$/, "");
    const link = make("a", { href: address, download: `${stem}-seed${video.seed}.mp4` });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => release(address), 60000);
  } catch (error) {
    say(error.words ?? sentence(error.message));
  }
}

async function copyParameters(id) {
  const video = state.videos.get(id);
  const pairs = ["model", ...PARAMETERS].map((name) => {
    const value = video[name];
    // A seed above 2^53 is text here, and a number for every other program.
    return `  "${name}": ${name === "seed" ? value : JSON.stringify(value)}`;
  });
  const copied = await copyText(`{\n${pairs.join(",\n")}\n}\n`);
  say(copied ? "Parameters copied." : "The browser did not allow to copy.");
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

/** Requests a clip once more; where this tab no longer has the photograph, fills in the form and asks for it. */
async function makeAgain(id, seed) {
  const video = state.videos.get(id);
  const { file, thumb } = state.sent.get(id) ?? state.sent.get(video.input?.sha256) ?? {};
  const values = Object.fromEntries(PARAMETERS.map((name) => [name, video[name]]));
  if (!file) {
    fillSettings({ ...values, seed });
    $("files").focus();
    $("new").scrollIntoView({ block: "start" });
    say(`The settings are filled in. Choose ${nameOf(video)} again: this tab does not have the photograph.`);
    return;
  }
  try {
    const made = await send({ file, thumb }, { ...values, seed, model: video.model });
    say(`${titleOf(made)}: in the queue.`);
  } catch (error) {
    say(error.words ?? sentence(error.message));
  }
  render();
}

// -------------------------------------------------------------------------------------------- compare

const compare = { leader: null, players: [...document.querySelectorAll("#compare video")], origin: null, addresses: [] };

function pick(id) {
  state.picked = state.picked.includes(id) ? state.picked.filter((each) => each !== id) : [...state.picked, id];
  if (state.picked.length === 1) say("Choose a second clip to compare.");
  if (state.picked.length === 2) openCompare(...state.picked.map((each) => state.videos.get(each)));
  render();
}

async function openCompare(...videos) {
  compare.videos = videos;
  compare.origin = document.activeElement;
  for (const [index, figure] of document.querySelectorAll("#compare figure").entries()) {
    const video = videos[index];
    setAttribute(figure, "data-tint", tintOf(video.id));
    figure.querySelector("figcaption").replaceChildren(make("span", { className: "dot" }), titleOf(video));
    setAttribute(compare.players[index], "aria-label", `${index ? "Second" : "First"} clip: ${titleOf(video)}`);
  }
  fillCompareTable(videos);
  $("compare").showModal();
  try {
    compare.addresses = await Promise.all(videos.map((video) => media(video.id)));
  } catch (error) {
    $("compare").close();
    say(error.words ?? sentence(error.message));
    return;
  }
  const lengths = videos.map((video) => video.frames / video.fps);
  compare.players.forEach((player, index) => { player.src = compare.addresses[index]; });
  // The longer clip leads; the shorter one stays on its last frame until both begin again.
  compare.leader = compare.players[lengths[1] > lengths[0] ? 1 : 0];
  if (!state.paused) playCompare();
  showCompare();
  requestAnimationFrame(syncCompare);
}

function fillCompareTable(videos) {
  const rows = [...PARAMETERS, "seconds"].map((name) => {
    const [first, second] = videos.map((video) => String(video[name]));
    return make("tr", { className: first === second ? "" : "differs" }, make("th", { scope: "row", textContent: name }),
      make("td", { textContent: first }), make("td", { textContent: second }));
  });
  const proofs = videos.map((video) => make("td", { textContent: PROOFS[proofOf(video)] }));
  $("compare-table").tBodies[0].replaceChildren(...rows, make("tr", {}, make("th", { scope: "row", textContent: "verified" }), ...proofs));
}

function playCompare() {
  for (const player of compare.players) if (!player.ended) player.play().catch(() => {});
}

function pauseCompare() {
  for (const player of compare.players) player.pause();
  seekCompare(compare.leader.currentTime);
}

function seekCompare(time) {
  for (const player of compare.players) {
    // The end itself would be "ended", which shows the last frame but starts from the first.
    player.currentTime = Math.max(0, Math.min(time, (player.duration || 0) - 0.001));
  }
}

/** Holds the two clips together: the one that follows is corrected when it is half a frame off. */
function syncCompare() {
  if (!$("compare").open) return;
  const { leader, players } = compare;
  const other = players.find((player) => player !== leader);
  if (leader.ended) {
    seekCompare(0);
    playCompare();
  } else if (!leader.paused && !other.ended && !other.seeking && other.readyState > 2) {
    const target = Math.min(leader.currentTime, other.duration - 0.001);
    const rate = compare.videos[0].fps;
    if (Math.abs(other.currentTime - target) > Math.max(0.05, 0.5 / rate)) other.currentTime = target;
  }
  showCompare();
  requestAnimationFrame(syncCompare);
}

function showCompare() {
  const { leader } = compare;
  const length = leader.duration || 1;
  const label = leader.paused ? "Play both" : "Pause both";
  if ($("compare-play").getAttribute("aria-label") !== label) {
    $("compare-play").replaceChildren(icon(leader.paused ? "play" : "pause"));
    setAttribute($("compare-play"), "aria-label", label);
  }
  if (document.activeElement !== $("compare-time") || !leader.paused) $("compare-time").value = leader.currentTime / length;
  setText($("compare-at"), `${leader.currentTime.toFixed(2)} / ${length.toFixed(2)} s`);
  setAttribute($("compare-time"), "aria-valuetext", `${leader.currentTime.toFixed(1)} s`);
}

function stepCompare(direction) {
  const { fps } = compare.videos[compare.players.indexOf(compare.leader)];
  pauseCompare();
  // To the middle of a frame, where rounding does not matter.
  const frame = Math.floor(compare.leader.currentTime * fps + 1e-6) + direction;
  const last = Math.round((compare.leader.duration || 0) * fps) - 1;
  seekCompare((Math.min(last, Math.max(0, frame)) + 0.5) / fps);
}

function closeCompare() {
  for (const player of compare.players) { player.pause(); player.removeAttribute("src"); player.load(); }
  compare.addresses.forEach(release);
  compare.addresses = [];
  state.picked = [];
  render();
  compare.origin?.focus();
}

// ----------------------------------------------------------------------------------------------- form

const field = (name) => $("new").elements[name];

function fillModels() {
  const select = field("model");
  const before = select.value;
  select.replaceChildren(...state.models.map((model) => make("option", { value: model.id, textContent: model.id })));
  select.closest("label").hidden = state.models.length < 2;
  $("settings").disabled = false;
  if (before && state.models.some((model) => model.id === before)) select.value = before; // a person's values stay
  else fillDefaults();
}

const model = () => state.models?.find((each) => each.id === field("model").value) ?? state.models?.[0];

function fillDefaults() {
  if (!model()) return;
  const { defaults, sizes, limits } = model();
  const common = defaults.size ?? `${defaults.width}x${defaults.height}`;
  const all = sizes?.length ? sizes : [common];
  field("size").replaceChildren(...all.map((each) => make("option", { value: each, textContent: each.replace("x", " × ") })));
  field("priority").replaceChildren(...Array.from({ length: 10 }, (_, value) =>
    make("option", { value, textContent: value === 0 ? "0 (usual)" : value === 9 ? "9 (first)" : value })));
  for (const name of ["steps", "frames"]) if (limits[`max_${name}`]) field(name).max = limits[`max_${name}`];
  fillSettings({ ...defaults, size: common, seed: "", priority: defaults.priority ?? 0 });
}

function fillSettings(values) {
  clearErrors();
  for (const name of PARAMETERS) if (values[name] !== undefined) field(name).value = values[name];
  const rare = ["motion_bucket_id", "noise_aug_strength", "min_guidance_scale", "max_guidance_scale", "fit"];
  const defaults = model()?.defaults ?? {};
  if (rare.some((name) => name in values && String(values[name]) !== String(defaults[name]))) {
    $("settings").querySelector("details").open = true;
  }
  showLength();
}

function showLength() {
  const [frames, fps] = [Number(field("frames").value), Number(field("fps").value)];
  setText($("length"), frames > 0 && fps > 0 ? `${(frames / fps).toFixed(2)} s long` : "");
}

function settings() {
  const values = Object.fromEntries(PARAMETERS.map((name) => [name, field(name).value.trim()]));
  return { model: field("model").value, ...values };
}

/** Six digits: short enough to read out. */
const randomSeed = () => String(crypto.getRandomValues(new Uint32Array(1))[0] % 1e6);

// crypto.randomUUID exists only on HTTPS and localhost.
const token = () => [...crypto.getRandomValues(new Uint32Array(4))].map((part) => part.toString(16).padStart(8, "0")).join("");

async function addPhotos(files) {
  for (const file of files) {
    const photo = { id: token(), file, seed: randomSeed(), thumb: null, error: "" };
    const most = model()?.limits?.max_upload_bytes ?? Infinity;
    if (file.type && !file.type.startsWith("image/")) photo.error = "This is not an image.";
    else if (file.size > most) photo.error = `The photograph has ${size(file.size)}; this server takes ${size(most)} at most.`;
    state.photos.push(photo);
    thumbnail(file).then((thumb) => { photo.thumb = thumb; renderPhotos(); });
  }
  renderPhotos();
}

/** The address of a small copy; null for what the browser cannot read, such as TIFF. */
async function thumbnail(file) {
  try {
    const bitmap = await createImageBitmap(file, { resizeWidth: 160, resizeQuality: "medium" });
    const canvas = make("canvas", { width: bitmap.width, height: bitmap.height });
    canvas.getContext("2d").drawImage(bitmap, 0, 0);
    bitmap.close();
    return await new Promise((resolve) => canvas.toBlob((blob) => resolve(blob && URL.createObjectURL(blob)), "image/jpeg", 0.85));
  } catch {
    return null;
  }
}

function renderPhotos() {
  $("photos").hidden = !state.photos.length;
  renderList($("photos"), state.photos, (photo) => photo.id, createPhoto, updatePhoto);
  const number = state.photos.length;
  const sending = state.photos.some((photo) => photo.sending);
  setText($("make"), sending ? "Sending…" : number > 1 ? `Make ${number} clips` : "Make clip");
}

function createPhoto(photo) {
  const parts = {
    picture: make("span", { className: "blank" }),
    note: make("span", { className: "note number" }),
    error: make("p", { className: "error", id: `photo-${photo.id}`, hidden: true }),
    drop: iconButton("close", `Leave out ${photo.file.name}`, () => {
      state.photos = state.photos.filter((each) => each !== photo);
      renderPhotos();
    }),
  };
  const node = make("li", { className: "photo" }, parts.picture,
    make("div", {}, make("span", { className: "name", title: photo.file.name, textContent: photo.file.name }), parts.note),
    parts.drop, parts.error);
  return Object.assign(node, { parts });
}

function updatePhoto(node, photo) {
  const { picture, note, error, drop: button } = node.parts;
  if (photo.thumb && picture.tagName !== "IMG") {
    node.parts.picture = make("img", { src: photo.thumb, alt: `Preview of ${photo.file.name}` });
    picture.replaceWith(node.parts.picture);
  }
  setText(note, photo.sending ? "sending…" : size(photo.file.size));
  setText(error, photo.error);
  error.hidden = !photo.error;
  node.classList.toggle("refused", Boolean(photo.error));
  setAttribute(button, "aria-describedby", photo.error ? error.id : "");
  button.disabled = Boolean(photo.sending);
}

/** Stores one clip's request on the server; a second try with the same values is the same request. */
async function send(photo, values) {
  const wanted = JSON.stringify(values);
  if (photo.wanted !== wanted) Object.assign(photo, { wanted, key: token() });
  const form = new FormData();
  form.append("input_reference", photo.file, photo.file.name || "photograph");
  for (const [name, value] of Object.entries(values)) if (String(value) !== "") form.append(name, value);
  const video = await get("/v1/videos", { method: "POST", body: form, headers: { "Idempotency-Key": photo.key } });
  state.sent.set(video.id, photo);
  if (video.input?.sha256) state.sent.set(video.input.sha256, photo);
  while (state.sent.size > 400) state.sent.delete(state.sent.keys().next().value);
  takeVideo(video, { quietly: true });
  return video;
}

async function submit(event) {
  event.preventDefault();
  clearErrors();
  if (!state.photos.length) {
    showFormError("Choose a photograph first.");
    $("files").focus();
    return;
  }
  if (!fieldsAreValid()) return;
  const values = settings();
  $("make").disabled = true;
  const made = [];
  for (const photo of [...state.photos]) {
    photo.sending = true;
    photo.error = "";
    renderPhotos();
    try {
      made.push(await send(photo, { ...values, seed: values.seed || photo.seed }));
      state.photos = state.photos.filter((each) => each !== photo);
      render();
    } catch (error) {
      if (showRefusal(error, photo)) break;
    } finally {
      photo.sending = false;
    }
  }
  $("make").disabled = false;
  renderPhotos();
  render();
  if (made.length) {
    const eta = Math.max(...made.map((video) => video.eta_seconds ?? -1));
    say(`${plural(made.length, "clip")} in the queue${eta < 0 ? "" : `, finished in about ${duration(eta)}`}.`);
  }
  wakeLoop();
}

/** Shows why a request was refused, where it can be corrected; true if the next ones would be refused too. */
function showRefusal(error, photo) {
  if (!(error instanceof Refusal)) {
    showFormError(error.words ?? sentence(error.message));
    return true;
  }
  const faults = faultsOf(error);
  for (const [name, words] of faults) showFieldError(name, words);
  if (faults.length) {
    $("new").querySelector("[aria-invalid=true]").focus();
    return true;
  }
  const isAboutPhoto = error.code === "invalid_image" || [408, 413, 415].includes(error.status);
  if (isAboutPhoto) photo.error = error.words;
  else showFormError(error.words);
  return !isAboutPhoto;
}

/** [field, words] of each setting that the server refuses. */
function faultsOf(error) {
  const known = (name) => (["width", "height"].includes(name) ? "size" : name === "seconds" ? "frames" : name);
  const has = (name) => [...PARAMETERS, "model"].includes(known(name));
  const faults = (error.details.faults ?? []).filter((fault) => has(fault.field));
  if (faults.length) return faults.map((fault) => [known(fault.field), sentence(fault.reason)]);
  const named = Object.keys(error.details).find(has) ?? /^(?:a )?([a-z_]+)\b/.exec(error.message)?.[1];
  return named && has(named) && error.status < 429 ? [[known(named), error.words]] : [];
}

function fieldsAreValid() {
  const wrong = PARAMETERS.map(field).filter((input) => !input.checkValidity());
  for (const input of wrong) showFieldError(input.name, input.name === "seed" ? "A whole number, or empty." : limitText(input));
  wrong[0]?.focus();
  return !wrong.length;
}

function limitText(input) {
  const whole = input.step === "1" ? "A whole number" : "A number";
  if (input.max) return `${whole} from ${input.min} to ${input.max}.`;
  return `${whole} of ${input.min} or more.`;
}

function showFieldError(name, words) {
  const input = field(name);
  const label = input.closest("label");
  const id = `error-${name}`;
  const old = $(id);
  if (old) { setText(old, words); return; }
  label.append(make("span", { className: "error", id, role: "alert", textContent: words }));
  setAttribute(input, "aria-invalid", "true");
  setAttribute(input, "aria-describedby", id);
  const folded = label.closest("details");
  if (folded) folded.open = true;
}

function clearFieldError(input) {
  $(`error-${input.name}`)?.remove();
  input.removeAttribute("aria-invalid");
  input.removeAttribute("aria-describedby");
}

function clearErrors() {
  $("form-error").hidden = true;
  for (const input of $("new").querySelectorAll("[aria-invalid]")) clearFieldError(input);
}

function showFormError(words) {
  setText($("form-error"), words);
  $("form-error").hidden = false;
}

// -------------------------------------------------------------------------------------- key and theme

function lock(message) {
  if (state.connection !== "locked") {
    state.connection = "locked";
    stopStreams();
    setText($("lock-text"), key() ? `The server refuses this key: ${message ?? "it does not know it"}.` : "This server needs an API key.");
    openLock();
  }
}

function openLock() {
  $("lock").dataset.open = "yes";
  $("key-forget").hidden = !key();
  $("key-cancel").hidden = state.connection === "locked";
  render();
  $("key").focus();
}

function closeLock() {
  delete $("lock").dataset.open;
  $("key").value = "";
  render();
}

/** Starts with another key: what the former one could see goes. */
function useKey(value) {
  if (value) sessionStorage.setItem("svdpp-key", value);
  else sessionStorage.removeItem("svdpp-key");
  stopStreams();
  [...state.videos.keys()].forEach(forget);
  Object.assign(state, { connection: "loading", engine: null, listed: false, counts: "", models: null });
  closeLock();
  wakeLoop();
}

const THEMES = ["auto", "light", "dark"];

function applyTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  const label = { auto: "Theme: as the system", light: "Theme: light", dark: "Theme: dark" }[theme];
  $("theme").replaceChildren(icon(theme));
  $("theme").title = label;
  setAttribute($("theme"), "aria-label", label);
  try { localStorage.setItem("svdpp-theme", theme); } catch { /* storage may be forbidden */ }
}

function storedTheme() {
  try { return localStorage.getItem("svdpp-theme") ?? "auto"; } catch { return "auto"; }
}

// ----------------------------------------------------------------------------------------------- start

function listen() {
  $("new").addEventListener("submit", submit);
  $("new").addEventListener("input", (event) => { clearFieldError(event.target); showLength(); });
  field("model").addEventListener("change", fillDefaults);
  $("reset").addEventListener("click", () => { fillDefaults(); say("Settings are the model's defaults again."); });
  $("files").addEventListener("change", () => { addPhotos([...$("files").files]); $("files").value = ""; });
  document.addEventListener("paste", (event) => {
    const files = [...(event.clipboardData?.files ?? [])].filter((file) => file.type.startsWith("image/"));
    if (files.length) { event.preventDefault(); addPhotos(files); }
  });
  // Files dropped beside the field must not replace the page.
  for (const name of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(name, (event) => {
      event.preventDefault();
      $("drop").classList.toggle("over", name === "dragover");
      if (name === "drop" && event.dataTransfer?.files.length) addPhotos([...event.dataTransfer.files]);
    });
  }
  $("queue-more").addEventListener("click", () => { state.wholeQueue = !state.wholeQueue; render(); });
  $("older").addEventListener("click", () => readOlder().catch((error) => say(error.words ?? error.message)).finally(render));
  $("play-all").addEventListener("click", () => {
    state.paused = !state.paused;
    for (const card of $("clip-list").children) card.play(!state.paused);
    render();
  });
  $("picked-cancel").addEventListener("click", () => { state.picked = []; render(); });
  $("compare-close").addEventListener("click", () => $("compare").close());
  $("compare").addEventListener("close", closeCompare);
  $("compare-play").addEventListener("click", () => (compare.leader.paused ? playCompare() : pauseCompare()));
  $("compare-back").addEventListener("click", () => stepCompare(-1));
  $("compare-forth").addEventListener("click", () => stepCompare(1));
  $("compare-time").addEventListener("input", () => {
    for (const player of compare.players) player.pause();
    seekCompare($("compare-time").value * (compare.leader.duration || 0));
  });
  $("banner-button").addEventListener("click", () => { state.retryAt = 0; wakeLoop(); });
  $("lock").addEventListener("submit", (event) => { event.preventDefault(); useKey($("key").value.trim()); });
  $("key-button").addEventListener("click", openLock);
  $("key-forget").addEventListener("click", () => useKey(""));
  $("key-cancel").addEventListener("click", closeLock);
  $("theme").addEventListener("click", () => applyTheme(THEMES[(THEMES.indexOf(storedTheme()) + 1) % THEMES.length]));
  document.addEventListener("visibilitychange", () => (document.hidden ? stopStreams() : wakeLoop()));
  addEventListener("online", () => { state.retryAt = 0; wakeLoop(); });
}

/** The icon of the tab, drawn here: a file would be one more request. */
function drawIcon() {
  const drawing = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" rx="7" fill="#3350c4"/>'
    + '<path d="M6 9h9v4H6zM11 14.5h9v4h-9zM16 20h10v4H16z" fill="#fff"/></svg>';
  const address = URL.createObjectURL(new Blob([drawing], { type: "image/svg+xml" }));
  document.head.append(make("link", { rel: "icon", href: address }));
}

applyTheme(storedTheme());
drawIcon();
listen();
render();
// The countdown of a server that is gone and the times in the queue move between two answers.
setInterval(() => { if (!document.hidden && state.connection === "gone") renderBanner(); }, 1000);
loop();
