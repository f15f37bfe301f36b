"""Prompts, read from a text file or from files beside images; file names made from prompts."""

from __future__ import annotations

import codecs
import itertools
import re
import unicodedata
from pathlib import Path

from svdpp.config.limits import read_small_file
from svdpp.config.pipeline import check_prompt
from svdpp.errors import InputError, RequestError

# Byte order mark, which is removed from prompts: it is invisible, but tokenizers turn it into
# tokens.
_MARK = "\ufeff"
# Maximum number of characters of a prompt that a clip's file name contains.
_NAME_CHARACTERS = 48
# Byte order marks and their encodings. UTF-32 comes before UTF-16, because its little-endian mark
# begins with the mark of UTF-16.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


def parse_prompts(data: bytes, name: str) -> list[str]:
    """Return the prompts in the content of a text file, one for each line.

    Blank lines and comment lines, which begin with `#`, are skipped. Byte order marks are removed
    everywhere, because concatenated files have them inside the text.

    Args:
        data: Content of the file: UTF-8, or UTF-16 or UTF-32 with a byte order mark.
        name: Option and file name, for error messages.

    Raises:
        InputError: A line is not text or not a valid prompt, or the file has no prompt.
    """
    prompts = []
    for number, line in enumerate(_split_lines(decode_text(data, name)), start=1):
        prompt = line.strip()
        if not prompt or prompt.startswith("#"):
            continue
        try:
            check_prompt("prompt", prompt)
        except RequestError as error:
            details = {"line": number, **error.details}
            message = f"{name}, line {number}: {error.message.replace('`prompt`', 'a prompt')}"
            raise InputError(message, error.hint, details=details) from error
        prompts.append(prompt)
    if not prompts:
        raise InputError(f"{name} has no prompt", "write one prompt in each line")
    return prompts


def decode_text(data: bytes, name: str) -> str:
    """Decode the content of a text file (UTF-8, UTF-16 or UTF-32), without byte order marks.

    Args:
        data: Content of the file: UTF-8, or UTF-16 or UTF-32 with a byte order mark.
        name: Option and file name, for error messages.

    Raises:
        InputError: A line is not text.
    """
    mark, encoding = next((pair for pair in _MARKS if data.startswith(pair[0])), (b"", "utf-8"))
    data = data.removeprefix(mark)
    hint = "save the file as UTF-8"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        line = len(_split_lines(data[: error.start].decode(encoding, errors="ignore")))
        message = f"{name}, line {line}: it is not {encoding.upper()}: {error.reason}"
        raise InputError(message, hint, details={"line": line}) from error
    if "\0" in text:
        line = len(_split_lines(text[: text.index("\0")]))
        message = f"{name}, line {line}: it has a null byte, as binary files and UTF-16 do"
        raise InputError(message, hint, details={"line": line})
    return text.replace(_MARK, "")


def _split_lines(text: str) -> list[str]:
    # `splitlines()` is not used, because it also splits at form feeds and other separators.
    return re.split(r"\r\n|\r|\n", text)


def read_caption(image: Path) -> str | None:
    """Return the caption of an image: the text in the `.txt` file of the same name beside it.

    Args:
        image: Path of the image.

    Returns:
        Caption, with a space in place of each line break; None: the text file does not exist.

    Raises:
        InputError: The text file cannot be read, or contains no prompt.
    """
    path = image.with_suffix(".txt")
    if not path.exists():
        return None
    name = repr(str(path))
    text = " ".join(decode_text(read_small_file(path, "the prompt"), name).split())
    if not text:
        raise InputError(f"{name} has no prompt", "write what happens in the clip")
    try:
        check_prompt("prompt", text)
    except RequestError as error:
        raise InputError(f"{name}: {error.message}", error.hint, details=error.details) from error
    return text


def slugify_prompt(prompt: str) -> str:
    """Return the first words of a prompt, as a part of a file name.

    Returns:
        At most 48 characters: letters of any script in lower case, and digits, with a `-` between
        words. Empty if the prompt has no letters and no digits.
    """
    text = unicodedata.normalize("NFC", prompt.lower())
    parts = (
        "".join(group) for is_kept, group in itertools.groupby(text, key=_is_of_word) if is_kept
    )
    return "-".join(parts)[:_NAME_CHARACTERS].rstrip("-")


def _is_of_word(character: str) -> bool:
    # Combining marks ("M") count as letters, because many scripts, such as those of Hindi and Thai,
    # write vowels with them.
    return unicodedata.category(character)[0] in "LNM"
