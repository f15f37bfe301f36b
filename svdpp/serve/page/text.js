// Formatting of numbers, times and sentences.

export const now = () => Date.now() / 1000;
export const plural = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
export const capital = (text) => text[0].toUpperCase() + text.slice(1);

export const withArticle = (noun) => `${/^[aeiou]/.test(noun) ? "an" : "a"} ${noun}`;

export function sentence(text) {
  if (!text) return "";
  // Texts that begin with a parameter, an option or a file name are not capitalized.
  const isName = /^[a-z]+_|^--|^'/.test(text);
  return (isName ? text : capital(text)) + (/[.!?]$/.test(text) ? "" : ".");
}

export function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  const [minutes, hours] = [Math.floor(whole / 60), Math.floor(whole / 3600)];
  const two = (value) => String(value).padStart(2, "0");
  return hours ? `${hours} h ${two(minutes % 60)} min` : `${minutes} min ${two(whole % 60)} s`;
}

export function fileSize(bytes) {
  return bytes < 1e6 ? `${Math.max(1, Math.round(bytes / 1e3))} kB` : `${(bytes / 1e6).toFixed(1)} MB`;
}
