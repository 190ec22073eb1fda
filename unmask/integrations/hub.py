"""Upload a checkpoint, its model card and its curves to the Hugging Face hub. See docs/hub.md."""

from pathlib import Path

from unmask.models.checkpoint import CARD
from unmask.models.lora import CONFIG as ADAPTER, base_of
from unmask.training.run.card import HERE
from unmask.training.run.folder import checkpoint_of

OF_RUN = ("config.yaml", "sft.yaml", "run.jsonl", "metrics.jsonl", "curves.png")
"""The files of a run folder that are uploaded with its checkpoint."""


def files_to_push(run_or_model: Path) -> dict[str, Path]:
    """The files of an upload by their names in the repository; ValueError if others could not load them."""
    checkpoint = Path(checkpoint_of(str(run_or_model)))
    if not any((checkpoint / name).is_file() for name in ("config.json", ADAPTER)):
        raise ValueError(f"{run_or_model} has no checkpoint: give the folder of a finished run, or of a model")
    if (checkpoint / ADAPTER).is_file() and (base := Path(base_of(checkpoint))).is_dir():
        raise ValueError(
            f"{checkpoint} is an adapter on {base}, a folder of this machine that others do not have. Merge it with "
            f"unmask merge {run_or_model} --out FOLDER and push FOLDER"
        )
    files = {path.name: path for path in sorted(checkpoint.iterdir()) if path.is_file()}
    return files | {name: run_or_model / name for name in OF_RUN if (run_or_model / name).is_file()}


def push_summary(files: dict[str, Path], repo: str, private: bool) -> str:
    megabytes = sum(path.stat().st_size for path in files.values()) / 1e6
    where = f"{repo} ({'private' if private else 'public'} if it is new)"
    return f"{len(files)} files, {megabytes:,.1f} MB, to {where}: {', '.join(files)}"


def push(files: dict[str, Path], repo: str, private: bool = False, revision: str | None = None) -> str:
    """Create the repository if there is none, and upload the files in one commit; returns its address."""
    from huggingface_hub import CommitOperationAdd, HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ValueError(f"{repo!r} is not a name on the hub like ORG/NAME: {error}") from None
    if get_token() is None:
        raise ValueError("there is no Hugging Face token: log in with hf auth login, or set HF_TOKEN")
    operations = []
    for name, path in files.items():
        content = path.read_text().replace(HERE, repo).encode() if name == CARD else path
        operations.append(CommitOperationAdd(path_in_repo=name, path_or_fileobj=content))
    api = HfApi()
    try:
        address = api.create_repo(repo, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        api.create_commit(repo, operations, commit_message="Upload with unmask push", revision=revision)
    except HfHubHTTPError as error:
        message = error.server_message or " ".join(str(error).split())
        raise ValueError(f"the hub refused the upload to {repo}: {message}. May your token write there?") from error
    except Exception as error:  # the HTTP library differs between versions of huggingface_hub
        raise ValueError(f"the upload to {api.endpoint} failed: {error}") from error
    return str(address)
