"""The fields of bodies: what is served, what is accepted only with values that change nothing, and errors in words."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from kvframe.contract import RequestError, shown

NOT_SERVED = "not_served"
"""The type of the error for a value that is not served."""


class Fields(BaseModel):
    """A JSON object with known fields only, whose values are not converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())

    @field_validator("*", mode="after")
    @classmethod
    def _check_served(cls, value: Any, info: ValidationInfo) -> Any:
        values = accepted_values(cls, str(info.field_name))
        if values is None or any(map(partial(_is_same, value), values)):
            return value
        raise PydanticCustomError(NOT_SERVED, "is not served")


FieldsT = TypeVar("FieldsT", bound=Fields)


def needed(description: str) -> Any:
    """Return the description of a field that has to be there."""
    return Field(description=description)


def field(description: str) -> Any:
    """Return the description of a field that is served."""
    return Field(default=None, description=description)


def only(description: str, *values: Any) -> Any:
    """Return the description of a field that is not served: it is accepted only with values that change nothing.

    Args:
        description: What the field would do.
        values: The accepted values, beside null.
    """
    return Field(default=None, description=description, json_schema_extra={"enum": [None, *values]})


def accepted_values(kind: type[BaseModel], name: str) -> list[Any] | None:
    """Return the values with which a field is accepted that is not served; None if it is served."""
    extra = kind.model_fields[name].json_schema_extra
    values = extra.get("enum") if isinstance(extra, dict) else None
    return values if isinstance(values, list) else None


def _is_same(value: Any, other_value: Any) -> bool:
    return value == other_value and isinstance(value, bool) == isinstance(other_value, bool)


def read_fields(kind: type[FieldsT], body: bytes) -> FieldsT:
    """Return the fields of a body.

    Raises:
        RequestError: The body is no JSON object of these fields (``bad_body``, ``bad_params``).
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as errors:
        raise _refusal(kind, errors.errors(include_url=False)[0]) from None


def _refusal(kind: type[Fields], error: ErrorDetails) -> RequestError:
    """Return the error for the first thing that is wrong, in one sentence."""
    error_type, value = error["type"], error["input"]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"]).lstrip(".")
    if error_type in ("json_invalid", "json_type") or not path:
        why = f": {error['msg']}" if error_type == "json_invalid" else ""
        return RequestError(f"the body must be a JSON object{why}", code="bad_body")
    if error_type == "extra_forbidden":
        known_text = f"; known are {', '.join(sorted(kind.model_fields))}" if len(error["loc"]) == 1 else ""
        return RequestError(f"the field {path!r} is unknown{known_text}", code="bad_params")
    if error_type == NOT_SERVED:
        return RequestError(f"{path} = {shown(value)} is not served; leave it out", code="bad_params")
    if error_type == "missing":
        return RequestError(f"{path} is missing", code="bad_params")
    message = error["msg"].replace("Input should be", "must be")
    return RequestError(f"{path} {message}, not {shown(value)}", code="bad_params")
