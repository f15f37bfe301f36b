"""Search for a checkpoint's components, also in other repositories of the hub; imports no torch.

The index of a modular pipeline, `modular_model_index.json`, has an entry for each component:
library, class and place. The place can name a repository, a subfolder, a revision and a variant,
all of which are untrusted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from svdpp.config import ModelConfig
from svdpp.errors import ModelError, redact_tokens
from svdpp.models.files import (
    UNSUPPORTED_HINT,
    ComponentFolder,
    JsonFile,
    has_weights,
    short_repr,
)
from svdpp.models.hub import download_component_configs, download_weights, snapshot_commit


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Repository and folder of a component, as its entry in `modular_model_index.json` says."""

    part: str
    """Name of the component."""
    repository: str | None
    """Hub id of another repository; None: the checkpoint's own folder has the component."""
    revision: str | None
    """Branch, tag or commit of the other repository; None: its main branch."""
    subfolder: str
    """Path of the component's folder in its repository; empty: the root."""
    variant: str | None
    """Variant of the component's weight files; None: the plain files."""


def find_component_folders(
    index: JsonFile, parts: Iterable[str], folder: Path, model: ModelConfig, *, is_local: bool
) -> tuple[ComponentFolder, ...]:
    """Find the components whose place a modular pipeline's index names; download their configs.

    The rules are those of diffusers. If the model is a local folder that has the component's files,
    the files in this folder are used. Otherwise, and for all hub models, the component comes from
    the repository that its entry in the index names.

    Args:
        index: Index of the checkpoint, `modular_model_index.json` or `model_index.json`.
        parts: Names of the components to find.
        folder: Folder of the checkpoint.
        model: Model of the checkpoint.
        is_local: Whether the model is a local folder, and not a hub model.

    Returns:
        Folders of the components that are not at the usual place, `folder/NAME`, and of the
        components whose entry in the index names a variant. All components that the result does not
        list are in `folder/NAME`.

    Raises:
        ModelError: An entry names no valid place, or the repository cannot be downloaded.
    """
    listed = (_find_source(index, part, folder, model, is_local=is_local) for part in sorted(parts))
    sources = [source for source in listed if source is not None]
    groups: dict[tuple[str | None, str | None], list[_Source]] = {}
    for source in sources:
        groups.setdefault((source.repository, source.revision), []).append(source)
    found: list[ComponentFolder] = []
    for (repository, revision), group in groups.items():
        root = folder
        subfolders = {source.subfolder for source in group}
        if repository is not None:
            other = replace(model, name=repository, revision=revision)
            with _named(repository, [source.part for source in group]):
                root = download_component_configs(other, subfolders)
        elif not is_local:
            own = replace(model, revision=snapshot_commit(folder) or model.revision)
            download_component_configs(own, subfolders)
        found += [
            ComponentFolder(each.part, root, each.subfolder, repository, each.variant)
            for each in group
        ]
    return tuple(found)


def download_missing_weights(model: ModelConfig, components: Iterable[ComponentFolder]) -> None:
    """Download the weights of components from the model's own and from other repositories.

    Args:
        model: Model of the checkpoint. For a hub model, its revision is the commit of the snapshot.
        components: Components whose weights are downloaded.

    Raises:
        ModelError: A repository cannot be downloaded.
    """
    groups: dict[tuple[str | None, Path], list[ComponentFolder]] = {}
    for component in components:
        groups.setdefault((component.repository, component.root), []).append(component)
    for (repository, root), group in groups.items():
        if repository is None:
            download_weights(model, group)
            continue
        other = replace(model, name=repository, revision=snapshot_commit(root))
        with _named(repository, [each.part for each in group]):
            download_weights(other, group)


