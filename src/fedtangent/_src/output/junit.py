"""Verdicts as JUnit XML, which CI systems read."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.storage import write_atomically

FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # XML has no such characters


def write_junit(
    path: Path,
    command: str,
    suites: Mapping[str, Sequence[Verdict] | str],
    seconds: Mapping[str, float],
    strict: bool = False,
) -> None:
    """Writes verdicts to a JUnit XML file, atomically: a test suite per comparison, a test case per verdict.

    Args:
        path: File to write; its folder is created if need be.
        command: Name of the command, which begins the names of all test classes.
        suites: For the name of each comparison its verdicts, or the text of the error that ended it.
        seconds: Seconds that each comparison took, by its name.
        strict: Whether an undecided verdict is a failure; otherwise its test case is skipped.
    """
    root = ElementTree.Element("testsuites", name=f"fedtangent {command}")
    for name, outcome in suites.items():
        suite = ElementTree.SubElement(root, "testsuite", name=_valid(name), time=f"{seconds[name]:.3f}")
        where = {"classname": _valid(f"fedtangent.{command}.{name}")}
        if isinstance(outcome, str):
            case = ElementTree.SubElement(suite, "testcase", where, name="the comparison runs")
            ElementTree.SubElement(case, "error", message=_valid(outcome))
        for verdict in () if isinstance(outcome, str) else outcome:
            text = _valid(f"{verdict.statement} [{verdict.subject}]")
            case = ElementTree.SubElement(suite, "testcase", where, name=text)
            finding = _valid(verdict.finding)
            if verdict.passed:
                ElementTree.SubElement(case, "system-out").text = finding
            elif verdict.passed is None and not strict:
                ElementTree.SubElement(case, "skipped", message=f"undecided: {finding}")
            else:
                kind = "undecided" if verdict.passed is None else "disagreement"
                ElementTree.SubElement(case, "failure", type=kind, message=f"{kind}: {finding}")
        _count(suite)
    _count(root)
    root.set("time", f"{sum(seconds[name] for name in suites):.3f}")
    ElementTree.indent(root)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, ElementTree.tostring(root, encoding="utf-8", xml_declaration=True) + b"\n")


def _count(element: ElementTree.Element) -> None:
    """Sets the attributes of an XML element that count its test cases: all, failed, with errors, and skipped."""
    for attribute, tag in (("tests", "testcase"), ("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        element.set(attribute, str(sum(1 for _ in element.iter(tag))))


def _valid(text: str) -> str:
    return FORBIDDEN.sub("?", text)
