"""Messages to prompts: tokenizers, chat templates, truncation, infill."""
