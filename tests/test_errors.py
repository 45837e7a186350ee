"""The tree of errors that users meet: exit codes, hints, and the drawing of it."""

from __future__ import annotations

import inspect

import pytest

from offline_diffusion import errors
from offline_diffusion.errors import OffdiffError, did_you_mean

CLASSES = [
    value for value in vars(errors).values() if inspect.isclass(value) and value.__module__ == errors.__name__
]


def test_every_error_is_in_the_drawing_with_its_exit_code() -> None:
    drawing = (errors.__doc__ or "").split("::")[1].splitlines()
    code_of = {line.strip("│├└─ ").split()[0]: line for line in drawing if line.strip("│├└─ ")}
    for error_class in CLASSES:
        line = code_of[error_class.__name__]
        if "exit" in line:
            assert f"exit {error_class.exit_code}" in line
        assert issubclass(error_class, OffdiffError)


@pytest.mark.parametrize(
    ("name", "code"),
    [("UsageError", 2), ("ConfigError", 2), ("ModelError", 1), ("JobError", 1), ("JobInterrupted", 75)],
)
def test_exit_codes_of_the_contract(name: str, code: int) -> None:
    assert getattr(errors, name)("no").exit_code == code


def test_a_hint_has_a_line_of_its_own() -> None:
    assert str(OffdiffError("it broke", hint="mend it")) == "it broke\nhint: mend it"
    assert str(OffdiffError("it broke")) == "it broke"


@pytest.mark.parametrize(
    ("name", "expected"),
    [("max_num_seq", "max_num_seqs"), ("Height", "height"), ("zzz", None), ("", None)],
)
def test_did_you_mean(name: str, expected: str | None) -> None:
    assert did_you_mean(name, ["height", "width", "max_num_seqs"]) == expected
