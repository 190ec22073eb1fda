"""Checkpoints on disk: config.json and safetensors, read tensor by tensor and written back in the same layout.

Pickles and code are never read.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import yaml
from torch import Tensor, nn

from unmask.models.names import SAME, Names
from unmask.util.files import digest, fsync, save_tensors
from unmask.util.parsing import parse_yaml

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SUMS = "SHA256SUMS"
CARD = "README.md"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
# Other files of a checkpoint. Python files are copied for the authors' own tools and never run.
BESIDE = (
    "generation_config.json",
    "tokenizer*.*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.*",
    "*.py",
)
STORED = ("F64", "F32", "F16", "BF16")  # other types are quantised and need a scale
HASHED = 2**16
"""Values of a tensor that enter `fingerprint_of` one by one."""
_EXPERT = re.compile(r"(?<=\.experts)\.\d+(?=\.)")
DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass
class Origin:
    """The parts of a checkpoint other than its weights, kept so that it can be written back."""

    config: dict[str, Any]
    files: Mapping[str, bytes] = field(default_factory=dict)
    names: Names = SAME


class StoredTensors:
    """A policy that keeps the origin of its weights, so that `save` can write them."""

    lm: Any
    origin: Origin
    names: Names
    home: str = ""
    """The name, folder or hub id it was loaded from. For a model with an adapter: that of its base model."""
    card: Mapping[str, Any] = MappingProxyType({})
    """The metadata of its model card."""
    fingerprint: str = ""
    """That of the weights before training; set for models that are trained."""

    def set_origin(self, origin: Origin) -> None:
        self.origin, self.names = origin, origin.names


# --- reading ------------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"There is no {path.name} in {path.parent}; give the folder of a checkpoint.")
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object.")
    return content


def card_metadata(folder: Path) -> dict[str, Any]:
    """The YAML metadata of a model card, README.md; empty if there is none that can be read."""
    try:
        start, *rest = (folder / CARD).read_text().split("\n---\n", 1)
        metadata = parse_yaml(start.removeprefix("---\n"), CARD) if start.startswith("---\n") and rest else None
    except (OSError, ValueError):
        return {}
    return metadata if isinstance(metadata, dict) else {}


def write_card_metadata(folder: Path, metadata: Mapping[str, Any]) -> None:
    """A model card of metadata alone."""
    (folder / CARD).write_text(f"---\n{yaml.safe_dump(dict(metadata), sort_keys=False)}---\n")


def files_beside(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for pattern in BESIDE for path in folder.glob(pattern)}


def stated_dtype(config: Mapping[str, Any], path: Path) -> torch.dtype | None:
    name = config.get("dtype", config.get("torch_dtype"))
    if name is None:
        return None
    if not isinstance(name, str) or name not in DTYPES:
        raise ValueError(f"{path} has the dtype {name!r}; supported: {', '.join(DTYPES)}.")
    return DTYPES[name]


def weight_files(folder: Path) -> list[Path]:
    """model.safetensors, or the shards that the index lists."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        if any(path for pattern in PICKLES for path in folder.glob(pattern)):
            raise ValueError(
                f"{folder} has only pickled weights. A pickle can run code, so only safetensors are read: "
                "convert the weights with the tool that wrote them."
            )
        raise ValueError(f"There is no {WEIGHTS} in {folder}, and no {INDEX}.")
    shards = read_json(folder / INDEX).get("weight_map")
    if not shards or not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise ValueError(f"{folder / INDEX} has no weight_map.")
    paths = [folder / Path(name).name for name in sorted(set(shards.values()))]
    for path in paths:
        if not path.is_file():
            raise ValueError(f"There is no {path.name} in {folder}, but {INDEX} lists it; download it again.")
    return paths


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); download it again.") from error


