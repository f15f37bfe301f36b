// Thumbnails of input images: of chosen files, and of the inputs of clips on the server.

import { getBlob, release } from "./api.js";
import { icon, make } from "./dom.js";

const MOST = 400;

const thumbs = new Map(); // SHA-256 of an image -> promise of the thumbnail's URL, or of null

/** Returns the URL of an image's thumbnail; null if the browser cannot decode the file, such as a TIFF. */
export async function shrink(blob) {
  try {
    const bitmap = await createImageBitmap(blob, { resizeWidth: 160, resizeQuality: "medium" });
    const canvas = make("canvas", { width: bitmap.width, height: bitmap.height });
    const context = canvas.getContext("2d");
    context.fillStyle = "white"; // transparent parts become white, as in the clip
    context.fillRect(0, 0, bitmap.width, bitmap.height);
    context.drawImage(bitmap, 0, 0);
    bitmap.close();
    const small = await new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.85));
    return URL.createObjectURL(small);
  } catch {
    return null;
  }
}

/** Caches an image's thumbnail; releases the oldest one if there are more than `MOST`. */
export function keepThumb(sha256, thumb) {
  thumbs.set(sha256, thumb);
  if (thumbs.size <= MOST) return;
  const [oldest, address] = thumbs.entries().next().value;
  thumbs.delete(oldest);
  address.then(release);
}

// Images are loaded one after another, and only once they are visible, because they may be large.
let last = Promise.resolve();
const watcher = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (!isIntersecting) continue;
    watcher.unobserve(target);
    fill(target);
  }
});

async function fill(blank) {
  const { id, input } = blank.video;
  if (!thumbs.has(input.sha256)) {
    last = last.then(() => getBlob(`/v1/videos/${id}/input`)).then(shrink).catch(() => null);
    keepThumb(input.sha256, last);
  }
  const src = await thumbs.get(input.sha256);
  if (src) blank.replaceWith(make("img", { className: "thumb", src, alt: "" }));
}

/** Creates an element that loads a clip's thumbnail once it is visible; an icon for a clip from text alone. */
export function thumbOf(video) {
  if (!video.input) return make("span", { className: "thumb text" }, icon("text"));
  const blank = Object.assign(make("span", { className: "thumb" }), { video });
  watcher.observe(blank);
  return blank;
}
