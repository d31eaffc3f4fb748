"""What samples: vLLM in this process, on a server, or several of them, and a small engine in plain torch for tests.

Only this package imports vLLM. Its subpackages, each of which imports only those before it:

    linears/   how a 4-bit linear and an adapter are multiplied, on CPU and GPU
    worker/    what runs inside vLLM's processes
    local/     LocalEngine: vLLM in this process
    client/    EngineClient, ServerEngine: an engine in another process; HTTP only
    fleet/     Fleet, RayFleet, connect: several of them as one
    server/    serve, start_server: vLLM's OpenAI server on a base

The modules next to them are used by several and import none of them.
"""
