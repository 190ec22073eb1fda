"""Upload a checkpoint, its model card and its curves to the Hugging Face hub. See docs/hub.md."""

from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from unmask.models.adapter_config import CONFIG as ADAPTER, WEIGHTS as ADAPTER_WEIGHTS, base_of
from unmask.models.checkpoint import BESIDE, CARD, INDEX, SUMS, WEIGHTS, weight_files
from unmask.models.known import EMBEDDED, is_hub_id
from unmask.training.run.card import HERE
from unmask.training.run.folder import checkpoint_of

OF_RUN = ("config.yaml", "sft.yaml", "run.jsonl", "metrics.jsonl", "curves.png")
"""The files of a run folder that are uploaded with its checkpoint."""
CODE = ("configuration_*.py", "modeling_*.py", "tokenization_*.py", "generation_*.py")
"""The authors' own code. Other Python files of a folder may be the user's."""
OF_CHECKPOINT = (
    *("config.json", WEIGHTS, INDEX, ADAPTER, ADAPTER_WEIGHTS, CARD, SUMS, "LICENSE"),
    *(pattern for pattern in BESIDE if pattern != "*.py"),
    *CODE,
)
"""Patterns of the files of a checkpoint that are uploaded; also the shards of the weights."""
LISTED = 20


class Upload(NamedTuple):
    files: dict[str, Path]
    """By their names in the repository."""
    left_out: list[str]
    """What else is in the folder of the checkpoint and in the run folder."""


def files_to_push(run_or_model: Path) -> Upload:
    """The files of an upload; ValueError if others could not load them. Links that leave the folder are left out."""
    checkpoint, root = Path(checkpoint_of(str(run_or_model))), run_or_model.resolve()
    if (checkpoint / ADAPTER).is_file():
        _check_base(run_or_model, checkpoint)
        needed = [ADAPTER, ADAPTER_WEIGHTS]
    elif (checkpoint / "config.json").is_file():
        needed = ["config.json", *(path.name for path in weight_files(checkpoint))]
    else:
        raise ValueError(f"{run_or_model} has no checkpoint: give the folder of a finished run, or of a model")
    patterns = (*OF_CHECKPOINT, *(name for name in needed if fnmatchcase(name, "[!.]*.safetensors")))
    files, left_out = dict[str, Path](), list[str]()
    for folder, allowed in ((checkpoint, patterns), (run_or_model, OF_RUN)):
        for path in sorted(folder.iterdir()):
            inside = path.is_file() and path.resolve().is_relative_to(root)
            if inside and any(fnmatchcase(path.name, pattern) for pattern in allowed):
                files[path.name] = path
            elif path != checkpoint:
                left_out.append(f"{path.relative_to(run_or_model)}{'/' if path.is_dir() else ''}")
    for name in needed:
        if name not in files:
            problem = "it is missing, a link to a file outside the folder, or not safetensors"
            raise ValueError(f"{checkpoint / name} is needed but cannot be uploaded: {problem}")
    left_out = [name for name in dict.fromkeys(left_out) if run_or_model / name not in files.values()]
    return Upload(files, left_out)


def _check_base(run_or_model: Path, adapter: Path) -> None:
    """ValueError if others do not have the base model of an adapter."""
    base = base_of(adapter)
    if base not in EMBEDDED and not is_hub_id(base):
        raise ValueError(
            f"{adapter} is an adapter on {base}, which is not a model on the hub, so others do not have it. Merge it "
            f"with unmask merge {run_or_model} --out FOLDER and push FOLDER"
        )


def push_summary(upload: Upload, repo: str, private: bool) -> str:
    megabytes = sum(path.stat().st_size for path in upload.files.values()) / 1e6
    where = f"{repo} ({'private' if private else 'public'} if it is new)"
    summary = f"{len(upload.files)} files, {megabytes:,.1f} MB, to {where}: {', '.join(upload.files)}"
    if not upload.left_out:
        return summary
    more = f" and {len(upload.left_out) - LISTED} more" if len(upload.left_out) > LISTED else ""
    return f"{summary}\nnot uploaded: {', '.join(upload.left_out[:LISTED])}{more}"


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
