"""
vLLM inside Triton's Python backend: token ids in, token ids out. This file is the model's ``1/model.py``.

It is one file, however long, so that it can be copied into any model repository. Its parts are constants, errors, the
carriers, the model that Triton calls, what requests and responses look like, what is used of vLLM, the engine, and
images and audio. It needs the standard library, NumPy and vLLM, and nothing of triton-openai. Beside it lies
``engine.json`` with the arguments of vLLM's engine, and ``multi_lora.json`` where the model has LoRA adapters.

Contract 1. A client opens a *carrier*, a request that stays open. Its generations are small requests that end at once;
their tokens come over the carrier, those of all its streams in one response per turn of the engine::

    request  {"kind": "carrier" | "generate" | "cancel" | "credit" | "embed" | "classify" | "token_embed" |
              "token_classify" | "transcribe" | "info", ...}
    carrier  [name, stream, number of the last response that the client has read]
    response {"n": number, "d": [[stream, ids, finish, stop, usage, logprobs, error, prompt_logprobs], ...],
              "q": [requests that wait in the engine, requests that it runs at most]}

Absent fields at the end of a list are left out. A carrier sends :data:`WINDOW` responses that nobody has acknowledged
at most. What the engine makes meanwhile is joined. A carrier is lost if its client has gone or does not acknowledge
anything for :data:`SILENCE` seconds; then its streams end.

Source of the facts: vLLM's ``AsyncLLM``, ``SamplingParams`` and ``PoolingParams``, releases 0.11 to 0.33.
"""

import asyncio
import base64
import binascii
import contextlib
import functools
import gc
import importlib
import inspect
import io
import json
import operator
import sys
import threading
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb

# --------------------------------------------------------------------------------------------------------------------
# 1. Constants

#: The version of the contract.
CONTRACT = 1
#: The oldest release of vLLM whose interface this file uses.
OLDEST = (0, 11)
#: The newest release whose interface was compared with it. A newer one is tried.
NEWEST = (0, 33)
#: Responses that a carrier sends before its client has to acknowledge one.
WINDOW = 32
#: Seconds without an acknowledgement after which a carrier that waits for one is lost.
SILENCE = 30.0
#: Seconds after which an idle carrier sends an empty response, which shows whether its client is still there.
PULSE = 1.0
#: Seconds for which the answers of a beam search are kept for the streams that share it.
KEPT = 30.0
#: Seconds between two looks at the engine's health.
HEALTH = 1.0
#: The status of HTTP for what can be tried again later.
UNAVAILABLE = 503
FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL
# The keys of a generation. Any other key is an error: a misspelt one would change the answer silently.
KEYS = {
    *("v", "kind", "ids", "prompt", "sampling", "lora", "priority", "salt", "media", "mm", "return", "pooling"),
    "beams",
}
RETURNS = {"logprobs", "prompt_logprobs"}
# Those of a transcription: with ids for a Whisper, with the others for a model that writes its prompts itself.
TRANSCRIPTION = {"v", "kind", "ids", "sampling", "media", "task", "language", "to_language", "prompt"}
TASKS = ("transcribe", "translate")
# Kinds of requests for vectors, which vLLM's tasks are called too: of a whole input, and of each of its tokens.
POOLING_KINDS = ("embed", "classify", "token_embed", "token_classify")
#: The most bytes of vectors in one response, and in all of a request: a client reads each response as a whole.
PART = 512 * 1024
MAX_VECTORS = 8 * 1024 * 1024
BEAMS = {"width", "index", "search", "length_penalty", "ends"}
# The fields of SamplingParams that this file sets itself, or that are no parameters.
OWN = {"output_kind", "detokenize", "n", "logprobs", "prompt_logprobs", "output_text_buffer_length", "skip_clone"}
# Those that hold token ids.
IDS = ("stop_token_ids", "allowed_token_ids")


# --------------------------------------------------------------------------------------------------------------------
# 2. Errors


class Refused(Exception):
    """
    A request that is not run.

    *kind* is ``invalid``, ``unsupported``, ``lora``, ``overloaded``, ``engine`` or ``dead``.
    """

    def __init__(self, message, param=None, kind="invalid"):
        super().__init__(message)
        self.fields = {"kind": kind, "message": message, "param": param}


def died():
    """Return the error for a request that an engine that has died cannot answer."""
    return Refused("The model's engine has died, and starts again.", kind="dead")


def error_fields(error):
    """Return *error* as the contract writes it."""
    if isinstance(error, Refused):
        return error.fields
    client = any(kind.__name__ == "VLLMClientError" for kind in type(error).__mro__)
    if client or isinstance(error, (ValueError, TypeError, NotImplementedError)):
        # vLLM's own validation: its error may name the parameter, and then says so in its text again.
        param = getattr(error, "parameter", None)
        message = str(error)
        if param is not None and error.args:
            message = str(error.args[0])
        return {"kind": "invalid", "message": message, "param": param}
    # vLLM's errors that come and go have a status, such as that of its own limit of the queue.
    status = getattr(error, "http_status", getattr(error, "status_code", None))
    if status == UNAVAILABLE:
        return {"kind": "overloaded", "message": str(error), "param": None}
    return {"kind": "engine", "message": str(error) or type(error).__name__, "param": None}


# --------------------------------------------------------------------------------------------------------------------
# 3. Carriers


class Stream:
    """One generation of a carrier."""

    __slots__ = ("carrier", "completion", "logprobs", "name", "number", "search")

    def __init__(self, carrier, number, name, logprobs, search=None):
        self.carrier = carrier
        self.number = number
        #: What the engine calls it.
        self.name = name
        #: How many alternatives each token has, None without log probabilities.
        self.logprobs = logprobs
        #: The name of the beam search that it takes its answer from, None for a generation of its own.
        self.search = search
        #: The tokens of its answer so far.
        self.completion = 0


