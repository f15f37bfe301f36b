// Helpers that create and change DOM elements.

export const $ = (id) => document.getElementById(id);

/** Creates an element; `properties` are DOM properties, attributes (aria-*, data-*, role) or listeners (on*). */
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

/** Creates a button with an icon. `text` is shown below the icon; `label`, the tooltip, also names the clip or file. */
export function iconButton(name, label, onclick, text = "") {
  const button = make("button", { type: "button", className: "icon-button", "aria-label": label, title: label },
    icon(name), ...(text ? [make("span", { textContent: text })] : []));
  if (onclick) button.addEventListener("click", onclick);
  return button;
}

/** Sets an element's text only if it differs, so that a screen reader's position and a selection stay. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttribute(element, name, value) {
  if (value === null || value === "") element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

/** Shows one child of `parent` for each item. Existing elements are reused, so that focus and playback stay. */
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

/** Moves the focus from a node that is about to be removed to a neighbour's button, or else to the section. */
function focusNear(node) {
  const section = node.closest("section, form");
  const neighbour = (node.nextElementSibling ?? node.previousElementSibling)?.querySelector("button");
  // A row of the queue also disappears when its clip ends. If the focus then moved to the next row's Cancel button,
  // a key that is pressed a moment too late would cancel the wrong clip.
  const next = section.id === "queue" ? null : neighbour;
  (next ?? (section.id === "new" ? $("files") : section)).focus({ preventScroll: true });
}

/** Shows a message for 6 seconds; screen readers read it aloud. */
export function toast(text) {
  $("toast").textContent = text;
  $("toast").classList.remove("past");
  clearTimeout(toast.timer);
  toast.timer = setTimeout(() => $("toast").classList.add("past"), 6000);
}
