"""
Relays of Triton's own protocol, over HTTP and over gRPC.

Both parse each request and send a new one: a request that is copied byte by byte could hide another one, with which a
client manages the server. Of that only loading and unloading models is relayed, where the operator allows it.
"""
