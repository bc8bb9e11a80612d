"""A Triton that is a few dictionaries behind a real HTTP server: for what the real one cannot easily be made to do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from aiohttp import web
from aiohttp.test_utils import TestServer


def config_of(
    name: str,
    inputs: Sequence[str] = ("text_input BYTES 1", "sampling_parameters? BYTES 1", "stream? BOOL 1"),
    outputs: Sequence[str] = ("text_output BYTES -1",),
    **fields: Any,
) -> dict[str, Any]:
    """Return a config as Triton writes it; tensors are ``name[?] TYPE dims…``, by default an old vLLM model's."""

    def tensors(texts: Sequence[str]) -> list[dict[str, Any]]:
        found = []
        for text in texts:
            tensor, datatype, *dims = text.split()
            kind = "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
            found.append({"name": tensor.rstrip("?"), "data_type": kind, "dims": [int(dim) for dim in dims],
                          "optional": tensor.endswith("?")})  # fmt: skip
        return found

    return {
        "name": name,
        "backend": "vllm",
        "model_transaction_policy": {"decoupled": True},
        **fields,
        "input": tensors(inputs),
        "output": tensors(outputs),
    }


class FakeTriton:
    """
    Serves *models* (name to config), and streams *responses*. Those in *waiting* are not ready, for the reason that
    stands there; ``loading`` is the state of that name.

    Its list of models is answered while *may_list* is set, and what follows the first response of a stream while
    *may_go_on* is. Each of the next *failing* requests to a model ends with *failure*. It tells its *version* where it
    has one; of its models, the version *loaded* is.
    """

    def __init__(self, *configs: dict[str, Any]) -> None:
        self.models = {config["name"]: config for config in configs}
        self.waiting: dict[str, str] = {}
        self.responses: Sequence[Mapping[str, Any]] = ()
        self.failing: float = 0
        self.failure = ""
        self.version = ""
        self.loaded = "1"
        self.index_calls = 0
        self.may_list = asyncio.Event()
        self.may_list.set()
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.asked: list[tuple[str, dict[str, Any]]] = []
        app = web.Application()
        app.router.add_get("/v2", self._info)
        app.router.add_post("/v2/repository/index", self._index)
        app.router.add_get("/v2/models/{name}/config", self._config)
        app.router.add_post("/v2/models/{name}/generate_stream", self._generate)
        app.router.add_post("/v2/models/{name}/infer", self._infer)
        self._server = TestServer(app, skip_url_asserts=True)

    async def __aenter__(self) -> FakeTriton:
        await self._server.start_server()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()

    @property
    def url(self) -> str:
        """The address."""
        return str(self._server.make_url("")).rstrip("/")

    async def _info(self, request: web.Request) -> web.Response:
        if not self.version:
            raise web.HTTPNotFound
        return web.json_response({"name": "triton", "version": self.version, "extensions": []})

    async def _index(self, request: web.Request) -> web.Response:
        self.index_calls += 1
        await self.may_list.wait()
        index = [{"name": name, "version": self.loaded, "state": "READY"} for name in self.models]
        # Of a model that was never loaded, the real one knows nothing but the name.
        index += [
            {"name": name, **({"state": "UNAVAILABLE", "reason": why} if why else {})}
            for name, why in self.waiting.items()
            if why != "loading"
        ]
        index += [{"name": name, "state": "LOADING"} for name, why in self.waiting.items() if why == "loading"]
        return web.json_response(index)

    async def _config(self, request: web.Request) -> web.Response:
        config = self.models.get(unquote(request.match_info["name"]))
        if config is None:
            return web.json_response({"error": "Request for unknown model"}, status=404)
        return web.json_response(config)

    async def _infer(self, request: web.Request) -> web.Response:
        name = unquote(request.match_info["name"])
        return web.json_response({"error": f"Request for unknown model: '{name}' is not found"}, status=400)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((unquote(request.match_info["name"]), await request.json()))
        if self.failing > 0:
            self.failing -= 1
            return web.json_response({"error": self.failure}, status=500)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        for values in self.responses:
            await response.write(b"data: " + json.dumps({"model_name": "m", **values}).encode() + b"\n\n")
            await self.may_go_on.wait()
        await response.write_eof()
        return response
