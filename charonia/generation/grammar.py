"""Structured output: which tokens may come next so that the text fits a JSON schema, a regular expression or a grammar.

The library is llguidance, which releases the GIL and counts its work ("fuel"), so that a schema or expression made to
exhaust it fails with a message. Its readers recurse where rules and schemas name one another, and an overflow of the
stack would end the process: so their number is bounded here, and they are read in a thread with a stack for the deepest
chain that the bounds allow. `check` is for gateways, `Matcher` for engines.
"""

from __future__ import annotations

import functools
import re
import threading
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from charonia.errors import InvalidArgument, Unsupported
from charonia.generation.parameters import MAX_SCHEMA_BYTES, StructuredOutput
from charonia.generation.tokenizer import MISSING_EXTRA, Tokenizer

MAX_REGEX_CHARACTERS = 8 * 1024
MAX_GRAMMAR_BYTES = 32 * 1024
MAX_CHOICES = 1024
MAX_COLONS = 512
"""Each rule of a grammar has a colon. A chain of 500 rules overflows a stack of 1 MiB."""
MAX_REFERENCES = 512
"""References in a schema. A chain of 1,000 schemas overflows a stack of 2 MiB; 64 KiB of text hold less than 8,000."""
_STACK_BYTES = 256 << 20
"""Of addresses: memory is only taken for what is used."""
_FUEL = 100_000
_STEP_FUEL = 50_000
_STEP_ITEMS = 20_000
_GRAMMAR_SYMBOLS = 20_000
"""A fraction of the library's bounds: the slowest schema found then takes 0.5 s to be refused, 0.2 s to compile, and
30 ms for a mask. A schema of 1,500 properties fits."""
_WHITESPACE = r"[\x20\x0A\x0D\x09]{0,32}"
"""Small models may otherwise write spaces between two parts of JSON without end."""
_UNFORCED = '\n%llguidance {"no_forcing": true}'
"""Ends a grammar. Otherwise the library follows what can come next in one way alone, byte by byte, to its end before
the first mask: the 15 characters of `(x{2,3}){10000}` then take minutes, and `x{10000000}` takes 4 GB. No bound above
counts that work. The texts that fit are the same; a forced part may be made of other tokens."""
_SCHEMA_RULE = "start: %json "
_IN_SCHEMA = "at 1(8): failed to compile JSON schema: "
"""How the library begins what it says of a schema in such a rule."""
_ADDED = re.compile(r"\n +[0-9]+ \| (?:start: %json |%llguidance )")
"""Lines of a grammar that were added here, in a message of the library."""
_NO_TOKEN = "NoExtensionBias"
_SHOWN_CHARACTERS = 300
_STACK_SIZE = threading.Lock()
"""Held while the stack's size of new threads is another one: Python has one value for all."""


