"""
The image, built from the Dockerfile on a Debian of its own, and run as a container engine runs it.

It has its user and its variables there, and a root that cannot be written.

Its name keeps it out of the other runs: it takes minutes, and needs root, buildah and debootstrap.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.deploy_files import ROOT
from tests.ports import free_port
from tests.triton_fixture import TestTriton

pytestmark = pytest.mark.timeout(1800)

#: Where the base image is kept, for the next run.
FOLDER = Path(os.environ.get("IMAGE_FOLDER", ROOT / ".venv" / "image")).resolve()
#: A release of Debian whose Python the service supports, and what the Dockerfile uses of its base image.
DEBIAN = "trixie"
PACKAGES = "python3,python3-venv,python3-pip,ca-certificates"
BASE = "localhost/triton-openai-base"
IMAGE = "localhost/triton-openai-test"
#: What the machine needs to reach PyPI, where it needs that.
OF_THE_MACHINE = ("/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")
PREFIX = "opt/triton-openai"
MAX_SIZE = 200 * 1000 * 1000
WRITABLE = ("tmp", "var/cache/triton-openai", "var/lib/triton-openai")


def buildah(*arguments: str) -> str:
    """Return what buildah prints, without containers' own isolation: it has to work inside a container too."""
    storage = ("--root", str(FOLDER / "root"), "--runroot", str(FOLDER / "run"), "--storage-driver", "vfs")
    command = ["buildah", *storage, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout.strip()


def make_base() -> None:
    """Make the base image from Debian's packages, unless a former run has."""
    if BASE in buildah("images", "--format", "{{.Name}}"):
        return
    tree = FOLDER / "debian"
    # A folder that a run left behind when it was interrupted has no such file, and debootstrap does not go on there.
    if not (tree / "complete").exists():
        shutil.rmtree(tree, ignore_errors=True)
        command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", DEBIAN, str(tree)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (tree / "complete").touch()
    container = buildah("from", "scratch")
    buildah("add", "--quiet", container, str(tree), "/")
    buildah("commit", "--quiet", "--rm", container, BASE)


class Image:
    """The built image: its configuration, and its files in a folder."""

    def __init__(self) -> None:
        FOLDER.mkdir(parents=True, exist_ok=True)
        make_base()
        volumes = [f"--volume={path}:{path}:ro" for path in OF_THE_MACHINE if Path(path).exists()]
        buildah(
            *("build", "--quiet", "--isolation", "chroot", "--format", "docker", *volumes),
            *("--build-arg", f"PYTHON_IMAGE={BASE}", "--ignorefile", "deploy/Dockerfile.dockerignore"),
            *("--file", "deploy/Dockerfile", "--tag", IMAGE, "."),
        )
        inspected = json.loads(buildah("inspect", "--type", "image", IMAGE))
        self.config: Mapping[str, Any] = inspected["Docker"]["config"]
        self.container = buildah("from", "--pull-never", IMAGE)
        self.root = Path(buildah("mount", self.container))

    def close(self) -> None:
        """Remove the container and the image; the base stays for the next run."""
        buildah("umount", self.container)
        buildah("rm", self.container)
        buildah("rmi", IMAGE)

    def start(self, command: Sequence[str], **variables: str) -> subprocess.Popen[str]:
        """
        Start *command* in the image, with its user and variables, and with *variables*.

        The process itself is the command: signals reach it as they do from a container engine.
        """
        user = self.config["User"]
        inside = dict(entry.split("=", 1) for entry in self.config["Env"])
        environ = [f"{name}={value}" for name, value in {**inside, **variables}.items()]
        root = shlex.quote(str(self.root))
        lines = [f"mount --bind {root} {root}", f"mount --rbind /proc {root}/proc"]
        lines += [f"mount -t tmpfs -o mode=1777 tmpfs {root}/{folder}" for folder in WRITABLE]
        lines += [
            f"mount -o remount,ro,bind {root}",
            f"exec chroot --userspec={user} {root} /usr/bin/env -i {shlex.join([*environ, *command])}",
        ]
        return subprocess.Popen(
            ["unshare", "--mount", "sh", "-ec", "\n".join(lines)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, command: Sequence[str], **variables: str) -> tuple[int, str]:
        """Return the exit status of *command* and what it prints."""
        with self.start(command, **variables) as process:
            printed, _ = process.communicate(timeout=120)
        return process.returncode, printed


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    """The image, built once."""
    if os.geteuid() != 0:
        pytest.fail("make image-test needs root: debootstrap and mounts do.")
    built = Image()
    yield built
    built.close()


@contextmanager
def serving(image: Image, triton: TestTriton) -> Iterator[Mapping[str, str]]:
    """Start the image as it starts itself, and yield its variables; SIGTERM ends it with status 0."""
    port = str(free_port())
    (packages,) = (image.root / PREFIX).glob("lib/python3*/site-packages")
    variables = {
        # Tests listen on the loopback interface only, the image on every one.
        "TRITON_OPENAI_HOST": "127.0.0.1",
        "TRITON_OPENAI_PORT": port,
        "TRITON_OPENAI_TRITON_URL": triton.http_url,
        "TRITON_OPENAI_TOKENIZER": f"/{packages.relative_to(image.root)}/triton_openai/demo/tokenizer",
    }
    process = image.start([*image.config["Entrypoint"], *image.config["Cmd"]], **variables)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if "For clients" in line:
                break
        yield variables
        process.send_signal(signal.SIGTERM)
        assert 0 == process.wait(120)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def ask(variables: Mapping[str, str], path: str, body: Any) -> Any:
    """Return what the service answers."""
    url = f"http://127.0.0.1:{variables['TRITON_OPENAI_PORT']}/v1/{path}"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def test_what_the_image_says(image: Image) -> None:
    """A user without rights, a health check, and what is started."""
    config = image.config

    assert "10001:10001" == config["User"]
    assert (["triton-openai"], ["serve"]) == (config["Entrypoint"], config["Cmd"])
    assert ["9000/tcp"] == list(config["ExposedPorts"])
    assert "CMD" == config["Healthcheck"]["Test"][0]
    assert "Apache-2.0" == config["Labels"]["org.opencontainers.image.licenses"]


def test_the_size(image: Image) -> None:
    """The environment of the service is small: it has what is loaded, and nothing else."""
    files = [path for path in (image.root / PREFIX).rglob("*") if path.is_file() and not path.is_symlink()]
    size = sum(path.stat().st_size for path in files)
    print(f"The environment has {size / 1e6:.0f} MB.")

    assert size <= MAX_SIZE
    assert not [path for path in files if "tests" in path.parts]


def test_nothing_can_be_written(image: Image) -> None:
    """The root is read-only, as the test sets it up, and the user writes to the folders that are for it."""
    assert 0 != image.run(["touch", "/written"])[0]
    assert 0 != image.run(["touch", f"/{PREFIX}/written"])[0]
    assert (0, "") == image.run(["touch", "/var/cache/triton-openai/written"])
    assert (0, "10001\n") == image.run(["id", "-u"])


def test_a_chat(image: Image, triton: TestTriton) -> None:
    """It is healthy, answers a chat, and ends on SIGTERM with status 0; then it is not healthy."""
    check = image.config["Healthcheck"]["Test"][1:]
    with serving(image, triton) as variables:
        status, printed = image.run(check, **variables)
        assert 0 == status, printed
        body = {"model": "ensemble", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}
        answer = ask(variables, "chat/completions", body)
    assert 1 == image.run(check, **variables)[0]

    assert answer["choices"][0]["message"]["content"]


def test_commands(image: Image) -> None:
    """The other commands work there too."""
    assert "triton-openai" in image.run(["triton-openai", "--version"])[1]
    status, printed = image.run(["triton-openai", "check"])
    assert 0 == status, printed
