"""Worker processes that share a listening socket."""
