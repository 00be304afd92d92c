"""Writes `src/libdsec/sync/_generated.py`: the synchronous twin of every public class, from the source of
the asynchronous one. `--check` fails when the file is not what would be written.

    python tools/gen_sync.py [--check]
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "libdsec"
TARGET = SOURCE / "sync" / "_generated.py"

#: Classes with a twin, and where they are.
CLASSES = {
    "Files": "_files",
    "Watch": "_files",
    "PortStream": "_ports",
    "Iam": "_iam",
    "Images": "_images",
    "Process": "_commands",
    "Session": "_sandbox",
    "Sandbox": "_sandbox",
    "DSecClient": "_client",
}

HEADER = '''"""Written by tools/gen_sync.py from the asynchronous classes. Do not edit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from .. import _client, _commands, _files, _iam, _images, _ports, _sandbox
from .._args import CpuClass, DSecContainerRunArgs, RegistryCredentials
from .._bodies import Data
from .._commands import StreamName
from .._files import LocalPath, RemotePath
from .._iam import AuditEntry, Grant, Identity, Key, Project, WhoAmI
from .._images import OnPrefetch, OnProgress
from .._records import (
    BlobTrace,
    ExecInfo,
    ExecResult,
    FileEvent,
    FileInfo,
    FileList,
    Gap,
    ImageInfo,
    LayerOnNode,
    NodeStatus,
    PackResult,
    SandboxInfo,
    SessionInfo,
    Transfer,
    Usage,
)
from .._sandbox import DEFAULT, Timeout
from .._tasks import Counts, TaskOutcome, TaskStatus
from ..errors import DSecError
from ._portal import Portal, close_at_exit


def _session(given: str | Session | None) -> str | None:
    return given.id if isinstance(given, Session) else given

'''

CLIENT_LIFE = '''
    def open(self) -> None:
        """Checks that the platform answers and the key is good. Again does nothing."""
        self._portal.start()
        try:
            self._portal.call(self._inner.open())
        except BaseException:
            self._portal.stop()
            raise
        close_at_exit(self)

    def close(self) -> None:
        """Stops the sandboxes that it made and that still run, then closes the connections."""
        if not self._portal.is_open:
            return
        try:
            self._portal.call(self._inner.close())
        finally:
            self._portal.stop()

    def __enter__(self) -> DSecClient:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
