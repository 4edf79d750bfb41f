"""The check that a page is one well-formed document that loads nothing."""

from __future__ import annotations

import re
from html.parser import HTMLParser

_VOID = {"meta", "br", "link", "img"}


class _Balance(HTMLParser):
    """Asserts that elements close in the order they were opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def assert_self_contained(page: str) -> None:
    """Check that a page's elements are balanced and that it loads nothing."""
    checker = _Balance()
    checker.feed(page)
    assert checker.open == []
    assert re.findall(r"""(?:src|href)\s*=|@import|url\(|<script|<link""", page) == []
