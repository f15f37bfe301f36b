"""Removal of proposals from hints of errors, if the proposals name options that a command lacks."""

from __future__ import annotations

import re
from collections.abc import Collection

# Command line in a hint, such as `svdpp plan --layout auto`. Its options are always kept, because
# they belong to another command.
_COMMAND_LINE = re.compile(r"\b(?:svdpp|hf|docker|pip|torchrun|srun) [^,;()]*")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z.-]*[a-z]")
# Separators of proposals. A comma before "which" does not separate two proposals, because the
# clause that follows belongs to the same proposal.
_BETWEEN = re.compile(r"(; |, or |, and | or |, (?!which ))")
# Verb that several proposals can share, as in "use --steps 21 or --gpus 3".
_VERB = re.compile(r"(?:use|check|try|raise|give|name|leave) ")


def keep_available(hint: str, options: Collection[str]) -> str:
    """Return an error's hint without the proposals that name an option outside of `options`.

    Args:
        hint: Proposals, separated by commas, semicolons or "or", such as "use --steps 21, or --gpus
            3".
        options: Names of options that may be proposed. Options of another command line in the
            hint, such as `svdpp plan --layout auto`, are always kept.

    Returns:
        Hint; empty if no proposal is left.
    """
    lines: list[str] = []

    def hide(line: re.Match[str]) -> str:
        lines.append(line[0])
        return f"\0{len(lines) - 1}\0"

    between, *others = "", *_BETWEEN.split(_COMMAND_LINE.sub(hide, hint))
    kept, verb = "", ""
    for proposal, following in zip(others[::2], [*others[1::2], ""], strict=True):
        if between == "; ":
            verb = ""
        if {*_OPTION.findall(proposal)} <= {*options}:
            kept += f"{between if kept else ''}{verb}{proposal}"
            verb = ""
        elif begins := _VERB.match(proposal):
            verb = begins[0]
        between = following
    return re.sub(r"\0(\d+)\0", lambda number: lines[int(number[1])], kept)
