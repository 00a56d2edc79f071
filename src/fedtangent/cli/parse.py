"""Channels and graphs as they are written on a command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedtangent.federated import graph
from fedtangent.federated.wire import channel
from fedtangent.types import Channel

CHANNELS = ("lossless", "top_k:<share>", "random_k:<share>", "qsgd:<bits>", "quantise:<bits>")
GRAPHS = ("ring", "torus", "complete", "erdos_renyi:<probability>")


def parse_channel(text: str, error_feedback: bool) -> Channel | None:
    """The channel called ``text``, such as ``top_k:0.01``; None for lossless. Raises ``ValueError``."""
    kind, _, number = text.partition(":")
    makers: dict[str, Callable[[Any], Channel]] = {
        "top_k": lambda share: channel.top_k(fraction=share),
        "random_k": lambda share: channel.random_k(fraction=share),
        "qsgd": lambda bits: channel.qsgd(int(bits)),
        "quantise": lambda bits: channel.uniform_quantiser(int(bits)),
    }
    if text == "lossless":
        if error_feedback:
            raise ValueError("error_feedback: a lossless channel owes nothing; name another channel")
        return None
    try:
        made = makers[kind](_number(number))
    except KeyError:
        raise ValueError(f"channel: got {text!r}, allowed are {', '.join(CHANNELS)}") from None
    except ValueError as error:
        raise ValueError(f"channel: got {text!r}: {error}") from error
    return channel.with_error_feedback(made) if error_feedback else made


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("needs a number after the colon") from None
    return int(value) if value.is_integer() and "." not in text else value


def parse_graph(text: str, num_nodes: int, seed: int) -> graph.Graph:
    """The graph called ``text`` over so many clients. Raises ``ValueError``."""
    kind, _, number = text.partition(":")
    if text == "torus":
        rows = max(r for r in range(1, int(num_nodes**0.5) + 1) if num_nodes % r == 0)
        return graph.torus(rows, num_nodes // rows)
    if kind == "erdos_renyi":
        try:
            return graph.erdos_renyi(num_nodes, _number(number), seed)
        except ValueError as error:
            raise ValueError(f"graph: got {text!r}: {error}") from error
    makers = {"ring": graph.ring, "complete": graph.complete}
    if text not in makers:
        raise ValueError(f"graph: got {text!r}, allowed are {', '.join(GRAPHS)}")
    return makers[text](num_nodes)
