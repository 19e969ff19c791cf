"""JSON schemas, rewritten for the grammar library, never wider than they were.

Keywords that the library lacks are replaced by others. The new schema allows the same values or fewer, never none,
so its values fit the schema as given. A keyword that cannot be replaced stays, and is refused by its name.
"""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

from paceline.core.errors import RequestError

MAX_DEPTH = 64  # of schemas within schemas
MAX_REFS = 8  # references followed from one schema
MAX_ALTERNATIVES = 64  # most alternatives of a oneOf, which are compared pair by pair
MAX_COMPARED = 1_000_000  # most names and values compared in all pairs; further pairs count as overlapping
_PAIR_COST = 16  # cost of comparing two empty alternatives, in names
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)  # formats that a grammar can enforce; others only say what a text means
_ONE = (
    "additionalProperties",
    "additionalItems",
    "items",
    "contains",
    "not",
    "if",
    "then",
    "else",
    "propertyNames",
)
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NOTES = frozenset(("title", "description", "default", "examples"))  # keywords that do not restrict values
_VALUES = frozenset(("enum", "const", "default", "examples"))  # keywords that hold values, no schemas
_MAPS = ("properties", "patternProperties", "definitions", "$defs", "dependentSchemas")
_TYPE_NAMES = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}

Schema = dict[str, Any]


def supported(schema: Any) -> Any:
    """Return a schema in keywords that grammars know. Raises `RequestError`."""
    return _Rewriter(schema).rewrite(schema, 0)


def resolved(schema: Any, root: Any) -> Any:
    """Return the schema that references within `root` lead to; None if there is none."""
    return _Rewriter(root)._resolved(schema)


def satisfiable(schema: Any, depth: int = 0) -> Any:
    """Return a schema without enums of which no value has the type beside them.

    Authors of tools write an enum beside `"type": "array"` when they mean each item: it is moved to the items.
    """
    if isinstance(schema, list):
        return [satisfiable(one, depth + 1) for one in schema]
    if not isinstance(schema, dict) or depth > 2 * MAX_DEPTH:
        return schema
    found = {k: v if k in _VALUES else satisfiable(v, depth + 1) for k, v in schema.items()}
    kind, values = found.get("type"), found.get("enum")
    if isinstance(kind, str) and isinstance(values, list) and not any(_has_type(v, kind) for v in values):
        del found["enum"]
        items = found.get("items", {})
        if kind == "array" and isinstance(items, dict):
            found["items"] = satisfiable({**items, "enum": values}, depth + 1)
    return found


def _has_type(value: Any, kind: str) -> bool:
    name = _TYPE_NAMES.get(type(value), "null")
    if name == "number" and kind == "integer":
        return isinstance(value, int) or value.is_integer()  # False for infinity and NaN
    return name == kind


class _Rewriter:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._written: dict[tuple[str, int], frozenset[str]] = {}  # (key, id of a list in the root) -> JSON
        self._num_compared = 0

    def rewrite(self, schema: Any, depth: int) -> Any:
        if not isinstance(schema, dict):
            return schema
        if depth > MAX_DEPTH:
            raise RequestError(f"the JSON schema nests more than {MAX_DEPTH} schemas", "grammar")
        found = dict(schema)
        for key in found.keys() & {*_ONE, *_LISTS, *_MAPS}:
            found[key] = self._inner(key, found[key], depth + 1)
        for step in (_formats, _dependencies, _conditions, _property_names, _property_counts):
            step(found)
        self._one_of(found)
        return found

    def _inner(self, key: str, value: Any, depth: int) -> Any:
        if isinstance(value, list) and key in _LISTS:
            return [self.rewrite(one, depth) for one in value]
        if isinstance(value, dict) and key in _MAPS:
            return {name: self.rewrite(one, depth) for name, one in value.items()}
        return self.rewrite(value, depth) if key in _ONE else value

    def _one_of(self, schema: Schema) -> None:
        """Turn oneOf into anyOf where no value fits two alternatives; close them if that helps."""
        ways = schema.get("oneOf")
        if not isinstance(ways, list) or "anyOf" in schema or len(ways) > MAX_ALTERNATIVES:
            return
        may_close = not schema.keys() & {"properties", "required", "allOf", "patternProperties", "$ref"}
        closed = [self._closed(way, schema.get("type")) for way in ways] if may_close else []
        for found in filter(None, (ways, closed)):
            if all(self._apart(a, b) for a, b in combinations(found, 2)):
                schema["anyOf"] = found
                del schema["oneOf"]
                return

    def _closed(self, way: Any, kind: Any) -> Any:
        """Return an object's schema without unlisted properties. kind: type around it."""
        known = self._resolved(way, alone=True)
        if not isinstance(known, dict) or not isinstance(known.get("properties"), dict):
            return way
        typed = {"type": kind} if kind == "object" else {}
        return {**typed, **known, "additionalProperties": known.get("additionalProperties") or False}

    def _apart(self, a: Any, b: Any) -> bool:
        """Return True if surely no value fits both."""
        a, b = self._resolved(a), self._resolved(b)
        if not isinstance(a, dict) or not isinstance(b, dict):
            return False
        self._num_compared += _PAIR_COST + sum(len(_items(s.get(k))) for s in (a, b) for k in ("enum", "required"))
        if self._num_compared > MAX_COMPARED:
            return False
        if not self._types(a) & self._types(b) or self._share_none(a, b):
            return True
        return _lacks(a, b) or _lacks(b, a) or self._told_apart(a, b)

    def _told_apart(self, a: Schema, b: Schema) -> bool:
        """Return True if both are objects and require a property whose values differ."""
        if self._types(a) != {"object"} or self._types(b) != {"object"}:
            return False
        also = {*_names(b.get("required"))}
        shared = [name for name in _names(a.get("required")) if name in also]
        ours, theirs = _properties(a), _properties(b)
        return any(self._share_none(self._resolved(ours.get(n)), self._resolved(theirs.get(n))) for n in shared)

    def _share_none(self, a: Any, b: Any) -> bool:
        """Return True if both have a list of values, and no value in common."""
        ours, theirs = self._values(a), self._values(b)
        if ours is None or theirs is None or ours is theirs:
            return False
        self._num_compared += min(len(ours), len(theirs))
        return ours.isdisjoint(theirs)

    def _values(self, schema: Any) -> frozenset[str] | None:
        """Return the only values of a schema, as JSON; None without a list."""
        if not isinstance(schema, dict) or not schema.keys() & {"const", "enum"}:
            return None
        key = "const" if "const" in schema else "enum"
        values = [schema[key]] if key == "const" else schema[key]
        if not isinstance(values, list):
            return None
        place = key, id(schema[key])
        if place not in self._written:
            self._written[place] = frozenset(json.dumps(value, sort_keys=True) for value in values)
        return self._written[place]

    def _resolved(self, schema: Any, alone: bool = False) -> Any:
        """Follow references to other parts of the whole schema.

        alone: return None if another keyword restricts values beside a reference.
        """
        for _ in range(MAX_REFS):
            ref = schema.get("$ref") if isinstance(schema, dict) else None
            if not isinstance(ref, str) or not ref.startswith("#"):
                return schema
            if alone and schema.keys() - _NOTES != {"$ref"}:
                return None
            schema = self._at(ref)
        return None

    def _at(self, pointer: str) -> Any:
        found = self._root
        for part in pointer.lstrip("#").split("/")[1:]:
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        return found

    def _types(self, schema: Schema) -> set[str]:
        """Return the types that a schema's values may have; integers are numbers."""
        every = {"null", *_TYPE_NAMES.values()}
        given = schema.get("type")
        if isinstance(given, str | list):
            return {"number" if t == "integer" else str(t) for t in ([given] if isinstance(given, str) else given)}
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list):
            return {_TYPE_NAMES.get(type(value), "null") for value in values}
        return every


