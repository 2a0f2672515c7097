"""Inserts, updates and lookups of many rows in one statement.

The rows are a parameter of ``json_each`` on SQLite, and of ``unnest`` on PostgreSQL. Django's ``bulk_create`` needs a
statement for each 999 parameters on SQLite, and its ``bulk_update`` a CASE for each row.
"""

import json
from collections.abc import Sequence
from typing import Any, cast

import orjson
from django.db import connection, connections
from django.db.models import (
    BigAutoField,
    BooleanField,
    CharField,
    Field,
    ForeignKey,
    JSONField,
    Model,
    PositiveBigIntegerField,
    TextField,
)
from django.db.models.expressions import RawSQL

Row = Sequence[Any]


def insert(
    model: type[Model], fields: Sequence[str], rows: Sequence[Row], *, returning: Sequence[str] = ()
) -> list[Any]:
    """Insert rows, each with its values in the order of ``fields``. Return the fields ``returning`` of each."""
    if not rows:
        return []
    columns = [_field(model, name) for name in fields]
    source, parameters = _table(columns, rows)
    names = ", ".join(_quoted(field.column) for field in columns)
    sql = f"INSERT INTO {_quoted(model._meta.db_table)} ({names}) SELECT {names} FROM {source}"
    if returning:
        sql += f" RETURNING {', '.join(_quoted(_field(model, name).column) for name in returning)}"
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        return _loaded(model, returning, cursor.fetchall()) if returning else []


def _loaded(model: type[Model], fields: Sequence[str], rows: list[Row]) -> list[Row]:
    """Return rows from the database with each value as its field loads it."""
    loads = [getattr(_field(model, name), "from_db_value", None) for name in fields]
    if not any(loads):
        return rows
    return [
        tuple(load(value, None, connection) if load else value for load, value in zip(loads, row, strict=True))
        for row in rows
    ]


def update(model: type[Model], fields: Sequence[str], rows: Sequence[Row]) -> None:
    """Update rows. Each row is its primary key followed by its values in the order of ``fields``."""
    if not rows:
        return
    columns = [model._meta.pk, *(_field(model, name) for name in fields)]
    source, parameters = _table(columns, rows)
    table, key = _quoted(model._meta.db_table), _quoted(columns[0].column)
    sets = ", ".join(f"{_quoted(field.column)} = fresh.{_quoted(field.column)}" for field in columns[1:])
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE {table} SET {sets} FROM {source} WHERE {table}.{key} = fresh.{key}", parameters)


def disable_nested_loops() -> None:
    """Disable PostgreSQL's nested loop joins until the end of the transaction.

    Without statistics about the rows, PostgreSQL prefers a nested loop: 2,000 rows take 700 ms instead of 5 ms. SQLite
    always uses the index.
    """
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SET LOCAL enable_nestloop = off")


def among(model: type[Model], by: Sequence[str], keys: Sequence[Row]) -> RawSQL:
    """Return a condition for ``filter``: a row's values of ``by`` are one of these keys. ``keys`` must not be empty.

    For one column, use ``__in``, unless a pass has thousands of keys: 10,000 take 160 ms instead of 25 on PostgreSQL.

    If the keys differ in one column only, as they usually do, the condition for PostgreSQL is ``= ANY`` of an array.
    Otherwise it is a join, for which PostgreSQL may choose a slow plan. Together with a condition that few rows met
    when its statistics were collected, it compares each row with each key.
    """
    columns = [_field(model, name) for name in by]
    table = _quoted(model._meta.db_table)
    names = [f"{table}.{_quoted(field.column)}" for field in columns]
    given = list(zip(columns, names, zip(*keys, strict=True), strict=True))
    varying = [name for field, name, values in given if not _is_constant(field, values)]
    parameters: list[Any] = []
    if connection.vendor == "postgresql" and len(varying) <= 1:
        conditions = []
        for field, name, values in given:
            type_ = field.rel_db_type(connection)
            if name in varying:
                conditions.append(f"{name} = ANY (%s::{type_}[])")
                parameters.append(_as_array(_prepared(field, values)))
            else:
                conditions.append(f"{name} = %s::{type_}")
                parameters += _prepared(field, values[:1])
        sql = f"({' AND '.join(conditions)})"
    else:
        source, parameters = _table(columns, keys)
        source_names = ", ".join(_quoted(field.column) for field in columns)
        sql = f"({', '.join(names)}) IN (SELECT {source_names} FROM {source})"
    return RawSQL(sql, parameters, output_field=BooleanField())


