"""Reads a page of HTML as strictly as it was meant to be written."""

from __future__ import annotations

from html.parser import HTMLParser

DATA = tuple(f"data:{kind};base64," for kind in ("image/png", "image/svg+xml", "application/pdf"))
VOID = {"meta", "img", "br", "link", "input"}


class Page(HTMLParser):
    """Its text, tables and images; ``faults`` is what is wrong with it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.faults: list[str] = []
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.downloads: dict[str, str] = {}
        self.images: list[dict[str, str]] = []
        self.tables: list[list[list[str]]] = []  # rows of cells, the names of the columns first
        self.text = ""
        self.scripts: list[dict[str, str]] = []
        self.feed(html)
        self.close()
        self.faults += [f"{name} is not closed" for name in self.open]
        self.faults += [f"id {name} twice" for name in set(self.ids) if self.ids.count(name) > 1]
        self.faults += [f"{to} leads nowhere" for to in self.links if to[1:] not in self.ids]
        for table in self.tables:
            self.faults += [f"row {row} of {len(table[0])} columns" for row in table if len(row) != len(table[0])]

    def handle_starttag(self, tag: str, given: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in given}
        for name, value in attributes.items():
            if name in ("src", "href") and not value.startswith((*DATA, "#")):
                self.faults.append(f"{tag} loads {value}")
            if name.startswith("on"):
                self.faults.append(f"{tag} has {name}")
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.links += [attributes["href"]] if tag == "a" and "download" not in attributes else []
        self.downloads |= {attributes["download"]: attributes["href"]} if "download" in attributes else {}
        self.scripts += [attributes] if tag == "script" else []
        if tag == "img":
            self.images.append(attributes)
            self.faults += [] if attributes.get("alt") else ["a figure has no text"]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"{tag} ends what did not begin")

    def handle_data(self, data: str) -> None:
        self.text += data if self.open[-1:] not in (["script"], ["style"]) else ""
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data
