// Signals between the parts of the page, so that the sender of a signal does not depend on its receivers.

const bus = new EventTarget();

/**
 * Sends a signal. "change": the state has changed, so the page must be rendered. "stale": the server must be asked now.
 * "refused": the server refuses the API key; the detail is its message. "models": the models are known.
 * "online": the server answers, at the start of the page or again. "form": the user has changed the form or the table.
 * "inputs": the chosen files have changed.
 */
export const emit = (name, detail) => bus.dispatchEvent(new CustomEvent(name, { detail }));

export const on = (name, react) => bus.addEventListener(name, (event) => react(event.detail));