class Carrier:
    """
    One request that stays open. A thread of its own sends what its streams produce.

    While it sends, and while no response may be sent, further turns of the engine are joined. So the number of round
    trips to Triton does not depend on the number of streams, and a client that reads nothing makes nothing grow.
    """

    def __init__(self, model, name, sender):
        self.name = name
        #: By number; used in the engine's loop only.
        self.streams = {}
        #: The beam searches by name; used in the engine's loop only.
        self.searches = {}
        self._model = model
        self._sender = sender
        self._changed = threading.Condition()
        # What the engine's turn has produced; used in the engine's loop only.
        self._turn = []
        # By stream; guarded, as all that follows.
        self._waiting = {}
        self._sent = 0
        self._acknowledged = 0
        self._heard = time.monotonic()
        self._closed = False
        threading.Thread(target=self._run, daemon=True, name=f"carrier {name}").start()

    def acknowledge(self, number):
        """Take it that the client has read the response *number*."""
        with self._changed:
            self._heard = time.monotonic()
            if number > self._acknowledged:
                self._acknowledged = number
                self._changed.notify()

    def close(self):
        """Let the thread end the request."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def put(self, event):
        """Add *event*; what one turn of the engine's loop adds goes to the thread together."""
        if not self._turn:
            self._model.loop.call_soon(self._flush)
        self._turn.append(event)

    def fail(self, stream, error):
        """End *stream* with *error*."""
        if self.streams.pop(stream.number, None) is not None:
            self.put([stream.number, [], None, None, None, None, error_fields(error)])

    def _flush(self):
        turn = self._turn
        self._turn = []
        with self._changed:
            for event in turn:
                self._add(event)
            self._changed.notify()

    def _add(self, event):
        """Keep *event* for the next response, joined with what its stream waits to send."""
        waiting = self._waiting.get(event[0])
        if waiting is None:
            self._waiting[event[0]] = event
        else:
            join(waiting, event)

    def _run(self):
        try:
            self._send({"n": 0, "d": [], "v": CONTRACT})
            while True:
                events = self._next()
                if events is None:
                    break
                self._sent += 1
                self._send({"n": self._sent, "d": events})
        except Exception as error:  # noqa: BLE001 - Triton's errors have no class of their own
            log(f"carrier {self.name} is lost: {error}")
        with contextlib.suppress(Exception):
            self._sender.send(flags=FINAL)
        self._model.loop.call_soon_threadsafe(self._model.lost, self)

    def _send(self, body):
        queue = self._model.queue()
        if queue is not None:
            body["q"] = queue
        self._sender.send(response_of(body))

    def _next(self):
        """Return the events of the next response, none after a pulse, or None at the end."""
        looked = time.monotonic()
        with self._changed:
            while True:
                now = time.monotonic()
                room = self._sent - self._acknowledged < WINDOW
                if self._closed:
                    return None
                if self._waiting and room:
                    events = list(self._waiting.values())
                    self._waiting = {}
                    return events
                if not room and now - self._heard > SILENCE:
                    log(f"carrier {self.name} is lost: its client has read nothing for {SILENCE:g} s")
                    return None
                if now - looked >= PULSE:
                    if self._sender.is_cancelled():
                        return None
                    looked = now
                    if room:
                        return []
                self._changed.wait(PULSE / 4)


def join(first, second):
    """Append an event of a stream to an earlier one that has not been sent."""
    first[1] = [*first[1], *second[1]]
    padded(first, len(second) - 1)
    for index, value in enumerate(second[2:], 2):
        if index == 5 and first[5] and value:
            first[5] = [*first[5], *value]
        elif value is not None:
            first[index] = value


def padded(event, index):
    """Return *event* with None for the absent fields up to *index*."""
    while len(event) <= index:
        event.append(None)
    return event


# --------------------------------------------------------------------------------------------------------------------
# 4. The model


