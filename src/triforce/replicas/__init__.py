"""One server, many engines: replicas on the machines of a Ray cluster, behind the same HTTP interface.

The application, with all that guards it, runs once, where `triforce serve` was called. What stands behind its seam
(`server.engine`) is Ray Serve: each request goes, as token ids, to one of the replicas, each of which is an engine of
one thread in a process of its own, or in several that share the model. The modules import one way, and tests/replicas
reads it from this list:

- `environment`: what Ray reads before it is imported
- `desk`: what requests are read with where no model is
- `words`: what a replica says of a request
- `others`: ranks that share the model with a replica
- `replica`: an engine in a process of Ray's
- `router`: which replica a request goes to
- `engine`: all replicas as one engine
- `cluster`: Ray, started or found, and the replicas on it
- `lines`: those of a batch, answered by engines on Ray Data instead
"""
