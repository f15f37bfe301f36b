"""The refusal of other classes, and of code and adapters, in a checkpoint's configs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from svdpp.errors import ModelError
from svdpp.models.safetensors_header import JsonFile, short_repr

NO_CODE = "svdpp runs no code from a checkpoint"


def check_classes(index: JsonFile, classes: Mapping[str, tuple[str, ...]]) -> None:
    """Checks that an index has exactly the components `classes`, of one of their classes."""
    for part in classes:
        if part not in index.values:
            raise index.error(f"the component {part} is missing")
    for part, entry in index.values.items():
        if part.startswith("_"):
            continue
        key, value = short_repr(part), short_repr(entry)
        if not (isinstance(entry, list) and len(entry) == 2):
            raise index.error(f"{key} is {value}, not a library and a class")
        if part in classes and entry[0] in _LIBRARIES:
            check_class(index, part, entry[1], classes[part])
        elif entry[0] not in (*_LIBRARIES, None):
            raise index.error(f"{key} is from the module {short_repr(entry[0])}, but {NO_CODE}")
        else:
            pipeline = index.values["_class_name"]
            raise index.error(f"{key} is {value}, which {pipeline} does not have")


def check_class(config: JsonFile, part: str, name: object, allowed: tuple[str, ...]) -> None:
    """ModelError if `name` is not one of the classes `allowed` for a component."""
    if name not in allowed:
        expected = " or ".join(allowed)
        raise config.error(f"the {part} is of class {short_repr(name)}, not {expected}")


def check_no_code_keys(config: JsonFile) -> None:
    """ModelError if a component's config names other code or other weights."""
    for key in config.values:
        if _CODE_KEYS.search(key):
            raise config.error(f"the key {short_repr(key)} is not supported: {NO_CODE}")


def check_no_code(folder: Path) -> None:
    """ModelError if a folder contains Python files or adapters.

    transformers loads adapters from other repositories.
    """
    for pattern in ("*.py", "*/*.py", "*/adapter_config.json"):
        for path in sorted(folder.glob(pattern)):
            name = short_repr(path.relative_to(folder).as_posix())
            raise ModelError(
                f"the folder contains {name}, but {NO_CODE}",
                "remove the file if the weights do not need it",
            )


_LIBRARIES = ("diffusers", "transformers")

#: Config keys that make the libraries load other code or weights: attn_implementation can name a
#: kernel on the hub, transformers_weights another file.
_CODE_KEYS = re.compile(
    r"auto_map|custom_pipeline|quantization_config|_implementation|use_kernels|kernel_(config|mapping)|transformers_weights"
)
