// Owns how a card's clip is loaded, played and let go, and how the exact clip takes its draft's place.

import { mediaOf, release } from "./api.js";
import { icon, iconButton, make, setAttribute, setText } from "./dom.js";
import { state } from "./state.js";
import { titleOf } from "./words.js";

// Clips outside the window neither load nor play.
const watcher = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) target.player.see(isIntersecting);
}, { rootMargin: "200px" });

const happens = (element, name) => new Promise((resolve) => element.addEventListener(name, resolve, { once: true }));

// Browsers have a limit of some dozens of loaded videos on a page.
function unload(element) {
  element.removeAttribute("src");
  element.load();
}

export class Player {
  constructor(video) {
    this.video = video;
    this.title = titleOf(video);
    this.isDraft = video.drafted;
    this.isVisible = false;
    this.isWanted = !state.paused;
    this.address = null; // of what is loaded
    this.toggle = iconButton("pause", "", () => this.play(this.element.paused));
    this.fault = make("p", { className: "error", hidden: true });
    this.badge = make("p", { className: "badge", textContent: "Draft: the exact clip follows" });
    this.element = this.makeElement();
    this.screen = make("div", { className: "screen" }, this.element, this.badge, this.toggle, this.fault);
    this.screen.player = this;
    watcher.observe(this.screen);
    this.showState();
  }

  makeElement() {
    const [width, height] = this.video.size.split("x").map(Number);
    const element = make("video", { muted: true, loop: true, playsInline: true, preload: "auto", width, height,
      "aria-label": `${this.isDraft ? "Draft" : "Clip"} of ${this.title}` });
    element.isDraft = this.isDraft;
    for (const name of ["play", "pause"]) element.addEventListener(name, () => this.showState());
    element.addEventListener("error", () => this.fail(element));
    return element;
  }

  showState() {
    const { paused, isDraft } = this.element;
    const label = `${paused ? "Play" : "Pause"} ${this.title}`;
    this.screen.classList.toggle("paused", paused);
    this.badge.hidden = !isDraft;
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

  /** Tries again what could not be loaded. */
  retry() {
    if (!this.fault.hidden) this.apply();
  }

  async apply() {
    const { element } = this;
    if (this.isVisible) await this.load();
    if (element !== this.element) return; // replaced meanwhile
    if (this.isVisible && this.address && !element.src) element.src = this.address;
    if (this.isVisible && this.isWanted) element.play().catch(() => {});
    else element.pause();
    if (!this.isVisible && element.src) unload(element);
  }

  async load() {
    if (this.address) return;
    this.fault.hidden = true;
    try {
      this.address = await mediaOf(this.video.id, this.isDraft);
    } catch (error) {
      this.showFault(error.words ?? "The clip could not be loaded.");
    }
  }

  fail(element) {
    if (element !== this.element || element.isDraft !== this.isDraft) return; // the other one is on its way
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

  /** Shows the exact clip; its draft stays until the first picture of the exact clip is here. */
  async becomeExact() {
    if (!this.isDraft) return;
    this.isDraft = false;
    const [draft, address] = [this.element, this.address];
    this.address = null;
    if (this.isVisible) await this.load();
    const exact = this.makeElement();
    if (this.address && !this.isGone) await this.bring(exact, draft.currentTime);
    draft.replaceWith(exact);
    this.element = exact;
    unload(draft);
    release(address);
    if (this.isGone) this.letGo();
    else this.apply();
    this.showState();
  }

  /** Loads a clip before it is shown, to the picture of that time. */
  async bring(element, time) {
    element.src = this.address;
    await Promise.race([happens(element, "loadeddata"), happens(element, "error")]);
    if (element.error) return;
    element.currentTime = time;
    await happens(element, "seeked");
  }

  forget() {
    this.isGone = true;
    watcher.unobserve(this.screen);
    this.letGo();
  }
}
