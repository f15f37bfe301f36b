// Owns what the page knows, as plain values.

export const state = {
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
  servers: [], // this one first
  videos: new Map(), // by id
  numSeen: 0,
  removed: new Set(), // ids, against answers that were on their way
  tints: new Map(), // by id
  busy: new Map(), // id -> what the page has asked for it and not got yet
  photos: [], // chosen, not sent
  sending: null, // {done, total, waits, hasToldWhy, control} while orders are sent
  removals: new Map(), // id -> a removal that can be undone, or whose place is still shown
  waits: new Map(), // rank -> [unix seconds] at which it waited
  picked: [], // ids to compare
  paused: matchMedia("(prefers-reduced-motion: reduce)").matches,
};
