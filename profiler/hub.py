"""Models of the Hugging Face hub: find the commit, download its safetensors, or use what was downloaded before.

Files land in the hub library's own cache (HF_HOME), under the user's own login and endpoint settings, and its
progress bars go to stderr. The commit is resolved first, so that a run records exactly which weights it had and
a repository without safetensors is refused before anything is downloaded.

Not here: opening the files (`model_files`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from profiler.errors import InputError
from profiler.model_files import PICKLES

#: Seconds to wait for the hub to answer before the local cache is used instead.
TIMEOUT_S = 10.0
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
#: Endings of the small files beside the weights: configs, tokenizers, chat templates.
SMALL = (".json", ".txt", ".model", ".jinja")


@dataclass(frozen=True)
class Snapshot:
    """A repository's files at one commit."""

    folder: Path
    revision: str


def snapshot(source: str, *, weights: bool) -> Snapshot:
    """The files of `org/name` or `org/name@revision`, downloaded or from the hub's cache.

    Args:
        source: a hub id, with a branch, tag or commit after `@` or the default branch.
        weights: download the weights too, not only config and tokenizer.

    Raises:
        InputError: there is no such repository or revision, it is not open to this user, it has no
            safetensors, or the hub is out of reach and the files are not in the cache.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    name, _, revision = source.partition("@")
    try:
        info = HfApi().model_info(name, revision=revision or None, timeout=TIMEOUT_S)
        held = [sibling.rfilename for sibling in info.siblings or []]
        if CONFIG not in held:
            raise InputError(f"model source {source}: the hub's repository has no {CONFIG}")
        # By branch or tag, so that the cache notes which commit it stands for and can be asked by it offline.
        folder = Path(hf_hub_download(name, CONFIG, revision=revision or None)).parent
        commit = folder.name  # the cache names a snapshot's folder after its commit
        # One by one: the library's own download of a whole snapshot returns what it has when the connection drops.
        for file in held:
            if "/" not in file and file.endswith(SMALL):
                hf_hub_download(name, file, revision=commit)
        for file in _weights(source, held, folder) if weights else []:
            hf_hub_download(name, file, revision=commit)
        return Snapshot(folder, commit)
    except InputError:
        raise
    except GatedRepoError as error:
        raise InputError(
            f"model source {source}: the hub lets only approved accounts download it; accept its terms on its page "
            "and log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise InputError(
            f"model source {source}: no such folder here, and the hub has no model {name} "
            "(or it is private: log in with `hf auth login`)"
        ) from error
    except RevisionNotFoundError as error:
        raise InputError(f"model source {source}: the hub's {name} has no revision {revision!r}") from error
    except Exception as error:  # whatever the hub's HTTP client raises when there is no connection, by version
        return _from_cache(source, weights, error)


def _weights(source: str, held: list[str], folder: Path) -> list[str]:
    """The repository's safetensors files; `folder` has its small files, the index of shards among them."""
    if INDEX in held:
        return sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values()))
    if SINGLE in held:
        return [SINGLE]
    pickles = [file for file in held if file.endswith(PICKLES)]
    instead = f"only pickles ({', '.join(pickles[:3])}), which run code when read" if pickles else "no weights"
    raise InputError(f"model source {source}: the hub's repository has no {SINGLE} and {instead}")


def _from_cache(source: str, weights: bool, error: Exception) -> Snapshot:
    """What an earlier download left, if it is all there; `error` is why the hub itself cannot be asked."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    name, _, revision = source.partition("@")
    try:
        folder = Path(snapshot_download(name, revision=revision or None, local_files_only=True))
        held = [path.name for path in folder.iterdir()]
        if all((folder / file).exists() for file in [CONFIG, *(_weights(source, held, folder) if weights else [])]):
            return Snapshot(folder, folder.name)
        state = "only partly in"
    except (LocalEntryNotFoundError, InputError):
        state = "not in"
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    raise InputError(
        f"model source {source}: no such folder here, the hub cannot be used ({reason}) and the model is {state} its "
        "cache. Check the network or the name, or download it on another machine and give its folder."
    ) from error
