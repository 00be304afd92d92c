"""Where the platform is and which key to show: arguments, else the environment, else the file that
`dsec up` writes."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from .errors import InvalidArgument, Unauthenticated

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Target:
    """A platform and a key for it."""

    base_url: str
    api_key: str


def config_path() -> Path:
    """The file that `dsec up` writes."""
    given = os.environ.get("DSEC_CONFIG")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return Path(base) / "dsec" / "config.toml"


def resolve(base_url: str | None, api_key: str | None) -> Target:
    """Fills in what was not given.

    A key from the file is used only with the file's own address: a key of one platform is not shown to
    another.
    """
    url = base_url or os.environ.get("DSEC_URL") or None
    key = api_key or os.environ.get("DSEC_API_KEY") or None
    if url is None or key is None:
        file = config_path()
        stored = _read(file)
        stored_url = stored.get("url")
        if url is None:
            url = stored_url
        if url is None:
            raise InvalidArgument(
                f"no address of a platform: no base_url, no DSEC_URL, and {file} has none",
                hint="run `dsec up` on this machine, or set DSEC_URL and DSEC_API_KEY",
            )
        if key is None and stored_url is not None and stored_url.rstrip("/") == url.rstrip("/"):
            key = stored.get("api_key")
        if key is None:
            raise Unauthenticated(
                f"no key for {url}: no api_key, no DSEC_API_KEY, and {file} has none for this address",
                hint="set DSEC_API_KEY",
            )
    url = url.rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise InvalidArgument(f"the address {url!r} must start with http:// or https://")
    # The API's pages show the base as http://HOST:PORT/v1, so both forms are taken.
    return Target(url.removesuffix("/v1"), key)


def _read(file: Path) -> dict[str, str]:
    try:
        with file.open("rb") as stream:
            data = tomllib.load(stream)
    except FileNotFoundError:
        return {}
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise InvalidArgument(f"{file} cannot be read: {error}") from error
    return {name: value for name, value in data.items() if isinstance(value, str)}
