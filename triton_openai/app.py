"""Builds the application: creates the parts of the service and connects them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import structlog
from aiohttp import web

from triton_openai.access.authorizer import AUTHORIZER, Authorizer
from triton_openai.access.browsers import BROWSER_GUARD, BrowserGuard
from triton_openai.access.cors import CORS, Cors
from triton_openai.access.rate_limits import LimitStore, RateLimits
from triton_openai.adapters._common.registry import Registry
from triton_openai.api.bodies import decode_json
from triton_openai.api.info import probe
from triton_openai.api.lines import LineHost
from triton_openai.api.messages.message_events import error_body
from triton_openai.api.responses.stored import ResponseStore
from triton_openai.api.routes import OPERATIONS, prefixes
from triton_openai.api.service import Service
from triton_openai.api.sse import HEARTBEAT, error_event
from triton_openai.batches.batch_runner import BatchRunner
from triton_openai.batches.figures import batch_state
from triton_openai.batches.file_folder import Files
from triton_openai.batches.first_tokens import FirstTokens
from triton_openai.config.sources import SDK_REFUSES
from triton_openai.config.tree import AUTO, NONE, AccessSettings, ModelSettings, ServerSettings, Settings
from triton_openai.config.worker import Worker
from triton_openai.draining import DRAINING, Draining, ModelDraining
from triton_openai.errors import ConfigurationError, ServiceError, install_advice
from triton_openai.media.fetch import AllowedHosts, Fetcher, is_public, is_public_or_private
from triton_openai.media.images import ImageLoader
from triton_openai.models.canary import PATIENCE, Canary
from triton_openai.models.control import ModelControl
from triton_openai.models.engine_loads import engine_loads
from triton_openai.models.lookup import Models, keep_loaded
from triton_openai.models.served import ServedModel
from triton_openai.parsers.parser_registry import REASONING_PARSERS, TOOL_PARSERS
from triton_openai.parsers.tools.format import read_format
from triton_openai.prompts import infill
from triton_openai.prompts.history import HistoryTemplate
from triton_openai.serving.admission import Admission
from triton_openai.serving.client_address import CLIENT_ADDRESSES, ClientAddresses
from triton_openai.serving.execution import Executor
from triton_openai.serving.http_operations import HttpOperations
from triton_openai.serving.middleware import ERROR_BODY, EXECUTOR, add_middleware
from triton_openai.serving.page import add_page
from triton_openai.serving.workers.shared import SharedClient
from triton_openai.storage import open_store
from triton_openai.tasks import Background, cancel, wait_any
from triton_openai.telemetry.access_log import AccessLog, ContentLog, InvalidAnswers, UnknownFields
from triton_openai.telemetry.exposition import EXPOSITION, Exposition
from triton_openai.telemetry.gauges import ServedName, State
from triton_openai.telemetry.instruments import EVENT_LOOP_LAG, LIMITS_STORE_UP, LOG_LINES_LOST, TRACES_LOST
from triton_openai.telemetry.logging import count_lost_lines
from triton_openai.telemetry.metrics import Metrics
from triton_openai.telemetry.process import LOOP_LAG, LoopLag
from triton_openai.telemetry.request_record import OBSERVERS, Observer, Observers
from triton_openai.telemetry.tracing import Tracing
from triton_openai.triton.client import TritonClient
from triton_openai.triton.fleet import Fleet

_log = structlog.get_logger(__name__)
SERVICE: web.AppKey[Service] = web.AppKey("service", Service)
# Longest time that the last spans have to leave when the service ends: there may be no collector.
_LAST_SPANS_SECONDS = 0.8
# Longest time to connect to the store of responses.
_STORE_SECONDS = 10.0
# Longest time that the first look at Triton's models may hold up the first connection.
_FIRST_LOOK_SECONDS = 2.0


def create_app(
    settings: Settings,
    *,
    client: TritonClient | None = None,
    worker: Worker | None = None,
    shared: SharedClient | None = None,
) -> web.Application:
    """
    Return the application. Nothing runs or connects before it starts.

    *client* replaces the connection to Triton. *worker* is this process among several workers, *shared* its connection
    to the state that they share. Raises :class:`ConfigurationError` for settings that cannot work.
    """
    check_names(settings)
    worker = worker or Worker()
    metrics = Metrics(worker)
    fleet = Fleet(
        settings.triton,
        settings.triton_access,
        connect=None if client is None else lambda _: client,
        grace=settings.server.shutdown_grace,
        count=metrics.count_fleet_event,
        lists=shared,
    )
    count_lost_lines(metrics.child(LOG_LINES_LOST).inc)
    tracing, send_spans = _traces(settings, metrics.child(TRACES_LOST).inc)
    characters = settings.server.log_content
    lag = LoopLag(metrics.child(EVENT_LOOP_LAG).observe)
    draining = Draining()
    model_draining = ModelDraining(draining, shared)
    if shared is not None:
        shared.listen(model_draining.apply)
    models = Models(settings, fleet, model_draining)

    async def ask(model: ServedModel, at: str | None = None) -> None:
        # The smallest possible request, within the time that clients may wait.
        await probe(service, model, timeout=min(PATIENCE, service.settings.triton.first_token_timeout), at=at)

    async def ask_at(name: str, endpoint: str) -> None:
        if (model := models.served.get(name)) is not None:
            await ask(model.variant_at(endpoint), endpoint)

    fleet.leasing.ejections.probe = ask_at
    canary = Canary(models, ask, metrics)
    files = _files(settings, worker)
    first_tokens = FirstTokens()
    observers = [AccessLog(), metrics, tracing, canary, UnknownFields(metrics), InvalidAnswers()]
    if files is not None:
        observers.append(first_tokens)
    if characters is not None:
        observers.insert(1, ContentLog(characters))
    limits = _limits(settings.access, shared, metrics)
    authorizer = Authorizer(settings.access, limits=limits, draining=draining, warns=worker.index == 0)
    all_observers = Observers(*observers)
    responses = ResponseStore(open_store(settings.responses), settings.responses)
    exposition = Exposition(
        metrics,
        lambda: _state(models, worker, responses),
        settings.metrics,
        settings.triton_metrics_url,
        None if files is None else partial(batch_state, files),
        partial(engine_loads, models),
    )
    service = Service(
        settings=settings,
        models=models,
        control=ModelControl(settings, models, fleet, model_draining),
        fleet=fleet,
        background=Background(),
        admission=Admission(
            settings.server,
            lag,
            worker=worker,
            model_draining=model_draining,
            observer=metrics,
            capacity=fleet.leasing.capacity,
        ),
        images=_image_loader(settings),
        worker=worker,
        executor=Executor(draining, all_observers),
        # No stop of the service waits for these.
        probes=Executor(Draining(), Observer()),
        authorizer=authorizer,
        canary=canary,
        exposition=exposition,
        responses=responses,
        operations=OPERATIONS,
        files=files,
    )
    if files is not None:
        service.batches = BatchRunner(files, LineHost(service), first_tokens, metrics)
    fleet.leasing.on_capacity = service.admission.admit
    fleet.engine_capacity.on_change = service.admission.set_engine_capacity
    _limit(fleet, worker, settings.server)
    app = web.Application(client_max_size=settings.server.max_body_size)
    app[SERVICE] = service
    app[LOOP_LAG] = lag
    app[DRAINING] = draining
    app[OBSERVERS] = all_observers
    app[EXECUTOR] = service.executor
    app[CORS] = Cors(settings.access)
    app[CLIENT_ADDRESSES] = ClientAddresses(settings.server.trusted_proxies)
    app[AUTHORIZER] = authorizer
    app[BROWSER_GUARD] = BrowserGuard(settings.server, app[CORS])
    app[EXPOSITION] = exposition
    app[ERROR_BODY] = error_body
    if send_spans is not None:
        # First, so that it ends last: when everything else has ended, so have all spans.
        app.cleanup_ctx.append(send_spans)
    app.cleanup_ctx.extend([_run_service, authorizer.run])
    HttpOperations(
        service, decode=decode_json, draining=draining, comment=HEARTBEAT, error_event=error_event
    ).add_routes(app, OPERATIONS, prefixes)
    add_middleware(app, reports_load=settings.metrics.vllm_names)
    if settings.server.page:
        add_page(app)
    return app


def _limit(fleet: Fleet, worker: Worker, server: ServerSettings) -> None:
    most = server.max_running_requests_per_endpoint
    fleet.leasing.limit(math.inf if most is None else worker.share(most))


def _limits(access: AccessSettings, shared: SharedClient | None, metrics: Metrics) -> LimitStore:
    """Return where the requests of keys are counted: by this process, by all workers, or in Redis."""
    local = shared or RateLimits()
    if access.limits_store is None:
        return local
    # Imported here: Redis belongs to an extra.
    from triton_openai.access.redis_limits import RedisLimits

    up = metrics.child(LIMITS_STORE_UP)
    up.set(1)
    return RedisLimits(access.limits_store, local, closed=access.limits_fail == "closed", answers=up.set)


def _files(settings: Settings, worker: Worker) -> Files | None:
    """Return where files and batches are kept; ``None`` where they are off."""
    if settings.batches.enabled is False:
        return None
    files = _open_files(settings)
    if (reason := files.unusable()) is not None:
        if settings.batches.enabled:
            raise ConfigurationError(f"--batches: {reason}.")
        if worker.index == 0:
            _log.warning("files and batches are off", reason=reason)
        return None
    return files


def unusable_files(settings: Settings) -> str | None:
    """Return why files and batches are off although the settings do not turn them off, if they are."""
    if settings.batches.enabled is False:
        return None
    return _open_files(settings).unusable()


def _open_files(settings: Settings) -> Files:
    if settings.files.store.startswith("dir"):
        return Files(settings.files, settings.batches)
    try:
        # Imported here: S3 belongs to an extra.
        from triton_openai.batches.bucket import BucketFiles
    except ImportError as error:
        advice = f"It needs the extra 's3': {install_advice('s3')}."
        raise ConfigurationError(f"--files-store: S3 cannot be used: {error}. {advice}") from error
    return BucketFiles(settings.files, settings.batches)


def _traces(
    settings: Settings, lost: Callable[[int], object]
) -> tuple[Observer, Callable[[web.Application], AsyncIterator[None]] | None]:
    """
    Return the observer that makes or passes on spans, and a cleanup context that sends them, if they are sent.

    *lost* is called with the number of requests whose spans were lost.
    """
    traces = settings.traces
    if traces.otlp_endpoint is None:
        return Tracing(), None
    # Imported here: most services send no traces, and OpenTelemetry's SDK takes a quarter of a second.
    try:
        from triton_openai.telemetry.otlp import exporter_class, spans
    except ValueError as error:
        # It reads some of its variables when it is imported.
        raise ConfigurationError(f"{SDK_REFUSES}: {error}") from error

    # Before anything runs.
    exporter_class(traces)
    tracing = Tracing(content=traces.content)

    async def send(app: web.Application) -> AsyncIterator[None]:
        timeout = min(_LAST_SPANS_SECONDS, settings.server.shutdown_grace)
        async with spans(traces, flush_timeout=timeout, lost=lost) as tracing.spans:
            yield

    return tracing, send


def _state(models: Models, worker: Worker, responses: ResponseStore) -> State:
    """Return the state of *models* and of what is kept of *responses* for the metrics."""
    snapshot = models.fleet.snapshot
    # What Triton's index says of a model that was unloaded, and of one that was never loaded (seen with 24.10).
    unloaded = sum(reason in ("unloaded", "") for reason in snapshot.waiting.values())
    served = []
    for name, model in models.served.items():
        adapter = model.adapter
        inner = model.adapter.token_level
        # The Triton models that may do its work.
        engines = {adapter.config.name, *(step.model for step in adapter.config.steps)}
        served.append(
            ServedName(
                name=name,
                triton_model=model.triton_model,
                adapter=adapter.name,
                can_chat=model.can_chat,
                engines=engines if inner is None else engines | {inner.name},
                lora=model.lora is not None,
                max_loras=model.metadata.max_loras,
            )
        )
    return State(
        workers=worker.count,
        triton_up=snapshot.reachable,
        store_up=responses.available,
        triton_models={
            "ready": len(snapshot.configs),
            "not_ready": len(snapshot.waiting) - unloaded,
            "unloaded": unloaded,
        },
        served=served,
    )


def _image_loader(settings: Settings) -> ImageLoader:
    media = settings.media
    fetcher = Fetcher(
        hosts=AllowedHosts(media.allowed_domains),
        max_size=media.max_image_size,
        allows=is_public_or_private if media.private_addresses else is_public,
    )
    # Fetched images may make a request no larger than it could be with the images in it.
    return ImageLoader(
        fetcher,
        max_images=media.max_images,
        max_size=media.max_image_size,
        max_total_size=settings.server.max_body_size,
    )


def check_names(settings: Settings) -> None:
    """Raise :class:`ConfigurationError` for unknown adapters, parsers and templates, before anything runs."""
    adapters = Registry()
    for entry in (settings.defaults, *settings.models.values()):
        if entry.adapter is not None:
            adapters.adapter_named(entry.adapter)
        if entry.history_template is not None:
            HistoryTemplate(entry.history_template)
        if entry.fim_template is not None:
            infill.parse(entry.fim_template)
        if isinstance(entry, ModelSettings) and entry.tool_format:
            read_format(entry.tool_format, "tool_format").parser("tool_format")
        if entry.tool_call_parser not in (None, AUTO, NONE):
            TOOL_PARSERS.load(entry.tool_call_parser)
        if entry.reasoning_parser not in (None, AUTO, NONE):
            REASONING_PARSERS.load(entry.reasoning_parser)


async def apply_settings(app: web.Application, settings: Settings, reload: bool) -> None:
    """
    Apply *settings* to the running *app*, all or nothing; see :data:`triton_openai.config.reload.ApplySettings`.

    Running requests keep what they began with. Raises :class:`ConfigurationError` for settings that cannot work.
    """
    await asyncio.to_thread(check_names, settings)
    service = app[SERVICE]
    authorizer = app[AUTHORIZER]
    # Whatever can refuse the settings comes first.
    take_access = authorizer.prepare(settings.access)
    take_endpoints = await service.fleet.prepare(settings.triton)
    await service.models.apply_settings(settings, reload=reload)
    await take_endpoints()
    take_access()
    app[CORS].replace(settings.access)
    app[BROWSER_GUARD].replace(settings.server)
    _limit(service.fleet, service.worker, settings.server)
    service.admission.replace(settings.server)
    service.settings = settings


async def _check_store(check: Awaitable[None]) -> None:
    """Raise :class:`ConfigurationError` if *check* does. A store that does not answer now may do so later."""
    try:
        async with asyncio.timeout(_STORE_SECONDS):
            await check
    except ConfigurationError:
        raise
    except (ServiceError, TimeoutError):
        # It is looked at again before anything is written, and the log says why batches wait.
        pass


async def _run_service(app: web.Application) -> AsyncIterator[None]:
    """Discover models while the application runs; close everything after it."""
    service = app[SERVICE]
    if service.worker.index == 0:
        # Remind the operator that clients' texts are readable there.
        settings = service.settings
        if settings.server.log_content is not None:
            _log.warning("prompts and answers are logged", characters=settings.server.log_content)
        if settings.traces.content is not None and settings.traces.otlp_endpoint is not None:
            _log.warning("prompts and answers are sent with traces", characters=settings.traces.content)
        if ":" in settings.responses.store:
            # The operator chose it. The file in the state folder is opened when the first response is stored.
            service.background.start(service.responses.check(), timeout=_STORE_SECONDS)
    checks: list[Awaitable[None]] = [service.responses.verify()]
    if service.files is not None:
        checks.append(service.files.verify())
    await asyncio.gather(*map(_check_store, checks))
    models = service.models
    work = [service.fleet.run(), keep_loaded(models), app[LOOP_LAG].run()]
    if service.batches is not None:
        work.append(service.batches.run())
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    # A request before that finds no models, though other workers may know them all.
    await wait_any(models.fleet.first, timeout=_FIRST_LOOK_SECONDS)
    yield
    await cancel(*tasks)
    if service.batches is not None:
        await service.batches.close()
    await service.control.close()
    await service.canary.close()
    await service.background.close()
    await service.responses.close()
    if service.files is not None:
        await service.files.store.close()
    await service.images.close()
    await service.fleet.close()
