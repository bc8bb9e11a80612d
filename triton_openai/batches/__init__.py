"""Files, and batches of requests that run below live traffic and survive the death of the process."""
