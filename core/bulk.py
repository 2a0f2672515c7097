"""Many rows in one statement, whatever their number.

One statement fed by ``json_each`` on SQLite, or by ``unnest`` on PostgreSQL. Django's ``bulk_create`` takes a statement
for each 999 parameters on SQLite, and its ``bulk_update`` a CASE for each row, so both grow with the rows.
"""

import json
from collections.abc import Sequence
from typing import Any, cast

import orjson
from django.db import connection, connections
from django.db.models import BooleanField, Field, ForeignKey, JSONField, Model
from django.db.models.expressions import RawSQL

Row = Sequence[Any]


def insert(
    model: type[Model],
    fields: Sequence[str],
    rows: Sequence[Row],
    *,
    returning: Sequence[str] = (),
    unique: Sequence[str] = (),
    update: Sequence[str] = (),
) -> list[Any]:
    """Insert rows, each with its values in the order of ``fields``, and return what ``returning`` names of each.

    Where one with the same values of ``unique`` is there, the fields of ``update`` are set in that instead, to what the
    new one would have, the database's default included. No two of the given rows may have the same.
    """
    if not rows:
        return []
    columns = [_field(model, name) for name in fields]
    source, parameters = _table(columns, rows)
    names = ", ".join(_quoted(field.column) for field in columns)
    sql = f"INSERT INTO {_quoted(model._meta.db_table)} ({names}) SELECT {names} FROM {source} WHERE true"
    if unique:
        keys = ", ".join(_quoted(_field(model, name).column) for name in unique)
        set_ = [_quoted(_field(model, name).column) for name in update]
        sql += f" ON CONFLICT ({keys}) DO UPDATE SET {', '.join(f'{column} = EXCLUDED.{column}' for column in set_)}"
    if returning:
        sql += f" RETURNING {', '.join(_quoted(_field(model, name).column) for name in returning)}"
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        return cursor.fetchall() if returning else []


def update(model: type[Model], fields: Sequence[str], rows: Sequence[Row]) -> None:
    """Update rows, each given as its primary key followed by its values in the order of ``fields``."""
    if not rows:
        return
    columns = [model._meta.pk, *(_field(model, name) for name in fields)]
    source, parameters = _table(columns, rows)
    table, key = _quoted(model._meta.db_table), _quoted(columns[0].column)
    sets = ", ".join(f"{_quoted(field.column)} = fresh.{_quoted(field.column)}" for field in columns[1:])
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE {table} SET {sets} FROM {source} WHERE {table}.{key} = fresh.{key}", parameters)


def disable_nested_loops() -> None:
    """Until the end of this transaction, have PostgreSQL not compare each row of one set with each of another.

    Where its statistics know nothing of the rows, that looks cheapest to it: of 2,000 it takes 700 ms instead of 5.
    SQLite takes the index in any case.
    """
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SET LOCAL enable_nestloop = off")


def among(model: type[Model], by: Sequence[str], keys: Sequence[Row]) -> RawSQL:
    """Return the condition, for ``filter``, that a row's values of ``by`` are one of these keys. There must be one.

    Where the keys differ in one column alone, as they mostly do, PostgreSQL is given an array of that to look up. Else
    it is a join, and to that it has several ways: beside another condition that few rows met when the statistics were
    made, it compares each row with each key.
    """
    columns = [_field(model, name) for name in by]
    table = _quoted(model._meta.db_table)
    mine = [f"{table}.{_quoted(field.column)}" for field in columns]
    given = list(zip(columns, mine, zip(*keys, strict=True), strict=True))
    different = [name for field, name, values in given if not _is_same(field, values)]
    parameters: list[Any] = []
    if connection.vendor == "postgresql" and len(different) <= 1:
        conditions = []
        for field, name, values in given:
            type_ = field.rel_db_type(connection)
            if name in different:
                conditions.append(f"{name} = ANY (%s::{type_}[])")
                parameters.append(_as_array(_prepared(field, values)))
            else:
                conditions.append(f"{name} = %s::{type_}")
                parameters += _prepared(field, values[:1])
        sql = f"({' AND '.join(conditions)})"
    else:
        source, parameters = _table(columns, keys)
        theirs = ", ".join(_quoted(field.column) for field in columns)
        sql = f"({', '.join(mine)}) IN (SELECT {theirs} FROM {source})"
    return RawSQL(sql, parameters, output_field=BooleanField())


def _table(columns: Sequence["Field[Any, Any]"], rows: Sequence[Row]) -> tuple[str, list[Any]]:
    """Return a table expression named ``fresh`` with these columns and rows, and its parameters.

    What is the same in every row, as most is in a pass, goes along once; the first column says how many there are.
    PostgreSQL is given its arrays as texts: an ``ARRAY[…]`` of ten thousand is so many expressions to it, and takes
    ten times as long.
    """
    is_sqlite = connection.vendor == "sqlite"
    cells: list[str] = []
    constants: list[Any] = []
    lists: list[list[Any]] = []
    arrays: list[tuple[str, str]] = []  # names and types
    for field, values in zip(columns, zip(*rows, strict=True), strict=True):
        name, type_ = _quoted(field.column), field.rel_db_type(connection)
        if lists and _is_same(field, values):
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


def _is_same(field: "Field[Any, Any]", values: Row) -> bool:
    # To Python a JSON true is the same as a 1.
    return field.get_internal_type() != "JSONField" and values.count(values[0]) == len(values)


def _as_array(values: Sequence[Any]) -> str:
    """Return an array in the form in which PostgreSQL reads it."""
    return "{" + ",".join(["NULL" if value is None else _in_quotes(str(value)) for value in values]) + "}"


def _in_quotes(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _prepared(field: "Field[Any, Any]", values: Row) -> list[Any]:
    """Return the values of one column as the database takes them, which an array of PostgreSQL's takes too."""
    if isinstance(field, JSONField):
        return [None if value is None else json.dumps(value, cls=field.encoder) for value in values]
    # Few columns have many different values, and preparing one costs more than looking it up. A text or a number is
    # what it is. The connection itself is asked, as the one that is imported looks for it each time.
    as_it_is = _AS_IT_IS.get((field.target_field if isinstance(field, ForeignKey) else field).get_internal_type())
    database = connections[connection.alias]
    ready = {
        value: value if type(value) is as_it_is else field.get_db_prep_save(value, database) for value in set(values)
    }
    return [ready[value] for value in values]


_AS_IT_IS: dict[str, type] = {"CharField": str, "TextField": str, "BigAutoField": int, "PositiveBigIntegerField": int}
"""Fields that give the database what they are given, where that is of this type."""


def _field(model: type[Model], name: str) -> "Field[Any, Any]":
    return cast("Field[Any, Any]", model._meta.get_field(name))


def _quoted(name: str | None) -> str:
    return connection.ops.quote_name(name or "")
