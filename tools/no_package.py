"""The build backend of the project itself, which refuses: Guardian runs from its folder. See pyproject.toml."""

REFUSAL = (
    "Guardian is not a package to install: run it from its folder, as docs/operators.md says. "
    "The packages in packages/ can be installed."
)


def _refuse(*_: object, **__: object) -> None:
    raise SystemExit(REFUSAL)


build_wheel = build_sdist = build_editable = _refuse
