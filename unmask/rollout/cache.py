"""The setting of a rollout's KV cache."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Cache:
    """What is kept between the steps of a block: all columns outside the block (dual), or only those before it.

    A full pass renews the cache at the start of every `refresh`-th block. In between, a new block begins by
    recomputing the columns of the finished one.
    """

    suffix: bool = True
    """Columns after the block are kept too (dual); otherwise they are recomputed (prefix)."""
    refresh: int = 1

    def __post_init__(self) -> None:
        if self.refresh < 1:
            raise ValueError(f"refresh={self.refresh} must be at least 1 block")


CacheSetting = Cache | Literal["auto"] | None
"""`auto`: a cache if the model is block-causal, for which it is exact; otherwise none."""


def cache_of(kind: str, refresh: int = 1) -> CacheSetting:
    """A cache by its name in a configuration: auto, none, prefix or dual."""
    named: dict[str, CacheSetting] = {"auto": "auto", "none": None}
    return named[kind] if kind in named else Cache(kind == "dual", refresh)


def cache_name(cache: CacheSetting) -> str:
    """The name of a cache in a configuration, once it is known for which model: auto is none for the others."""
    if not isinstance(cache, Cache):
        return "none"
    return "dual" if cache.suffix else "prefix"