'''


def doc_of(node: ast.AST, indent: str) -> list[str]:
    text = ast.get_docstring(node, clean=True)  # type: ignore[arg-type]
    if not text:
        return []
    for old, new in (
        (r"async with await ", "with "),
        (r"await \(?", ""),
        (r"async (with|for)", r"\1"),
        (r"for one event loop", "whose calls wait"),
        (r"\((client\.run_shell|sb\.run_shell\(\"uname -a\"\))\)\.", r"\1."),
    ):
        text = re.sub(old, new, text)
    text = text.replace('print((sb.run_shell("uname -a")).stdout)', 'print(sb.run_shell("uname -a").stdout)')
    lines = text.splitlines()
    if len(lines) == 1:
        return [f'{indent}"""{lines[0]}"""']
    body = [f"{indent}{line}".rstrip() for line in lines[1:]]
    return [f'{indent}"""{lines[0]}', *body, f'{indent}"""']


def wrapped(annotation: str, value: str) -> str:
    """An expression for a value of the asynchronous side, on this side."""
    if annotation in CLASSES:
        return f"{annotation}(self._portal, {value})"
    match = re.fullmatch(r"list\[(\w+)\]", annotation)
    if match and match[1] in CLASSES:
        return f"[{match[1]}(self._portal, each) for each in {value}]"
    return value


def call_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The call with this function's own arguments."""
    args = [arg.arg for arg in node.args.args[1:]]
    if node.args.vararg:
        args.append(f"*{node.args.vararg.arg}")
    for arg in node.args.kwonlyargs:
        value = f"_session({arg.arg})" if arg.arg == "session" else arg.arg
        args.append(f"{arg.arg}={value}")
    return f"self._inner.{node.name}({', '.join(args)})"


def method(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    decorators = [ast.unparse(each) for each in node.decorator_list]
    returns = ast.unparse(node.returns) if node.returns else "None"
    head = f"({ast.unparse(node.args)})"
    doc = doc_of(node, "        ")
    out: list[str] = []
    if "property" in decorators:
        inner = wrapped(returns, f"self._inner.{node.name}")
        return ["    @property", f"    def {node.name}(self) -> {returns}:", *doc, f"        return {inner}"]
    iterator = re.fullmatch(r"AsyncIterator\[(.+)\]", returns)
    call = call_of(node)
    if "asynccontextmanager" in decorators:
        assert iterator
        return [
            "    @contextmanager",
            f"    def {node.name}{head} -> Iterator[{iterator[1]}]:",
            *doc,
            f"        context = {call}",
            f"        value = {wrapped(iterator[1], 'self._portal.call(_enter(context))')}",
            "        try:",
            "            yield value",
            "        except BaseException as error:",
            "            if not self._portal.call(_leave(context, error)):",
            "                raise",
            "        else:",
            "            self._portal.call(_leave(context, None))",
        ]
    if node.name == "__aenter__":
        return [
            f"    def __enter__(self) -> {returns}:",
            "        self._portal.call(self._inner.__aenter__())",
            "        return self",
        ]
    if node.name == "__aexit__":
        return [
            f"    def __exit__{head} -> None:",
            "        if self._portal.is_open:",
            "            self._portal.call(self._inner.__aexit__(kind, error, trace))",
        ]
    if node.name == "__aiter__":
        assert iterator
        return [f"    def __iter__(self) -> Iterator[{iterator[1]}]:", "        return self"]
    if node.name == "__anext__":
        return [
            f"    def __next__(self) -> {returns}:",
            "        try:",
            "            return self._portal.call(self._inner.__anext__())",
            "        except StopAsyncIteration:",
            "            raise StopIteration from None",
        ]
    if iterator:
        out += [f"    def {node.name}{head} -> Iterator[{iterator[1]}]:", *doc]
        if iterator[1] in CLASSES:
            out += [
                f"        for each in self._portal.iterate({call}):",
                f"            yield {iterator[1]}(self._portal, each)",
            ]
        else:
            out.append(f"        return self._portal.iterate({call})")
        return out
    value = f"self._portal.call({call})" if isinstance(node, ast.AsyncFunctionDef) else call
    out += [f"    def {node.name}{head} -> {returns}:", *doc]
    if returns == "None":
        out.append(f"        {value}")
    else:
        out.append(f"        return {wrapped(returns, value)}")
    return out


KEPT = {"__repr__", "__aenter__", "__aexit__", "__aiter__", "__anext__"}


def twin(name: str) -> list[str]:
    tree = ast.parse((SOURCE / f"{CLASSES[name]}.py").read_text())
    node = next(each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name)
    out = [f"class {name}:", *doc_of(node, "    "), ""]
    functions = [each for each in node.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]
    if name == "DSecClient":
        init = next(each for each in functions if each.name == "__init__")
        given = call_of(init).removeprefix("self._inner.__init__")
        out += [
            f"    def __init__({ast.unparse(init.args)}) -> None:",
            f"        self._inner = _client.DSecClient{given}",
            "        self._portal = Portal()",
            CLIENT_LIFE.rstrip("\n"),
            "",
        ]
    else:
        out += [
            f"    def __init__(self, portal: Portal, inner: {CLASSES[name]}.{name}) -> None:",
            "        self._portal = portal",
            "        self._inner = inner",
            "",
        ]
    for each in functions:
        if each.name.startswith("_") and each.name not in KEPT:
            continue
        if name == "DSecClient" and each.name in {"open", "close", "__aenter__", "__aexit__"}:
            continue
        if each.name == "__repr__":
            out += ["    def __repr__(self) -> str:", "        return repr(self._inner)", ""]
            continue
        out += [*method(each), ""]
    return out


FOOTER = """

async def _enter(context: Any) -> Any:
    return await context.__aenter__()


async def _leave(context: Any, error: BaseException | None) -> bool:
    if error is None:
        return bool(await context.__aexit__(None, None, None))
    return bool(await context.__aexit__(type(error), error, error.__traceback__))
"""


def generate() -> str:
    parts = ["\n".join(twin(name)) for name in CLASSES]
    text = HEADER + "\n\n" + "\n\n".join(parts) + FOOTER
    ruff = Path(sys.executable).parent / "ruff"
    command = [str(ruff) if ruff.exists() else "ruff"]
    where = ["--stdin-filename", str(TARGET), "-"]
    for verb in (["format"], ["check", "--fix", "--exit-zero", "--quiet"], ["format"]):
        text = subprocess.run(
            [*command, *verb, *where], input=text, capture_output=True, text=True, check=True, cwd=SOURCE
        ).stdout
    return text


def main() -> int:
    text = generate()
    if "--check" in sys.argv[1:]:
        if not TARGET.exists() or TARGET.read_text() != text:
            print(f"{TARGET} is not what tools/gen_sync.py writes; run it", file=sys.stderr)
            return 1
        return 0
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
