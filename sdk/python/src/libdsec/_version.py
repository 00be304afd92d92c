"""The version, as the wheel has it."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("libdsec")
except PackageNotFoundError:  # run from a source tree that was not installed
    __version__ = "0+source"
