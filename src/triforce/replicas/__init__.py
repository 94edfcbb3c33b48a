"""Replicas: several engines on the machines of a Ray cluster behind one server or one batch.

The application and its middleware run once, in the process of `triforce serve`. Each request goes, as token ids, to one
of the replicas. A replica is an engine in a process of its own, or in several processes that share the model.
"""
