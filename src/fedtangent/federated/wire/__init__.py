"""What crosses the wire between clients and server, and what it costs."""

from fedtangent.federated.wire import channel, key_server, secure_aggregation, shuffler, subsample

__all__ = ["channel", "key_server", "secure_aggregation", "shuffler", "subsample"]
