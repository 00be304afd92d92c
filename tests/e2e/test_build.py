"""`dsec image build`: images of recipes, step by step, and what of them is not done again."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from libdsec.sync import DSecClient

from platform_under_test import BIN, IMAGE, Platform, leftovers, stored_files, tar, until
from registry import Layer, registry

DOCKERFILE = f"""\
# What every test that needs some image builds.
ARG BASE={IMAGE}
FROM $BASE
ARG GREETING=hello
ENV WHO=world \\
    PATH=/opt/tools:$PATH
RUN useradd --create-home --uid 1234 builder
WORKDIR /srv/app
COPY --chown=builder --chmod=640 src conf/
COPY tool /opt/tools/greet
USER builder
RUN greet > /tmp/lost; echo "$GREETING $WHO from $PWD as $(id -un)" > ~/seen
WORKDIR made
"""


@pytest.fixture
def context(tmp_path: Path) -> Path:
    """A directory with a Dockerfile and what it copies."""
    (tmp_path / "src/deep").mkdir(parents=True)
    (tmp_path / "src/a.txt").write_text("a\n")
    (tmp_path / "src/deep/b.txt").write_text("b\n")
    (tmp_path / "src/link").symlink_to("a.txt")
    (tmp_path / "tool").write_text("#!/bin/sh\necho greetings\n")
    (tmp_path / "tool").chmod(0o755)
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    return tmp_path


class Seen:
    """What is there of sandboxes, ended ones too, and of steps."""

    def __init__(self, shared: Platform) -> None:
        self.shared = shared
        self.sandboxes = self._sandboxes()
        self.steps = self._steps()
        self.left = self._left()

    def _sandboxes(self) -> set[str]:
        return {each["id"] for each in json.loads(self.shared.dsec("ps", "--all", "--json").stdout)}

    def _steps(self) -> set[str]:
        steps = self.shared.state / "store/steps"
        return set(os.listdir(steps)) if steps.exists() else set()

    def _left(self) -> dict[str, int]:
        # Layers that were used stay mounted for the next sandbox.
        return {kind: count for kind, count in leftovers(self.shared.state).items() if kind != "mounts"}

    def new_sandboxes(self) -> int:
        return len(self._sandboxes() - self.sandboxes)

    def new_steps(self) -> int:
        return len(self._steps() - self.steps)

    def assert_nothing_left(self) -> None:
        assert not [each for each in json.loads(self.shared.dsec("ps", "--json").stdout) if "build" in each["labels"]]
        left = self._left()
        assert not {kind: (then, left[kind]) for kind, then in self.left.items() if left[kind] > then}
        assert not os.listdir(self.shared.state / "layers/work")


def build(shared: Platform, name: str, context: Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return shared.dsec("image", "build", name, str(context), *arguments, **options)


def cached(shared: Platform, name: str, context: Path, *arguments: str) -> list[bool]:
    """Builds, and tells which steps were there."""
    done = json.loads(build(shared, name, context, "--json", *arguments).stdout)
    assert done["image"]["name"] == name and done["image"]["kind"] == "base"
    return [step["cached"] for step in done["steps"]]


def run(shared: Platform, image: str, line: str) -> str:
    return shared.dsec("run", image, "--", "sh", "-c", line).stdout


def test_a_dockerfile_becomes_an_image_with_all_it_says(shared: Platform, context: Path) -> None:
    before = Seen(shared)
    done = build(shared, "built", context, "--build-arg", "GREETING=good morning")
    assert "[1/4] RUN useradd" in done.stderr and "[4/4] RUN greet" in done.stderr and "cached" not in done.stderr
    assert done.stdout.startswith("built: ")
    # A sandbox for each step and one for the image, none of which is left.
    assert (before.new_sandboxes(), before.new_steps()) == (5, 5)
    before.assert_nothing_left()
    assert run(shared, "built", "cat ~/seen") == "good morning world from /srv/app as builder\n"
    assert run(shared, "built", "echo $WHO $GREETING; greet; pwd; id -un; ls /tmp").split() == [
        "world", "greetings", "/srv/app/made", "builder",
    ]
    line = "cd ../conf; stat -c '%n %U %G %a %F' . a.txt deep deep/b.txt link /opt/tools /opt/tools/greet"
    assert run(shared, "built", line).splitlines() == [
        ". builder builder 755 directory",
        "a.txt builder builder 640 regular file",
        "deep builder builder 750 directory",
        "deep/b.txt builder builder 640 regular file",
        "link builder builder 777 symbolic link",
        "/opt/tools root root 755 directory",
        "/opt/tools/greet root root 755 regular file",
    ]
    assert run(shared, "built", "stat -c '%U %a' . /srv/app").split() == ["builder", "755", "builder", "755"]
    inspected = json.loads(shared.dsec("image", "inspect", "built").stdout)
    assert inspected["env"][0].startswith("PATH=/opt/tools:/usr/local/sbin:") and inspected["env"][1] == "WHO=world"
    assert (inspected["working_dir"], inspected["user"]) == ("/srv/app/made", "builder")
    # Nothing of it is among the layers that people made.
    assert "step" not in shared.dsec("layer", "ls", "workspace").stdout


def test_what_is_there_is_not_done_again(shared: Platform, context: Path) -> None:
    assert cached(shared, "again", context, "--no-cache") == [False] * 4
    before = Seen(shared)
    first = json.loads(shared.dsec("image", "inspect", "again").stdout)["digest"]
    done = build(shared, "again:2", context)
    assert done.stderr.count(" cached\n") == 4 and "[4/4] RUN greet" in done.stderr
    # Another time, another text of the same meaning: the same.
    os.utime(context / "src/a.txt", (1, 1))
    (context / "Dockerfile").write_text("# A comment.\n" + DOCKERFILE.replace("RUN greet", "RUN   greet"))
    assert cached(shared, "again:3", context) == [True] * 4
    assert (before.new_sandboxes(), before.new_steps()) == (0, 0)
    assert json.loads(shared.dsec("image", "inspect", "again:3").stdout)["digest"] == first
    # What is copied has changed: from there on.
    (context / "src/a.txt").write_text("other\n")
    assert cached(shared, "again", context) == [True, False, False, False]
    assert before.new_sandboxes() == 4
    assert run(shared, "again", "cat /srv/app/conf/a.txt") == "other\n"
    # Only what the image says of itself: the steps are there, the image is not.
    (context / "Dockerfile").write_text(DOCKERFILE + "ENV LATE=1\n")
    assert cached(shared, "again", context) == [True] * 4
    assert run(shared, "again", "echo $LATE") == "1\n"
    assert before.new_sandboxes() == 4 + 1 + 2
    # An ARG counts where commands see it.
    assert cached(shared, "again", context, "--build-arg", "GREETING=hi") == [False, False, False, False]
    before.assert_nothing_left()


def test_an_image_is_built_over_a_built_one(shared: Platform, context: Path) -> None:
    build(shared, "lower", context)
    over = context / "over"
    over.mkdir()
    (over / "recipe.toml").write_text(
        'base = "lower"\nenv = { MORE = "more" }\n[[step]]\nrun = "echo $WHO $MORE $PWD $(id -un) > seen"\n'
        '[[step]]\nrun = ["sh", "-c", "echo in $1 > seen-too", "x", "a b"]\nworking_dir = "below"\n'
        '[[step]]\ncopy = { from = ["recipe.toml"], to = "copied.toml" }\n'
    )
    assert cached(shared, "upper", over) == [False] * 3
    seen = run(shared, "upper", "cat seen below/seen-too; stat -c '%U %n' copied.toml below; echo $PATH").splitlines()
    assert seen[0] == "world more /srv/app/made builder" and seen[1] == "in a b"
    assert seen[2:4] == ["root copied.toml", "builder below"] and seen[4].startswith("/opt/tools:")
    # The base moves: what stands on it is done again.
    (context / "src/a.txt").write_text("moved\n")
    build(shared, "lower", context)
    assert cached(shared, "upper", over) == [False] * 3
    assert run(shared, "upper", "cat ../conf/a.txt") == "moved\n"


def test_a_build_of_many_steps_stores_what_they_add(shared: Platform, context: Path) -> None:
    steps = "".join(f"RUN echo {n} > /step-{n}\n" for n in range(12))
    (context / "Dockerfile").write_text(f"FROM {IMAGE}\nRUN echo 0 > /first\n{steps}")

    def stored(under: str = "") -> int:
        top = shared.state / "store" / under
        return sum(path.stat().st_size for path in stored_files(shared) if path.is_relative_to(top))

    base = json.loads(shared.dsec("image", "inspect", IMAGE).stdout)
    before, whole = stored("packs"), stored()
    build(shared, "many", context)
    assert stored("packs") - before < 64 << 10
    # Steps have metadata of their own, not the base's.
    assert stored() - whole < base["size_bytes"] / 10
    built = json.loads(shared.dsec("image", "inspect", "many").stdout)
    assert set(base["blobs"]) <= set(built["blobs"])
    assert run(shared, "many", "cat /first /step-*").split() == ["0", *sorted(map(str, range(12)))]


def test_a_step_that_fails_is_named_and_nothing_is_left(shared: Platform, context: Path) -> None:
    (context / "Dockerfile").write_text(f"FROM {IMAGE}\nRUN true\n\nRUN echo out; echo err >&2; \\\n  exit 37\nRUN true\n")
    before = Seen(shared)
    done = build(shared, "failed", context, check=False)
    assert (done.returncode, done.stdout) == (37, "out\n")
    assert "err\n" in done.stderr and "step 2 of 3" in done.stderr and "Dockerfile:4) ended with 37: RUN echo out" in done.stderr
    assert "--keep-failed" in done.stderr
    before.assert_nothing_left()
    # The step before it is kept for the next build, of this one there is nothing.
    assert before.new_steps() == 1 and "failed" not in shared.dsec("image", "ls").stdout
    told = build(shared, "failed", context, "--json", check=False)
    error = json.loads(told.stderr)
    assert (told.returncode, told.stdout) == (37, "")
    assert error["detail"] | {"text": ""} == {
        "step": 2, "line": 4, "text": "", "exit_code": 37, "output": "out\nerr\n",
    }
    (context / "Dockerfile").write_text(f'FROM {IMAGE}\nRUN ["no-such-program"]\n')
    done = build(shared, "failed", context, check=False)
    assert done.returncode == 127 and "Dockerfile:2) did not start" in done.stderr and "no-such-program" in done.stderr
    before.assert_nothing_left()


def test_the_sandbox_of_a_step_that_failed_is_kept_if_asked(shared: Platform, context: Path) -> None:
    (context / "Dockerfile").write_text(f"FROM {IMAGE}\nRUN echo half > /made; false\n")
    before = Seen(shared)
    done = build(shared, "kept", context, "--keep-failed", check=False)
    kept = [each for each in json.loads(shared.dsec("ps", "--json").stdout) if each["labels"].get("build") == "kept"]
    assert done.returncode == 1 and len(kept) == 1 and f"dsec shell {kept[0]['id']}" in done.stderr
    assert shared.dsec("exec", kept[0]["id"], "--", "cat", "/made").stdout == "half\n"
    shared.dsec("stop", kept[0]["id"])
    before.assert_nothing_left()
    # One that does not fail keeps none.
    (context / "Dockerfile").write_text(f"FROM {IMAGE}\nRUN echo half > /made\n")
    build(shared, "kept", context, "--keep-failed")
    before.assert_nothing_left()


@pytest.mark.parametrize("step", ["RUN sleep 1000", "RUN trap '' INT TERM; sleep 1000"])
def test_an_interrupted_build_leaves_nothing(shared: Platform, context: Path, step: str) -> None:
    (context / "Dockerfile").write_text(f"FROM {IMAGE}\n{step} # {time.monotonic()}\n")
    before = Seen(shared)
    command = [str(BIN / "dsec"), "image", "build", "interrupted", str(context)]
    with subprocess.Popen(command, env=shared.env, stderr=subprocess.PIPE, text=True) as building:
        until(lambda: before.new_sandboxes() == 1 and "sleep 1000" in str(_running(shared)), "the step runs")
        building.send_signal(signal.SIGINT)
        assert building.wait(30) == 130
    before.assert_nothing_left()
    assert before.new_steps() == 0


def _running(shared: Platform) -> list[str]:
    """Command lines of all that runs in sandboxes of builds."""
    lines = []
    for each in json.loads(shared.dsec("ps", "--json").stdout):
        if "build" in each["labels"]:
            lines.append(shared.dsec("execs", each["id"], "--json").stdout)
    return lines


def test_what_cannot_be_built_is_refused_before_anything_is_done(shared: Platform, context: Path, tmp_path: Path) -> None:
    before = Seen(shared)
    (context / "out").symlink_to("/etc")
    (context / ".dockerignore").write_text("# Not for images.\nsecret*\n")
    (context / "secret.txt").write_text("s")
    for text, words in (
        (f"FROM {IMAGE}\n\nHEALTHCHECK CMD true\n", ("Dockerfile: line 3", "HEALTHCHECK is not understood")),
        (f"FROM {IMAGE}\nCOPY ../x /x\n", ("line 2", "below the recipe's directory")),
        (f"FROM {IMAGE}\nCOPY out /x\n", ("leads out of", "through a link")),
        (f"FROM {IMAGE}\nCOPY out/passwd /x\n", ("leads out of",)),
        (f"FROM {IMAGE}\nCOPY secret.txt /x\n", ("left out by line 2 of .dockerignore",)),
        (f"FROM {IMAGE}\nCOPY nothing /x\n", ("nothing", "No such file")),
        ("FROM no-such-image\nRUN true\n", ("no image \"no-such-image\"", "dsec image import no-such-image")),
    ):
        (context / "Dockerfile").write_text(text)
        done = build(shared, "refused", context, check=False)
        assert done.returncode == 1 and all(word in done.stderr for word in words), (text, done.stderr)
    (context / "Dockerfile").write_text(DOCKERFILE)
    for arguments, word in (
        (("No/Name", str(context)), "not an image name"),
        (("x", str(context), "--build-arg", "NONE=1"), "no ARG takes the value"),
        (("x", str(context), "--platform", "linux/arm64"), "--platform is for"),
        (("x", str(tmp_path / "src")), "no recipe.toml and no Dockerfile"),
    ):
        done = shared.dsec("image", "build", *arguments, check=False)
        assert done.returncode == 1 and word in done.stderr, done.stderr
    assert (before.new_sandboxes(), before.new_steps()) == (0, 0)


def test_what_is_left_out_is_neither_copied_nor_counted(shared: Platform, context: Path) -> None:
    (context / ".dockerignore").write_text("**/*.log\nsrc/deep\n!src/deep/kept\nDockerfile\n")
    (context / "src/deep/kept").write_text("k")
    (context / "src/x.log").write_text("1")
    (context / "Dockerfile").write_text(f"FROM {IMAGE}\nCOPY . /all/\n")
    assert cached(shared, "ignored", context) == [False]
    assert run(shared, "ignored", "cd /all; find . | sort").split() == [
        ".", "./.dockerignore", "./src", "./src/a.txt", "./src/deep", "./src/deep/kept", "./src/link", "./tool",
    ]
    (context / "src/x.log").write_text("22")
    (context / "src/deep/b.txt").write_text("other")
    assert cached(shared, "ignored", context) == [True]


def test_files_go_where_docker_puts_them(shared: Platform, context: Path) -> None:
    (context / "Dockerfile").write_text(
        f"FROM {IMAGE}\nRUN mkdir /there && ln -s there /way && echo old > /there/tool && chmod 700 /there\n"
        "COPY tool /way\nCOPY src/a.txt tool /new/dir/\nCOPY src/a.txt /other/name\nCOPY src /there\n"
        "COPY --chown=7 src/a.txt /new/owned/\n"
    )
    build(shared, "placed", context)
    seen = run(shared, "placed", "cat /there/tool | head -1; ls /new/dir /there; cat /other/name; stat -c %a /there")
    assert seen.split() == ["#!/bin/sh", "/new/dir:", "a.txt", "tool", "/there:", "a.txt", "deep", "link", "tool", "a", "700"]
    assert run(shared, "placed", "stat -c %u:%g /new /new/owned /new/owned/a.txt").split() == ["0:0", "7:7", "7:7"]
    (context / "Dockerfile").write_text(f"FROM {IMAGE}\nCOPY tool /etc/passwd/tool\n")
    done = build(shared, "placed", context, check=False)
    assert done.returncode == 1 and "step 1 of 1" in done.stderr and "/etc/passwd is there" in done.stderr


def repository(at: Path) -> None:
    """An apt repository of files with one package."""
    tree = at / "tree"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "usr/share/tiny").mkdir(parents=True)
    (tree / "usr/share/tiny/it").write_text("installed\n")
    fields = "Package: tiny\nVersion: 1\nArchitecture: all\nMaintainer: Nobody <nobody@invalid>\nDescription: tiny\n"
    (tree / "DEBIAN/control").write_text(fields)
    (at / "repo").mkdir()
    package = at / "repo/tiny.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "-b", str(tree), str(package)], check=True, capture_output=True)
    data = package.read_bytes()
    rest = f"Filename: ./tiny.deb\nSize: {len(data)}\nSHA256: {hashlib.sha256(data).hexdigest()}\n"
    (at / "repo/Packages").write_text(fields + rest)


def test_packages_come_from_what_the_base_has(shared: Platform, tmp_path: Path) -> None:
    repository(tmp_path)
    recipe = (
        f'base = "{IMAGE}"\n[[step]]\ncopy = {{ from = "repo", to = "/srv/repo" }}\n'
        '[[step]]\nrun = "rm -rf /etc/apt/sources.list*; echo \'deb [trusted=yes] file:/srv/repo ./\' > /etc/apt/sources.list"\n'
        '\n[[step]]\npackages = ["tiny"]\n'
    )
    (tmp_path / "recipe.toml").write_text(recipe)
    done = build(shared, "packages", tmp_path)
    assert "[3/3] packages tiny" in done.stderr
    assert run(shared, "packages", "cat /usr/share/tiny/it; ls /var/lib/apt/lists") == "installed\n"
    before = Seen(shared)
    (tmp_path / "recipe.toml").write_text(recipe.replace('"tiny"', '"no-such-package"'))
    done = build(shared, "packages", tmp_path, check=False)
    assert done.returncode == 100 and "recipe.toml:7) ended with 100: packages no-such-package" in done.stderr
    assert "Unable to locate package" in done.stderr and "no network" in done.stderr
    before.assert_nothing_left()


def test_two_builds_of_one_recipe_at_once_both_end_well(shared: Platform, context: Path) -> None:
    (context / "Dockerfile").write_text(DOCKERFILE.replace("WHO=world", f"ONCE={time.monotonic()} WHO=world"))
    before = Seen(shared)
    command = [str(BIN / "dsec"), "image", "build", "both", str(context), "--json"]
    building = [subprocess.Popen(command, env=shared.env, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    done = [json.loads(each.communicate(timeout=120)[0]) for each in building]
    assert [each.returncode for each in building] == [0, 0, 0]
    assert len({json.dumps([step["key"] for step in each["steps"]]) for each in done}) == 1
    assert before.new_steps() == 5
    assert run(shared, "both", "cat ~/seen").startswith("hello world")
    assert cached(shared, "both", context) == [True] * 4
    before.assert_nothing_left()


def test_steps_stay_for_the_next_build_and_go_when_told(shared: Platform, client: DSecClient, context: Path) -> None:
    (context / "Dockerfile").write_text(DOCKERFILE.replace("useradd", "true of-gc; useradd"))
    before = Seen(shared)
    build(shared, "gc-app", context)
    assert before.new_steps() == 5
    image = client.images.get("gc-app")
    client.images.remove("gc-app")
    shared.dsec("layer", "gc", "--grace", "0s")
    assert cached(shared, "gc-app", context) == [True] * 4, "what was used a moment ago is kept without a name too"
    # The image has all of its steps, so they are kept as long as it is.
    shared.dsec("layer", "gc", "--grace", "0s", "--step-age", "0s")
    assert before.new_steps() == 5 and run(shared, "gc-app", "cat ~/seen").startswith("hello")
    client.images.remove("gc-app")
    shared.dsec("layer", "gc", "--grace", "0s", "--step-age", "0s")
    assert not (shared.state / "store/layers" / image.digest).exists()
    assert before.new_steps() == 0 and cached(shared, "gc-app", context) == [False] * 4
    assert "all is well" in shared.dsec("layer", "verify").stdout


def test_a_recipe_begins_with_an_image_of_a_registry(shared: Platform, tmp_path: Path) -> None:
    with registry() as running:
        layer = Layer.of(tar({"etc/from": b"registry\n"}))
        running.push("team/app", "1", [layer])
        reference = f"docker://{running.address}/team/app:1"
        (tmp_path / "recipe.toml").write_text(
            f'base = "{reference}"\nworking_dir = "/w"\n[[step]]\ncopy = {{ from = "recipe.toml", to = "." }}\n'
        )
        assert cached(shared, "pulled", tmp_path) == [False]
        name = f"registry/{running.address.replace(':', '-')}/team/app:1"
        assert shared.dsec("image", "inspect", name).stdout
        before = Seen(shared)
        running.push("team/app", "1", [layer, Layer.of(tar({"etc/more": b"x"}))])
        assert cached(shared, "pulled", tmp_path) == [True], "what is here is not asked for"
        assert before.new_sandboxes() == 0
        assert cached(shared, "pulled", tmp_path, "--pull") == [False]
    # The registry is gone, what came of it is not.
    assert cached(shared, "pulled", tmp_path) == [True]
    assert json.loads(shared.dsec("image", "inspect", "pulled").stdout)["working_dir"] == "/w"


def test_an_example_of_the_guide_works_as_it_is_written(shared: Platform, tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs/guide.md").read_text()
    section = guide.split("## Building images", 1)[1].split("\n## ", 1)[0]
    blocks = [block.split("\n", 1) for block in section.split("```")[1::2]]
    recipe = next(text for kind, text in blocks if kind == "toml")
    script = next(text for kind, text in blocks if kind == "sh")
    (tmp_path / "recipe.toml").write_text(recipe.replace('base = "debian"', f'base = "{IMAGE}"'))
    (tmp_path / "src").mkdir()
    (tmp_path / "src/app.py").write_text("print('it runs')\n")
    env = {**shared.env, "PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", "-euc", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "it runs" in done.stdout, (done.stdout, done.stderr)
