"""The images of one request: as many as it may have, all loaded at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from triton_openai.errors import InvalidRequest
from triton_openai.generation import Image
from triton_openai.media import files
from triton_openai.media.fetch import ImageFetcher


class ImageReference(msgspec.Struct, frozen=True):
    """Where a request names an image, as ``param`` shows it, and the URL that it gives."""

    place: str
    url: str


class ImageLoader:
    """
    Turns references into images: at most *most* for a request, of at most *largest* bytes each and of *together* bytes
    (in base64) in all.
    """

    def __init__(self, fetcher: ImageFetcher, *, most: int, largest: int, together: int) -> None:
        self._fetcher = fetcher
        self._most = most
        self._largest = largest
        self._together = together

    def check_count(self, references: Sequence[ImageReference], *, most: int | None = None) -> None:
        """Raise :class:`InvalidRequest` for too many; *most* is the model's own limit, where it is known."""
        limit = self._most if most is None else min(self._most, most)
        if len(references) > limit:
            raise InvalidRequest(
                f"A request to this model can have {limit} image{'' if limit == 1 else 's'} at most, and this one has "
                f"{len(references)}.",
                param=references[limit].place,
                code="too_many_images",
            )

    async def load(self, references: Sequence[ImageReference], *, most: int | None = None) -> tuple[Image, ...]:
        """
        Return the images in the order of *references*; *most* is the model's own limit, where it is known.

        Raises :class:`InvalidRequest` that names the place. The first image that fails ends the work on all others.
        """
        self.check_count(references, most=most)
        # Before any connection: a request that is wrong in one place is refused without side effects.
        for reference in references:
            if not files.is_data_url(reference.url):
                with _blaming(reference):
                    self._fetcher.check(reference.url)
        tasks = [asyncio.ensure_future(self._load(reference)) for reference in references]
        try:
            images = tuple(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        return self._within(images, references)

    async def _load(self, reference: ImageReference) -> Image:
        with _blaming(reference):
            if files.is_data_url(reference.url):
                return await files.image_of(reference.url, largest=self._largest)
            return await self._fetcher.fetch(reference.url)

    def _within(self, images: tuple[Image, ...], references: Sequence[ImageReference]) -> tuple[Image, ...]:
        total = 0
        for image, reference in zip(images, references, strict=True):
            total += len(image.base64)
            if total > self._together:
                raise InvalidRequest(
                    f"The request's images are larger than the limit of {self._together} bytes together.",
                    param=reference.place,
                    code="image_too_large",
                )
        return images

    async def close(self) -> None:
        """Close the connections."""
        await self._fetcher.close()


@contextmanager
def _blaming(reference: ImageReference) -> Iterator[None]:
    """Name *reference* in the errors that are raised within."""
    try:
        yield
    except InvalidRequest as error:
        error.param = error.param or reference.place
        raise
