"""The two splits: which problems are held out, and the random numbers that a split is drawn with."""

import hashlib
import random

SPLITS = ("train", "test")
TEST_SHARE = 5  # one problem in five is a test problem


def in_test(problem: str) -> bool:
    """Whether a problem is of the test split, where nothing else says it: a stable hash of its text."""
    return hashlib.sha256(problem.encode(errors="surrogatepass")).digest()[0] % TEST_SHARE == 0


def hashed_split(problem: str) -> str:
    """The split that `in_test` decides for, by name."""
    return "test" if in_test(problem) else "train"


def split_rng(task: str, split: str, seed: int) -> random.Random:
    """The random numbers of one (task, split, seed); seeded by a text, so that no two streams are related."""
    if split not in SPLITS:
        raise ValueError(f'{task} has the splits "train" and "test", not {split!r}.')
    return random.Random(f"unmask {task} {split} {seed}")
