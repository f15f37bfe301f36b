// State of the page, as plain values.

export const state = {
  connection: "loading", // loading, online, gone, locked
  failures: 0, // consecutive failed tries to reach the server
  retryAt: 0, // unix seconds of the next try, while the server is gone
  problem: "", // why the last try failed; empty if the server did not answer at all
  engine: null, // last response of /v1/engine
  clockOffset: 0, // seconds of the server's clock minus this one's
  counts: "", // numbers of jobs and engine state as JSON: if they change, the list of clips is read again
  listAt: 0, // unix seconds at which the list of clips was last read
  listed: false, // the list of clips was read at least once
  hasOlder: false, // the server has older clips than the page
  lastId: null, // id of the oldest clip on the pages of the list that were read
  allRead: false, // the last page of the list was read, so the oldest clip is known
  wholeQueue: false, // the queue shows all of its rows
  moreWaiting: false, // the server has more waiting clips than the list
  models: null,
  servers: [], // servers that share the queue, the one that this page is from first
  videos: new Map(), // by id
  numSeen: 0, // number of clips so far, from which each new clip gets its `index`
  removed: new Set(), // ids of removed clips, which late responses may still contain
  tints: new Map(), // id -> number of the clip's colour
  busy: new Map(), // id -> text about the request in progress for the clip, such as "Cancelling…"
  inputs: [], // chosen images or videos that are not sent yet
  sending: null, // {done, total, waits, hasToldWhy, control} while orders are sent
  removals: new Map(), // id -> removal that can still be undone, or whose placeholder is still shown
  waits: new Map(), // rank -> [unix seconds] at which the rank was waiting
  picked: [], // ids of the clips to compare, at most two
  paused: matchMedia("(prefers-reduced-motion: reduce)").matches,
};