class Matcher:
    """Follows one text. Resuming is pushing the tokens that the text has already.

    Raises `InvalidArgument` for a constraint that cannot be used, `Unsupported` without the library.
    """

    def __init__(self, structured: StructuredOutput, tokenizer: Tokenizer) -> None:
        self._ends = tokenizer.end_tokens
        self._matcher = _compiled(structured, _library_tokenizer(tokenizer))
        self._words = np.zeros((tokenizer.vocabulary + 31) // 32, np.int32)
        self._ended = False

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing can be added to it."""
        return self._ended or bool(self._matcher.is_stopped())

    def mask(self) -> npt.NDArray[np.int32]:
        """Returns which tokens may come next: words of 32 bits each, the lowest bit first.

        The array is the same at each call. End tokens are allowed where the text may end. Raises `InvalidArgument`
        where the constraint takes too much work.
        """
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        if self._matcher.is_error():
            raise InvalidArgument(f"the structured output is too complex: {_reason(self._matcher.get_error())}")
        return self._words

    def push(self, token: int) -> None:
        """Take the next token of the text.

        Raises `InvalidArgument` for one that the mask does not allow, or that takes too much work.
        """
        if self._ended:
            return
        if token in self._ends:
            self._ended = True
            return
        if not self._matcher.consume_token(token):
            reason = _reason(self._matcher.get_error())
            raise InvalidArgument(f"token {token} does not fit the structured output: {reason}")


def check(structured: StructuredOutput, tokenizer: Tokenizer | None = None) -> None:
    """Raises `InvalidArgument` for a constraint that cannot be used or takes too much work, before an engine sees it.

    Without the model's tokenizer, that of single bytes stands in. Raises `Unsupported` without the library.
    """
    library = _bytes_tokenizer() if tokenizer is None else _library_tokenizer(tokenizer)
    matcher = _compiled(structured, library)
    matcher.compute_bitmask()
    if matcher.is_error():
        raise InvalidArgument(f"structured_outputs: {structured.kind}: {_reason(matcher.get_error())}")


def _compiled(structured: StructuredOutput, tokenizer: Any) -> Any:
    """The library's matcher; made in a thread of its own."""
    found: list[Any] = []

    def compile_constraint() -> None:
        try:
            found.append(_matcher(structured, tokenizer))
        except Exception as error:
            found.append(error)

    with _STACK_SIZE:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=compile_constraint, name="grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def _matcher(structured: StructuredOutput, tokenizer: Any) -> Any:
    llguidance = _library()
    try:
        text = _grammar(structured, llguidance)
    except (ValueError, TypeError) as error:  # orjson refuses deep objects by a TypeError
        raise InvalidArgument(f"structured_outputs: {structured.kind}: {_reason(str(error))}") from None
    limits = llguidance.LLParserLimits(
        initial_lexer_fuel=_FUEL,
        step_lexer_fuel=_STEP_FUEL,
        step_max_items=_STEP_ITEMS,
        max_grammar_size=_GRAMMAR_SYMBOLS,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )
    matcher = llguidance.LLMatcher(tokenizer, text, limits=limits, log_level=0)
    if matcher.is_error():
        raise InvalidArgument(f"structured_outputs: {structured.kind}: {_reason(matcher.get_error())}")
    return matcher


def _grammar(structured: StructuredOutput, llguidance: Any) -> str:
    """The constraint as the library reads it. Raises `InvalidArgument` for one that is too large."""
    kind, text = structured.kind, structured.text
    if kind == "json_object":
        return _of_schema('{"type": "object"}', llguidance)
    if kind == "json":
        _bound(len(text), MAX_SCHEMA_BYTES, "json", "characters")
        return _of_schema(text, llguidance)
    if kind == "regex":
        _bound(len(text), MAX_REGEX_CHARACTERS, "regex", "characters")
        return _of_regex(text, llguidance)
    if kind == "choice":
        choices = orjson.loads(text)
        _bound(len(choices), MAX_CHOICES, "choice", "choices")
        _bound(len(text), MAX_SCHEMA_BYTES, "choice", "characters")
        return _of_regex("|".join(re.escape(choice) for choice in choices), llguidance)
    _bound(len(text), MAX_GRAMMAR_BYTES, "grammar", "characters")
    _bound(text.count(":"), MAX_COLONS, "grammar", "colons")
    return str(llguidance.LLMatcher.grammar_from_lark(text + _UNFORCED))


def _of_regex(text: str, llguidance: Any) -> str:
    made = orjson.loads(llguidance.LLMatcher.grammar_from_regex(text))
    return str(llguidance.LLMatcher.grammar_from_lark(made["grammars"][0]["lark_grammar"] + _UNFORCED))


def _of_schema(text: str, llguidance: Any) -> str:
    options = {"coerce_one_of": True, "whitespace_pattern": _WHITESPACE}
    schema = orjson.loads(text)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError(f"a JSON schema must be an object, got {type(schema).__name__}")
    plain = orjson.dumps(schema).decode()  # without escapes, in which names could hide
    _bound(plain.count('"$ref"') + plain.count('"$dynamicRef"'), MAX_REFERENCES, "json", "references")
    made = str(llguidance.LLMatcher.grammar_from_json_schema(plain, overrides=options))
    if '"pattern' not in plain:
        return made
    whole = orjson.dumps(orjson.loads(made)["grammars"][0]["json_schema"]).decode()
    return str(llguidance.LLMatcher.grammar_from_lark(_SCHEMA_RULE + whole + _UNFORCED))


def _bound(count: int, most: int, kind: str, what: str) -> None:
    if count > most:
        raise InvalidArgument(f"structured_outputs: {kind} must have at most {most} {what}, got {count}")


def _reason(message: str) -> str:
    """The first lines of the library's message, which may show the whole constraint, without what was added to it."""
    if message.startswith(_NO_TOKEN):
        return "no text fits it"
    text = " ".join(_ADDED.split(message.removeprefix(_IN_SCHEMA))[0].split())
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise Unsupported(MISSING_EXTRA.format(what="structured output", package="llguidance")) from None
    return llguidance


class _LibraryView:
    """A tokenizer in the form that the library wants."""

    def __init__(self, tokenizer: Tokenizer, end: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = end
        self.bos_token_id = None
        self.tokens = list(tokenizer.all_bytes())
        self.special_token_ids = sorted(tokenizer.special_tokens | tokenizer.end_tokens)

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        return self._tokenizer.encode(text, special=False)


class _ByteTokens:
    """A tokenizer whose tokens are the bytes, and 256 ends a text."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


_TOKENIZERS: weakref.WeakKeyDictionary[Tokenizer, Any] = weakref.WeakKeyDictionary()
"""The library's view of each tokenizer, a tree of its tokens: it takes 0.1 s to make for 49,152 tokens."""


def _library_tokenizer(tokenizer: Tokenizer) -> Any:
    found = _TOKENIZERS.get(tokenizer)
    if found is None:
        if not tokenizer.end_tokens:
            raise InvalidArgument("structured output needs a model with an end token, but this one has none")
        llguidance = _library()
        ends = sorted(tokenizer.end_tokens)
        view = llguidance.TokenizerWrapper(_LibraryView(tokenizer, ends[0]))
        found = llguidance.LLTokenizer(view, n_vocab=tokenizer.vocabulary, eos_token=ends)
        _TOKENIZERS[tokenizer] = found
    return found


@functools.cache
def _bytes_tokenizer() -> Any:
    llguidance = _library()
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_ByteTokens()), n_vocab=257)
