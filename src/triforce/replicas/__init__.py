"""Many engines behind one server: replicas on the machines of a Ray cluster, and the same HTTP interface.

The application, with all that guards it, runs once, where `triforce serve` was called. What stands behind its seam
(`server.engine`) is Ray Serve: each request goes, as token ids, to one of the replicas, each of which is an engine of
one thread in a process of its own, or in several that share the model. The modules import one way, in the
order that docs/data/layers.toml gives.
"""