def component_revisions(components: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return (component name, commit) pairs, the format of `ModelConfig.component_revisions`.

    Args:
        components: `Checkpoint.external_components`, which has `OWNER/NAME@COMMIT` by component
            name.
    """
    return tuple((part, place.rpartition("@")[2]) for part, place in components.items())


@contextmanager
def _named(repository: str, parts: Iterable[str]) -> Iterator[None]:
    """Add the repository and the component names to any ModelError that the `with` block raises."""
    try:
        yield
    except ModelError as error:
        about = {"repository": redact_tokens(repository), "components": sorted(parts)}
        raise ModelError(
            f"{', '.join(sorted(parts))} of the repository {short_repr(about['repository'])}: "
            f"{error.message}",
            error.hint,
            details={**error.details, **about},
        ) from error


def _find_source(
    index: JsonFile, part: str, folder: Path, model: ModelConfig, *, is_local: bool
) -> _Source | None:
    """Return the repository and folder that a modular pipeline's index names for a component.

    The result is None if the component is in the usual folder, `folder/NAME`, and the index names
    no variant for it.
    """
    entry = index.values.get(part)
    if not (isinstance(entry, list) and len(entry) == 3 and isinstance(entry[2], Mapping)):
        return None
    where = entry[2]
    subfolder = _text(index, part, where, "subfolder", _SUBFOLDER) or ""
    variant = _text(index, part, where, "variant", _VARIANT)
    repository = where.get("pretrained_model_name_or_path")
    if repository is None:
        repository = where.get("repo")  # older index files use this key
    revision = _text(index, part, where, "revision", _REVISION)
    other = None
    if not _is_own(index, part, repository, revision, folder / subfolder, model, is_local=is_local):
        other = repository
    if other is None and subfolder == part and variant is None:
        return None
    return _Source(
        part=part,
        repository=other,
        revision=None if other is None else dict(model.component_revisions).get(part, revision),
        subfolder=subfolder,
        variant=variant,
    )


def _is_own(
    index: JsonFile,
    part: str,
    repository: Any,
    revision: str | None,
    folder: Path,
    model: ModelConfig,
    *,
    is_local: bool,
) -> bool:
    """Whether a component is in the checkpoint's own folder, and not in another repository.

    Args:
        index: Index of the checkpoint.
        part: Name of the component.
        repository: Repository in the component's entry, untrusted; None: the entry has none.
        revision: Revision that the index names; None: no revision.
        folder: Folder that has the component's files if the component is in the checkpoint.
        model: Model of the checkpoint.
        is_local: Whether the model is a local folder.

    Raises:
        ModelError: The component is neither in the checkpoint nor in a repository of the hub. Or
            the working directory has a folder with the repository's name, which diffusers would
            read instead of the repository.
    """
    if repository is None or (is_local and _has_files(folder, part)):
        return True
    if not is_local and repository == model.name and revision in (None, model.revision):
        return True
    is_hub_id = isinstance(repository, str) and re.fullmatch(_HUB_ID, repository) is not None
    is_here = is_hub_id and os.path.isdir(repository)
    if is_hub_id and not is_here:
        return False
    if is_here and not is_local:
        raise index.error(
            f"the {part} is in the repository {short_repr(repository)}, and the working directory "
            "has a folder of this name, which diffusers would read",
            "run the command in another directory",
            details={"component": part, "repository": repository},
        )
    # `save_pretrained` writes the path of its output folder into the index. If the user has moved
    # the folder since, that path is wrong, but the component is still in the folder.
    if folder.is_dir():
        return True
    raise index.error(
        f"the {part} is at {short_repr(repository)}, which is not a repository OWNER/NAME of the "
        f"hub, and the checkpoint has no {part}",
        f"copy the {part} into the checkpoint's folder",
        details={"component": part, "repository": short_repr(repository)},
    )


def _has_files(folder: Path, part: str) -> bool:
    """Whether a local folder has files by which diffusers recognises a component."""
    names = {path.name for path in folder.glob("*")} if folder.is_dir() else set()
    if has_weights(part):
        return any(name.endswith(_WEIGHT_SUFFIXES) for name in names)
    return bool(names & _CONFIG_NAMES)


def _text(
    index: JsonFile, part: str, where: Mapping[str, Any], key: str, pattern: str
) -> str | None:
    """Return the text at a key of a component's index entry, such as `revision`; None if missing.

    Raises:
        ModelError: The value is not a text, does not match the pattern, or contains `..`.
    """
    value = where.get(key)
    if value is None:
        return None
    is_text = isinstance(value, str) and re.fullmatch(pattern, value) is not None
    if not is_text or ".." in value:
        raise index.error(
            f"the {key} of the {part} is {short_repr(value)}, which svdpp does not accept",
            UNSUPPORTED_HINT,
            details={"component": part, key: short_repr(value)},
        )
    return str(value)


_HUB_ID = r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}"
#: Patterns of the allowed subfolders, revisions and variants. `_text` also refuses values with
#: `..`, because such a path could lead out of the repository.
_SUBFOLDER = r"([A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)*)?"
_REVISION = r"[A-Za-z0-9_][\w./-]{0,199}"
_VARIANT = r"[A-Za-z0-9_][\w.-]{0,49}"
#: File suffixes and file names by which diffusers recognises a component in a local folder
#: (`_is_local_component` in diffusers' modular pipelines).
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".onnx", ".pb", ".flashpack")
_CONFIG_NAMES = {
    *("scheduler_config.json", "guider_config.json", "chat_template.jinja"),
    "generation_config.json",
    *("preprocessor_config.json", "processor_config.json"),
    *("tokenizer.json", "tokenizer_config.json"),
}
