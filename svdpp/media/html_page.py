"""Writing one self-contained HTML page from a template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from svdpp.media import output_files


def write_html_page(template: Path, path: Path, **values: Any) -> None:
    """Renders a Jinja2 template, in which every value is escaped, to `path`.

    It may import others by their path below `svdpp`.

    Raises:
        OutputError: the page cannot be written.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # few commands need it

    environment = Environment(
        loader=FileSystemLoader(template.parents[1]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template(f"{template.parent.name}/{template.name}").render(**values)
    with output_files.atomic_output(str(path), ".html") as temporary:
        temporary.write_text(page, encoding="utf-8", errors="replace")
