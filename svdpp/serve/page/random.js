// Owns what is drawn: seeds, and tokens that no other tab draws.

/** Six digits: short enough to read out. */
export const randomSeed = () => String(crypto.getRandomValues(new Uint32Array(1))[0] % 1e6);

// crypto.randomUUID exists only on HTTPS and localhost.
export const token = () =>
  [...crypto.getRandomValues(new Uint32Array(4))].map((part) => part.toString(16).padStart(8, "0")).join("");
