"""Many engines behind one server or one batch: replicas on the machines of a Ray cluster.

The application, with all that guards it, runs once, where `triforce serve` was called. Each request goes, as token ids,
to one of the replicas: an engine in a process of its own, or in several that share the model.
"""
