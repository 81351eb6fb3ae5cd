"""Secrets: credentials in texts. Whatever reshard shows, logs or records is `masked`; only the stores get the texts as they were given.

    https://user:password@host/m?X-Amz-Signature=abc        https://***@host/m?X-Amz-Signature=***
    --storage-option secret_access_key=abc --token abc      --storage-option secret_access_key=*** --token ***
    Authorization: Bearer abc                               Authorization: Bearer ***
    the value of AWS_SECRET_ACCESS_KEY, wherever it stands  ***

What tells whether two runs are the same is `public`: with a new password or signature it stays the same.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

MASK = "***"
# Patterns are texts: they are compiled when a text first needs them, as most commands have no URL. Texts may be hostile, so that whatever
# could be looked at again from many starts has a limit.
_URL = r"(?<![\w+.-])([a-zA-Z][\w+.-]*://)"
# A user and a password end at the last @ of the host, or, where a password holds slashes, which is a mistake, at the first @. In Azure's
# URLs the container stands there.
_PASSWORD_WITH_SLASHES = r"[^\s/?#@:<>]{0,500}:(?!\d{0,5}(?:[/?#\s]|$))[^\s@<>]{0,500}"
_USERINFO = rf"(?!(?:abfss?|wasbs?)://[^\s:/]*@){_URL}([^\s/?#<>]{{0,1500}}|{_PASSWORD_WITH_SLASHES})@"
_QUERY = rf"({_URL}[^\s?#<>]{{0,1500}}[?#])([^\s<>]+)"
_PARAMETER = r"""([\w%.~;-]*=)?([^&]+?)([.,:;)}\]'"`]{0,3})(&|$)"""
_NAMED = r"""((?<![\w.-])[\w.-]+)=(?!\*\*\*)([^\s&"'`,;]+)"""
_NEXT = r"""["']?:\s*["']?(?:(?:basic|bearer) )?"""
_HEADER = rf"""(?i:((?:authorization|cookie|security-token|api-key){_NEXT}))(?!\*\*\*|(?i:basic|bearer) )[^\s"',}}]+"""
# Options of stores that are no credentials.
_HARMLESS = (
    r"(?i:(?:(?:aws|azure|azure_storage|google)_)?(?:endpoint(?:_url)?|(?:default_)?region|(?:connect_)?timeout|allow_http"
    r"|skip_signature|virtual_hosted_style_request|(?:account|container|bucket)(?:_name)?))"
)
_SECRET_NAMES = (
    "token", "password", "passwd", "passphrase", "credential", "credentials", "signature", "sig", "sas", "api_key", "apikey", "access_key",
    "access_key_id", "account_key", "connection_string",
)  # fmt: skip
# Shorter values stand in too many texts by accident.
_SHORTEST = 6
_remembered: dict[str, None] = {}


def masked(text: str) -> str:
    """The text with *** in place of credentials: in URLs and headers, behind names of credentials, and those that this process has."""
    text = public(text)
    if "=" in text:
        text = re.sub(_NAMED, lambda match: f"{match[1]}={MASK}" if _is_secret(match[1]) else match[0], text)
    if ":" in text and re.search("(?i:auth|cookie|token|key)", text):
        text = re.sub(_HEADER, rf"\1{MASK}", text)
    given = _given(int(time.monotonic()))
    return given.sub(MASK, text) if given else text


def public(text: str) -> str:
    """The text without the credentials of the URLs in it. It depends on the text alone."""
    if "://" not in text:
        return text
    text = re.sub(_USERINFO, rf"\1{MASK}@", text)
    return re.sub(_QUERY, lambda url: url[1] + re.sub(_PARAMETER, rf"\1{MASK}\3\4", url[3]), text)


def masked_in(value: Any, mask: Callable[[str], str] = masked) -> Any:
    """A JSON value with every text masked."""
    if isinstance(value, str | os.PathLike):
        return mask(os.fspath(value))
    if isinstance(value, dict):
        return {masked_in(key, mask): masked_in(inner, mask) for key, inner in value.items()}
    return [masked_in(inner, mask) for inner in value] if isinstance(value, list | tuple) else value


def remember(*texts: str) -> None:
    """From now on, mask these values wherever they stand; of a URL, its credentials."""
    _remembered.update(dict.fromkeys(value for text in texts for value in (_credentials(text) if "://" in text else (text,))))
    _given.cache_clear()


def masked_option(key: str, value: str) -> str:
    """The value of a store's option, masked unless it is no credential. It is remembered."""
    is_harmless = bool(re.fullmatch(_HARMLESS, key))
    if not is_harmless or "://" in value:
        remember(value)
    return masked(value) if is_harmless else MASK


def masked_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line with masked credentials, which are remembered."""
    remember(*(argument for argument in arguments if "://" in argument))
    return [_shown(before, argument) for before, argument in zip(("", *arguments), arguments, strict=False)]


def _shown(before: str, argument: str) -> str:
    """An argument with masked credentials. before: the argument before it, which may be the option whose value it is."""
    option, equals, value = argument.partition("=") if argument.startswith("--") else (before, "", argument)
    front = f"{option}=" if equals else ""
    if value and option == "--storage-option":
        key, _, text = value.partition("=") if "=" in value else ("", "", value)
        return front + (f"{key}=" if key else "") + masked_option(key, text)
    return front + masked_option(option, value) if value and option[:2] == "--" and _is_secret(option) else masked(argument)


def _is_secret(name: str) -> bool:
    """Whether the name of a variable, an option or a parameter says that its value is a credential."""
    words = f"_{name.lower()}".replace("-", "_").replace(".", "_")
    is_like_one = "secret" in words or words.endswith(tuple(f"_{secret}" for secret in _SECRET_NAMES))
    return is_like_one and not re.fullmatch(_HARMLESS, name)


def _credentials(url: str) -> Iterator[str]:
    """The passwords, tokens and signatures in a URL."""
    for match in re.finditer(_USERINFO, url):
        user, _, password = match[2].partition(":")
        yield password or user
    for match in re.finditer(_QUERY, url):
        yield from (value for name, value, *_ in re.findall(_PARAMETER, match[3]) if _is_secret(name[:-1]))


@lru_cache(maxsize=1)
def _given(second: int) -> re.Pattern[str] | None:
    """What finds the values that were remembered, and those of the environment, which may have changed since the last second."""
    values = {*_remembered, *(value for name, value in os.environ.items() if _is_secret(name))}
    values.update(secret for value in os.environ.values() if "://" in value for secret in _credentials(value))
    spelled = {text for value in values if len(value) >= _SHORTEST for text in (value, value.replace("\\", r"\\").replace('"', r"\""))}
    return re.compile("|".join(map(re.escape, sorted(spelled, key=len, reverse=True)))) if spelled else None
