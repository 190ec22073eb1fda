"""GGUF files, the format of llama.cpp, read with the package gguf: the fields of a model, and its weights as fp32."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Gguf:
    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, Any]
    """gguf's ReaderTensor by name; weights are read on demand."""

    def need(self, name: str) -> Any:
        if name not in self.fields:
            raise ValueError(f"{self.path} has no field {name}, which a model of this kind needs.")
        return self.fields[name]

    def tensor(self, name: str) -> Tensor:
        from gguf.quants import dequantize

        if name not in self.tensors:
            raise ValueError(f"{self.path} has no tensor {name}.")
        stored = self.tensors[name]
        try:
            return torch.from_numpy(dequantize(stored.data, stored.tensor_type).copy())
        except NotImplementedError:
            kind = stored.tensor_type.name
            raise ValueError(f"{self.path}: {name} is stored as {kind}, which is not supported.") from None


def read_gguf(path: str | Path) -> Gguf:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ValueError("reading GGUF files needs the package gguf: pip install 'unmask[gguf]'") from None

    class BoundedReader(GGUFReader):
        """gguf loops forever if a stated length exceeds the file; this raises."""

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            if offset + int(count) * np.dtype(dtype).itemsize > len(self.data):
                raise ValueError("it ends too early")
            return super()._get(offset, dtype, count, override_order)

    path = Path(path)
    if not path.is_file():
        raise ValueError(f"There is no file {path}.")
    try:
        reader = BoundedReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, KeyError, IndexError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} is not a complete GGUF file: {error}; fetch it again.") from None
    return Gguf(path, fields, {tensor.name: tensor for tensor in reader.tensors})
