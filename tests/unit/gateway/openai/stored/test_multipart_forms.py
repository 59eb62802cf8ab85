"""Uploads as they come, cut anywhere."""

from __future__ import annotations

import pytest

from gateway.openai.shapes.api_errors import ApiError
from gateway.openai.stored.multipart_forms import MAX_PARTS, UploadForm, boundary_of

BOUNDARY = b"----x"


def part(name: str, content: bytes, filename: str | None = None) -> bytes:
    more = f'; filename="{filename}"' if filename is not None else ""
    head = f'Content-Disposition: form-data; name="{name}"{more}\r\nContent-Type: text/plain\r\n\r\n'
    return b"--" + BOUNDARY + b"\r\n" + head.encode() + content + b"\r\n"


def read(body: bytes, size: int) -> tuple[UploadForm, bytes]:
    form = UploadForm(BOUNDARY)
    content = b"".join(form.feed(body[at : at + size]) for at in range(0, len(body), size))
    form.end()
    return form, content


CONTENT = b"a\r\n--\r\n-----\r\n----x\r\n--" + bytes(range(256))
BODY = (
    part("purpose", b"batch") + part("file", CONTENT, 'in "1".jsonl'.replace('"', '\\"')) + b"--" + BOUNDARY + b"--\r\n"
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
def test_a_form_is_the_same_wherever_it_is_cut(size: int) -> None:
    form, content = read(BODY, size)
    assert content == CONTENT
    assert form.fields == {"purpose": "batch"}
    assert form.filename == 'in "1".jsonl'


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"nothing like it at all", "does not begin"),
        (BODY[:-10], "ends before"),
        (part("purpose", b"batch") + b"--" + BOUNDARY + b"--", "'file' is a required"),
        (part("a", b"1") + part("a", b"2") + b"--" + BOUNDARY + b"--", "two parts named 'a'"),
        (part("a", b"x" * 5000) + b"--" + BOUNDARY + b"--", "'a' of the form is too long"),
        (b"--" + BOUNDARY + b"\r\nX: y\r\n\r\nx\r\n--" + BOUNDARY + b"--", "has no name"),
        (b"--" + BOUNDARY + b"\r\n" + b"x" * 9000, "head of a part is too long"),
        (b"".join(part(f"n{at}", b"") for at in range(MAX_PARTS + 1)), f"more than {MAX_PARTS} parts"),
    ],
)
def test_other_bodies_are_refused(body: bytes, text: str) -> None:
    with pytest.raises(ApiError, match=text):
        read(body, 100)


def test_what_a_form_holds_is_bounded() -> None:
    form = UploadForm(BOUNDARY)
    form.feed(part("file", b"x", "f")[:-2])
    for _ in range(100):
        assert len(form.feed(b"y" * 10_000)) >= 9_900


@pytest.mark.parametrize(
    ("declared", "boundary"),
    [
        (b"multipart/form-data; boundary=abc", b"abc"),
        (b'Multipart/Form-Data; charset=utf-8; boundary="a b"', b"a b"),
        (b"multipart/form-data", None),
        (b"multipart/form-data; boundary=", None),
        (b"application/json", None),
    ],
)
def test_boundaries(declared: bytes, boundary: bytes | None) -> None:
    if boundary is None:
        with pytest.raises(ApiError):
            boundary_of(declared)
    else:
        assert boundary_of(declared) == boundary