def _lacks(a: Schema, b: Schema) -> bool:
    """Return True if `a` is a closed object that lacks what `b` requires."""
    closed = (
        a.get("type") == "object" and a.get("additionalProperties") is False and not a.get("patternProperties")
    )
    return closed and any(name not in _properties(a) for name in _names(b.get("required")))


def _properties(schema: Schema) -> Schema:
    """Return an object's properties; ill-formed ones are left to the grammar library to refuse."""
    given = schema.get("properties")
    return given if isinstance(given, dict) else {}


def _names(given: Any) -> list[str]:
    return [name for name in _items(given) if isinstance(name, str)]


def _items(given: Any) -> list[Any]:
    return given if isinstance(given, list) else []


# Steps, each on one schema whose inner schemas are done ------------------------------------------


def _formats(schema: Schema) -> None:
    if isinstance(schema.get("format"), str) and schema["format"] not in FORMATS:
        del schema["format"]


def _dependencies(schema: Schema) -> None:
    """Require whatever some property would require."""
    for key in ("dependencies", "dependentRequired"):
        rules = schema.get(key)
        if isinstance(rules, dict) and all(isinstance(names, list) for names in rules.values()):
            del schema[key]
            needed = [name for names in rules.values() for name in _names(names)]
            if not needed:
                continue
            known = _properties(schema)
            if schema.get("additionalProperties") is False and any(name not in known for name in needed):
                schema[key] = rules
                continue
            schema["required"] = sorted({*_names(schema.get("required")), *needed})


def _conditions(schema: Schema) -> None:
    """Drop conditions without a consequence."""
    if "if" in schema and all(schema.get(key, {}) in ({}, True) for key in ("then", "else")):
        for key in ("if", "then", "else"):
            schema.pop(key, None)


def _property_names(schema: Schema) -> None:
    """Write a pattern of all names as a pattern of properties."""
    rule = schema.get("propertyNames")
    if not isinstance(rule, dict) or set(rule) - {"type"} != {"pattern"} or not isinstance(rule["pattern"], str):
        return
    if schema.keys() & {"properties", "patternProperties", "required"}:
        return
    del schema["propertyNames"]
    schema["patternProperties"] = {rule["pattern"]: schema.get("additionalProperties", True)}
    schema["additionalProperties"] = False


def _property_counts(schema: Schema) -> None:
    """Require as many listed properties as needed, and allow no more."""
    known, required = schema.get("properties"), list(dict.fromkeys(_names(schema.get("required"))))
    if not isinstance(known, dict) or not known or all(name in required for name in known):
        return
    least, most = schema.get("minProperties"), schema.get("maxProperties")
    if isinstance(least, int) and least <= len(known):
        optional = [name for name in known if name not in required]
        schema["required"] = [*required, *optional[: max(least - len(required), 0)]]
        del schema["minProperties"]
    lists_all = known.keys() >= {*required} and not schema.get("patternProperties")
    if isinstance(most, int) and len(known) <= most and lists_all:
        schema["additionalProperties"] = False
        del schema["maxProperties"]
