// Random seeds, and random tokens that are unique across tabs.

/** Returns a random seed of up to six digits, which is short enough to read aloud. */
export const randomSeed = () => String(crypto.getRandomValues(new Uint32Array(1))[0] % 1e6);

// crypto.randomUUID exists only on HTTPS and localhost.
export const token = () =>
  [...crypto.getRandomValues(new Uint32Array(4))].map((part) => part.toString(16).padStart(8, "0")).join("");
