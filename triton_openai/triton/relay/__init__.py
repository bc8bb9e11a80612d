"""
Relays of Triton's own protocol, over HTTP and over gRPC.

Both parse each request and send a new one: a request copied byte by byte could hide another one that manages the
server. The only management that is relayed is loading and unloading models, if the operator allows it.
"""
