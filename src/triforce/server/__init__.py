"""`triforce serve`: OpenAI's HTTP interface in front of an engine.

Its modules import one way, and tests/server/test_order.py reads it from this list:

- `engine`: the seam to what makes texts
- `failures`: what goes wrong, in OpenAI's error shape
- `limits`: how much one request may ask for
- `fields`: what all bodies have in common, and which of OpenAI's fields are not served
- `formats`: what an answer must look like
- `calls`: how models write calls of functions
- `tools`: functions that may be called
- `messages`: turns of a conversation
- `schemas`: what may be sent
- `toolbox`: the tools of one request
- `turns`: what was said so far
- `crew`: the same requests on each rank that makes them
- `worker`: one thread that makes them, first come first served
- `prompts`: from what was sent to what the engine takes
- `logs`: one JSON object a line
- `metrics`: what Prometheus reads
- `security`: who may ask, and how much at a time
- `startup_checks`: keys, and what may be open to whom
- `streaming`: server-sent events; clients that hang up
- `token_report`: log-probabilities, statistics of the tiers
- `service`: from a request to its answer, whatever the endpoint
- `completions`: /v1/completions
- `chat`: /v1/chat/completions
- `items`: the output of a response as it grows
- `responses`: /v1/responses
- `models`: /v1/models, /tokenize, /detokenize, /health, /metrics
- `page`: a playground at /
- `app`: all of it as one ASGI application
- `batch_input`: the lines of a file of requests
- `batch`: on a file of requests
- `connections`: connections that must get on, and how many there may be
- `door`: where they are accepted
- `listener`: on a socket, until it is told to stop
"""
