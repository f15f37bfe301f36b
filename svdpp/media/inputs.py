"""Owns which photographs a command's inputs name: files, folders, patterns; all of them checked."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from svdpp.errors import InputError
from svdpp.media.image import Photo, file_problem, read_photo

#: Of the files that a folder or a pattern stands for.
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif")


def find_images(inputs: Sequence[str], *, recursive: bool = False) -> list[Path]:
    """The image files that `inputs` name, in their order, each once.

    Args:
        inputs: each a file (taken whatever its suffix), a folder (its own files with one of
            `SUFFIXES`, by name, hidden ones skipped) or, where nothing of that literal name exists,
            a glob pattern with `*`, `?`, `[]` or `**` (files with one of `SUFFIXES`, by name).
        recursive: whether a folder's subfolders are looked into, hidden ones and links apart.

    Raises:
        InputError: a missing path, a folder or pattern without images, something that is not a
            regular file; one error that lists them all.
    """
    problems: list[InputError] = []
    found = _find(inputs, problems, recursive=recursive)
    raise_all(problems)
    return found


def check_photos(paths: Sequence[Path]) -> list[Photo]:
    """Reads each photograph to its last pixel, and keeps none of them.

    Raises:
        InputError: one error that lists every photograph `read_photo` refuses.
    """
    problems: list[InputError] = []
    photos = _check(paths, problems)
    raise_all(problems)
    return photos


def check_inputs(inputs: Sequence[str]) -> list[Photo]:
    """`find_images` and `check_photos` in one, so that no problem hides another.

    Raises:
        InputError: one error that lists all that is missing, unreadable or hostile.
    """
    photos, problems = sift_inputs(inputs)
    raise_all(problems)
    return photos


def sift_inputs(
    inputs: Sequence[str], *, recursive: bool = False
) -> tuple[list[Photo], list[InputError]]:
    """What `check_inputs` gives, and apart from it an error for each input that it refuses.

    Raises:
        InputError: not one of them can be read.
    """
    problems: list[InputError] = []
    photos = _check(_find(inputs, problems, recursive=recursive), problems)
    if not photos:
        raise_all(problems)
    return photos, problems


def raise_all(problems: Sequence[InputError], hint: str = "") -> None:
    """Raises the only one of `problems` as it is, several as one error that lists them.

    Args:
        problems: none raises nothing.
        hint: of the error, beside its own.
    """
    if len(problems) == 1:
        raise InputError(problems[0].message, "; ".join(filter(None, (problems[0].hint, hint))))
    if problems:
        lines = [f"{len(problems)} inputs cannot be used:", *(each.message for each in problems)]
        raise InputError("\n  ".join(lines), hint)


def _expand(text: str, *, recursive: bool) -> Iterator[Path]:
    """The files that one input names, not yet checked; InputError where it names none."""
    path = Path(text)
    if not text:
        raise InputError("'' is an empty name")
    if os.path.isdir(text):
        files = list(_files_in(path, recursive=recursive))
    elif not os.path.lexists(text) and "\0" not in text and any(char in text for char in "*?["):
        files = [Path(match) for match in sorted(glob.glob(text, recursive=True))]
    else:
        yield path
        return
    images = list(filter(_is_image, files))
    if not images:
        what = "is a folder without" if os.path.isdir(text) else "matches no"
        deeper = os.path.isdir(text) and any(map(_is_image, _files_in(path, recursive=True)))
        hint = "its subfolders have some: --recursive takes them" if deeper else ""
        raise InputError(f"{text!r} {what} images ({' '.join(SUFFIXES)})", hint)
    yield from images


def _files_in(folder: Path, *, recursive: bool) -> Iterator[Path]:
    """The folder's own files by name, then those of its subfolders; hidden ones are skipped."""
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as error:
        raise InputError(f"{str(folder)!r} cannot be read: {error.strerror}") from None
    paths = [folder / name for name in names]
    yield from (path for path in paths if not path.is_dir())
    if recursive:
        for path in paths:
            if path.is_dir() and not path.is_symlink():
                yield from _files_in(path, recursive=True)


def _is_image(path: Path) -> bool:
    """By its name."""
    return path.suffix.lower() in SUFFIXES and not path.is_dir()


def _find(
    inputs: Sequence[str], problems: list[InputError], *, recursive: bool = False
) -> list[Path]:
    found: dict[str, Path] = {}
    for text in inputs:
        try:
            for path in _expand(text, recursive=recursive):
                if problem := file_problem(path):
                    problems.append(InputError(f"{str(path)!r} {problem}"))
                else:
                    found.setdefault(os.path.realpath(path), path)
        except InputError as error:
            problems.append(error)
    return list(found.values())


def _check(paths: Sequence[Path], problems: list[InputError]) -> list[Photo]:
    photos: list[Photo] = []
    for path in paths:
        try:
            photos.append(read_photo(path)[1])
        except InputError as error:
            problems.append(error)
    return photos