def load_weights(
    lm: "PreTrainedModel",
    folder: Path,
    names: Names = SAME,
    *,
    tied: Mapping[str, str] | None = None,
    unused: tuple[str, ...] = (),
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
) -> set[str]:
    """Load the weights of a network on the meta device, one tensor at a time, in their final dtype and device.

    tied     tensors that may be missing, each with the tensor it is tied to
    unused   prefixes of tensor names that are skipped
    dtype    None: as stored
    returns  the tied tensors that are in the files and differ from the tensor they are tied to
    """
    tied = tied or {}
    check_sums(folder)
    where = tensor_places(lm, weight_files(folder), names, tied, unused)
    files: dict[Path, list[tuple[str, str]]] = {}
    for name, (path, own) in where.items():
        files.setdefault(path, []).append((name, own))
    places: dict[str, Tensor] = {}
    shapes = {name: weight.shape for name, weight in lm.state_dict().items()}
    for path, wanted in files.items():
        with open_safetensors(path) as file:
            for part, own in wanted:
                stored = file.get_tensor(own)
                if part not in places:
                    name = _EXPERT.sub("", part)
                    weight = torch.empty(shapes[name], dtype=dtype or stored.dtype, device=device)
                    places |= stored_parts(name, weight)
                    _set(lm, name, weight)
                # A copy: memory that is mapped to the file changes with the file.
                places.pop(part).copy_(stored)
    kinds = {weight.dtype for weight in lm.parameters() if not weight.is_meta}
    if len(kinds) > 1:
        found = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        raise ValueError(
            f"{folder} has weights of several dtypes ({found}): add the one to use to config.json, as dtype."
        )
    apart = {
        name
        for name, base in tied.items()
        if name in where and not torch.equal(lm.get_parameter(name), lm.get_parameter(base))
    }
    for name in tied.keys() - apart:
        _set(lm, name, lm.get_parameter(tied[name]))
    _restore_buffers(lm, device)
    for name, buffer in lm.named_buffers():  # a router's bias that is not finite gives finite logits
        if not buffer.isfinite().all():
            raise ValueError(f"{folder}: {names.own(name)} has values that are not finite: the files are damaged.")
    return apart


def stored_tensors(lm: nn.Module) -> dict[str, Tensor]:
    """The tensors of a network for a checkpoint, a shared one once. `state_dict` would shard them again."""
    biases = {name: buffer for name, buffer in lm.named_buffers() if name.endswith(".expert_bias")}
    return {**dict(lm.named_parameters()), **biases}


def stored_parts(name: str, weight: Tensor) -> dict[str, Tensor]:
    """A tensor of a network as files store it: a stack of experts' matrices matrix by matrix."""
    if weight.ndim < 3:
        return {name: weight}
    before, _, after = name.rpartition(".experts.")
    return {f"{before}.experts.{number}.{after}": matrix for number, matrix in enumerate(weight)}


