// Owns the signals between the parts of the page, so that what happens need not know who shows it.

const bus = new EventTarget();

/**
 * Sends a signal. "change": what is shown is out of date. "stale": ask the server now.
 * "refused": it refuses the key, in its words. "models": they are known. "online": it answers again.
 * "form": a person has changed what the form or the table asks for. "photos": the chosen files are others.
 */
export const emit = (name, detail) => bus.dispatchEvent(new CustomEvent(name, { detail }));

export const on = (name, react) => bus.addEventListener(name, (event) => react(event.detail));
