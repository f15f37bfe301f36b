"""Prompts: the lines of a text file, and the words of a prompt for a file's name."""

from __future__ import annotations

import codecs
import itertools
import re
import unicodedata

from svdpp.config.pipeline import check_prompt
from svdpp.errors import InputError, RequestError

# As a character inside a text it shows nothing, and tokenizers make tokens of it.
_MARK = "\ufeff"
# Characters of a prompt in the name of its clips.
_NAME_CHARACTERS = 48
# UTF-32's before UTF-16's, which the little-endian one begins with.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


def parse_prompts(data: bytes, name: str) -> list[str]:
    """Return the prompts of a text file, one for each line.

    Blank lines, and those whose first character besides spaces is `#`, are skipped. Byte order
    marks are dropped, also inside, where files that were joined have them.

    Args:
        data: Content of the file: UTF-8, with or without a byte order mark, or UTF-16 or UTF-32
            with one.
        name: Option and file, for messages.

    Raises:
        InputError: A line is not text or no prompt, or there is no prompt.
    """
    prompts = []
    for number, line in enumerate(_lines(data, name), start=1):
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


def _lines(data: bytes, name: str) -> list[str]:
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
    return _split_lines(text.replace(_MARK, ""))


def _split_lines(text: str) -> list[str]:
    # Not splitlines(), which also splits at form feeds and other separators inside a prompt.
    return re.split(r"\r\n|\r|\n", text)


def slugify_prompt(prompt: str) -> str:
    """Return the first words of a prompt for a file's name: letters of any script, and digits.

    Returns:
        At most 48 characters in lower case, words joined by `-`; empty if it has no letter.
    """
    text = unicodedata.normalize("NFC", prompt.lower())
    parts = (
        "".join(group) for is_kept, group in itertools.groupby(text, key=_is_of_word) if is_kept
    )
    return "-".join(parts)[:_NAME_CHARACTERS].rstrip("-")


def _is_of_word(character: str) -> bool:
    # Marks are the vowels of many scripts: without them words of Hindi or Thai would fall apart.
    return unicodedata.category(character)[0] in "LNM"
