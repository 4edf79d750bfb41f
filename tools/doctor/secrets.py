"""Removal of secrets from text: keys, passwords, tokens, and what addresses carry of them. Pure."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final
from urllib.parse import quote

_LEAST: Final = 6
"""A known secret shorter than this is a word that may stand anywhere."""

_SECRET: Final = (
    r"(?:pass(?:word|wd|phrase)|(?<![a-z])(?:pass|pwd|sas)(?![a-z])|secret|token(?![si])|credential"
    r"|api[-_]?key|access[-_]?key|account[-_]?key|private[-_]?key|signing[-_]?key"
    r"|encryption[-_]?key|(?<![a-z])auth(?:orization)?(?![a-z])|cookie|session[-_]?id|webhook"
    r"|connection[-_]?string)"
)
_NAME: Final = re.compile(rf"(?i){_SECRET}|(?:^|_)(?:KEY|DSN|PAT)(?:$|_)")
"""Names of variables and fields whose values are secrets."""

_HARMLESS_NAME: Final = re.compile(
    r"(?i)(?:file|path|dir|directory|sock|socket|provider|parallelism)$|^(?:OLD)?PWD$"
)
"""Names whose values are places or choices, not secrets."""

_HARMLESS_VALUE: Final = frozenset({"null", "none", "true", "false", "", "{", "["})

_PEM: Final = re.compile(
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]*PRIVATE KEY-----|\Z)"
    r"|\A[A-Za-z0-9+/=\s\\]*-----END [A-Z0-9 ]*PRIVATE KEY-----",
    re.DOTALL,
)
_SCHEME: Final = r"(?i)\b([a-z][a-z0-9+.-]{0,30}://"
_USER_INFO: Final = re.compile(_SCHEME + r")([^\s/\"'<>\\]{1,300})@")
_QUERY: Final = re.compile(_SCHEME + r"[^\s?\"'<>\\]{1,2000})\?([^\s\"'<>\\]+)")
_SIGNED: Final = re.compile(
    rf"(?i)(?:^|[&;])(?:x-amz-|x-goog-|[a-z_-]*(?:signature|{_SECRET})[a-z_-]*=|sig=|key=|code=|se=)"
)
_HEADER: Final = re.compile(
    r"(?i)(authorization\W{1,8}(?:basic|digest|negotiate|token)\s+|\bbearer\s+)"
    r"((?<=digest )[^\n]+|[A-Za-z0-9._~+/=-]{8,})"
)
_SHAPES: Final = re.compile(
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bgh[opsur]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}"
    r"|\bglpat-[\w-]{16,}|\bhf_[A-Za-z0-9]{16,}|\bsk-[\w-]{16,}|\bxox[a-z]-[\w-]{10,}"
    r"|\bAIza[\w-]{30,}|\bya29\.[\w-]{20,}|\bnpm_[A-Za-z0-9]{30,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
)
_SCHEMES: Final = ("bearer", "authorization")
_WORDS: Final = (
    *("pass", "pwd", "sas", "secret", "token", "credential", "key", "auth", "cookie"),
    *("session", "webhook", "connection", "header"),
)
_BEGINS: Final = (
    *("AKIA", "ASIA", "ghp_", "gho_", "ghs_", "ghu_", "ghr_", "github_pat_", "glpat-", "hf_"),
    *("sk-", "xox", "AIza", "ya29.", "npm_", "eyJ"),
)
_VALUE: Final = (
    r"(\\*\"(?:(?!\\*\").)*|\\*'(?:(?!\\*').)*|[^\s,;\"'&}\])]+)"  # quoted, or up to a separator
)
_OPTION: Final = re.compile(
    rf"(?i)(?<![\w-])(--?[a-z0-9-]{{0,40}}(?:{_SECRET}|header)[a-z0-9-]{{0,40}})"
    rf"(=|[ ]+|\\*[\"']?,\s*)(?!-){_VALUE}"
)
_PAIR: Final = re.compile(
    rf"(?i)({_SECRET}[a-z0-9_.-]{{0,60}})(\\*[\"']?\s*(?:=>|[:=])\s*){_VALUE}"
)


def is_secret_name(name: str) -> bool:
    """Say whether the value of a variable or field of this name is a secret."""
    return bool(_NAME.search(name)) and not _HARMLESS_NAME.search(name)


def secrets_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the values of the secret variables, with their names."""
    return {
        value.strip(): f"variable {name}"
        for name, value in environment.items()
        if is_secret_name(name) and value.strip().lower() not in _HARMLESS_VALUE
    }


class Redactor:
    """Removes secrets from texts; ``removed`` counts them by kind.

    ``known`` maps secrets to the name of what they are: they are removed wherever they stand. The
    others are recognised: by the name before them, by their place in an address, or by their form.
    """

    def __init__(self, known: Mapping[str, str]) -> None:
        self._known = {
            spelled: name
            for secret, name in known.items()
            if len(secret) >= _LEAST
            for spelled in _spellings(secret)
        }
        longest_first = sorted(self._known, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self.removed: Counter[str] = Counter()

    def text(self, text: str) -> str:
        """Return a text of one or more lines without its secrets."""
        if self._any is not None:
            text = self._any.sub(lambda found: self._mark(self._known[found[0]]), text)
        text = _PEM.sub(lambda _: self._mark("private key"), text)
        return "".join(map(self._line, text.splitlines(keepends=True)))

    def _line(self, line: str) -> str:
        """Return a line without its secrets; a pattern is tried only where its words are."""
        lowered = line.lower()
        if "://" in line:
            line = _USER_INFO.sub(
                lambda found: f"{found[1]}{self._mark('user of an address')}@", line
            )
            line = _QUERY.sub(self._of_query, line)
        if any(word in lowered for word in _SCHEMES):
            line = _HEADER.sub(lambda found: found[1] + self._mark("credentials"), line)
        if any(word in lowered for word in _WORDS):
            line = _OPTION.sub(self._of_pair, line)
            line = _PAIR.sub(self._of_pair, line)
        if any(begin in line for begin in _BEGINS):
            line = _SHAPES.sub(lambda _: self._mark("token"), line)
        return line

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return variables of the environment, without the values of secret ones."""
        found = {}
        for name, value in environment.items():
            secret = is_secret_name(name) and value
            found[name] = self._mark(f"variable {name}") if secret else self.text(value)
        return found

    def _mark(self, kind: str) -> str:
        self.removed[kind] += 1
        return f"[removed: {kind}]"

    def _of_query(self, found: re.Match[str]) -> str:
        if not _SIGNED.search(found[2]):
            return found[0]
        return f"{found[1]}?{self._mark('query of an address')}"

    def _of_pair(self, found: re.Match[str]) -> str:
        """Return a name and its value without the value; JSON stays JSON."""
        name, between, value = found[1], found[2], found[3]
        opening = re.match(r"(?:\\*[\"'])?", value)
        before = opening[0] if opening else ""
        inside = value.removeprefix(before)
        if _HARMLESS_NAME.search(name) or inside.lower() in _HARMLESS_VALUE:
            return found[0]
        if inside.startswith("[removed"):
            return found[0]
        mark = self._mark("value of a name")
        quoted = re.match(r"\\*[\"']", between)
        around = quoted[0] if quoted and not before and "," not in between else ""
        return f"{name}{between}{before}{around}{mark}{around}"


def _spellings(secret: str) -> Iterable[str]:
    """Return a secret as it stands in text, in addresses and in JSON."""
    return {secret, quote(secret, safe=""), json.dumps(secret)[1:-1]}
