"""JSON text and strict values: the one way in and out of every boundary.

Laws:
* What would be refused on reading is refused on writing: `encode` reads its own text back.
* Nothing is coerced: `true` is no number, `5` is no text, an unknown key is an error.
* A refusal names the path of the value (`$.tool_calls[0].id`), or of the object that lacks a key.
* A refusal's text is short and free of surrogates, whatever the value is: it is sent, logged and shown.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args, get_origin

import attrs
from cattrs import Converter
from cattrs.errors import (
    AttributeValidationNote,
    BaseValidationError,
    ForbiddenExtraKeysError,
    IterableValidationNote,
)
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override

from boxmaker.errors import ValueRefused

T = TypeVar("T")
JsonObject = dict[str, Any]

Count = Annotated[int, "count"]
"""An integer ≥ 0."""
Positive = Annotated[int, "positive"]
"""An integer ≥ 1."""
Sha256 = Annotated[str, "sha256"]
"""64 lower-case hex digits."""

SURROGATE = re.compile("[\ud800-\udfff]")
_encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def dumps(value: object) -> str:
    """Write compact JSON text, keys in the order of the value, nothing escaped that need not be.

    Raises:
        ValueRefused: NaN or infinity, a lone surrogate, a type JSON does not have.
    """
    try:
        text = _encoder.encode(value)
    except RecursionError as exc:
        raise ValueRefused(path="$", problem="nested too deep") from exc
    except (TypeError, ValueError) as exc:
        raise ValueRefused(path="$", problem=f"not JSON: {exc}") from exc
    if SURROGATE.search(text):
        raise ValueRefused(path="$", problem="holds a lone surrogate")
    return text


def loads(text: str | bytes, decoder: json.JSONDecoder | None = None) -> Any:
    """Read one JSON text; bytes are UTF-8.

    Raises:
        ValueRefused: not UTF-8, not JSON (NaN and infinity included), a number over what a double
            holds, or nested too deep.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        return (decoder or _DECODER).decode(text)
    except UnicodeDecodeError as exc:
        raise ValueRefused(path="$", problem=f"not UTF-8 at byte {exc.start}") from exc
    except RecursionError as exc:
        raise ValueRefused(path="$", problem="nested too deep") from exc
    except ValueError as exc:
        raise ValueRefused(path="$", problem=f"not JSON: {exc}") from exc


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON value")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {_short(text)} is out of range")
    return value


_MAX_DIGITS = 310  # with a sign, more than the longest integer that a double holds
MAX_INTEGER = sys.float_info.max


def _integer(text: str) -> int:
    """Integers keep all digits up to the range of a double: other readers refuse those beyond.

    Python's own limit (4,300 digits) can be moved by an environment variable, so it must not decide.
    """
    if len(text) <= _MAX_DIGITS and abs(value := int(text)) <= MAX_INTEGER:
        return value
    raise ValueError(f"the number {_short(text)} is out of range")


# Made once: `json.loads` makes one a call.
_DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite, parse_int=_integer)
CHECKED_COUNTS = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)
"""For values whose every integer is a Count, which has its own limit: a call in Python for each costs much."""


