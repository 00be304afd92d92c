"""Where the platform is and which key to show: arguments, else the environment, else the config file,
else the default. The `dsec` command has the same rules; both are held to `tests/configuration.json`."""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from .errors import InvalidArgument, Unauthenticated

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Where `dsec up` listens unless told otherwise.
DEFAULT_URL = "http://127.0.0.1:7420"
_FIELDS = ("url", "api_key", "ca_file")


@dataclass(frozen=True)
class Target:
    """A platform, a key for it, and a PEM file of certificates to trust beside the system's."""

    base_url: str
    api_key: str | None
    ca_file: str | None = None


def _home_of(user: str) -> str | None:
    try:
        return pwd.getpwnam(user).pw_dir
    except KeyError:
        return None


def locate(env: Mapping[str, str], root: bool, home_of: Callable[[str], str | None]) -> Path:
    """Where the config file is in these surroundings."""
    if given := env.get("DSEC_CONFIG"):
        return Path(given)
    base = env.get("XDG_CONFIG_HOME", "")
    # The base directory specification has relative paths ignored.
    if os.path.isabs(base):
        return Path(base) / "dsec" / "config.toml"
    behind_sudo = env.get("SUDO_USER", "") if root else ""
    home = home_of(behind_sudo) if behind_sudo not in ("", "root") else None
    home = home or env.get("HOME") or os.path.expanduser("~")
    return Path(home) / ".config" / "dsec" / "config.toml"


def config_path() -> Path:
    """The file that `dsec up` writes."""
    return locate(os.environ, os.geteuid() == 0, _home_of)


def resolve(base_url: str | None, api_key: str | None, ca_file: str | None = None) -> Target:
    """Fills in what was not given."""
    file = config_path()
    target = join(
        base_url or os.environ.get("DSEC_URL"),
        api_key or os.environ.get("DSEC_API_KEY"),
        ca_file or os.environ.get("DSEC_CA_FILE"),
        read(file),
    )
    if target.api_key is None:
        raise Unauthenticated(
            f"no key for {target.base_url}: no api_key, no DSEC_API_KEY, and {file} has none for it",
            hint="set DSEC_API_KEY, or run `dsec up` on this machine",
        )
    return target


def join(url: str | None, api_key: str | None, ca_file: str | None, file: Mapping[str, str]) -> Target:
    """What was given over what the file has. What is empty was not given.

    The file's key and certificates are used only with the file's own address: a key of one platform is not
    shown to another.
    """
    stored_url = normal(_set(file.get("url")) or DEFAULT_URL)
    given = _set(url)
    address = stored_url if given is None else normal(given)
    stored = file if _place(address) == _place(stored_url) else {}
    return Target(
        address,
        _set(api_key) or _set(stored.get("api_key")),
        _set(ca_file) or _set(stored.get("ca_file")),
    )


def _set(text: str | None) -> str | None:
    return text if text is not None and text.strip() else None


def normal(text: str) -> str:
    """An address as `SCHEME://HOST[:PORT][/PATH]`: http where no scheme is given, without the `/v1` that the
    API's pages show at its end."""
    text = text.strip()
    whole = text if "://" in text else f"http://{text}"

    def bad(why: str) -> InvalidArgument:
        return InvalidArgument(
            f"{text!r} is not an address of the API: {why}",
            hint=f"it looks like {DEFAULT_URL} or https://dsec.example.com",
        )

    try:
        parts = urlsplit(whole)
        host, _port = parts.hostname, parts.port
    except ValueError as error:
        raise bad(str(error)) from None
    if parts.scheme not in ("http", "https"):
        raise bad("its scheme is neither http nor https")
    if any(mark in whole for mark in "?#@"):
        raise bad("it holds more than a host, a port and a path")
    if not host or any(character.isspace() for character in whole):
        raise bad("it has no host")
    rest = whole.split("://", 1)[1].rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{rest}"


def _place(url: str) -> tuple[str, str, int, str]:
    """What makes two addresses the same server."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if host in ("localhost", "::1"):
        host = "127.0.0.1"
    return parts.scheme, host, parts.port or (443 if parts.scheme == "https" else 80), parts.path.rstrip("/")


def read(file: Path) -> dict[str, str]:
    """The config file's fields. A missing file is an empty one."""
    try:
        with file.open("rb") as stream:
            data = tomllib.load(stream)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InvalidArgument(f"{file} cannot be read: {error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{file} is not a config file: {error}") from error
    for name, value in data.items():
        if name not in _FIELDS or not isinstance(value, str):
            raise InvalidArgument(
                f"{file} is not a config file: {name} = {value!r}",
                hint="it holds `url`, `api_key` and `ca_file`, all of them text",
            )
    return data