@torch.no_grad()
def fingerprint_of(policy: StoredTensors) -> str:
    """A SHA-256 of the names, shapes, types and values of all weights.

    Of a tensor with more than `HASHED` values it covers the sum of all, read as 64-bit integers, and `HASHED` of them
    one by one, at even distances. So any changed value changes the fingerprint, no copy is made, and 16 GB take about
    1.5 s on a CPU.
    """
    total = hashlib.sha256()
    for name, weight in stored_tensors(policy.lm).items():
        total.update(f"{policy.names.own(name)} {list(weight.shape)} {weight.dtype}\n".encode())
        flat = weight.detach().flatten()
        if flat.numel() > HASHED:
            flat = flat.clone() if flat.storage_offset() else flat  # a view of wider integers has to be aligned
            whole = flat.numel() - flat.numel() % (8 // flat.element_size())
            total.update(f"{int(flat[:whole].view(torch.int64).sum())}\n".encode())
            flat = torch.cat([flat[:: -(-flat.numel() // HASHED)], flat[whole:]])
        total.update(flat.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def tensor_places(
    lm: "PreTrainedModel", paths: list[Path], names: Names, tied: Mapping[str, str], unused: tuple[str, ...]
) -> dict[str, tuple[Path, str]]:
    """For every tensor of the network, its file and its name there. Reads headers only."""
    tensors = lm.state_dict().items()
    shapes = {part: list(each.shape) for name, weight in tensors for part, each in stored_parts(name, weight).items()}
    where: dict[str, tuple[Path, str]] = {}
    for path in paths:
        with open_safetensors(path) as file:
            for own in file.keys():  # noqa: SIM118 (no mapping)
                name = names.native(own)
                # Early BERT checkpoints have other names for the parameters of a norm.
                name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
                if name.startswith(unused) or name.endswith("rotary_emb.inv_freq"):  # computed by _restore_buffers
                    continue
                if name not in shapes:
                    raise ValueError(f"{path} has a tensor {own}, which this kind of model does not have.")
                shape, kind = file.get_slice(own).get_shape(), file.get_slice(own).get_dtype()
                if shape != shapes[name]:
                    raise ValueError(f"{path}: {own} has the shape {shape}; by config.json it is {shapes[name]}.")
                if kind not in STORED:
                    raise ValueError(f"{path}: {own} is stored as {kind}; supported: {', '.join(STORED)}.")
                if name in where:
                    _check_equal(where[name], (path, own))
                where[name] = path, own
    missing = [names.own(name) for name in shapes if name not in where and name not in tied]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"{paths[0].parent} has no tensor {missing[0]}{more}.")
    return where


def _check_equal(first: tuple[Path, str], second: tuple[Path, str]) -> None:
    """ValueError for a tensor that is stored twice with different values."""
    stored = []
    for path, own in (first, second):
        with open_safetensors(path) as file:
            stored.append(file.get_tensor(own))
    if not torch.equal(*stored):
        (one, name), (other, again) = first, second
        raise ValueError(f"{other}: {again} has other values than {name} in {one.name}; download the model again.")


def _set(lm: nn.Module, name: str, value: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module = lm.get_submodule(path)
    plain = isinstance(value, nn.Parameter) or leaf in dict(module.named_buffers(recurse=False))
    setattr(module, leaf, value if plain else nn.Parameter(value))


def _restore_buffers(lm: "PreTrainedModel", device: str | torch.device) -> None:
    """Compute the buffers that are not stored in checkpoints."""
    for name, module in list(lm.named_modules()):
        if name.endswith("rotary_emb"):
            lm.set_submodule(name, type(module)(module.config).to(device))
        elif name == "bert.embeddings":
            places = module.position_ids.shape[-1]
            module.position_ids = nn.Buffer(torch.arange(places, device=device)[None], persistent=False)
            module.token_type_ids = nn.Buffer(torch.zeros_like(module.position_ids), persistent=False)
    assert not any(tensor.is_meta for tensor in (*lm.parameters(), *lm.buffers()))


# --- writing ------------------------------------------------------------------------------------------------


def save(policy: StoredTensors, folder: str | Path, max_shard_bytes: int = 5_000_000_000) -> None:
    """Write a checkpoint in the family's own format: field names, tensor names, tokenizer.

    The folder is replaced atomically. Files that do not belong to a checkpoint stay.
    """
    if "peft_config" in vars(policy.lm):
        raise ValueError("This model has an adapter: merge it first, or save the adapter alone with save_adapter.")
    with replace_folder(folder, _holds_weights) as new:
        weights = stored_tensors(policy.lm)
        dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
        parts = {part: each for name, weight in weights.items() for part, each in stored_parts(name, weight).items()}
        types = {key: dtype for key in ("dtype", "torch_dtype") if key in policy.origin.config}
        (new / "config.json").write_text(json.dumps({**policy.origin.config, **types}, indent=2) + "\n")
        for name, content in policy.origin.files.items():
            (new / name).write_bytes(content)
        _write_weights(new, {policy.names.own(part): weight for part, weight in parts.items()}, max_shard_bytes)


def _write_weights(folder: Path, weights: Mapping[str, Tensor], max_shard_bytes: int) -> None:
    shards: list[list[str]] = [[]]
    room = max_shard_bytes
    for name, weight in weights.items():
        if weight.nbytes > room and shards[-1]:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= weight.nbytes
    place: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_tensors({name: weights[name].detach().cpu().clone() for name in shard}, folder / file)
        place.update(dict.fromkeys(shard, file))
    if len(shards) > 1:
        total = {"total_size": sum(weight.nbytes for weight in weights.values())}
        (folder / INDEX).write_text(json.dumps({"metadata": total, "weight_map": place}, indent=2) + "\n")


@contextmanager
def replace_folder(folder: str | Path, obsolete: Callable[[str], bool] = lambda name: False) -> Iterator[Path]:
    """A new folder that replaces the old one on exit, with checksums and synced to disk. Files of the old folder that
    the new one does not have are kept, unless they are `obsolete`."""
    folder = Path(folder).absolute()
    if folder == Path.cwd():
        raise ValueError("A checkpoint replaces its folder: give another folder than the current folder.")
    new = folder.with_name(f".{folder.name}.new-{os.getpid()}")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        yield new
        _put(new, folder, obsolete)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _put(new: Path, folder: Path, obsolete: Callable[[str], bool]) -> None:
    sums = "".join(f"{digest(path)}  {path.name}\n" for path in sorted(new.glob("*.safetensors")))
    (new / SUMS).write_text(sums)
    for path in (*new.iterdir(), new):
        fsync(path)
    if not folder.exists() or not any(folder.iterdir()):
        new.rename(folder)
        fsync(folder.parent)
        return
    old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    folder.rename(old)
    new.rename(folder)
    for path in old.iterdir():
        if not obsolete(path.name) and not (folder / path.name).exists():
            path.rename(folder / path.name)
    fsync(folder.parent)
    shutil.rmtree(old)


def _holds_weights(name: str) -> bool:
    return name == INDEX or (name.startswith("model") and name.endswith(".safetensors"))


def check_sums(folder: Path) -> None:
    """ValueError if weights do not match the checksums of the folder, if it has any (`sha256sum -c` reads the file)."""
    if not (folder / SUMS).is_file():
        return
    for line in (folder / SUMS).read_text().splitlines():
        wanted, _, name = line.partition("  ")
        path = folder / Path(name).name
        if not path.is_file() or digest(path) != wanted:
            raise ValueError(f"{path} is damaged. (If it was changed on purpose, delete {folder / SUMS}.)")