class TritonPythonModel:
    """The model. ``execute`` hands over to the loop of the engine, which has a thread of its own."""

    def initialize(self, args):
        """Start the engine. Raises RuntimeError for a release of vLLM whose interface differs."""
        folder = Path(args["model_repository"]) / str(args["model_version"])
        self.name = args["model_name"]
        #: By name.
        self.carriers = {}
        #: None until the engine has started, and while it starts again.
        self.engine = None
        started = []
        ready = threading.Event()
        threading.Thread(target=self._run, args=(folder, started, ready), daemon=True, name="engine").start()
        ready.wait()
        if started:
            raise started[0]

    def _run(self, folder, started, ready):
        try:
            import uvloop

            run = uvloop.run
        except ImportError:
            run = asyncio.run
        run(self._main(folder, started, ready))

    async def _main(self, folder, started, ready):
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        try:
            self.engine = Engine(folder)
        except BaseException as error:  # noqa: BLE001 - the engine may fail in any way
            started.append(error if isinstance(error, Exception) else RuntimeError(repr(error)))
            ready.set()
            return
        # What the engine has made of its modules is never garbage.
        gc.collect()
        gc.freeze()
        ready.set()
        watching = asyncio.create_task(self._watch(folder))
        await self._stop.wait()
        watching.cancel()
        if self.engine is not None:
            self.engine.shutdown()

    async def _watch(self, folder):
        while True:
            await asyncio.sleep(HEALTH)
            if self.engine.dead:
                await self._start_again(folder)

    async def _start_again(self, folder):
        """
        Replace an engine that has died; until then requests are refused.

        Triton does not start a model's process again that has ended, so this one stays.
        """
        log("the engine has died, and starts again")
        dead = self.engine
        self.engine = None
        for carrier in list(self.carriers.values()):
            for stream in list(carrier.streams.values()):
                carrier.fail(stream, died())
        # What the streams are told goes out first: the engine's start holds this loop.
        await asyncio.sleep(PULSE)
        with contextlib.suppress(Exception):
            dead.shutdown()
        while self.engine is None:
            try:
                self.engine = Engine(folder)
            except Exception as error:  # noqa: BLE001 - the engine may fail in any way
                log(f"the engine does not start: {error}")
                await asyncio.sleep(10 * HEALTH)

    def finalize(self):
        """Stop the engine."""
        self.loop.call_soon_threadsafe(self._stop.set)

    def execute(self, requests):
        """Hand every request over to the engine's loop, which this never waits for."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                message, address = read(request)
                answered = self._hand_over(sender, message, address, media_of(request), request.request_id())
            except Exception as error:  # noqa: BLE001 - each request has its answer
                answer(sender, {"e": error_fields(error)})
                continue
            if answered:
                sender.send(flags=FINAL)

    def _hand_over(self, sender, message, address, media, request_id):
        """Have the loop do what *message* asks for. Return whether nothing more is sent. Raises Refused."""
        kind = message.get("kind")
        if self.engine is None:
            raise died()
        if kind in (*POOLING_KINDS, "transcribe", "info"):
            asyncio.run_coroutine_threadsafe(self._answer(sender, message, media, request_id), self.loop)
            return False
        if kind not in ("carrier", "generate", "cancel", "credit"):
            raise Refused(f"There is no kind {kind!r} of requests.", "kind", "unsupported")
        if address is None:
            raise Refused(f"The kind {kind!r} needs the input 'carrier'.", "carrier")
        name, number, acknowledged = address
        if kind == "carrier":
            self.carriers[name] = Carrier(self, name, sender)
            return False
        carrier = self.carriers.get(name)
        if carrier is None:
            raise Refused("The carrier is not open.", "carrier", "overloaded")
        carrier.acknowledge(acknowledged)
        if kind == "generate":
            check_keys(message, KEYS, "request")
            check_keys(message.get("return", {}), RETURNS, "return", "return.")
            check_keys(message.get("beams", {}), BEAMS, "beams", "beams.")
            self.loop.call_soon_threadsafe(self._begin, carrier, number, message, media, request_id)
        elif kind == "cancel":
            self.loop.call_soon_threadsafe(self._cancel, carrier, number)
        return True

    def _begin(self, carrier, number, message, media, request_id):
        name = f"{request_id}/{carrier.name}/{number}"
        search = message.get("beams", {}).get("search")
        stream = Stream(carrier, number, name, message.get("return", {}).get("logprobs"), search)
        if number in carrier.streams:
            # Neither can be told from the other.
            self._cancel(carrier, number)
        carrier.streams[number] = stream
        self.loop.create_task(self._generate(stream, message, media))

    async def _generate(self, stream, message, media):
        carrier = stream.carrier
        try:
            if message.get("beams"):
                self._output(stream, await self._search(stream, message, media))
                return
            await self.engine.generate(stream, message, media, self._output, self._tokens)
            if carrier.streams.get(stream.number) is not stream:
                # Cancelled meanwhile, or done: then this does nothing.
                await self.engine.abort([stream.name])
        except Exception as error:  # noqa: BLE001 - the engine may fail in any way
            carrier.fail(stream, self._explained(error))

    async def _search(self, stream, message, media):
        """
        Return the answer of a beam search to *stream*.

        The answers to one prompt share a search: the first that asks begins it, and it goes on while one is wanted.
        """
        carrier = stream.carrier
        name = stream.search
        search = carrier.searches.get(name)
        if search is None:

            def wanted():
                return any(one.search == name for one in carrier.streams.values())

            search = self.loop.create_task(self.engine.search(stream.name, message, media, wanted))
            carrier.searches[name] = search
            search.add_done_callback(lambda _: self.loop.call_later(KEPT, carrier.searches.pop, name, None))
        answers = await asyncio.shield(search)
        index = message["beams"]["index"]
        if index >= len(answers):
            raise Refused(f"The beam search has found {len(answers)} answers only.", "n", "engine")
        return answers[index]

    def _explained(self, error):
        """Return *error*, or that the engine has died if it has."""
        if self.engine is None or self.engine.dead:
            return died()
        return error

    def _output(self, stream, output):
        """Pass on an output of the engine, or its error; runs in the engine's loop."""
        carrier = stream.carrier
        if carrier.streams.get(stream.number) is not stream:
            # An abort has a last output too.
            return
        if isinstance(output, Exception):
            carrier.fail(stream, self._explained(output))
            return
        choice = output.outputs[0]
        ids = list(choice.token_ids)
        stream.completion += len(ids)
        event = [stream.number, ids]
        finish = choice.finish_reason
        if finish is not None:
            del carrier.streams[stream.number]
            usage = [len(output.prompt_token_ids or ()), output.num_cached_tokens, stream.completion]
            event += [finish, choice.stop_reason, usage]
        if stream.logprobs is not None and choice.logprobs:
            padded(event, 5)[5] = [
                position(entry, token, stream.logprobs) for entry, token in zip(choice.logprobs, ids, strict=False)
            ]
        if output.prompt_logprobs:
            padded(event, 7)[7] = prompt_positions(output)
        if ids or len(event) > 2:
            carrier.put(event)

    def _tokens(self, stream, ids):
        """Pass on the next tokens of an answer that goes on; runs in the engine's loop."""
        carrier = stream.carrier
        if carrier.streams.get(stream.number) is stream:
            stream.completion += len(ids)
            carrier.put([stream.number, ids])

    def _cancel(self, carrier, number):
        stream = carrier.streams.pop(number, None)
        if stream is not None:
            self._abort([stream.name])

    def _abort(self, names):
        if self.engine is not None and names:
            self.loop.create_task(self.engine.abort(names))

    def lost(self, carrier):
        """Forget *carrier*, and end its streams."""
        if self.carriers.get(carrier.name) is carrier:
            del self.carriers[carrier.name]
        names = [stream.name for stream in carrier.streams.values()]
        carrier.streams = {}
        if names:
            log(f"carrier {carrier.name} has gone: {len(names)} streams end")
        self._abort(names)

    def _streams(self):
        """Return how many generations there are."""
        return sum(len(carrier.streams) for carrier in list(self.carriers.values()))

    def queue(self):
        """Return how many requests wait in the engine and how many it runs at most; None where that is not known."""
        engine = self.engine
        if engine is None:
            return None
        return engine.queue(self._streams())

    async def _answer(self, sender, message, media, request_id):
        """Answer a request that belongs to no carrier."""
        try:
            if message["kind"] == "info":
                body = self.engine.info(self._streams())
            elif message["kind"] == "transcribe":
                check_keys(message, TRANSCRIPTION, "request")
                body = await self.engine.transcribe(message, media, request_id)
            else:
                check_keys(message, KEYS, "request")
                *parts, body = await self.engine.pool(message, request_id)
                for part in parts:
                    sender.send(response_of(part))
                    # Streams of the engine go on in between.
                    await asyncio.sleep(0)
        except Exception as error:  # noqa: BLE001 - the engine may fail in any way
            body = {"e": error_fields(self._explained(error))}
        answer(sender, body)


# --------------------------------------------------------------------------------------------------------------------
# 5. Requests and responses


