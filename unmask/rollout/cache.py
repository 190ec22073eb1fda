"""The setting of a rollout's KV cache."""

from dataclasses import dataclass


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


def cache_of(kind: str, refresh: int = 1) -> Cache | None:
    """A cache by its name in a configuration: none, prefix or dual."""
    return {"none": None, "prefix": Cache(False, refresh), "dual": Cache(True, refresh)}[kind]
