"""What requests may ask for: the API, and media in requests."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from triton_openai.config.tree.fields import Bytes, Count, Seconds, SettingsGroup, Text, Tokens, file_only, flag


class ApiSettings(SettingsGroup, frozen=True):
    """The API for clients."""

    default_model: Annotated[Text | None, flag("Model for requests that name none, or 'default'.")] = None
    default_max_tokens: Annotated[Tokens, flag("Longest answer to a request without a limit.")] = 512
    strict_parameters: Annotated[bool, file_only("Refuse unknown request fields instead of ignoring them.")] = False
    lora_separator: Annotated[str | None, flag("Serve each LoRA adapter as MODEL<separator>NAME, not as NAME.")] = None
    always_include_usage: Annotated[
        bool, file_only("End every stream with its usage, also if the request does not ask for it.")
    ] = False
    reasoning_field: Annotated[
        Literal["reasoning_content", "reasoning", "both"], file_only("Name of the field with an answer's reasoning.")
    ] = "reasoning_content"
    strict_tools: Annotated[
        bool, flag("Refuse tools that run at the provider, such as web_search, and not leave them out.")
    ] = False
    trust_request_chat_template: Annotated[
        bool, flag("Let a request bring its own chat template: a program that this service runs in Jinja's sandbox.")
    ] = False


class MediaSettings(SettingsGroup, frozen=True):
    """Images in requests. Without allowed hosts, only data URLs are accepted."""

    allowed_domains: Annotated[
        tuple[str, ...],
        flag(
            "Host of images that may be fetched: example.com, or *.example.com for all below it; both also with :PORT.",
            name="allowed-media-domain",
        ),
    ] = ()
    private_addresses: Annotated[
        bool,
        file_only(
            "Also fetch images from allowed hosts on loopback and private networks. Clients can then make this service "
            "request any path of those hosts."
        ),
    ] = False
    max_images: Annotated[Count, Meta(le=4096), file_only("Most images in one request.")] = 16
    max_image_size: Annotated[Bytes, file_only("Largest image file.")] = 20 * 1024 * 1024


class AudioLimits(SettingsGroup, frozen=True):
    """Audio in requests. Reading it needs the extra [audio], and for MP4, WebM and AAC also [media]."""

    max_file_size: Annotated[Bytes, file_only("Largest file of audio, whatever server.max_body_size is.")] = (
        25 * 1024 * 1024
    )
    max_total_size: Annotated[
        Bytes,
        file_only(
            "Memory of a worker for media: uploaded files of audio, what is decoded of them and of chats, and images. "
            "Each key has a fair part; what does not fit waits."
        ),
    ] = 512 * 1024 * 1024
    max_duration: Annotated[Seconds, file_only("Longest audio of a request.")] = 3600.0
    parallel_chunks: Annotated[
        Count, Meta(le=64), file_only("Most chunks of one recording that Triton has at the same time.")
    ] = 4
    max_sessions: Annotated[
        Count,
        file_only("Most realtime sessions at the same time, divided among the workers; keys share them."),
    ] = 128
