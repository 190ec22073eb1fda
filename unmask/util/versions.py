"""The versions of the packages that a result depends on."""

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from unmask.util.version import __version__


def versions() -> dict[str, str]:
    installed = {"unmask": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "numpy", "safetensors"):
        installed[package] = _installed(package)
    return installed


@cache  # every checkpoint asks, and reading a package's metadata takes a millisecond
def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"
