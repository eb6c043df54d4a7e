"""The toolkit of every HTTP server in the package: store, proxy, engine and the legacy protocol.

A server is an ASGI application `async (scope, receive, send)` that is composed of these parts; each works alone:

    request = Request(scope, receive)             header(name), raw_path, query
    callers.check(scope)                          CallerCheck: raises NotAllowed for pages of other sites; no body read
    async with bodies.read(request, max_bytes=...) as body    Bodies: size, memory of all, gzip bombs, timeouts
    value = await bodies.parse(body, parse)       JSON with few enough values; a large body in a thread
    await request.unless_disconnected(work)       ends work whose caller left
    endpoints, values = routes.find(raw_path)     RouteTable: path patterns -> anything
    await json_response(value).send(send)         Response: status, body, headers; gzip with accept_encoding=...
    await error_response(error).send(send)        an error of `agentlightning.errors` with its http_status

Refusals are exceptions with an `http_status`: `PayloadTooLarge` 413, `InvalidValue` 400, `RequestTimeout` 408 and
`Disconnected`, after which nobody reads an answer. A server whose API has its own shape of errors catches
`AgentLightningError` and writes its own body. `with_nosniff(send)` adds the header of `Response.send` to the answers of
somebody else's application. `TimedProtocol`, which the launcher gives uvicorn, limits how
long, and how large, the head of a request may be.
"""
