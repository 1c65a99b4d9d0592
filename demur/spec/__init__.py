"""Specs: frozen dataclasses that are written and read as text, with checked field types."""

from demur.spec.spec import (
    Spec,
    Vocabulary,
    check_readable,
    differences,
    digest,
    edit,
    field_types,
    find_name,
    later,
    lines,
    older_version,
    read,
    renamed,
    replace_specs,
    required_fields,
    show,
    specs_in,
    typed,
)

__all__ = [
    "Spec", "Vocabulary", "check_readable", "differences", "digest", "edit", "field_types",
    "find_name", "later", "lines", "older_version", "read", "renamed", "replace_specs",
    "required_fields", "show", "specs_in", "typed",
]  # fmt: skip
