"""
Triton's own protocol, passed on to Triton as it comes: over HTTP and over gRPC.

Both relays end their side of the protocol and speak it anew, because what manages a server (loading models, shared
memory, its log and its traces) is kept from clients unless the operator allows it, and a request that was only copied
could hide another one from whoever looks for those.
"""
