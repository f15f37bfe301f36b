"""Names of a run's clips: one for each input, none twice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from svdpp.media import video
from svdpp.media.inputs import ClipInput
from svdpp.media.prompts import slugify_prompt


def clip_names(inputs: Sequence[ClipInput]) -> list[str]:
    """Return a unique name for each input, with which the file names of its clips begin.

    The name is that of the image, or the first words of the prompt; both if an image has several
    prompts. Where two would be equal, as for `a.jpg` and `a.png`, the second one gets `-2`, and so
    on.
    """
    prompts: dict[Path, set[str | None]] = {}
    for each in inputs:
        if each.media_file is not None:
            prompts.setdefault(each.media_file.path, set()).add(each.prompt)
    wanted = []
    for each in inputs:
        has_several = each.media_file is not None and len(prompts[each.media_file.path]) > 1
        words = slugify_prompt(each.prompt or "") or "prompt"
        wanted.append(f"{each.name}-{words}" if has_several else each.name)
    # A longer name is cut in the file's name, where only its beginning distinguishes it.
    beginnings = [_beginning(name, _UNIQUE_BYTES) for name in wanted]
    names, taken, numbers = list[str](), set(beginnings), dict[str, int]()
    for name, beginning in zip(wanted, beginnings, strict=True):
        unique, number = name, numbers.get(beginning, 0) + 1
        while number > 1 and (unique := f"{_beginning(name, _NUMBERED_BYTES)}-{number}") in taken:
            number += 1
        numbers[beginning] = number
        taken.add(unique)
        names.append(unique)
    return names


# Bytes of a name that are in every clip's file name: it ends with a seed and a suffix. With a
# number there are fewer.
_UNIQUE_BYTES = video.MAX_NAME_BYTES - len("_9223372036854775807.webp")
_NUMBERED_BYTES = _UNIQUE_BYTES - len("-100000")


def _beginning(name: str, num_bytes: int) -> str:
    encoded = name.encode("utf-8", "surrogatepass")
    if len(encoded) <= num_bytes:
        return name
    return encoded[:num_bytes].decode("utf-8", "ignore")