def read(request):
    """Return the JSON object of *request*, and what the input 'carrier' has, None without it. Raises Refused."""
    texts = []
    for name in ("request", "carrier"):
        tensor = pb.get_input_tensor_by_name(request, name)
        if tensor is None:
            texts.append(None)
        else:
            texts.append(tensor.as_numpy().reshape(-1)[0])
    try:
        message = json.loads(texts[0])
        address = json.loads(texts[1] or "null")
    except (ValueError, RecursionError) as error:
        raise Refused(f"The request is no JSON: {error}.", "request") from None
    if not isinstance(message, dict):
        raise Refused("The request is no JSON object.", "request")
    if message.get("v", CONTRACT) != CONTRACT:
        raise Refused(f"This model has version {CONTRACT} of the contract.", "v", "unsupported")
    if address is not None and (not isinstance(address, list) or len(address) != 3):
        raise Refused("The input 'carrier' is no list of a name and two numbers.", "carrier")
    return message, address


def media_of(request):
    """Return the files that came with *request*."""
    tensor = pb.get_input_tensor_by_name(request, "media")
    if tensor is None:
        return []
    return list(tensor.as_numpy().reshape(-1))


def check_keys(values, known, name, prefix=""):
    """Raise Refused for a key of *values*, which is called *name*, that is not *known*; *prefix* stands before it."""
    if not isinstance(values, dict):
        raise Refused(f"'{name}' is no JSON object.", name)
    for key in values:
        if key not in known:
            raise Refused(f"There is no parameter '{prefix}{key}'.", key, "unsupported")


def answer(sender, body):
    """Send the only response of a request, or the last one."""
    sender.send(response_of(body), flags=FINAL)


def response_of(body):
    """Return *body* as a response."""
    return pb.InferenceResponse([pb.Tensor("response", np.array([compact(body)], dtype=object))])


def compact(value):
    """Return *value* as JSON without spaces. Raises ValueError for a number that JSON does not have."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def log(text):
    """Write a line to Triton's log."""
    pb.Logger.log_info(f"companion: {text}")


def position(entries, token, count):
    """Return the log probability of *token*: its id, value, rank, and as many of the likeliest alternatives."""
    chosen = entries[token]
    ranked = sorted(entries.items(), key=lambda item: item[1].rank or 0)[:count]
    return [token, finite(chosen.logprob), chosen.rank, [[number, finite(one.logprob)] for number, one in ranked]]


def prompt_positions(output):
    """Return the log probabilities of the prompt's tokens; the first has none."""
    positions = []
    for token, entries in zip(output.prompt_token_ids, output.prompt_logprobs, strict=False):
        if not entries:
            positions.append(None)
        else:
            positions.append(position(entries, token, len(entries)))
    return positions


def encoded(vectors):
    """Return the bytes of *vectors* in base64."""
    return base64.b64encode(vectors.tobytes()).decode()


def finite(value):
    """Return *value*; for minus infinity, what vLLM's server writes."""
    return max(float(value), -9999.0)


# --------------------------------------------------------------------------------------------------------------------
# 6. What is used of vLLM

#: What this file uses of vLLM, by module. All releases from OLDEST to NEWEST have it.
USED = {
    "vllm": ("PoolingParams", "SamplingParams"),
    "vllm.engine.arg_utils": ("AsyncEngineArgs",),
    "vllm.lora.request": ("LoRARequest",),
    "vllm.sampling_params": ("RequestOutputKind", "StructuredOutputsParams"),
    "vllm.v1.engine.async_llm": ("AsyncLLM",),
}
#: The methods of AsyncLLM that are called, with the arguments that they are called with: the first ones in this order.
METHODS = {
    "from_engine_args": (("engine_args",), ()),
    "add_request": (("request_id", "prompt", "params"), ("lora_request", "priority")),
    "generate": (("prompt", "sampling_params", "request_id"), ("lora_request", "priority")),
    "encode": (("prompt", "pooling_params", "request_id"), ("lora_request",)),
    "abort": (("request_id",), ()),
    "shutdown": ((), ()),
}
#: What saves time, by module. In a release that has it in another form, the model does without.
SAVING = {
    "vllm.v1.engine": ("EngineCoreOutput",),
    "vllm.v1.engine.output_processor": ("RequestOutputCollector",),
    "vllm.v1.metrics.loggers": ("PrometheusStatLogger",),
}
#: What transcriptions by models that write their prompts themselves use, by module.
SPEECH = {"vllm.model_executor.model_loader": ("get_model_cls",)}
#: The methods of vLLM's ``SupportsTranscription`` that are called, with the arguments that they are called with.
SPEECH_METHODS = {
    "get_speech_to_text_config": ("model_config", "task_type"),
    "validate_language": ("language",),
}
#: What ``get_generation_prompt`` of it takes: these arguments in release 0.17, and in 0.24 one object that has them.
PROMPT_ARGUMENTS = ("audio", "stt_config", "model_config", "language", "task_type", "request_prompt", "to_language")
PROMPT_CLASS = {"vllm.config.speech_to_text": ("SpeechToTextParams",)}
PROMPT_CLASS_ARGUMENT = "stt_params"


class Library:
    """What this file uses of vLLM, by its names there. Raises RuntimeError for a release that does not have it."""

    def __init__(self):
        try:
            import vllm
        except ImportError as error:
            raise RuntimeError(f"The companion model needs vLLM in Triton's Python: {error}.") from None
        self.version = vllm.__version__
        numbers = tuple([int(part) for part in self.version.split(".")[:2] if part.isdecimal()])
        if numbers and numbers < OLDEST:
            raise RuntimeError(
                f"The companion model needs vLLM {written(OLDEST)} or newer, and this is {self.version}."
            )
        if numbers > NEWEST:
            log(f"vLLM {self.version} is newer than {written(NEWEST)}, the newest release that was tried")
        try:
            for module, names in USED.items():
                for name in names:
                    setattr(self, name, getattr(importlib.import_module(module), name))
            check_methods(self.AsyncLLM)
        except (ImportError, AttributeError, TypeError) as error:
            raise RuntimeError(
                f"vLLM {self.version} has another interface than the companion model uses: {error}."
                " A newer triton-openai may write a model that fits."
            ) from None
        for name, value in names_of(SAVING).items():
            setattr(self, name, value)

    @property
    def has_collectors(self):
        """Whether outputs can be taken where the engine collects them."""
        kind = self.RequestOutputCollector
        return callable(getattr(kind, "put", None)) and callable(getattr(kind, "get_nowait", None))


def names_of(table, purpose=None):
    """
    Return what *table* names, by name: None for what this release does not have.

    Raises Refused for it if it is needed for a *purpose*.
    """
    values = {}
    for module, names in table.items():
        for name in names:
            try:
                values[name] = getattr(importlib.import_module(module), name, None)
            except ImportError:
                values[name] = None
            if values[name] is None and purpose is not None:
                raise Refused(f"This release of vLLM has no {module}.{name}: no {purpose}.", None, "unsupported")
    return values


