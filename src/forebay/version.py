"""The release of this package."""

from __future__ import annotations

import importlib.metadata


def package_version() -> str:
    """The installed version.

    Raises:
        PackageNotFoundError: The package runs from a checkout that is not installed.
    """
    return importlib.metadata.version("forebay")
