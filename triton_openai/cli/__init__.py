"""The command ``triton-openai``: serves, and asks, checks and measures what is served."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

import structlog
from msgspec.structs import replace

from triton_openai.cli.aliases import translate
from triton_openai.cli.arguments import DEFAULTS, OWN_COMMANDS, parse
from triton_openai.cli.model_repository import COMMAND, run
from triton_openai.cli.terminal import shows_colours
from triton_openai.config.reload import Source
from triton_openai.config.sources import config_file, load_settings
from triton_openai.errors import ConfigurationError, ServiceError
from triton_openai.telemetry.logging import configure_logging, log_native_output
from triton_openai.telemetry.streams import drain

__all__ = ["main"]

_log = structlog.get_logger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """
    Run the command that *arguments* (by default the process's own) ask for, and return its exit status.

    0 after a clean end, 1 when the command failed, 2 with one sentence on stderr for wrong arguments or settings.
    """
    given = list(arguments or ())
    if arguments is None:
        given = sys.argv[1:]
    try:
        if given[:1] == [COMMAND]:
            return run(given[1:])
        if given[:1] and given[0] in OWN_COMMANDS:
            own = parse(given)
            return OWN_COMMANDS[own.command].run(own.options)
        written, environ, warnings = translate(given, os.environ)
        parsed = parse(written)
        if parsed.command == "serve":
            # Ignored until the service can reload its settings: the default action would end the process.
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        source = Source(
            lambda: load_settings(parsed.settings, environ, DEFAULTS.get(parsed.command)),
            config_file(parsed.settings, environ),
        )
        if parsed.command == "collect-env":
            from triton_openai.cli.collect_env import collect_env

            return collect_env(source.load, environ)
        settings = source.load()
        server = settings.server
        if parsed.command == "check":
            # It prints its findings itself. A default of the command could exclude other settings.
            server = replace(server, log_level="error")
        configure_logging(server, colours=shows_colours(sys.stderr))
        if arguments is None and parsed.command not in ("inspect", "check"):
            # The process is this command's own.
            log_native_output()
        for warning in warnings:
            # Printed for people, because `inspect` logs errors only.
            if settings.server.log_format == "console":
                print(f"triton-openai: {warning}", file=sys.stderr)
            else:
                _log.warning(warning)
        # Imported only when needed, so that `--help` and errors in flags are fast.
        if parsed.command == "check":
            from triton_openai.cli.check import check

            return check(settings, source, strict=parsed.strict)
        if parsed.command == "inspect":
            from triton_openai.cli.inspect import inspect

            return inspect(settings, parsed)
        if parsed.command == "demo":
            from triton_openai.cli.demo import demo

            return demo(settings, environ, parsed)
        from triton_openai.cli.serve import serve

        return serve(settings, source, environ)
    except ServiceError as error:
        print(f"triton-openai: {error.message}", file=sys.stderr)
        if isinstance(error, ConfigurationError):
            return 2
        return 1
    except KeyboardInterrupt:
        # Only before or after serving, which ends by itself when it is interrupted.
        return 130
    finally:
        drain()