def _table(columns: Sequence["Field[Any, Any]"], rows: Sequence[Row]) -> tuple[str, list[Any]]:
    """Return a table expression named ``fresh`` with these columns and rows, and its parameters.

    A column with the same value in every row is one parameter, except the first column, which gives the number of rows.
    PostgreSQL gets its arrays as text: it parses an ``ARRAY[…]`` of 10,000 elements as 10,000 expressions, which takes
    ten times as long.
    """
    is_sqlite = connection.vendor == "sqlite"
    cells: list[str] = []
    constants: list[Any] = []
    lists: list[list[Any]] = []
    arrays: list[tuple[str, str]] = []  # names and types
    for field, values in zip(columns, zip(*rows, strict=True), strict=True):
        name, type_ = _quoted(field.column), field.rel_db_type(connection)
        if lists and _is_constant(field, values):
            cells.append(f"%s AS {name}" if is_sqlite else f"%s::{type_} AS {name}")
            constants += _prepared(field, values[:1])
        else:
            cells.append(f"json_extract(value, '$[{len(lists)}]') AS {name}" if is_sqlite else name)
            lists.append(_prepared(field, values))
            arrays.append((name, f"%s::{type_}[]"))
    select = f"SELECT {', '.join(cells)} FROM"
    if is_sqlite:
        lines = orjson.dumps(list(zip(*lists, strict=True))).decode()
        return f"({select} json_each(%s)) AS fresh", [*constants, lines]
    names, types = zip(*arrays, strict=True)
    given = f"unnest({', '.join(types)}) AS given ({', '.join(names)})"
    return f"({select} {given}) AS fresh", [*constants, *map(_as_array, lists)]


def _is_constant(field: "Field[Any, Any]", values: Row) -> bool:
    # In Python True == 1, but in JSON these are different values.
    return field.get_internal_type() != "JSONField" and values.count(values[0]) == len(values)


def _as_array(values: Sequence[Any]) -> str:
    return "{" + ",".join(["NULL" if value is None else _array_element(str(value)) for value in values]) + "}"


def _array_element(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _prepared(field: "Field[Any, Any]", values: Row) -> list[Any]:
    """Return the values of one column as database parameters, which PostgreSQL's arrays accept too."""
    if isinstance(field, JSONField):
        return [
            None if value is None else json.dumps(field.get_prep_value(value), cls=field.encoder) for value in values
        ]
    # Each distinct value is prepared once, because preparing costs more than a lookup. django.db.connection is a proxy
    # that looks up the real connection at each access, so use the real one.
    unchanged_type = _UNCHANGED_TYPES.get(type(field.target_field if isinstance(field, ForeignKey) else field))
    database = connections[connection.alias]
    prepared = {
        value: value if type(value) is unchanged_type else field.get_db_prep_save(value, database)
        for value in set(values)
    }
    return [prepared[value] for value in values]


_UNCHANGED_TYPES: dict[type, type] = {
    CharField: str,
    TextField: str,
    BigAutoField: int,
    PositiveBigIntegerField: int,
}
"""Fields that pass a value of this type to the database unchanged."""


def _field(model: type[Model], name: str) -> "Field[Any, Any]":
    return cast("Field[Any, Any]", model._meta.get_field(name))


def _quoted(name: str | None) -> str:
    return connection.ops.quote_name(name or "")
