"""Uploading an export to the hub; only ever when asked for."""

from __future__ import annotations

import re
from pathlib import Path

from modelopt_eagle.errors import ExportError
from modelopt_eagle.export.folders import is_export


def push_to_hub(folder: str | Path, repo: str, *, private: bool = False, endpoint: str | None = None) -> str:
    """Upload a whole export folder as one commit.

    Args:
        folder: an export.
        repo: ``owner/name``; created if it does not exist.
        private: create it private.
        endpoint: another hub than the default.

    Returns:
        The address of the commit.

    Raises:
        ExportError: no export, no such name, or the hub refused (its own words are kept).
    """
    from huggingface_hub import HfApi

    folder = Path(folder)
    if not folder.is_dir() or not is_export(folder):
        raise ExportError(
            f"{folder} is no export (config.json, *.safetensors, README.md, no links, nothing else): not uploaded"
        )
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise ExportError(f"expected a hub repository as owner/name, found {repo!r}")
    api = HfApi(endpoint=endpoint)
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        commit = api.upload_folder(repo_id=repo, folder_path=folder, commit_message="EAGLE-3 draft head")
    except Exception as error:  # the hub's client and its transport raise many kinds; each means the same here
        words = (str(error).splitlines() or [type(error).__name__])[0]
        raise ExportError(
            f"the hub did not take {folder}: {words} (log in with `hf auth login`; the folder itself is complete and "
            "stays)"
        ) from error
    return str(commit.commit_url)
