"""Removal of proposals from hints of errors, if the proposals name options that a command lacks."""

from __future__ import annotations

import re
from collections.abc import Collection

from svdpp.errors import filter_hint

# Options behind the name of a program belong to that program, as in `svdpp plan --layout auto`.
_PROGRAM = re.compile(r"\b(?:svdpp|hf|docker) ")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9.-]*[a-z0-9]")


def keep_available(hint: str, options: Collection[str]) -> str:
    """Return an error's hint without the proposals that name an option outside of `options`.

    Args:
        hint: Proposals; see `filter_hint`.
        options: Names of options that may be proposed. Options of another command line at the end
            of a proposal, such as `svdpp plan --layout auto`, are always kept.

    Returns:
        Hint; empty if no proposal is left.
    """

    def is_available(proposal: str) -> bool:
        own_part = _PROGRAM.split(proposal)[0]
        return set(_OPTION.findall(own_part)) <= set(options)

    return filter_hint(hint, is_available)
