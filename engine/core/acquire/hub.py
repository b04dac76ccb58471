"""Gets a repository's checkpoint from the Hugging Face hub, into the hub library's own cache."""

from __future__ import annotations

from pathlib import Path

from inferdbg.engine.core.acquire.progress import OnProgress
from inferdbg.engine.errors import EnvironmentLacks, ModelError

__all__ = ["download_repository"]

# Weights as safetensors, configuration, tokenizer: never a pickle, never Python.
PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")


def download_repository(repository_id: str, on_progress: OnProgress) -> Path:
    """Returns the snapshot directory of `owner/name`; what the hub's cache has already is not fetched again.

    Raises:
        ModelError: the hub has no such repository, or it is not open to this user.
        EnvironmentLacks: the hub cannot be reached and the snapshot is not in its cache.
    """
    import huggingface_hub  # 0.3 s that only this way of naming a model needs
    from huggingface_hub import errors

    looked_up = f"no directory or file {repository_id!r} exists here, so it was looked up as a Hugging Face repository"
    on_progress(f"getting {repository_id} from the Hugging Face hub", None)
    try:
        return Path(huggingface_hub.snapshot_download(repository_id, allow_patterns=list(PATTERNS)))
    except errors.GatedRepoError as error:
        raise ModelError(f"{looked_up}: it is gated; accept its terms on the hub and set HF_TOKEN") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(f"{looked_up}: the hub has none of that name, or it is private (set HF_TOKEN)") from error
    except errors.HFValidationError as error:
        raise ModelError(f"{looked_up}: that is not a valid id") from error
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError, errors.OfflineModeIsEnabled, OSError) as error:
        raise EnvironmentLacks(
            f"{looked_up}: the hub cannot be reached and its cache does not have it ({type(error).__name__}). "
            "Give the path of a checkpoint directory or a GGUF file, or use: inferdbg pull smollm2"
        ) from error
