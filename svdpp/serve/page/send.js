// Owns the requests for clips: of the chosen images or videos, and of a clip once more.

import { get, getBlob, ApiError, errorText } from "./api.js";
import { takeVideo } from "./clips.js";
import { $, toast } from "./dom.js";
import {
  clearErrors, fieldErrorsOf, fieldsAreValid, model, settings, showFieldError, showFormError,
} from "./form.js";
import { field, videosOf } from "./fields.js";
import { removePhoto, randomSeed, renderPhotos, token } from "./photos.js";
import { emit } from "./signals.js";
import { state } from "./state.js";
import { duration, plural, withArticle } from "./text.js";
import { keepThumb } from "./thumbs.js";
import { inputWord, parametersOf, titleOf } from "./format.js";

// What stands for the file of a clip from text alone.
const newText = () => ({ file: null, seed: randomSeed() });
let text = newText();

/** Stores one clip's request on the server; a second try with the same values is the same request. */
async function send(photo, values, videos) {
  const wanted = JSON.stringify([values, videos.map(([name, file]) => [name, file.name, file.size, file.lastModified])]);
  if (photo.wanted !== wanted) Object.assign(photo, { wanted, key: token() });
  const form = new FormData();
  if (photo.file) form.append("input_reference", photo.file, photo.file.name || "image");
  for (const [name, file] of videos) form.append(name, file, file.name || name);
  for (const [name, value] of Object.entries(values)) if (String(value) !== "") form.append(name, value);
  const video = await get("/v1/videos", { method: "POST", body: form, headers: { "Idempotency-Key": photo.key } });
  if (photo.thumb) keepThumb(video.input.sha256, photo.thumb);
  takeVideo(video, { quietly: true });
  return video;
}

export async function submit(event) {
  event.preventDefault();
  clearErrors();
  if (!state.photos.length && (model()?.inputs.input_reference ?? "needed") === "needed") {
    showFormError(`Choose ${withArticle(inputWord(model()))} first.`);
    $("files").focus();
    return;
  }
  if (!fieldsAreValid()) return;
  $("make").disabled = true;
  const made = await sendAll(settings());
  $("make").disabled = false;
  renderPhotos();
  emit("change");
  if (made.length) {
    const eta = Math.max(...made.map((video) => video.eta_seconds ?? -1));
    toast(`${plural(made.length, "clip")} in the queue${eta < 0 ? "" : `, finished in about ${duration(eta)}`}.`);
  }
  emit("stale");
}

/** Sends the chosen photographs one after another, or the text alone; those that are refused stay. */
async function sendAll(values) {
  const made = [], videos = videosOf(model()).map((name) => [name, field(name).files[0]]);
  for (const photo of state.photos.length ? [...state.photos] : [text]) {
    Object.assign(photo, { sending: true, error: "" });
    renderPhotos();
    try {
      made.push(await send(photo, { ...values, seed: values.seed || photo.seed }, videos));
      if (photo === text) text = newText();
      removePhoto(photo);
      emit("change");
    } catch (error) {
      if (showRefusal(error, photo)) break;
    } finally {
      photo.sending = false;
    }
  }
  return made;
}

/** Shows why a request was refused, where it can be corrected; true if the next ones would be refused too. */
function showRefusal(error, photo) {
  if (!(error instanceof ApiError)) {
    showFormError(errorText(error));
    return true;
  }
  const faults = fieldErrorsOf(error);
  for (const [name, words] of faults) showFieldError(name, words);
  if (faults.length) {
    $("new").querySelector("[aria-invalid=true]").focus();
    return true;
  }
  const isAboutPhoto = photo.file && (error.code === "invalid_image" || [408, 413, 415].includes(error.status));
  if (isAboutPhoto) photo.error = error.words;
  else showFormError(error.words);
  return !isAboutPhoto;
}

/** Requests a clip once more, of the photograph that the server has, if it has one. */
export async function requestAgain(id, changes = {}) {
  const video = state.videos.get(id);
  const values = Object.fromEntries(["model", ...parametersOf(video)].map((name) => [name, video[name]]));
  try {
    const file = video.input && new File([await getBlob(`/v1/videos/${id}/input`)], video.input.name);
    const videos = [];
    for (const name of Object.keys(video.videos ?? {}))
      videos.push([name, new File([await getBlob(`/v1/videos/${id}/input?field=${name}`)], name)]);
    const made = await send({ file }, { ...values, ...changes }, videos);
    toast(`${titleOf(made)}: in the queue.`);
  } catch (error) {
    toast(errorText(error));
  }
  emit("change");
}
