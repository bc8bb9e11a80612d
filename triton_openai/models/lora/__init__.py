"""LoRA adapters: discovery, files, and delivery of weights."""
