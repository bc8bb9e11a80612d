"""The way of one client's request to the Tritons that have its model."""

from __future__ import annotations

from collections.abc import Collection

from triton_openai.errors import UpstreamUnavailable
from triton_openai.triton.leasing import Attempts, Leasing, ended_midway
from triton_openai.triton.member import Lease
from triton_openai.triton.routing import prefix_key


class Route:
    """
    Leases Tritons for one client's request. All answers to one prompt come from the same Triton.

    *among* are the names of the Tritons with the wanted variant of *model*, all if empty. Requests with the same *key*
    get the same Triton; without one, the beginning of the prompt and the *lora* adapter may be the key. *at* names the
    only Triton that may be used. *previous_attempts* are those of the same request for another variant. Without
    *resends_lost*, a request is not retried after its Triton ended: the request may be the cause. The first attempt
    goes to the Triton that it *prefers*, if that takes requests.
    """

    def __init__(
        self,
        leasing: Leasing,
        model: str,
        *,
        among: Collection[str] = (),
        key: str | None = None,
        lora: str = "",
        at: str | None = None,
        previous_attempts: Attempts | None = None,
        resends_lost: bool = True,
        prefers: str | None = None,
    ) -> None:
        self._leasing = leasing
        self.model = model
        self.previous_attempts = previous_attempts
        self.resends_lost = resends_lost
        self._among = among
        self._key: bytes | None = None
        if key is not None:
            self._key = key.encode("utf-8", "surrogatepass")
        self._lora = lora
        self._at = at
        self._prefers = prefers
        self._prompt: str | None = None
        #: The name of the Triton that got the request last, and how many have got it.
        self.endpoint: str | None = None
        self.attempts = 0
        #: The attempts, when no Triton with the wanted variant is left while others have another variant.
        self.exhausted: Attempts | None = None

    @property
    def name(self) -> str | None:
        """The name of the Triton that got the request last, ``None`` if the settings name only one."""
        if self._leasing.single is None:
            return self.endpoint
        return None

    def lease(self, attempts: Attempts, *, prompt: str | None = None) -> Lease:
        """
        Return a lease of a Triton that is not in *attempts*. *prompt* is what is sent.

        Raises :class:`UpstreamUnavailable` if there is none.
        """
        leasing = self._leasing
        if leasing.single is not None:
            return leasing.single
        at = self._at
        key = self._key
        if at is None and not attempts and self._takes_preferred():
            at = self._prefers
        elif at is None and prompt is not None:
            policy = leasing.policy(self.model)
            repeated = prompt == self._prompt and not attempts
            if repeated and policy != "round_robin" and leasing.takes(self.model, self.endpoint):
                at = self.endpoint
            elif key is None and policy == "affinity":
                key = prefix_key(leasing.routing, self.model, self._lora, prompt)
        try:
            lease = leasing.lease(self.model, among=self._among, key=key, avoid=attempts, at=at)
        except UpstreamUnavailable:
            if self._at is None and leasing.has_other(self.model, (), attempts):
                self.exhausted = attempts
            raise
        self._prompt = prompt
        self.endpoint = lease.endpoint
        self.attempts = max(self.attempts, len(attempts) + 1)
        return lease

    def _takes_preferred(self) -> bool:
        """Return whether the preferred Triton is one of the wanted ones, and takes requests."""
        if self._prefers is None or (self._among and self._prefers not in self._among):
            return False
        return self._leasing.takes(self.model, self._prefers)

    def may_retry(self, lease: Lease, error: Exception, attempts: Attempts) -> bool:
        """
        Return whether a request that failed with *error* at *lease*, before its answer began, is sent again.

        Call this before the lease is closed.
        """
        if self._at is not None:
            return False
        if ended_midway(error) and not self.resends_lost:
            return False
        if not self._leasing.may_retry(lease, error, attempts):
            return False
        if self._leasing.has_other(self.model, self._among, attempts):
            return True
        self.exhausted = attempts
        return False
