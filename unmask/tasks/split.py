"""Which problems are held out, where nothing else says it."""

import hashlib

TEST_SHARE = 5  # one problem in five is a test problem


def in_test(problem: str) -> bool:
    """Whether a problem is of the test split: a stable hash of its text."""
    return hashlib.sha256(problem.encode(errors="surrogatepass")).digest()[0] % TEST_SHARE == 0
