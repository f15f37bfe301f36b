// Owns how elements are made and changed.

export const $ = (id) => document.getElementById(id);

/** An element; `properties` are properties, attributes (aria-*, data-*, role) or listeners (on*). */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && !name.startsWith("aria")) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export function makeSvg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export const icon = (name) => makeSvg("svg", { "aria-hidden": "true" }, makeSvg("use", { href: `#icon-${name}` }));

/** A button with an icon; `text` is shown below it, `label` says the same of one clip. */
export function iconButton(name, label, onclick, text = "") {
  const button = make("button", { type: "button", className: "icon-button", "aria-label": label, title: label },
    icon(name), ...(text ? [make("span", { textContent: text })] : []));
  if (onclick) button.addEventListener("click", onclick);
  return button;
}

/** Sets a text only where it changes, so that a reader's place and a selection stay. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttribute(element, name, value) {
  if (value === null || value === "") element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

/** Makes the children of `parent` those of `items`, reusing elements, so that focus and playback stay. */
export function renderList(parent, items, keyOf, create, update) {
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
export function toast(text) {
  $("toast").textContent = text;
  $("toast").classList.remove("past");
  clearTimeout(toast.timer);
  toast.timer = setTimeout(() => $("toast").classList.add("past"), 6000);
}
