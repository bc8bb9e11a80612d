"""What of new settings a running service takes over."""

from __future__ import annotations

from pathlib import Path

from triton_openai.config.options import options
from triton_openai.config.reload import changes_between
from triton_openai.config.tree import (
    ApiSettings,
    DefaultParameters,
    ModelDefaults,
    ModelSettings,
    ServerSettings,
    Settings,
    TritonSettings,
)


def test_the_same_settings() -> None:
    """Nothing changes, and an entry that says nothing is none."""
    changes = changes_between(Settings(), Settings(models={"a": ModelSettings()}))

    assert ((), ()) == (changes.live, changes.fixed)


def test_live_ones_are_taken_and_fixed_ones_are_kept() -> None:
    """Both are named as the file has them; what needs a restart keeps its value beside what does not."""
    new = Settings(
        server=ServerSettings(port=1234, queue_timeout=5),
        triton=TritonSettings(url=("http://elsewhere",), idle_timeout=7),
        api=ApiSettings(default_max_tokens=3),
        defaults=ModelDefaults(chat_template="chatml"),
    )
    changes = changes_between(Settings(), new)

    assert ("server.queue_timeout", "triton.idle_timeout", "api.default_max_tokens", "defaults.chat_template") == (
        changes.live
    )
    assert ("server.port", "triton.url") == changes.fixed
    assert (
        Settings(
            server=ServerSettings(queue_timeout=5),
            triton=TritonSettings(idle_timeout=7),
            api=ApiSettings(default_max_tokens=3),
            defaults=ModelDefaults(chat_template="chatml"),
        )
        == changes.settings
    )


def test_models_are_named_with_their_settings() -> None:
    """What was added, what was changed and what was taken away."""
    before = Settings(models={"a": ModelSettings(aliases=("x",)), "b": ModelSettings(adapter="vllm")})
    parameters = DefaultParameters(temperature=0.1)
    after = Settings(
        models={
            "a": ModelSettings(aliases=("y",), default_parameters=parameters),
            "c": ModelSettings(lora_dir=Path("/loras")),
        }
    )
    changes = changes_between(before, after)

    assert ("models.a.default_parameters", "models.a.aliases", "models.b.adapter", "models.c.lora_dir") == changes.live
    assert after == changes.settings


def test_what_is_made_once_needs_a_restart() -> None:
    """Sockets, connections, processes and the log are made when the service starts."""
    fixed = {option.key for option in options() if not option.live}

    assert {
        *("server.host", "server.port", "server.workers", "server.max_body_size"),
        *("server.log_format", "server.log_level"),
        *("triton.url", "triton.model_repository", "triton.refresh_interval"),
    } <= fixed