def found(value: object) -> str:
    """Name a JSON value for an error text, in a few characters."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "an array"
    return _short(json.dumps(value, default=lambda _: type(value).__name__))


def _short(text: str) -> str:
    return text if len(text) <= 40 else text[:39] + "…"


def check_text(value: object, _: object) -> str:
    """Take text without lone surrogates; raises ValueError for anything else."""
    if type(value) is not str:
        raise ValueError(f"expected text, found {found(value)}")
    if SURROGATE.search(value):
        raise ValueError("text with a lone surrogate")
    return value


def _flag(value: object, _: object) -> bool:
    if type(value) is not bool:
        raise ValueError(f"expected true or false, found {found(value)}")
    return value


def _count(value: object, _: object) -> int:
    if type(value) is not int or not 0 <= value <= MAX_INTEGER:
        raise ValueError(f"expected an integer ≥ 0, found {found(value)}")
    return value


def _positive(value: object, _: object) -> int:
    if type(value) is not int or not 1 <= value <= MAX_INTEGER:
        raise ValueError(f"expected an integer ≥ 1, found {found(value)}")
    return value


def _sha256(value: object, _: object) -> str:
    if type(value) is not str or not re.fullmatch("[0-9a-f]{64}", value):
        raise ValueError(f"expected 64 lower-case hex digits, found {found(value)}")
    return value


def _object(value: object, _: object) -> JsonObject:
    if type(value) is not dict:
        raise ValueError(f"expected an object, found {found(value)}")
    if loads(dumps(value)) != value:
        raise ValueError("holds keys or values that JSON does not have")
    return value


def _one_of(value: object, kind: Any) -> str:
    allowed: tuple[str, ...] = get_args(kind)
    if type(value) is not str or value not in allowed:
        raise ValueError(f"expected one of {', '.join(allowed)}, found {found(value)}")
    return value


def strict_converter(extra: Mapping[object, Callable[[Any, Any], Any]] | None = None) -> Converter:
    """Build a converter that refuses what it is not sure of.

    `extra` adds checks for further types (NewTypes of ids and times, enums), `(value, type) -> value`.
    A field named `class_` is the key `class`. A field with a default may be left out by who writes, and is left out
    by us when it has its default: that is how a key is added that older readers do not know.
    """
    converter = Converter(forbid_extra_keys=True)
    checks: dict[object, Callable[[Any, Any], Any]] = {
        str: check_text, bool: _flag, Count: _count, Positive: _positive, Sha256: _sha256, JsonObject: _object,
    }  # fmt: skip
    checks.update(extra or {})
    for kind, check in checks.items():
        if isinstance(kind, type):  # cattrs looks for a class first, and has coercions of its own for these
            converter.register_structure_hook(kind, check)
        else:
            converter.register_structure_hook_func(_is(kind), check)
    converter.register_structure_hook_func(_is_literal, _one_of)
    converter.register_structure_hook_func(_is_tuple, lambda value, t: _array(converter, value, t))

    def keys(cls: type) -> dict[str, Any]:
        return {a.name: override(rename=a.name[:-1]) for a in attrs.fields(cls) if a.name.endswith("_")}

    converter.register_structure_hook_factory(
        attrs.has, lambda cls: _only_objects(make_dict_structure_fn(cls, converter, **keys(cls)))
    )
    converter.register_unstructure_hook_factory(
        attrs.has, lambda cls: make_dict_unstructure_fn(cls, converter, _cattrs_omit_if_default=True, **keys(cls))
    )
    return converter


def _is(kind: object) -> Callable[[Any], bool]:
    return lambda t: bool(t == kind)


def _is_tuple(kind: Any) -> bool:
    return get_origin(kind) is tuple


def _is_literal(kind: Any) -> bool:
    return bool(get_origin(kind) == Literal)


def _only_objects(structure: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def checked(value: object, cls: Any) -> Any:
        if type(value) is not dict:
            raise ValueError(f"expected an object, found {found(value)}")
        return structure(value, cls)

    return checked


def _array(converter: Converter, value: object, kind: Any) -> tuple[Any, ...]:
    if type(value) is not list:
        raise ValueError(f"expected an array, found {found(value)}")
    items: Any = list[get_args(kind)[0]]  # type: ignore[misc]  # a type made at run time
    return tuple(converter.structure(value, items))


def refusal(exc: BaseException, path: str) -> ValueRefused:
    """Turn what a converter raised into the first refusal that it holds."""
    above = path
    while isinstance(exc, BaseValidationError):
        exc = exc.exceptions[0]
        above, path = path, path + _step(exc)
    if isinstance(exc, KeyError):
        return ValueRefused(path=above, problem=f"the key {exc.args[0]!r} is missing")
    if isinstance(exc, ForbiddenExtraKeysError):
        return ValueRefused(path=path, problem=f"unknown key {found(min(exc.extra_fields))}")
    return ValueRefused(path=path, problem=exc.problem if isinstance(exc, ValueRefused) else str(exc))


def _step(exc: BaseException) -> str:
    """The step of a path that cattrs has noted on an exception of a group."""
    for note in getattr(exc, "__notes__", ()):
        if isinstance(note, AttributeValidationNote):
            return "." + note.name.removesuffix("_")
        if isinstance(note, IterableValidationNote):
            return f"[{note.index}]"
    return ""


class Codec(Generic[T]):
    """Objects of one class to and from JSON."""

    def __init__(self, converter: Converter, cls: type[T]) -> None:
        self._converter = converter
        self._cls = cls

    def from_object(self, value: object, path: str = "$") -> T:
        """Make a value of an object that came from `loads`.

        Raises:
            ValueRefused: with the path below `path` of the first thing that is wrong.
        """
        try:
            return self._converter.structure(value, self._cls)
        except Exception as exc:  # cattrs raises groups, KeyError, ValueError: all mean "refused"
            raise refusal(exc, path) from exc

    def to_object(self, value: T) -> JsonObject:
        """Make the JSON object of a value; refuses what `from_object` would."""
        try:
            made: JsonObject = self._converter.unstructure(value, self._cls)
        except (AttributeError, TypeError) as exc:  # a field that does not hold what its class says
            raise ValueRefused(path="$", problem=f"no {self._cls.__name__}: {exc}") from exc
        self.from_object(made)
        return made

    def decode(self, text: str | bytes) -> T:
        """Read one value; raises ValueRefused."""
        return self.from_object(loads(text))

    def encode(self, value: T) -> str:
        """Write one value; raises ValueRefused for what `decode` would refuse."""
        return dumps(self.to_object(value))


class TaggedCodec(Generic[T]):
    """Objects of a union, told apart by their key `type`; `decoder` reads their text, as in `loads`."""

    def __init__(
        self, converter: Converter, classes: Mapping[str, type[Any]], decoder: json.JSONDecoder | None = None
    ) -> None:
        self._decoder = decoder
        self._codecs: dict[str, Codec[Any]] = {tag: Codec(converter, cls) for tag, cls in classes.items()}
        self._tags = {cls: tag for tag, cls in classes.items()}
        self.tags = tuple(classes)

    def from_object(self, value: object, path: str = "$") -> T:
        """Make a value of a tagged object; raises ValueRefused."""
        if type(value) is not dict:
            raise ValueRefused(path=path, problem=f"expected an object, found {found(value)}")
        if "type" not in value:
            raise ValueRefused(path=path, problem="the key 'type' is missing")
        tag = value["type"]
        codec = self._codecs.get(tag) if type(tag) is str else None
        if codec is None:
            raise ValueRefused(path=f"{path}.type", problem=f"unknown type {found(tag)}")
        made: T = codec.from_object({k: v for k, v in value.items() if k != "type"}, path)
        return made

    def to_object(self, value: T) -> JsonObject:
        """Make the tagged object of a value; refuses what `from_object` would."""
        tag = self._tags.get(type(value))
        if tag is None:
            raise ValueRefused(path="$", problem=f"a {type(value).__name__} is none of {', '.join(self.tags)}")
        return {"type": tag, **self._codecs[tag].to_object(value)}

    def decode(self, text: str | bytes) -> T:
        """Read one value; raises ValueRefused."""
        return self.from_object(loads(text, self._decoder))

    def encode(self, value: T) -> str:
        """Write one value; raises ValueRefused for what `decode` would refuse."""
        return dumps(self.to_object(value))
