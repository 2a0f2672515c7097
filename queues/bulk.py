"""Writing many rows in one statement, whatever their number.

One statement fed by ``json_each`` on SQLite, or by ``unnest`` on PostgreSQL. Django's ``bulk_create`` takes a statement
for each 999 parameters on SQLite, and its ``bulk_update`` a CASE for each row, so both grow with the rows.
"""

from collections.abc import Sequence
from typing import Any, cast

import orjson
from django.db import connection
from django.db.models import BooleanField, Field, Model
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


def among(model: type[Model], by: Sequence[str], keys: Sequence[Row]) -> RawSQL:
    """Return the condition, for ``filter``, that a row's values of ``by`` are one of these keys. There must be one."""
    columns = [_field(model, name) for name in by]
    source, parameters = _table(columns, keys)
    table = _quoted(model._meta.db_table)
    mine = ", ".join(f"{table}.{_quoted(field.column)}" for field in columns)
    theirs = ", ".join(_quoted(field.column) for field in columns)
    return RawSQL(f"({mine}) IN (SELECT {theirs} FROM {source})", parameters, output_field=BooleanField())


def _table(columns: Sequence["Field[Any, Any]"], rows: Sequence[Row]) -> tuple[str, list[Any]]:
    """Return a table expression named ``fresh`` with these columns and rows, and its parameters."""
    prepared = [_prepared(field, values) for field, values in zip(columns, zip(*rows, strict=True), strict=True)]
    names = [_quoted(field.column) for field in columns]
    if connection.vendor == "sqlite":
        cells = ", ".join(f"json_extract(value, '$[{number}]') AS {name}" for number, name in enumerate(names))
        lines = orjson.dumps(list(zip(*prepared, strict=True))).decode()
        return f"(SELECT {cells} FROM json_each(%s)) AS fresh", [lines]
    arrays = ", ".join(f"%s::{field.rel_db_type(connection)}[]" for field in columns)
    return f"unnest({arrays}) AS fresh ({', '.join(names)})", prepared


def _prepared(field: "Field[Any, Any]", values: Row) -> list[Any]:
    """Return the values of one column as the database takes them."""
    if field.get_internal_type() == "JSONField":
        return [field.get_db_prep_save(value, connection) for value in values]
    # Few columns have many different values, and preparing one costs more than looking it up.
    ready = {value: field.get_db_prep_save(value, connection) for value in set(values)}
    return [ready[value] for value in values]


def _field(model: type[Model], name: str) -> "Field[Any, Any]":
    return cast("Field[Any, Any]", model._meta.get_field(name))


def _quoted(name: str | None) -> str:
    return connection.ops.quote_name(name or "")