def written(numbers):
    """Return the *numbers* of a release as it is written."""
    return ".".join(map(str, numbers))


def check_methods(kind):
    """Raise AttributeError if the methods of *kind*, vLLM's ``AsyncLLM``, do not take what they are called with."""
    for method, (first, others) in METHODS.items():
        parameters = inspect.signature(getattr(kind, method)).parameters
        names = [name for name in parameters if name != "self"]
        if tuple(names[: len(first)]) != first:
            raise AttributeError(f"AsyncLLM.{method} does not begin with the arguments {', '.join(first)}")
        for name in others:
            if name not in names:
                raise AttributeError(f"AsyncLLM.{method} has no argument {name}")


# --------------------------------------------------------------------------------------------------------------------
# 7. The engine


class Engine:
    """vLLM's ``AsyncLLM``, as far as the model uses it."""

    def __init__(self, folder):
        self._library = Library()
        self._arguments = json.loads((folder / "engine.json").read_text())
        loras = folder / "multi_lora.json"
        self._loras = {}
        if loras.exists():
            self._loras = json.loads(loras.read_text())
        self._lora_numbers = {}
        # Nobody reads vLLM's own log in this process.
        arguments = {"disable_log_stats": True, **self._arguments}
        # The vLLM backend takes it, vLLM does not know it.
        arguments.pop("disable_log_requests", None)
        # By engine: what its scheduler has said last. Several engines share the work with data parallelism.
        self._scheduled = {}
        options = {}
        library = self._library
        takes_loggers = "stat_loggers" in inspect.signature(library.AsyncLLM.from_engine_args).parameters
        if takes_loggers and library.PrometheusStatLogger is not None:
            options["stat_loggers"] = [scheduler_logger(library.PrometheusStatLogger, self._scheduled)]
        self._engine = library.AsyncLLM.from_engine_args(library.AsyncEngineArgs(**arguments), **options)
        self._short_way = ShortWay.into(self._engine, library.EngineCoreOutput)
        # The requests for vectors and transcriptions that run.
        self._pooling = 0
        # What the model's class says of transcriptions, once it is asked for one.
        self._speech = None
        config = self._engine.vllm_config
        self._model_config = config.model_config
        self._config = config
        self._vocabulary = self._model_config.get_vocab_size()
        self._multimodal = bool(getattr(self._model_config, "is_multimodal_model", False))
        # Whether it reads one part of a prompt with an encoder, as Whisper does.
        self._encodes = bool(getattr(self._model_config, "is_encoder_decoder", False))
        fields = inspect.signature(library.SamplingParams).parameters
        self._known = {name for name in fields if not name.startswith("_")} - OWN
        # Each request has parameters of its own: vLLM need not copy them.
        self._own = {}
        if "skip_clone" in fields:
            self._own["skip_clone"] = True
        log(f"vLLM {library.version} serves {self._model_config.model}")

    @property
    def dead(self):
        """Whether the engine has died."""
        return bool(getattr(self._engine, "errored", False))

    def shutdown(self):
        """Stop the engine."""
        self._engine.shutdown()

    async def abort(self, names):
        """End the requests of these *names*."""
        await self._engine.abort(names)

    def info(self, streams):
        """Return what the engine is, and its load: *streams* run or wait in it."""
        config = self._model_config
        return {
            **self._load(streams),
            "engine": "vllm",
            "version": self._library.version,
            "model": config.model,
            "tokenizer": config.tokenizer,
            "max_model_len": config.max_model_len,
            "vocab_size": self._vocabulary,
            "runner": getattr(config, "runner_type", None),
            "multimodal": self._multimodal,
            "loras": sorted(self._loras),
            "max_num_seqs": self._config.scheduler_config.max_num_seqs,
            "priorities": getattr(self._config.scheduler_config, "policy", None) == "priority",
        }

    def queue(self, streams):
        """
        Return how many requests wait in the engine and how many it runs at most, if *streams* run or wait in it.

        None where it is not known, and where the engine's own queue puts requests in the order of their priorities.
        """
        waiting = self._load(streams)["waiting"]
        scheduler = self._config.scheduler_config
        if waiting is None or getattr(scheduler, "policy", None) == "priority":
            return None
        return [waiting, scheduler.max_num_seqs * max(1, len(self._scheduled))]

    def _load(self, streams):
        """Return running and waiting requests, and the use of the KV cache from 0 to 1; None where it is not known."""
        cache = getattr(self._config, "cache_config", None)
        load = {
            "running": None,
            "waiting": None,
            "cache_usage": None,
            "cache_blocks": getattr(cache, "num_gpu_blocks", None),
            "block_size": getattr(cache, "block_size", None),
        }
        if not streams and not self._pooling:
            # The scheduler says nothing more when its last request was aborted.
            load.update(running=0, waiting=0, cache_usage=0.0)
        elif self._scheduled:
            engines = list(self._scheduled.values())
            load["running"] = sum(one.num_running_reqs for one in engines)
            load["waiting"] = sum(one.num_waiting_reqs + getattr(one, "num_skipped_waiting_reqs", 0) for one in engines)
            load["cache_usage"] = max(one.kv_cache_usage for one in engines)
        return load

    async def generate(self, stream, message, media, take, take_tokens):
        """
        Begin a generation; *take* gets the stream and each output, or its error. Raises what vLLM does not take.

        *take_tokens* gets the stream and the ids of outputs that have nothing but tokens, where the short way is open.
        The engine's own output loop calls both: its collector hands outputs on, so that no task wakes per token.
        Where vLLM has no such collector any more, a task reads its public generator.
        """
        params = self._sampling(message)
        prompt = self._prompt(message, media)
        options = self._options(message)
        if not self._library.has_collectors:
            async for output in self._engine.generate(prompt, params, stream.name, **options):
                take(stream, output)
            return
        collector = await self._engine.add_request(stream.name, prompt, params, **options)
        # In releases before 0.12 the engine uses our name.
        name = getattr(collector, "request_id", stream.name)

        def put(output):
            if self._short_way is not None:
                if getattr(output, "finished", True):
                    self._short_way.close(name)
                else:
                    self._short_way.open(name, functools.partial(take_tokens, stream))
            take(stream, output)

        collector.put = put
        early = collector.get_nowait()
        if early is not None:
            put(early)

    async def search(self, name, message, media, wanted):
        """
        Return the answers of a beam search, the best first, as vLLM's server finds them; fewer once none is *wanted*.

        Each step asks the engine for one token of every beam, and keeps the likeliest continuations.
        """
        beams = message["beams"]
        width = beams["width"]
        asked = message.get("sampling", {})
        prompt = self._prompt(message, media)
        if "prompt_token_ids" not in prompt:
            raise Refused("A beam search needs the prompt as token ids.", "ids")
        one_token = {"max_tokens": 1, "temperature": asked.get("temperature", 1.0)}
        params = self._sampling({"sampling": one_token, "return": {"logprobs": 2 * width}})
        options = self._options(message)
        ends = set(beams.get("ends", ()))
        penalty = beams.get("length_penalty", 1.0)
        running = [Beam(prompt["prompt_token_ids"])]
        ended = []
        for step in range(asked["max_tokens"]):
            if not running or not wanted():
                break
            steps = [
                self._next_entries(beam, prompt, params, f"{name}/{step}-{index}", options)
                for index, beam in enumerate(running)
            ]
            following = []
            for beam, entries in zip(running, await asyncio.gather(*steps), strict=True):
                for token, entry in entries.items():
                    if token in ends:
                        ended.append(beam.followed_by(token, entries, ends=True))
                    else:
                        following.append((beam.total + entry.logprob, token, beam, entries))
            following.sort(key=lambda candidate: candidate[0], reverse=True)
            running = [beam.followed_by(token, entries, ends=False) for _, token, beam, entries in following[:width]]
            ended = best(ended, width, penalty)
        return best([*ended, *running], width, penalty)

    async def _next_entries(self, beam, prompt, params, name, options):
        """Return the log probabilities of the tokens that may follow *beam*."""
        longer = {**prompt, "prompt_token_ids": [*beam.prompt_token_ids, *beam.token_ids]}
        async for output in self._engine.generate(longer, params, name, **options):
            choice = output.outputs[0]
            if choice.logprobs:
                return choice.logprobs[0]
        raise Refused("The engine has stopped the beam search.", kind="engine")

    def _prompt(self, message, media):
        """Return the prompt as vLLM takes it."""
        ids = message.get("ids")
        if ids is None and isinstance(message.get("prompt"), str):
            prompt = {"prompt": message["prompt"]}
        elif isinstance(ids, list) and ids:
            self._check_ids(ids, "prompt")
            prompt = {"prompt_token_ids": ids}
            if not (message.get("media") or message.get("mm") or self._encodes):
                # As vLLM's renderer gives it. Any other prompt is rendered in a thread, which costs two switches.
                prompt["type"] = "token"
        else:
            raise Refused("The prompt is empty: there is nothing to continue.", "prompt")
        if message.get("media"):
            if not self._multimodal:
                raise Refused("The model takes texts only, no images, audio or video.", "messages", "unsupported")
            prompt["multi_modal_data"] = multi_modal_data(message["media"], media)
        if message.get("mm"):
            prompt["mm_processor_kwargs"] = message["mm"]
        if message.get("salt"):
            prompt["cache_salt"] = message["salt"]
        return prompt

    def _check_ids(self, ids, param):
        """Raise Refused for an id that is not in the vocabulary: in the engine it would fail other requests too."""
        if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < self._vocabulary:
            return
        for number in ids:
            if type(number) is not int or not 0 <= number < self._vocabulary:
                raise Refused(f"'{param}' holds {number}, which is not a token of this model.", param)

    def _sampling(self, message, **more):
        """
        Return the sampling parameters; *more* are some that this file sets itself.

        Raises Refused for an unknown key, and for ids outside of the vocabulary.
        """
        asked = message.get("sampling", {})
        check_keys(asked, self._known, "sampling")
        values = dict(asked)
        for name in IDS:
            if values.get(name):
                self._check_ids(values[name], name)
        if values.get("logit_bias"):
            # JSON has texts for keys.
            values["logit_bias"] = {int(key): float(value) for key, value in values["logit_bias"].items()}
            self._check_ids(values["logit_bias"], "logit_bias")
        if values.get("structured_outputs"):
            values["structured_outputs"] = self._library.StructuredOutputsParams(**values["structured_outputs"])
        returns = message.get("return", {})
        set_here = {
            "logprobs": returns.get("logprobs"),
            "prompt_logprobs": returns.get("prompt_logprobs"),
            "detokenize": False,
            "output_kind": self._library.RequestOutputKind.DELTA,
            **self._own,
            **more,
        }
        return self._library.SamplingParams(**values, **set_here)

    def _lora(self, lora):
        """Return the request for a LoRA adapter. Raises Refused for one that is not known."""
        if not lora:
            return None
        if not self._arguments.get("enable_lora"):
            raise Refused("LoRA is not enabled for this model.", "model", "unsupported")
        name = lora["name"]
        path = lora.get("path") or self._loras.get(name)
        if path is None:
            raise Refused(f"The model has no LoRA adapter {name!r}.", "model", "lora")
        number = self._lora_numbers.setdefault((name, path), len(self._lora_numbers) + 1)
        return self._library.LoRARequest(name, number, path)

    def _options(self, message):
        """Return the options of a request beside its parameters."""
        return {"lora_request": self._lora(message.get("lora")), "priority": message.get("priority", 0)}

    async def transcribe(self, message, media, request_id):
        """
        Return what is spoken in an audio file.

        With ids, which begin the answer of a Whisper's decoder, these are token ids; without them it is the text of a
        model that writes the prompt itself.
        """
        data = multi_modal_data(message.get("media", []), media)
        if len(data.get("audio", [])) != 1:
            raise Refused("A transcription needs one audio file.", "media")
        (audio,) = data["audio"]
        self._pooling += 1
        try:
            if "ids" in message:
                return await self._transcribed_ids(message, audio, request_id)
            return await self._transcribed_text(message, audio, request_id)
        finally:
            self._pooling -= 1

    async def _transcribed_text(self, message, audio, request_id):
        """Return the text that the model hears in *audio*, by the prompt that its class in vLLM makes."""
        if self._speech is None:
            # It reads files, as vLLM's server does when it starts.
            self._speech = await asyncio.to_thread(Speech, self._model_config)
        prompt = self._speech.prompt(message, *audio)
        sampling = {"temperature": 0.0, "max_tokens": None, **message.get("sampling", {})}
        params = self._sampling(
            {"sampling": sampling}, detokenize=True, output_kind=self._library.RequestOutputKind.FINAL_ONLY
        )
        last = await last_output(self._engine.generate(prompt, params, request_id))
        choice = last.outputs[0]
        return {
            "text": self._speech.text_of(choice.text),
            "complete": choice.finish_reason != "length",
            "prompt": len(last.prompt_token_ids or ()),
            "completion": len(choice.token_ids),
        }

    async def _transcribed_ids(self, message, audio, request_id):
        """Return the token ids of what a Whisper hears in *audio*: those that follow the ids of *message*."""
        if not self._encodes:
            raise Refused("The model does not take the beginning of its answer: leave 'ids' out.", "ids")
        ids = message["ids"]
        if not isinstance(ids, list) or not ids:
            raise Refused("The beginning of the decoder's answer is missing.", "ids")
        self._check_ids(ids, "ids")
        room = self._model_config.max_model_len - len(ids)
        if room < 1:
            raise Refused("The prompt leaves no room for an answer.", "prompt")
        sampling = {"max_tokens": room, **message.get("sampling", {})}
        params = self._sampling({"sampling": sampling, "return": {"logprobs": 0}})
        prompt = {
            "encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": audio}},
            "decoder_prompt": {"prompt_token_ids": ids},
        }
        spoken = []
        total = 0.0
        async for output in self._engine.generate(prompt, params, request_id):
            choice = output.outputs[0]
            new = list(choice.token_ids)
            spoken += new
            if choice.logprobs:
                total += sum([entry[token].logprob for entry, token in zip(choice.logprobs, new, strict=False)])
        return {"ids": spoken, "logprob": finite(total), "prompt": len(ids)}

    async def pool(self, message, request_id):
        """
        Return the responses with the vector of one input, or of each of its tokens: an embedding, or scores of classes.

        Raises Refused for more vectors than a request gets.
        """
        values = dict(message.get("pooling", {}))
        params = self._library.PoolingParams(task=message["kind"], **values)
        prompt = self._prompt(message, [])
        lora = self._lora(message.get("lora"))
        self._pooling += 1
        try:
            result = await last_output(self._engine.encode(prompt, params, request_id, lora_request=lora))
        finally:
            self._pooling -= 1
        vectors = np.asarray(result.outputs.data.float().cpu().numpy(), dtype="<f4")
        tokens = len(result.prompt_token_ids)
        if not message["kind"].startswith("token_"):
            return [{"vector": encoded(vectors), "prompt": tokens}]
        if vectors.nbytes > MAX_VECTORS:
            raise Refused(f"The vectors of an input have {vectors.nbytes} bytes, of at most {MAX_VECTORS}.", "input")
        rows = max(1, PART // vectors[0].nbytes)
        parts = []
        for start in range(0, len(vectors), rows):
            part = vectors[start : start + rows]
            parts.append({"vector": encoded(part), "shape": list(part.shape), "more": True})
        parts[-1].update(more=False, prompt=tokens)
        return parts


async def last_output(outputs):
    """Return the last of an engine's *outputs* of a request. Raises Refused if there is none."""
    last = None
    async for output in outputs:
        last = output
    if last is None:
        raise Refused("The engine gave no answer.", kind="engine")
    return last


class Speech:
    """
    The transcriptions of a model that writes their prompts itself, by vLLM's ``SupportsTranscription``.

    Such are language models that take audio (Voxtral, Qwen3-ASR), and encoders with a decoder. Raises Refused for a
    model that has no transcriptions.
    """

    def __init__(self, model_config):
        names = {**names_of(SPEECH, "transcriptions"), **names_of(PROMPT_CLASS)}
        self._model_config = model_config
        self._class = names["get_model_cls"](model_config)
        self._params = names["SpeechToTextParams"]
        if not getattr(self._class, "supports_transcription", False):
            raise Refused("The model does not write down speech by itself: send the audio in a chat.", "model")
        takes = inspect.signature(self._class.get_generation_prompt).parameters
        self._takes_object = PROMPT_CLASS_ARGUMENT in takes and self._params is not None
        if not self._takes_object and not set(PROMPT_ARGUMENTS) <= set(takes):
            raise Refused("vLLM makes the prompts of transcriptions in another way here.", None, "unsupported")
        # By task: how the model takes audio.
        self._configs = {}
        for task in TASKS:
            self._configs[task] = self._class.get_speech_to_text_config(model_config, task)

    def prompt(self, message, samples, rate):
        """Return the prompt for *samples*, of which there are *rate* a second. Raises Refused."""
        task = message.get("task", TASKS[0])
        if task not in TASKS:
            raise Refused(f"There is no task {task!r}.", "task")
        context = message.get("prompt") or ""
        if not isinstance(context, str):
            raise Refused("'prompt' is no text.", "prompt")
        config = self._configs[task]
        if rate != config.sample_rate:
            raise Refused(f"The model takes audio of {config.sample_rate:g} Hz.", "media")
        longest = config.max_audio_clip_s
        if longest is not None and len(samples) > longest * rate:
            raise Refused(f"The model takes up to {longest:g} seconds of audio at once.", "media")
        values = {
            "audio": samples,
            "stt_config": config,
            "model_config": self._model_config,
            "language": self._language(message, "language"),
            "task_type": task,
            "request_prompt": context,
            "to_language": self._language(message, "to_language"),
        }
        try:
            if self._takes_object:
                return self._class.get_generation_prompt(**{PROMPT_CLASS_ARGUMENT: self._params(**values)})
            return self._class.get_generation_prompt(**values)
        except ValueError as error:
            if values["language"] is None:
                # All that is known to fail: some models do not find the language out.
                raise Refused(str(error), "language") from None
            raise

    def _language(self, message, name):
        """Return the code of a language in *message*, as the model takes it. Raises Refused."""
        code = message.get(name)
        if code is None and name != "language":
            return None
        try:
            return self._class.validate_language(code)
        except ValueError as error:
            raise Refused(str(error), name) from None

    def text_of(self, answer):
        """Return the text of what is spoken in the model's *answer*, which may have marks around it."""
        clean = getattr(self._class, "post_process_output", None)
        if clean is None:
            return answer
        return clean(answer)


class Beam:
    """An answer of a beam search, as far as it has come, with the fields of an output of vLLM."""

    num_cached_tokens = None
    prompt_logprobs = None
    index = 0

    def __init__(self, prompt_ids, token_ids=(), total=0.0, logprobs=(), stop_reason=None):
        self.prompt_token_ids = prompt_ids
        self.token_ids = [*token_ids]
        #: The log probability of the whole.
        self.total = total
        self.logprobs = [*logprobs]
        self.stop_reason = stop_reason
        self.finish_reason = "length"
        if stop_reason is not None:
            self.finish_reason = "stop"

    @property
    def outputs(self):
        """The only choice: itself."""
        return [self]

    def followed_by(self, token, entries, *, ends):
        """Return this answer with one more *token*, of which *entries* have the log probability."""
        stop_reason = None
        if ends:
            stop_reason = token
        total = self.total + entries[token].logprob
        tokens = [*self.token_ids, token]
        return Beam(self.prompt_token_ids, tokens, total, [*self.logprobs, entries], stop_reason)

    def score(self, length_penalty):
        """Return by what answers are compared: the log probability for a token, those of the prompt included."""
        length = len(self.prompt_token_ids) + len(self.token_ids)
        if self.stop_reason is not None:
            length -= 1
        return self.total / max(length, 1) ** length_penalty


def best(beams, count, length_penalty):
    """Return the best *count* of *beams* in their order."""
    return sorted(beams, key=lambda beam: beam.score(length_penalty), reverse=True)[:count]


class ShortWay:
    """
    Passes tokens on as they come from the engine, before vLLM makes outputs of them.

    vLLM makes two objects with thirty fields for each token, and takes its times. That is two thirds of what a token
    costs in this process, and nobody reads it here. The first output of an answer, the last one, and all that have
    more than tokens go vLLM's way: the log probabilities are made there, and its own state begins and ends.
    """

    def __init__(self, processor, kind):
        self._process = processor.process_outputs
        # By the engine's name of the request: what takes its tokens.
        self._takers = {}
        names = getattr(kind, "__struct_fields__", ())
        # Of an output, what may come with its tokens, and how that looks if it is absent.
        self._more = None
        self._absent = getattr(kind, "__struct_defaults__", ())
        interval = getattr(processor, "stream_interval", 1)
        if names[:2] == ("request_id", "new_token_ids") and len(self._absent) == len(names) - 2 and interval == 1:
            self._more = operator.attrgetter(*names[2:])

    @classmethod
    def into(cls, engine, kind):
        """
        Return the short way for *engine*, whose outputs are of *kind*; None where vLLM's interface is another one.

        It is not there where vLLM sends traces, which have the times of tokens.
        """
        processor = getattr(engine, "output_processor", None)
        process = getattr(processor, "process_outputs", None)
        if process is None or getattr(processor, "tracing_enabled", False):
            return None
        if list(inspect.signature(process).parameters)[2:3] != ["iteration_stats"]:
            return None
        way = cls(processor, kind)
        processor.process_outputs = way.process_outputs
        return way

    def open(self, name, take):
        """Have *take* get the ids of the request that the engine calls *name*, from its next output on."""
        if self._more is not None:
            self._takers[name] = take

    def close(self, name):
        """Forget the request *name*, which has ended."""
        self._takers.pop(name, None)

    def process_outputs(self, outputs, timestamp=None, iteration_stats=None, **options):
        """Process *outputs*, as vLLM's method of this name does."""
        others = []
        for output in outputs:
            take = self._takers.get(output.request_id)
            if take is None or not self._has_tokens_only(output):
                others.append(output)
            else:
                take(output.new_token_ids)
        return self._process(others, timestamp, None, **options)

    def _has_tokens_only(self, output):
        return all(map(operator.is_, self._more(output), self._absent))


def scheduler_logger(base, scheduled):
    """
    Return a class for vLLM to log statistics with: it keeps what each engine's scheduler has said last in *scheduled*.

    *base* is vLLM's logger for Prometheus, which is left out where a class of it is given: nobody reads it here.
    """

    class SchedulerLogger(base):
        def __init__(self, vllm_config, engine_indexes=None):
            """Register no metrics."""

        def record(self, scheduler_stats=None, iteration_stats=None, mm_cache_stats=None, engine_idx=0):
            if scheduler_stats is not None:
                scheduled[engine_idx] = scheduler_stats

        def ignore(self, *arguments, **options):
            """Do nothing."""

        log = ignore
        log_engine_initialized = ignore
        record_sleep_state = ignore
        record_admission_rejection = ignore

    return SchedulerLogger


# --------------------------------------------------------------------------------------------------------------------
# 8. Images and audio

#: Of a broken file, in the words that the service knows from other backends.
NO_IMAGE = "cannot identify image file"


def multi_modal_data(described, media):
    """Return the files of a request as vLLM takes them. Raises Refused for what cannot be read."""
    data = {}
    for one in described:
        kind = one.get("type")
        index = one.get("at")
        if kind not in READERS:
            raise Refused(f"There is no medium {kind!r}.", "media", "unsupported")
        if type(index) is not int or not 0 <= index < len(media):
            raise Refused(f"The request has no file {index}.", "media")
        raw = media[index]
        if one.get("encoding") == "base64":
            try:
                raw = base64.b64decode(raw, validate=True)
            except (binascii.Error, ValueError):
                raise Refused(f"An {kind} is no base64.", "messages") from None
        data.setdefault(kind, []).append(READERS[kind](raw))
    return data


def read_image(raw):
    """Return an image as PIL has it, read to its end. Raises Refused."""
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(raw))
        return image.convert("RGB")
    except Exception:  # noqa: BLE001 - decoders fail in many ways
        raise Refused(NO_IMAGE, "messages") from None


def read_audio(raw):
    """Return the samples of a WAV file of 16 bits, and their rate. Raises Refused."""
    import wave

    try:
        with wave.open(io.BytesIO(raw)) as file:
            if file.getsampwidth() != 2:
                raise ValueError("not 16 bits")
            samples = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
            channels = samples.reshape(-1, file.getnchannels())
            return channels.mean(axis=1).astype(np.float32) / 32768.0, file.getframerate()
    except Exception:  # noqa: BLE001 - decoders fail in many ways
        raise Refused("An audio file cannot be read.", "messages") from None


READERS = {"image": read_image, "audio": read_audio}


if sys.byteorder != "little":
    raise RuntimeError("The companion model needs a little-endian machine.")
