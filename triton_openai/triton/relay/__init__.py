"""
Relays of Triton's own protocol, over HTTP and over gRPC.

Both parse each request and send a new one. Clients must not manage the server (load models, use shared memory, change
its log and traces) unless the operator allows it, and a request that is copied byte by byte could hide another one.
"""
