"""``triton-openai batch``: sends a file of prompts to a service and writes a file of answers."""

from __future__ import annotations

COMMAND = "batch"
PURPOSE = "Send a file of prompts to a service, as a batch or as live requests, and write a file of answers."
