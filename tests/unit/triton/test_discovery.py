"""The list of Tritons: settings, a file and names."""

import asyncio
import socket

import pytest
import structlog

from triton_openai.config.addresses import endpoints
from triton_openai.config.tree import EndpointSettings, TritonAccess, TritonSettings
from triton_openai.errors import ConfigurationError
from triton_openai.triton import discovery as discovery_module
from triton_openai.triton.discovery import Discovery, lookup


class Names:
    """A resolver whose answers the test sets."""

    def __init__(self, **hosts):
        self.hosts = hosts

    async def __call__(self, host):
        found = self.hosts.get(host)
        if found is None:
            raise OSError(-2, "Name or service not known")
        if isinstance(found, Exception):
            raise found
        return found


def discovery_of(triton, names=lookup):
    applied = []

    async def apply(endpoints):
        applied.append(endpoints)

    return Discovery(triton, TritonAccess(), apply, lookup=names), applied


async def test_every_address_of_a_name_is_a_triton():
    """An endpoint with dns becomes one for each address, which keeps the name for its certificate."""
    names = Names(tritons={"10.0.0.2", "10.0.0.1", "fd00::1"})
    discovery, applied = discovery_of(
        TritonSettings(endpoints=("pool=dns+https://tritons:8000+grpcs://tritons:8001", "b=http://b:8000")), names
    )
    await discovery.look()
    (found,) = applied
    assert [one.name for one in found] == ["pool/10.0.0.1", "pool/10.0.0.2", "pool/fd00::1", "b"]
    assert found[0].url == ("https://10.0.0.1:8000", "grpcs://10.0.0.1:8001")
    assert found[2].url == ("https://[fd00::1]:8000", "grpcs://[fd00::1]:8001")
    assert found[0].access.server_name == "tritons"
    assert found[3] == EndpointSettings(name="b", url=("http://b:8000",))


async def test_a_lookup_that_fails_keeps_the_old_addresses():
    """Neither an error nor an empty answer takes the Tritons away, and the log says it once."""
    names = Names(tritons={"10.0.0.1", "10.0.0.2"})
    discovery, applied = discovery_of(TritonSettings(endpoints=("dns+http://tritons:8000",)), names)
    await discovery.look()
    with structlog.testing.capture_logs() as lines:
        for hosts in (None, (), UnicodeError("label too long")):
            names.hosts = {"tritons": hosts}
            await discovery.look()
    assert len(applied) == 1
    assert [line["host"] for line in lines] == ["tritons"]
    names.hosts = {"tritons": {"10.0.0.2"}}
    await discovery.look()
    assert [one.name for one in applied[-1]] == ["tritons:8000/10.0.0.2"]


async def test_the_system_finds_addresses():
    """The lookup is the system's own."""
    assert "127.0.0.1" in await lookup("localhost")


async def test_a_triton_with_addresses_of_two_families_is_one(monkeypatch):
    """Those of the family that the system prefers count: it knows which of them can be reached."""
    four = [(socket.AF_INET, 1, 6, "", (address, 0)) for address in ("10.0.0.1", "10.0.0.2")]
    six = [(socket.AF_INET6, 1, 6, "", (address, 0)) for address in ("fd00::1", "fd00::2")]
    for found, expected in (
        ([*four, *six], {"10.0.0.1", "10.0.0.2"}),
        ([*six, *four], {"fd00::1", "fd00::2"}),
        (four[1:], {"10.0.0.2"}),
    ):

        async def getaddrinfo(*_, found=found, **__):
            return found

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
        assert await lookup("tritons") == expected


async def test_a_file_adds_endpoints(tmp_path):
    """The file has the same list as the settings; a wrong one is refused by name."""
    file = tmp_path / "endpoints.yaml"
    file.write_text("- a=http://a:8000\n- {name: b, url: [http://b:8000, grpc://b:8001], weight: 2}\n")
    triton = TritonSettings(endpoints=("c=http://c:8000",), endpoints_file=file)
    discovery, applied = discovery_of(triton)
    await discovery.look()
    assert [one.name for one in applied[0]] == ["c", "a", "b"]
    for text, problem in (
        ("- a=http://a:8000\n- a=http://b:8000\n", "two endpoints have the name 'a'"),
        ("a: b\n", "is not accepted"),
        ("- {name: a}\n", "is not accepted"),
        ("- ftp://a\n", "has to begin with"),
        ("- [\n", "is not valid YAML"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigurationError, match=problem):
            endpoints(triton)
    file.write_text("[]")
    await discovery.replace(triton, endpoints(triton))
    assert [one.name for one in applied[-1]] == ["c"]


async def test_names_are_looked_up_whatever_went_wrong(tmp_path, monkeypatch):
    """Neither a wrong file nor endpoints that cannot be used end the watch."""
    monkeypatch.setattr(discovery_module, "LOOK_SECONDS", 0)
    file = tmp_path / "endpoints.yaml"
    file.write_text("- a=http://a:8000\n")
    names, tried, twice = Names(tritons={"10.0.0.1"}), [], asyncio.Event()

    async def apply(endpoints):
        tried.append(endpoints)
        if len(tried) > 2:
            twice.set()
        raise ConfigurationError("There is no certificate.") if len(tried) == 2 else KeyError("a mistake")

    triton = TritonSettings(endpoints=("dns+http://tritons:8000",), endpoints_file=file, dns_interval=0.001)
    discovery = Discovery(triton, TritonAccess(), apply, lookup=names)
    file.write_text("- [\n")
    running = asyncio.create_task(discovery.run())
    with structlog.testing.capture_logs() as lines:
        async with asyncio.timeout(120):
            await twice.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    told = [line["exc_info"] for line in lines if line["event"] == "endpoints cannot be used"]
    assert told[:2] == [True, False]
