"""Channels and graphs as they are written on a command line."""

from fedtangent.federated.graph import named_graph as parse_graph
from fedtangent.federated.wire.channel import named_channel as parse_channel

__all__ = ["parse_channel", "parse_graph"]
