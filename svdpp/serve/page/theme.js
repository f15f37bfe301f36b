// Theme of the page: light, dark, or the setting of the system.

import { $, icon, make, setAttribute } from "./dom.js";

const THEMES = { auto: "Theme: as the system", light: "Theme: light", dark: "Theme: dark" };

function storedTheme() {
  try { return localStorage.getItem("svdpp-theme") ?? "auto"; } catch { return "auto"; }
}

function applyTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  $("theme").replaceChildren(icon(theme), make("span", { textContent: "Theme" }));
  $("theme").title = THEMES[theme];
  setAttribute($("theme"), "aria-label", THEMES[theme]);
  try { localStorage.setItem("svdpp-theme", theme); } catch { /* storage may be forbidden */ }
}

function nextTheme() {
  const names = Object.keys(THEMES);
  applyTheme(names[(names.indexOf(storedTheme()) + 1) % names.length]);
}

export function listenToTheme() {
  applyTheme(storedTheme());
  $("theme").addEventListener("click", nextTheme);
}
