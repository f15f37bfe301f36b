// Player of a card's clip: loads, plays and unloads it.

import { mediaOf, release } from "./api.js";
import { icon, iconButton, make, setAttribute, setText } from "./dom.js";
import { state } from "./state.js";
import { titleOf } from "./format.js";

// Clips that are more than 200 px outside the window are neither loaded nor played.
const watcher = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) target.player.see(isIntersecting);
}, { rootMargin: "200px" });

// Clips outside the window are unloaded, because browsers load only some dozens of videos on a page.
function unload(element) {
  element.removeAttribute("src");
  element.load();
}

export class Player {
  constructor(video) {
    this.video = video;
    this.title = titleOf(video);
    this.isVisible = false;
    this.isWanted = !state.paused;
    this.address = null; // URL of the clip; null until it is known
    this.toggle = iconButton("pause", "", () => this.play(this.element.paused));
    this.fault = make("p", { className: "error", hidden: true });
    this.element = this.makeElement();
    this.screen = make("div", { className: "screen" }, this.element, this.toggle, this.fault);
    this.screen.player = this;
    watcher.observe(this.screen);
    this.showState();
  }

  makeElement() {
    const [width, height] = this.video.size.split("x").map(Number);
    const element = make("video", { muted: true, loop: true, playsInline: true, preload: "auto", width, height,
      "aria-label": `Clip of ${this.title}` });
    for (const name of ["play", "pause"]) element.addEventListener(name, () => this.showState());
    element.addEventListener("error", () => this.fail());
    return element;
  }

  showState() {
    const { paused } = this.element;
    const label = `${paused ? "Play" : "Pause"} ${this.title}`;
    this.screen.classList.toggle("paused", paused);
    this.toggle.replaceChildren(icon(paused ? "play" : "pause"));
    this.toggle.title = label;
    setAttribute(this.toggle, "aria-label", label);
  }

  see(isVisible) {
    this.isVisible = isVisible;
    this.apply();
  }

  play(isWanted) {
    this.isWanted = isWanted;
    this.apply();
  }

  /** Loads the clip again if it could not be loaded. */
  retry() {
    if (!this.fault.hidden) this.apply();
  }

  async apply() {
    const { element } = this;
    if (this.isVisible) await this.load();
    if (this.isVisible && this.address && !element.src) element.src = this.address;
    if (this.isVisible && this.isWanted) element.play().catch(() => {});
    else element.pause();
    if (!this.isVisible && element.src) unload(element);
  }

  async load() {
    if (this.address) return;
    this.fault.hidden = true;
    try {
      this.address = await mediaOf(this.video.id);
    } catch (error) {
      this.showFault(error.words ?? "The clip could not be loaded.");
    }
  }

  fail() {
    this.showFault("The clip could not be loaded or played.");
    this.letGo();
  }

  showFault(words) {
    setText(this.fault, words);
    this.fault.hidden = false;
  }

  letGo() {
    unload(this.element);
    release(this.address);
    this.address = null;
  }

  forget() {
    watcher.unobserve(this.screen);
    this.letGo();
  }
}
