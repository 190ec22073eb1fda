"""The versions of the packages that a result depends on."""

import platform
from importlib.metadata import PackageNotFoundError, version

from unmask.util.version import __version__


def versions() -> dict[str, str]:
    installed = {"unmask": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "numpy", "safetensors"):
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            installed[package] = "missing"
    return installed
